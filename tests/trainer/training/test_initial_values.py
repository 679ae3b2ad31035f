"""The values that parameters begin with: by name and seed alone; and those that nobody needs to draw."""

from __future__ import annotations

import hashlib

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.trainer import LlamaModel, ModelConfig, build_mesh, initialize_parameters
from energon_lite.trainer.parallel.parameters import layout_of

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
