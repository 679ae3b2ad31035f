"""Scaled rotary frequencies: those of transformers, in float64."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import pytest
import torch
import transformers
from hypothesis import given, settings
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from energon_lite.trainer.conversion.language_config import ARCHITECTURES, huggingface_config
from energon_lite.trainer.conversion.tensor_names import huggingface_name
from energon_lite.trainer.models.config import ModelConfig, RopeScaling
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.models.sequence import scaled_frequencies
from energon_lite.trainer.parallel.mesh import ParallelMesh
from tests.testing import examples
from tests.trainer.conversion.small_models import configs, scalings


@contextmanager
def in_double() -> Iterator[None]:
    """Their rotations and norms are float32, whatever the model is; here they are as precise as ours."""
    for kind in ARCHITECTURES:  # what is imported inside would keep the types of here
        getattr(transformers, kind.name)
    with ExitStack() as stack:
        for owner, name, wide in (
            (torch, "float", torch.float64),
            (torch, "float32", torch.float64),
            (torch.Tensor, "float", torch.Tensor.double),
        ):
            stack.enter_context(mock.patch.object(owner, name, wide))
        yield


@settings(max_examples=examples(20), deadline=None)
@given(configs, scalings)
def test_logits_of_scaled_rotations_are_theirs(config: ModelConfig, scaling: RopeScaling) -> None:
    """The logits, in float64."""
    config = dataclasses.replace(config, rope_scaling=scaling, dtype="float64", vocab_size=50, init_std=0.2)
    told = AutoConfig.for_model(**huggingface_config(config, torch.float64))
    ours = LlamaModel(config, ParallelMesh(), seed=3)
    tokens = torch.arange(40)[None]
    with torch.no_grad(), in_double():
        theirs = AutoModelForCausalLM.from_config(told, attn_implementation="eager").double()
        for name, p in ours.named_parameters():
            parameter = theirs.get_parameter(huggingface_name(name))
            parameter.copy_(p[: len(parameter)])
        wanted = theirs(tokens).logits
    torch.testing.assert_close(ours.all_logits(tokens), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["linear", "llama3", "yarn"])
def test_frequencies_are_theirs(kind: str) -> None:
    """Of 60 models each: widths of heads, bases, former lengths, and bounds of the waves that are kept."""
    draw = random.Random(0)
    for _ in range(60):
        width, theta = draw.choice([8, 12, 64, 96, 128]), draw.choice([1e3, 1e4, 5e5, 1e6])
        scaling = RopeScaling(
            draw.uniform(1, 64), draw.uniform(0.5, 4), draw.uniform(5, 40), draw.randint(8, 40_000), kind
        )
        config = ModelConfig(head_dim=width, rope_theta=theta, rope_scaling=scaling)
        with in_double():
            told = AutoConfig.for_model(**huggingface_config(config, torch.float32))
            wanted, size = ROPE_INIT_FUNCTIONS[kind](told, "cpu")
        plain = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        torch.testing.assert_close(scaled_frequencies(plain, scaling, theta), wanted, rtol=1e-12, atol=0)
        assert scaling.attention_factor == pytest.approx(size, rel=1e-12)
