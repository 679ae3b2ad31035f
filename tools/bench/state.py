"""Size of a saved state and time to save it while workers are busy, for blends of 1, 10 and 100 data sets.

The state is measured as JSON. Saving is timed right after a batch was delivered, when both workers are making the next
ones (each sample costs them about a millisecond).

Two kinds of batches: ``planned`` ones of 8 samples, and ``packed`` ones, where hooks pack the samples of a buffer and
group the packs, and the one rank has all of 64 lanes: the largest state there is. The marks: at most 1,024 bytes for
100 data sets, 4,096 with packs and groups; under 1 ms.

With ``--energon`` the same is done with megatron-energon, if it is installed: same files, same number of workers, same
work in ``encode_sample``. Its state is a tree of Python objects, so its size is that of a pickle. It asks its workers
for the state, so the time has a round trip in it; the first save costs more than the later ones, which is why both are
shown. It has no lanes, so only planned batches are compared.

How to read it: one line for each library, kind and number of data sets; the processes of the two libraries alternate.
"first save" has one value a process, "later saves" have all others.

    python tools/bench/state.py --runs 5 --energon
"""

from __future__ import annotations

import argparse
import importlib
import json
import pickle
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from common import fresh_process, machine, make_blend, spread, table

LEAVES = (1, 10, 100)
KINDS = ("planned", "packed")
_SAVES = 20


def child(library: str, blend: str, kind: str) -> None:
    """Save often in one process; prints ``[bytes, [milliseconds, ...]]``."""
    energon: Any = importlib.import_module("megatron.energon" if library == "energon" else "energon_lite")

    class Busy(energon.DefaultTaskEncoder):
        @energon.stateless
        def encode_sample(self, sample: Any) -> Any:
            stop = time.perf_counter() + 1e-3
            while time.perf_counter() < stop:
                pass
            return sample

    class Packs(Busy):  # type: ignore[misc]  # whatever the library's class is
        def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
            return [samples[first : first + 2] for first in range(0, len(samples), 2)]

        @energon.stateless
        def pack_selected_samples(self, samples: list[Any]) -> Any:
            return samples[0]

        def batch_group_criterion(self, sample: Any) -> tuple[Any, None]:
            return len(sample.text) % 3, None

    packed = {"packing_buffer_size": 16, "chunk_size": 64, "lanes": 64} if kind == "packed" else {}
    dataset = energon.get_train_dataset(
        blend,
        batch_size=8,
        shuffle_buffer_size=100,
        max_samples_per_sequence=100,
        worker_config=energon.WorkerConfig(rank=0, world_size=1, num_workers=2),
        task_encoder=Packs() if packed else Busy(),
        **packed,
    )
    loader = energon.get_savable_loader(dataset)
    iterator = iter(loader)
    times, state = [], None
    for _ in range(10):
        next(iterator)
    for _ in range(_SAVES):
        next(iterator)
        start = time.perf_counter()
        state = loader.save_state_rank()
        times.append((time.perf_counter() - start) * 1e3)
    size = len(pickle.dumps(state)) if library == "energon" else len(json.dumps(state))
    print(json.dumps([size, times]), flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5, help="fresh processes for each line")
    parser.add_argument("--leaves", type=int, nargs="+", default=list(LEAVES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--energon", action="store_true", help="measure megatron-energon too")
    parser.add_argument("--child", nargs=3, metavar=("LIBRARY", "BLEND", "KIND"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child(*options.child)
        return
    lines = [("energon_lite", kind) for kind in options.kinds]
    lines += [("energon", "planned")] if options.energon else []
    found: dict[tuple[int, str, str], list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        blends = {count: str(make_blend(Path(folder) / str(count), [200] * count)) for count in options.leaves}
        for _ in range(options.runs):
            for count, blend in blends.items():
                for library, kind in lines:
                    one = fresh_process(__file__, "--child", library, blend, kind)
                    found.setdefault((count, library, kind), []).append(one)
    rows = []
    for (count, library, kind), results in found.items():
        first = [times[0] for _, times in results]
        later = [ms for _, times in results for ms in times[1:]]
        size = statistics.median(size for size, _ in results)
        rows.append([count, library, kind, f"{size:.0f}", spread(first, 3), spread(later, 3), len(results)])
    print(machine())
    print(table(["data sets", "library", "batches", "bytes", "first save, ms", "later saves, ms", "processes"], rows))
    if options.energon and "planned" in options.kinds:
        for count in options.leaves:
            pair = [found[count, library, "planned"] for library in ("energon_lite", "energon")]
            ours, theirs = ([size for size, _ in one] for one in pair)
            times = [[ms for _, t in one for ms in t[1:]] for one in pair]
            size_ratio = statistics.median(theirs) / statistics.median(ours)
            time_ratio = statistics.median(times[1]) / statistics.median(times[0])
            print(f"{count} data sets: energon / energon_lite: {size_ratio:.0f} x bytes, {time_ratio:.0f} x time")
    print("\nmarks: 100 data sets in at most 1024 bytes, packed 4096; under 1 ms")


if __name__ == "__main__":
    main()
