"""By what a data set is measured, and what came out of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from energon_lite.loading.measuring.values import Values
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
        """Return whether values made so are the ones that this maker would make."""
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
        columns: by the name of another column: how many values it has (one for each sample, but in ragged ones), their
            sum, and the largest; ragged ones of rows have no sum.
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
    columns: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    written: tuple[str, ...] = ()

    @property
    def kept(self) -> int:
        """Samples that have a length."""
        return self.samples - self.skipped - self.failed

    def add(self, block: Values) -> None:
        """Count the samples of one shard."""
        flags = block.flags
        kept = block.lengths[block.flags == 0]
        if len(kept):
            self.shortest = min(self.shortest, int(kept.min())) if self.kept else int(kept.min())
            self.longest = max(self.longest, int(kept.max()))
        self.samples += len(flags)
        self.skipped += int((flags == SKIPPED).sum())
        self.failed += int((flags == FAILED).sum())
        self.total += int(kept.sum())
        values = {**block.columns, **{name: rows.values for name, rows in block.ragged.items()}}
        for name, found in values.items():
            count, total, largest = self.columns.get(name, (0, 0, 0))
            more = int(found.sum()) if found.ndim == 1 or found.shape[1] == 1 else 0
            self.columns[name] = count + len(found), total + more, max(largest, int(found.max(initial=0)))
