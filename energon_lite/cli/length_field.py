"""``energon-lite prepare --length-field``: store lengths that need no task encoder."""

from __future__ import annotations

import shlex

from energon_lite.cli.measure import show_report
from energon_lite.cli.measure_progress import measure_progress
from energon_lite.loading.measuring.part_lengths import measure_parts
from energon_lite.storage.index.index_cache import shard_counts
from energon_lite.storage.index.jsonl import is_jsonl
from energon_lite.storage.sharded_job.ranks import Ranks

__all__ = ["store_lengths"]


def store_lengths(root: str, field: str, workers: int | None, progress: bool) -> None:
    """Store the column ``length`` of a folder that has just been prepared, and say what it holds."""
    only = [] if is_jsonl(root) else ["--tar-index-only"]
    again = ["energon-lite", "prepare", root, *only, "--length-field", field]
    with measure_progress(root, sum(shard_counts(root).values()), progress) as tick:
        report = measure_parts(root, field, command=shlex.join(again), workers=workers, progress=tick)
    show_report(report, Ranks())
