"""Findings of an examination, and their text for many ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

Level = Literal["ok", "warning", "wrong"]


@dataclass(frozen=True)
class Finding:
    """Result of one check.

    Args:
        topic: subject in a word or two.
        text: the observation.
        level: ``wrong`` if training will fail or be far too slow; ``warning`` if it may be.
        fix: advice.
    """

    topic: str
    text: str
    level: Level = "ok"
    fix: str = ""


def report_lines(by_rank: Sequence[Sequence[Finding]]) -> Iterator[str]:
    """Yield the findings of all ranks as lines: each once, with the ranks that have it unless all do.

    Findings of level ``ok`` are shown for the first rank only, because each rank has, for example, another number of
    free bytes.
    """
    owners: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            if finding.level != "ok" or finding in by_rank[0]:
                owners.setdefault(finding, []).append(rank)
    width = max((len(finding.topic) for finding in owners), default=0)
    for finding, ranks in owners.items():
        who = "" if finding.level == "ok" or len(ranks) == len(by_rank) else f"  [{_ranks(ranks)}]"
        yield f"{finding.level:8s} {finding.topic.ljust(width)}  {finding.text}{who}"
        if finding.fix:
            yield f"{'':8s} {'':{width}}  -> {finding.fix}"


def _ranks(ranks: Sequence[int]) -> str:
    """Abbreviate a list of ranks, such as ``ranks 0-3, 7``."""
    starts = [ranks[0], *(b for a, b in pairwise(ranks) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ranks) if b != a + 1), ranks[-1]]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"
