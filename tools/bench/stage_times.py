"""What it costs that some jobs are always timed: a cheap loader with it, without it, and as it is.

python tools/bench/stage_times.py --rounds 15
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import make_dataset  # type: ignore[import-not-found]

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, stateless
from energon_lite.loading.executors.executor import InlineExecutor
from energon_lite.loading.makers.observers import JobTimer


class Plain(TaskEncoder):
    """A hook that does nothing: samples are made one by one."""

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        sample.text = sample.text.strip()
        return sample


def _never(self: JobTimer, tell: Callable[[Any], Any]) -> None:
    self._tell, self.due, self.sent = tell, math.inf, 0.0


def _seconds(dataset: Any, batches: int) -> float:
    """CPU seconds of so many batches."""
    loader = get_savable_loader(dataset, watchdog_timeout_seconds=None)
    stream = iter(loader)
    for _ in islice(stream, 50):
        pass
    began = time.process_time()
    for _ in islice(stream, batches):
        pass
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        path = make_dataset(Path(folder, "text"), 20_000)
        for name, encoder in (("default hooks", None), ("a hook", Plain())):
            for size in (1, 8, 64):
                config = WorkerConfig(rank=0, world_size=1)
                dataset = get_train_dataset(path, batch_size=size, worker_config=config, task_encoder=encoder)
                batches = max(300, 12_000 // size)
                found: dict[str, list[float]] = {"without": [], "never due": [], "as it is": []}
                for _ in range(rounds):
                    with patch.object(InlineExecutor, "_timed", lambda self, make: make()):
                        found["without"].append(_seconds(dataset, batches))
                    with patch.object(JobTimer, "__init__", _never):
                        found["never due"].append(_seconds(dataset, batches))
                    found["as it is"].append(_seconds(dataset, batches))
                base = min(found["without"])
                text = ", ".join(
                    f"{kind} {100 * (min(times) / base - 1):+.2f} % (median {100 * (_median(found, kind) - 1):+.2f} %)"
                    for kind, times in found.items()
                )
                each = 1e6 * base / batches / size
                print(f"{name}, batches of {size}: {each:.2f} us a sample; {text}", flush=True)


def _median(found: dict[str, list[float]], kind: str) -> float:
    """Of round by round."""
    return statistics.median(one / other for one, other in zip(found[kind], found["without"], strict=True))


if __name__ == "__main__":
    main()
