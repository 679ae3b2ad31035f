"""Loaders that are slow for a known reason: what the limit is, is known before it is measured."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from energon_lite import TaskEncoder, register_source, stateless
from energon_lite.storage import SampleDecoder
from tests.testing import train_loader

#: Seconds that a slow step takes, of each sample.
SLOW = 2e-3
#: A picture of 2 MiB; to make it takes nothing, to put some of them into a batch does.
PIXELS = torch.zeros(1 << 21, dtype=torch.uint8)


def busy(seconds: float) -> None:
    """Work, other than waiting."""
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class SlowRows:
    """A source each of whose samples takes a while to come."""

    identity = "slow rows"

    def __len__(self) -> int:
        return 4000

    def read(self, index: int) -> dict[str, Any]:
        time.sleep(SLOW)
        return {"txt": b"row", "n": index}


register_source("slowrows", lambda path, split_part: SlowRows())


class Plain(TaskEncoder):
    """Costs nothing."""

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        return {"key": sample.__key__}


def _slowly(data: bytes) -> str:
    time.sleep(SLOW)
    return data.decode()


def _busily(data: bytes) -> str:
    busy(SLOW)
    return data.decode()


class SlowDecode(TaskEncoder):
    decoder = SampleDecoder(handlers={"txt": _slowly})


class BusyDecode(TaskEncoder):
    decoder = SampleDecoder(handlers={"txt": _busily})


class SlowHook(TaskEncoder):
    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        if SLOW:
            time.sleep(SLOW)
        return {"key": sample.__key__}


class BusyHook(TaskEncoder):
    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        busy(SLOW)
        return {"key": sample.__key__}


class SlowBatchHook(Plain):
    def encode_batch(self, batch: Any) -> Any:
        time.sleep(4 * SLOW)
        return batch


class SlowPacks(Plain):
    """Packs, so that chunks are worked on."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[:2], samples[2:]]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        time.sleep(2 * SLOW)
        return {"keys": [sample["key"] for sample in samples]}


class Big(TaskEncoder):
    """Large samples, which are only put together."""

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        return {"pixels": PIXELS}


class Case(NamedTuple):
    """A loader that is slow, and why.

    Attributes:
        limit: why.
        encoder: the hooks.
        workers: how many.
        start_method: of these.
        path: of the data; "": some texts.
        step: seconds that the trainer takes for a batch of four.
        options: more for ``get_train_dataset``.
    """

    limit: str
    encoder: Callable[[], TaskEncoder] = Plain
    workers: int = 0
    start_method: str = "fork"
    path: str = ""
    step: float = 0.0
    options: tuple[tuple[str, Any], ...] = ()

    def __str__(self) -> str:
        name = f"{self.limit}-{self.encoder.__name__}-{self.workers}"
        return name + ("-thread" if self.start_method == "thread" else "") + ("-packs" if self.options else "")


#: How the work may be done.
WAYS: list[dict[str, Any]] = [{}, {"workers": 2}, {"workers": 2, "start_method": "thread"}]
CASES = [
    *(Case("storage", path="slowrows://", encoder=TaskEncoder, **way) for way in WAYS),
    *(Case("decoding", SlowDecode, **way) for way in WAYS),
    *(Case("hooks", SlowHook, **way) for way in WAYS),
    *(Case("transport", Big, **way) for way in WAYS),
    *(Case("trainer", step=0.03, **way) for way in WAYS),
    Case("decoding", BusyDecode, workers=2),
    Case("hooks", BusyHook),
    Case("hooks", SlowBatchHook, workers=2),
    Case("hooks", SlowPacks, workers=2, options=(("packing_buffer_size", 4),)),
    Case("hooks", SlowPacks, options=(("packing_buffer_size", 4),)),
]


def staged_loader(case: Case, texts: Path, **kwargs: Any) -> Any:
    """The loader of a case.

    Args:
        texts: a data set.
        kwargs: more for the loader.
    """
    arguments = {"batch_size": 4, "task_encoder": case.encoder(), "start_method": case.start_method}
    return train_loader(case.path or texts, case.workers, **arguments, **dict(case.options), **kwargs)


def run(case: Case, loader: Any, batches: int = 30) -> dict[str, Any]:
    """Go through some batches, as the trainer of a case does; what the loader says then."""
    for _ in zip(range(batches), loader, strict=False):
        time.sleep(case.step)
    stats: dict[str, Any] = loader.stats()
    return stats
