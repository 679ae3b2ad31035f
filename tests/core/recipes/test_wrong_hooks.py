"""Hooks that cannot work are refused before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from energon_lite import Chunks, EnergonLiteError, TaskEncoder, get_train_dataset
from tests.testing import ALONE


class Packs(TaskEncoder):
    def select_samples_to_pack(self, samples: list[Any]) -> Any:
        return [samples]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


def _hooked(base: type[TaskEncoder] = TaskEncoder, **hooks: Any) -> TaskEncoder:
    encoder: TaskEncoder = type("Wrong", (base,), hooks)()
    return encoder


def _yields(self: Any, value: Any) -> Any:
    yield value


def _returns(self: Any, value: Any) -> Any:
    return value


PACKING = {"packing_buffer_size": 4}
#: Name: (encoder, arguments, words of the message).
WRONG_HOOKS: dict[str, tuple[TaskEncoder, dict[str, Any], str]] = {
    "build": (_hooked(build_batch=_returns), {}, "build_batch would not be called"),
    "aux": (
        _hooked(cook_crude_sample=lambda self, sample, cooker, aux, more: sample),
        {},
        r"called with \(sample, cooker, aux\)",
    ),
    "two first hooks": (
        _hooked(encode_sample=_returns, preencode_sample=_returns),
        {},
        "both encode_sample and preencode_sample",
    ),
    "half a packing": (
        _hooked(select_samples_to_pack=lambda self, samples: [samples]),
        PACKING,
        "has no pack_selected_samples",
    ),
    "selection yields": (_hooked(Packs, select_samples_to_pack=_yields), PACKING, "select_samples_to_pack is a gener"),
    "late yields": (
        _hooked(Packs, postencode_sample=_yields),
        PACKING,
        "postencode_sample is a generator: the samples",
    ),
    "criterion yields": (_hooked(batch_group_criterion=_yields), {}, "batch_group_criterion is a generator"),
    "group yields": (
        _hooked(batch_group_criterion=_returns, batch=_yields),
        {},
        "batch is a generator: a group makes one batch",
    ),
    "buffers never full": (
        Packs(),
        {**PACKING, "chunks": Chunks(size=3)},
        "chunk_size is 3, but packing_buffer_size 4",
    ),
    "no chunk": (Packs(), {**PACKING, "chunks": Chunks(size=0)}, "chunk_size is 0"),
    "groups hand nothing over": (
        _hooked(batch_group_criterion=_returns),
        {"chunks": Chunks(remainder="carry")},
        '"carry" needs batches of batch_size samples, without batch_group_criterion',
    ),
}


@pytest.mark.parametrize("case", WRONG_HOOKS)
def test_hooks_that_cannot_work_are_refused(images: Path, case: str) -> None:
    encoder, arguments, words = WRONG_HOOKS[case]
    with pytest.raises(EnergonLiteError, match=words) as caught:
        config = ALONE
        get_train_dataset(images, worker_config=config, task_encoder=encoder, **({"batch_size": 2} | arguments))
    assert caught.value.fix
