"""Task encoders whose content decides how many samples and batches there are, put together from a few switches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from energon_lite import SkipSample, TaskEncoder
from tests.core.laws.naive_hooks import chance


@dataclass(frozen=True)
class Content:
    """What the hooks do.

    Args:
        salt: another number, other choices.
        yields: sample hooks yield 0..2 results.
        skips: one sample of so many is skipped, in each hook; 0: none.
        packing: samples of a buffer; None: no packing.
        pack_yields: packing yields 0..2 results.
        groups: so many groups; 0: no groups.
        batch_size: None: no batches, or as the groups say.
        batch_yields, encoded_yields: ``batch``, ``encode_batch`` yield 0..2 results.
        late: half of the work is done by ``postencode_sample``.
    """

    salt: int = 0
    yields: bool = False
    skips: int = 0
    packing: int | None = None
    pack_yields: bool = False
    groups: int = 0
    batch_size: int | None = 3
    batch_yields: bool = False
    encoded_yields: bool = False
    late: bool = False

    @property
    def decides(self) -> bool:
        """Whether the number of samples depends on content at all."""
        batched = bool(self.batch_size or self.groups)
        batch_hooks = batched and (self.batch_yields or self.encoded_yields)
        return bool(self.yields or self.packing or self.groups or batch_hooks)

    def arguments(self) -> dict[str, Any]:
        """Arguments of ``get_train_dataset``; chunks are left to the caller."""
        return {"batch_size": self.batch_size, "packing_buffer_size": self.packing, "task_encoder": self.encoder()}

    def encoder(self) -> TaskEncoder:
        """An encoder of a class that has just these hooks."""
        # Some contents lose hundreds of samples in a row, by chance.
        hooks: dict[str, Any] = {"content": self, "failure_tolerance": 10_000}
        first = "preencode_sample" if self.packing or self.late else "encode_sample"
        hooks[first] = _yield_samples if self.yields else _one_sample
        if self.late:
            hooks["postencode_sample"] = _late
        if self.packing:
            hooks["select_samples_to_pack"] = _select
            hooks["pack_selected_samples"] = _yield_packs if self.pack_yields else _one_pack
        if self.groups:
            hooks["batch_group_criterion"] = _group
        hooks["batch"] = _yield_batches if self.batch_yields and not self.groups else _one_batch
        if self.encoded_yields:
            hooks["encode_batch"] = _yield_encoded
        cls: type[TaskEncoder] = type("ContentEncoder", (TaskEncoder,), hooks)
        return cls()


def _maybe_skip(self: Any, name: str, salt: int) -> None:
    content: Content = self.content
    if content.skips and not self.rng.integers(content.skips):
        if chance(2, content.salt + salt + 50, name):
            raise SkipSample("by chance")
        raise ValueError(f"{name} is broken")


def _sample(self: Any, name: str, key: Any) -> dict[str, Any]:
    return {"__key__": name, "__restore_key__": key, "noise": [float(self.rng.random())]}


def _noise(self: Any, samples: list[Any]) -> list[float]:
    return [float(self.rng.random()), *(number for sample in samples for number in sample["noise"])]


def _one_sample(self: Any, sample: Any) -> Any:
    _maybe_skip(self, sample.text, 1)
    return _sample(self, sample.text, sample.__restore_key__)


def _yield_samples(self: Any, sample: Any) -> Iterator[Any]:
    _maybe_skip(self, sample.text, 1)
    for part in range(int(self.rng.integers(3))):
        yield _sample(self, f"{sample.text}.{part}", sample.__restore_key__)
        _maybe_skip(self, f"{sample.text}.{part}", 2)


def _late(self: Any, sample: Any) -> Any:
    _maybe_skip(self, sample["__key__"], 3)
    return sample | {"noise": [*sample["noise"], float(self.rng.random())]}


def _select(self: Any, samples: list[Any]) -> list[list[Any]]:
    """Every second sample first, in packs of 1 to 3; one of ten is left out."""
    salt = self.content.salt
    kept = [sample for sample in samples[::2] + samples[1::2] if chance(10, salt + 4, sample["__key__"])]
    _maybe_skip(self, "".join(sample["__key__"] for sample in samples), 5)
    packs: list[list[Any]] = [[]]
    for sample in kept:
        packs[-1].append(sample)
        if len(packs[-1]) > chance(3, salt + 6, sample["__key__"]):
            packs.append([])
    return packs


def _one_pack(self: Any, samples: list[Any]) -> Any:
    name = "+".join(sample["__key__"] for sample in samples)
    _maybe_skip(self, name, 7)
    return {"__key__": name, "__restore_key__": (), "noise": _noise(self, samples)}


def _yield_packs(self: Any, samples: list[Any]) -> Iterator[Any]:
    one = _one_pack(self, samples)
    for part in range(int(self.rng.integers(3))):
        yield one | {"__key__": f"({one['__key__']}).{part}"}


def _group(self: Any, sample: Any) -> Any:
    content: Content = self.content
    _maybe_skip(self, sample["__key__"], 9)
    group = chance(content.groups, content.salt + 10, sample["__key__"])
    return f"group {group}", None if content.batch_size else 1 + group


def _one_batch(self: Any, samples: list[Any]) -> Any:
    names = [sample["__key__"] for sample in samples]
    _maybe_skip(self, " ".join(names), 11)
    return {"__key__": names, "__restore_key__": (), "noise": _noise(self, samples)}


def _yield_batches(self: Any, samples: list[Any]) -> Iterator[Any]:
    one = _one_batch(self, samples)
    for part in range(int(self.rng.integers(3))):
        yield one | {"part": part}


def _yield_encoded(self: Any, batch: Any) -> Iterator[Any]:
    for part in range(int(self.rng.integers(3))):
        yield batch | {"encoded": part, "noise": _noise(self, [batch])}
