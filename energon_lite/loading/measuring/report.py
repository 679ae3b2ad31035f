"""Maker of measured columns, and the report of a measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from energon_lite.loading.measuring.values import Values
from energon_lite.storage.index.columns import FAILED, SKIPPED

__all__ = ["Maker", "MeasureReport"]


@dataclass(frozen=True)
class Maker:
    """Maker of columns: the settings and the code that their values depend on.

    Args:
        settings: plain data; with other settings, values are different.
        code: hash of the user's code involved; empty if there is none.
        command: command line that makes the columns again.
        any_code: accept values that were made with the same settings and other code.
    """

    settings: Mapping[str, Any]
    code: str = ""
    command: str = ""
    any_code: bool = False

    def made(self, settings: Mapping[str, Any], code: str) -> bool:
        """Return whether values made with these settings and code are valid for this maker."""
        return dict(settings) == dict(self.settings) and (self.any_code or code == self.code)


@dataclass
class MeasureReport:
    """Results of a measuring.

    Attributes:
        path: path of the data set.
        shards: number of shards to be measured.
        samples: samples in those shards; on ranks other than 0: samples that this rank has measured.
        known: number of samples that had been measured before.
        skipped, failed: numbers of samples.
        shortest, longest, total: of the lengths of the other samples.
        reasons: ``(count, stage, reason, skipped)`` of samples measured now, the most frequent first.
        failures: a few of the failed samples: shard, key, stage and reason as text.
        columns: by the name of another column: its number of values (one for each sample, except in ragged ones), their
            sum, and the largest; ragged columns of rows have no sum.
        written: files of the columns; empty on ranks other than 0.
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
        """Number of samples that have a length."""
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
        for name, column in values.items():
            count, total, largest = self.columns.get(name, (0, 0, 0))
            more = int(column.sum()) if column.ndim == 1 or column.shape[1] == 1 else 0
            self.columns[name] = count + len(column), total + more, max(largest, int(column.max(initial=0)))
