"""A task encoder that copies Energon's pipeline to sort a pool by length before the batch: refused, with advice."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from energon_lite import (
    ByTokens,
    Capacity,
    DefaultTaskEncoder,
    Sample,
    TextSample,
    edataclass,
    get_savable_loader,
    get_train_dataset,
)
from energon_lite.batching import SortedWindow
from energon_lite.errors import UsageError
from tests.testing import ALONE


@edataclass
class Tokens(Sample):
    tokens: torch.Tensor


class Encoder(DefaultTaskEncoder[TextSample, Tokens, Tokens, Tokens]):
    padding = 0

    def encode_sample(self, sample: TextSample) -> Tokens:
        return Tokens.derive_from(sample, tokens=torch.full([int(sample.text[2:]) * 29 % 64 + 1], 7))


def builder(method: str) -> Encoder:
    made: Encoder = type("Builder", (Encoder,), {method: lambda self, *given, **more: None})()
    return made


def test_the_refusal_names_what_to_use_and_that_is_enough(leaf_of: Any) -> None:
    with pytest.raises(UsageError, match=r"Builder\.build_train_datasets would not be called") as refused:
        get_train_dataset(leaf_of(64), batch_size=4, worker_config=ALONE, task_encoder=builder("build_train_datasets"))
    fix = str(refused.value.fix)
    assert "batch_group_criterion that returns (class of the length, None)" in fix
    batching = eval(fix.rpartition("batching=")[2], {**globals()})  # the advice, to the letter
    assert batching == ByTokens(SortedWindow(Capacity(12_000, "padded_tokens")), length_column=None)
    dataset = get_train_dataset(leaf_of(64), batching=batching, worker_config=ALONE, task_encoder=Encoder())
    assert len(next(iter(get_savable_loader(dataset))).tokens) > 4


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("build_batch", "encode_batch"),
        ("build_cook_crude_sample", "cookers"),
        ("build_encode_sample", "preencode_sample"),
        ("build_val_datasets", "get_val_dataset"),
    ],
)
def test_each_method_of_the_pipeline_has_its_own_advice(leaf_of: Any, method: str, instead: str) -> None:
    with pytest.raises(UsageError, match=f"{method} would not be called") as refused:
        get_train_dataset(leaf_of(64), batch_size=4, worker_config=ALONE, task_encoder=builder(method))
    assert instead in str(refused.value.fix)
