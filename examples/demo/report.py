"""The output of the demo: its parts as they run, and a summary at the end."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Report:
    """Results of the demo, and the time of each part."""

    results: list[tuple[str, str, bool]] = field(default_factory=list)
    pictures: list[Path] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def part(self, title: str) -> Iterator[None]:
        """Announce a part, and measure its time."""
        print(f"\n{len(self.seconds) + 1}. {title}", flush=True)
        began = time.monotonic()
        yield
        self.seconds[title] = time.monotonic() - began
        print(f"  ({self.seconds[title]:.0f} s)", flush=True)

    def check(self, what: str, found: str, good: bool) -> None:
        """Note the result of a check."""
        self.results.append((what, found, good))
        print(f"  {'ok' if good else 'FAILED'}: {what}: {found}", flush=True)

    @property
    def failures(self) -> list[str]:
        """A sentence for each check that failed."""
        return [f"{what}: {found}" for what, found, good in self.results if not good]

    def __str__(self) -> str:
        width = max((len(what) for what, _, _ in self.results), default=0)
        lines = ["Results"]
        lines += [f"  {'ok    ' if good else 'FAILED'}  {what:{width}}  {found}" for what, found, good in self.results]
        lines += ["Pictures", *(f"  {path}" for path in self.pictures)]
        lines += ["Time", *(f"  {seconds:5.0f} s  {title}" for title, seconds in self.seconds.items())]
        return "\n".join([*lines, f"  {sum(self.seconds.values()):5.0f} s  in all"])
