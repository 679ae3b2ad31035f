"""Two checkouts of energon_lite beside each other: preparing, measuring, first batches, hooks, plans, steps, states.

    git worktree add ../before v0.1.0
    python tools/bench/versions.py --before ../before --runs 7

Each figure is a fresh process that does all tasks in turn, with the package of one checkout on its path; the checkouts
alternate. Only names that both versions have may be used here.

How to read it: the ratio is the median of this checkout over that of the other one, so below 1 is faster. Processor
time is of this process and of workers that have ended; other load disturbs it less than time by the clock.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Samples of the data set, and batches that are taken in a task.
SAMPLES = 20_000
BATCHES = 400


def write_shards(folder: Path) -> None:
    """Write text samples of 1 to 200 words."""
    folder.mkdir()
    for shard in range(4):
        with tarfile.open(folder / f"{shard}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number in range(shard * SAMPLES // 4, (shard + 1) * SAMPLES // 4):
                text = b"word " * (number * 7919 % 200 + 1)
                info = tarfile.TarInfo(f"{number:06d}.txt")
                info.size = len(text)
                tar.addfile(info, io.BytesIO(text))


def seconds_of_tasks(folder: Path) -> dict[str, tuple[float, float]]:
    """Do each task once; return its seconds by the clock and of the processor, by name."""
    import numpy as np
    import torch  # noqa: F401
    from click.testing import CliRunner

    found: dict[str, tuple[float, float]] = {}

    @contextmanager
    def timed(name: str, times: int = 1) -> Iterator[None]:
        wall, processor = time.perf_counter(), _processor()
        yield
        found[name] = ((time.perf_counter() - wall) / times, (_processor() - processor) / times)

    def measure() -> None:
        call("measure", str(folder), "--task-encoder", f"{__name__}:Measured", "--num-workers", "0")

    def prepare() -> None:
        options = ["--non-interactive", "--force-overwrite", "--split-ratio", "1,0,0", "--num-workers", "1"]
        call("prepare", str(folder), *options, "--sample-type", "TextSample", "--field-map", '{"text": "txt"}')

    def call(*arguments: str) -> None:
        from energon_lite.cli.main import main as command

        done = CliRunner().invoke(command, list(arguments))
        assert done.exit_code == 0, done.output

    with timed("import, prepare, measure"):  # a version may import at once what another imports at first use
        import energon_lite as lite

        prepare()
        measure()
    shutil.rmtree(folder / ".nv-meta")

    class Own(lite.TaskEncoder):  # type: ignore[misc]
        """An encoder of a user: tokens and their number."""

        def encode_sample(self, sample: Any) -> dict[str, Any]:
            tokens = np.frombuffer(sample.text.encode(), dtype=np.uint8)
            return {"__key__": sample.__key__, "tokens": tokens, "length": len(tokens)}

        def batch(self, samples: list[Any]) -> Any:
            return [sample["tokens"].sum() for sample in samples]

    def loader(workers: int = 0, **options: Any) -> Any:
        config = lite.WorkerConfig(rank=0, world_size=1, num_workers=workers)
        return lite.get_savable_loader(lite.get_train_dataset(folder, worker_config=config, **options))

    def by_tokens(step: int | None) -> Any:
        strategy = lite.BestFit(lite.Capacity(4096))
        return lite.ByTokens(strategy, length_column="length", micro_batches_per_step=step)

    with timed("prepare"):
        prepare()
    with timed("measure"):
        measure()
    next(iter(loader(batch_size=8)))  # imports
    for workers in (0, 2):
        with timed(f"first batch, {workers} workers"), loader(workers, batch_size=8) as opened:
            next(iter(opened))
    rows: dict[str, Callable[[], Any]] = {
        "batch of 8, no hooks": lambda: loader(batch_size=8, shuffle_buffer_size=None),
        "batch of 8, own hooks": lambda: loader(batch_size=8, task_encoder=Own()),
        "batch by tokens": lambda: loader(task_encoder=Own(), batching=by_tokens(None)),
        "batch of an even step": lambda: loader(task_encoder=Own(), batching=by_tokens(8)),
    }
    for name, make in rows.items():
        if "tokens" in name or "step" in name:
            next(iter(make()))  # imports
            time.sleep(0.5)  # the next window is planned meanwhile
            with timed(f"first {name}"):
                next(iter(make()))
        batches = iter(opened := make())
        next(batches)
        with timed(name, BATCHES):
            for _ in islice(batches, BATCHES):
                pass
        with timed(f"state, {name}", 100):
            for _ in range(100):
                state = opened.save_state_rank()
        with timed(f"resume, {name}"):
            again = make()
            again.restore_state_rank(state)
            next(iter(again))
    return found


def _processor() -> float:
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def __getattr__(name: str) -> Any:
    """Make the encoder of ``measure`` when it is asked for, with the package of the checkout."""
    if name != "Measured":
        raise AttributeError(name)
    from energon_lite import TaskEncoder

    class Measured(TaskEncoder):  # type: ignore[misc]
        def sample_length(self, sample: Any) -> int:
            return len(sample.text)

    return Measured


def _run(checkout: Path) -> dict[str, tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder) / "data")
        environment = os.environ | {"PYTHONPATH": f"{checkout}{os.pathsep}{Path(__file__).parent}"}
        code = "import json, sys, versions; from pathlib import Path; "
        code += "print(json.dumps(versions.seconds_of_tasks(Path(sys.argv[1]))))"
        command = [sys.executable, "-c", code, str(Path(folder) / "data")]
        # Not in the folder of a checkout: "-c" would put it before PYTHONPATH.
        done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
        if done.returncode:
            sys.exit(done.stderr)
        found: dict[str, tuple[float, float]] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="the other checkout")
    parser.add_argument("--runs", type=int, default=7, help="processes of each checkout")
    options = parser.parse_args()
    runs: dict[Path, list[dict[str, tuple[float, float]]]] = {options.before.resolve(): [], ROOT: []}
    for run in range(options.runs):
        for checkout in list(runs) if run % 2 else reversed(list(runs)):
            runs[checkout].append(_run(checkout))
    print(f"{'':32s}{'before':>12s}{'now':>12s}{'ratio':>8s}{'by clock':>10s}   (milliseconds of the processor)")
    for name in runs[ROOT][0]:
        medians = [[statistics.median(found[name][kind] for found in runs[at]) for kind in (0, 1)] for at in runs]
        (wall_before, before), (wall, now) = medians
        print(f"{name:32s}{before * 1e3:12.3f}{now * 1e3:12.3f}{now / before:8.2f}{wall / wall_before:10.2f}")


if __name__ == "__main__":
    main()
