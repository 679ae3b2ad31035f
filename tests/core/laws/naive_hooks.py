"""Hooks as plain functions of names, and the task encoder that has the same ones for the library."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from energon_lite import Cooker, DefaultTaskEncoder, SkipSample, TaskEncoder, TextSample, basic_sample_keys, cooker
from energon_lite.batching import TokenSequence
from energon_lite.storage.stores import FileStore
from tests.core.laws.token_data import length_of


def chance(of: int, *what: object) -> int:
    """A number below ``of`` that looks random, and depends on ``what`` only."""
    return zlib.crc32(":".join(map(str, what)).encode()) % of


@dataclass(frozen=True)
class Hooks:
    """Hooks as plain functions of names.

    Args:
        salt: another number, other choices.
        losses: in each hook, one of this number is skipped or fails; 0: none.
        yields: a sample yields 0 to 3 results.
        packing: samples of a buffer; None: no packs.
        groups: number of groups, with a ``batch_size``; 0: none.
        batch_yields: a batch is cut into 0 to 3.
        batch_size: None: no batches.
        draws: hooks draw random numbers.
        tokens: samples are sequences of tokens.
        default: no hooks at all; nothing else counts.
    """

    salt: int = 0
    losses: int = 0
    yields: bool = False
    packing: int | None = None
    groups: int = 0
    batch_yields: bool = False
    batch_size: int | None = 3
    draws: bool = False
    tokens: bool = False
    default: bool = False

    @property
    def decide(self) -> bool:
        """Content decides how many batches there are."""
        return bool(self.yields or self.packing or self.groups or (self.batch_size and self.batch_yields))

    def fate(self, stage: str, name: str) -> str | None:
        """The end of something that does not get through: "skipped" or "failed"; None: it does."""
        if self.losses and not chance(self.losses, self.salt, stage, name):
            return ("skipped", "failed")[chance(2, stage, name)]
        return None

    def samples(self, name: str) -> list[str]:
        if not self.yields:
            return [name]
        return [f"{name}.{part}" for part in range(chance(4, self.salt, "parts", name))]

    def packs(self, names: list[str]) -> list[list[str]]:
        """Packs of one to three, every second sample first; one of ten is left out."""
        packs: list[list[str]] = [[]]
        for name in names[::2] + names[1::2]:
            if chance(10, self.salt, "select", name):
                packs[-1].append(name)
                if len(packs[-1]) > chance(3, self.salt, "pack", name):
                    packs.append([])
        return [pack for pack in packs if pack]

    def group(self, name: str) -> int:
        return chance(self.groups, self.salt, "group", name)

    def batches(self, names: list[str]) -> list[list[str]]:
        if not self.batch_yields:
            return [names]
        parts = chance(4, self.salt, "batches", *names)
        return [names[part::parts] for part in range(parts) if names[part::parts]]


@cooker
def cook(sample: dict[str, Any], notes: FileStore) -> TextSample:
    """A crude sample, with a note of its key from another data set."""
    note = notes.get(f"{sample['__key__']}.txt", sample)
    return TextSample(**basic_sample_keys(sample), text=f"{sample['txt']} {note}")


def encoder_of(hooks: Hooks) -> TaskEncoder:
    """The same hooks for the library."""
    used: dict[str, Any] = {"cookers": [Cooker(cook)]}
    if not hooks.default:
        used |= _functions(hooks)
    bases = (DefaultTaskEncoder,) if hooks.default else (TaskEncoder,)
    cls: type[TaskEncoder] = type("OracleEncoder", bases, used)
    return cls()


def _functions(hooks: Hooks) -> dict[str, Any]:
    def checked(stage: str, name: str) -> None:
        match hooks.fate(stage, name):
            case "skipped":
                raise SkipSample(stage)
            case "failed":
                raise ValueError(stage)

    def drawn(encoder: Any) -> list[float]:
        if not hooks.draws:
            return []
        return [encoder.rng.random(), random.random(), float(np.random.rand()), float(torch.rand(()))]

    def made(encoder: Any, name: str, sample: Any) -> Any:
        if hooks.tokens:
            number = int(sample.__key__[1:])
            tokens = torch.arange(length_of(number)) + 1000 * number
            own = TokenSequence.derive_from(sample, tokens=tokens, labels=tokens)
            own.__key__ = name
            return own
        keys = {"__key__": name, "__restore_key__": sample.__restore_key__}
        return keys | {"text": sample.text, "drawn": drawn(encoder)}

    def one(self: Any, sample: Any) -> Any:
        checked("sample", sample.__key__)
        return made(self, sample.__key__, sample)

    def several(self: Any, sample: Any) -> Iterator[Any]:
        checked("sample", sample.__key__)
        yield from (made(self, name, sample) for name in hooks.samples(sample.__key__))

    def select(self: Any, samples: list[Any]) -> list[list[Any]]:
        by_name: dict[str, list[Any]] = {}  # a buffer may have a sample of two epochs
        for sample in samples:
            by_name.setdefault(sample["__key__"], []).append(sample)
        return [[by_name[name].pop() for name in pack] for pack in hooks.packs([one["__key__"] for one in samples])]

    def pack(self: Any, samples: list[Any]) -> Any:
        name = "+".join(sample["__key__"] for sample in samples)
        checked("pack", name)
        return {"__key__": name, "__restore_key__": (), "samples": samples, "drawn": drawn(self)}

    def criterion(self: Any, sample: Any) -> Any:
        return hooks.group(sample["__key__"]), None

    def batch(self: Any, samples: list[Any]) -> Any:
        if hooks.tokens:
            names, contents = [sample.__key__ for sample in samples], [sample.tokens.tolist() for sample in samples]
        else:
            names, contents = [sample["__key__"] for sample in samples], samples
        checked("batch", " ".join(names))
        return {"__key__": names, "__restore_key__": (), "samples": contents, "drawn": drawn(self)}

    def cut(self: Any, samples: list[Any]) -> Iterator[Any]:
        whole = batch(self, samples)
        for names in hooks.batches(whole["__key__"]):
            yield whole | {"__key__": names}

    used: dict[str, Any] = {"failure_tolerance": 200, "batch": cut if hooks.batch_yields else batch}
    used["encode_sample"] = several if hooks.yields else one
    used["empty_batch"] = lambda self, like, rows: {"__key__": [], "__restore_key__": ()}
    if hooks.packing:
        used |= {"select_samples_to_pack": select, "pack_selected_samples": pack}
    if hooks.groups:
        used["batch_group_criterion"] = criterion
    return used
