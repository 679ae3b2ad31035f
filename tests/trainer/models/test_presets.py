"""Known shapes have as many weights as their makers say."""

from __future__ import annotations

import math

import pytest

from energon_lite.errors import ConfigError
from energon_lite.trainer import config_from_dict
from energon_lite.trainer.conversion.tensor_names import model_shapes
from energon_lite.trainer.models.config import PRESETS, model_preset

#: In millions, as the makers' papers and model cards state them; tied tables once.
STATED = {
    "160M": 162,
    "1.1B": 1100,
    "7B": 6738,
    "13B": 13016,
    "30B": 32529,
    "65B": 65286,
    "70B": 68977,
    "llama-3-8B": 8030,
    "llama-3-70B": 70554,
    "llama-3.1-8B": 8030,
    "llama-3.1-70B": 70554,
    "llama-3.2-1B": 1236,
    "llama-3.2-3B": 3213,
    "qwen-2.5-0.5B": 494,
    "qwen-2.5-1.5B": 1544,
    "qwen-2.5-3B": 3086,
    "qwen-2.5-7B": 7616,
    "qwen-2.5-14B": 14770,
    "qwen-2.5-32B": 32764,
    "qwen-2.5-72B": 72706,
    "qwen-3-0.6B": 596,
    "qwen-3-1.7B": 1721,
    "qwen-3-4B": 4022,
    "qwen-3-8B": 8191,
    "qwen-3-14B": 14768,
    "qwen-3-32B": 32762,
    "mistral-7B": 7248,
}


@pytest.mark.parametrize("name", STATED)
def test_presets_have_the_size_that_is_stated(name: str) -> None:
    shapes = model_shapes(model_preset(name))
    assert round(sum(math.prod(shape) for shape in shapes.values()) / 1e6) == STATED[name]


def test_each_preset_is_read_from_a_file_as_from_python() -> None:
    for name in PRESETS:
        config = config_from_dict({"data": {"path": "texts"}, "model": {"preset": name, "dtype": "bfloat16"}})
        assert config.model == model_preset(name, dtype="bfloat16")
    assert set(PRESETS) == {*STATED, "tiny"}


def test_a_preset_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="did you mean 'qwen-3-8B'"):
        model_preset("qwen3-8B")
