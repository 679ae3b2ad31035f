"""Models: as many weights as their makers say, a free width of heads, and the values that weights begin with."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.trainer import (
    PRESETS,
    LlamaModel,
    ModelConfig,
    build_mesh,
    config_from_dict,
    initialize_parameters,
    model_preset,
)
from energon_lite.trainer.conversion.huggingface_folder import model_shapes
from energon_lite.trainer.models.config import model_changes
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.parameters import layout_of
from energon_lite.trainer.training.throughput import training_flops

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


def test_a_free_width_of_heads() -> None:
    config = ModelConfig(hidden_size=10, num_heads=4, num_kv_heads=2, head_dim=6, qkv_bias=True, qk_norm=True)
    attention = LlamaModel(config, build_mesh()).layers["0"].self_attn
    assert torch.equal(attention.q_norm.weight, torch.ones(6)) and not attention.q_proj.bias.any()
    # Useful work follows the heads, not the hidden size: four times as wide heads are four times the scores.
    wide = ModelConfig(hidden_size=10, num_heads=4, num_kv_heads=2, head_dim=24)
    narrow, more = (training_flops(one, 1, 64 / 2) - training_flops(one, 1, 32 / 2) for one in (config, wide))
    assert more == 4 * narrow == 6.0 * 3 * 4 * 24 * 32


def test_a_width_that_is_said_is_the_one_that_follows() -> None:
    plain = ModelConfig(hidden_size=96, num_heads=4)
    assert not model_changes(plain, ModelConfig(hidden_size=96, num_heads=4, head_dim=24))
    assert [name for name, _, _ in model_changes(plain, ModelConfig(head_dim=48))] == ["head_dim"]
    for trait in ({"qkv_bias": True}, {"qk_norm": True}, {"sliding_window": 8}):
        assert [name for name, _, _ in model_changes(plain, ModelConfig(**trait))] == list(trait)


# -- the values that they begin with: by name and seed alone -----------------------------------------------------------

CONFIG = ModelConfig(hidden_size=48, num_layers=3, num_heads=4, ffn_size=80, vocab_size=259, image_size=4)


@pytest.mark.parametrize("cores", [1, 6])
def test_values_are_those_of_one_generator_for_each_name(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: cores)
    for name, parameter in LlamaModel(CONFIG, build_mesh(), seed=7).named_parameters():
        digest = hashlib.blake2b(f"7/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        layout = layout_of(parameter)
        drawn = torch.empty(layout.full_shape).normal_(layout.mean, layout.std, generator=generator)
        assert torch.equal(parameter, drawn), name


def test_what_will_be_loaded_is_not_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = dict(LlamaModel(CONFIG, build_mesh(), seed=7).named_parameters())
    for name, parameter in LlamaModel(CONFIG, build_mesh(), seed=7, drawn=("vision.*",)).named_parameters():
        assert torch.equal(parameter, whole[name] if name.startswith("vision.") else torch.zeros_like(parameter))
    monkeypatch.setattr(torch.Tensor, "normal_", lambda *args, **settings: pytest.fail("drawn"))
    LlamaModel(CONFIG, build_mesh(), drawn=())


def test_how_a_parameter_without_layout_begins_is_not_guessed() -> None:
    with pytest.raises(UsageError, match=r"weight of shape \(2, 2\) does not say what it is a part of"):
        initialize_parameters(torch.nn.Linear(2, 2), seed=0, mesh=build_mesh())


@pytest.mark.parametrize(
    ("mesh", "why"),
    [(ParallelMesh(pp=2), "on several pipeline stages"), (ParallelMesh(cp=2), "rows are cut over ranks")],
)
def test_a_model_in_parts_is_not_called_as_a_whole(mesh: ParallelMesh, why: str) -> None:
    model = LlamaModel(ModelConfig(num_layers=2), mesh, seed=0)
    with pytest.raises(UsageError, match=why):
        model(torch.zeros(1, 4, dtype=torch.int64))
