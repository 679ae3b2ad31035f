"""What it costs to have the global generators of random, numpy and torch seeded for each sample; no sample is read.

    python tools/bench/hook_seeds.py

Prints microseconds: for each sample, where one scope lasts for many of them (workers; a batch with num_workers=0); for
the scope itself, once a batch with num_workers=0; and for each sample where threads take turns.
"""

from __future__ import annotations

import itertools
import timeit

from energon_lite.hooks import HookContext, LendingScope, hook_context

ROUNDS, TIMES = 7, 2000
_numbers = itertools.count()


def run_hooks(seeds: bool) -> None:
    context = HookContext(1, 11, 99, 3, next(_numbers))
    with hook_context(context) if seeds else context:
        pass


def run_batch() -> None:
    with LendingScope():
        run_hooks(True)


def microseconds(step: str) -> float:
    return 1e6 * min(timeit.repeat(step, globals=globals(), number=TIMES, repeat=ROUNDS)) / TIMES


def main() -> None:
    bare = microseconds("run_hooks(False)")
    with LendingScope():
        sample = microseconds("run_hooks(True)") - bare
    turns = microseconds("run_hooks(True)") - bare
    batch = microseconds("run_batch()") - bare - sample
    print(f"a sample {sample:.1f}, a batch without workers {batch:.1f}, a sample with threads {turns:.1f}")


if __name__ == "__main__":
    main()
