"""By what a data set is measured, and what came out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from energon_lite.storage.index.columns import FAILED, SKIPPED

__all__ = ["Maker", "MeasureReport"]


@dataclass(frozen=True)
class Maker:
    """By what columns are made.

    Args:
        settings: plain data; other settings make other values.
        code: hash of the code that does it, empty if there is none of the user's.
        command: what the user runs to make the columns again.
        any_code: take values that the same settings made with other code.
    """

    settings: Mapping[str, Any]
    code: str = ""
    command: str = ""
    any_code: bool = False

    def made(self, settings: Mapping[str, Any], code: str) -> bool:
        """Whether values made so are the ones that this maker would make."""
        return dict(settings) == dict(self.settings) and (self.any_code or code == self.code)


@dataclass
class MeasureReport:
    """What measuring did.

    Attributes:
        path: the data set.
        shards: the shards that were to be measured.
        samples: in those shards; on other ranks than 0: those that this rank has measured.
        known: how many of the samples had been measured before.
        skipped, failed: how many of the samples.
        shortest, longest, total: of the lengths of the others.
        reasons: ``(count, stage, reason, skipped)`` of what was not known before, the most frequent first.
        failures: a few of the failed samples: shard, key, stage and reason in words.
        written: the files of the columns; none on other ranks than 0.
    """

    path: str
    shards: int = 0
    samples: int = 0
    known: int = 0
    skipped: int = 0
    failed: int = 0
    shortest: int = 0
    longest: int = 0
    total: int = 0
    reasons: tuple[tuple[int, str, str, bool], ...] = ()
    failures: tuple[str, ...] = ()
    written: tuple[str, ...] = ()

    @property
    def kept(self) -> int:
        """Samples that have a length."""
        return self.samples - self.skipped - self.failed

    def add(self, lengths: NDArray[Any], flags: NDArray[Any]) -> None:
        """Count the samples of one shard."""
        kept = lengths[flags == 0]
        if len(kept):
            self.shortest = min(self.shortest, int(kept.min())) if self.kept else int(kept.min())
            self.longest = max(self.longest, int(kept.max()))
        self.samples += len(lengths)
        self.skipped += int((flags == SKIPPED).sum())
        self.failed += int((flags == FAILED).sum())
        self.total += int(kept.sum())
