"""The order as arrays on disk, for programs that want arrays: Megatron's blend index, and a shuffle made ahead of time.

Nothing in this library needs them. The blend index is the pair that Megatron-Core's blended data set reads: of each
sample the data set, and its number in that data set's own stream. The counts are exact at the end (largest remainder,
as in Lyuwen Fu, "Finding efficiency gains in data loading procedure in Megatron Core framework", 2024), and at the end
of each block of 4,096 samples they are within one sample of their share. Any block can be computed alone: so slices
are written by all cores and all ranks at once, each in bounded memory, and the bytes do not depend on who wrote what.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import astuple
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError, WorkerError
from energon_lite.order.blend import Layout, integer_shares
from energon_lite.order.block_counts import BLOCK, BlockCounts
from energon_lite.order.permutation import MAX_LENGTH, permute_array
from energon_lite.order.stages import Stage, StagedBlend, check_stages

__all__ = ["DATASET_INDEX", "SAMPLE_INDEX", "build_blend_index", "shuffle_ahead"]

DATASET_INDEX = "dataset_index.npy"
SAMPLE_INDEX = "dataset_sample_index.npy"

#: Blocks written at once: 2.5 MiB.
_BLOCKS_AT_ONCE = 64
_SHUFFLED_AT_ONCE = 1 << 18
#: A slice shorter than this is not worth a process of its own.
_WORTH_A_PROCESS = 1 << 20

Ints = NDArray[np.int64]
#: What the counts come from, as plain data: either of each data set, or stages and the length.
Recipe = dict[str, Any]


def build_blend_index(
    weights: Sequence[float] | Sequence[Stage],
    n: int,
    path: str | os.PathLike[str] | None = None,
    *,
    key: int = 0,
    workers: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    barrier: Callable[[], object] | None = None,
) -> tuple[NDArray[np.int16], Ints]:
    """Write a blend of ``n`` samples as two arrays.

    Args:
        weights: one positive number a data set; only ratios count. Or stages, where weights change along the way:
            counts are then within one sample of the integral of the share, at the end too.
        n: samples in all.
        path: a folder to be made, which appears when both files in it are whole; None: arrays in memory, computed by
            this process alone.
        key: another key, another interleaving; the counts stay.
        workers: processes of this rank; None: one a core. A short array takes fewer.
        rank, world_size, barrier: to share the work with other processes that see the same folder and call this with
            the same arguments. ``barrier()`` returns when all of them have called it.

    Returns:
        ``(data set of each sample [n] int16, its number in that data set's stream [n] int64)``, read-only and mapped
        from the files where there are files. Numbers go 0, 1, 2, ... in each data set, to its count.

    Raises:
        UsageError: more than 32,767 data sets, a weight that is not positive, a folder that is there already, ranks
            without a barrier.

    Example:
        >>> data_set, sample = build_blend_index([3, 1], 8)
        >>> np.bincount(data_set).tolist(), sample[data_set == 1].tolist()
        ([6, 2], [0, 1])
    """
    recipe = _recipe(weights, n)
    _check_ranks(rank, world_size, barrier)
    if path is None:
        halves = np.empty(n, dtype=np.int16), np.empty(n, dtype=np.int64)
        _each_chunk(recipe, key, 0, _blocks(n), lambda start, *parts: _copy(halves, start, parts))
        return halves
    final = os.path.abspath(os.fspath(path))
    if os.path.exists(final):
        raise UsageError("there is something at this path already", where=final, fix="remove it, or give another path")
    wait = barrier or (lambda: None)
    unfinished = os.path.join(os.path.dirname(final), f".{os.path.basename(final)}.unfinished")
    if rank == 0:
        _make_files(unfinished, n)
    wait()
    first, stop = (_blocks(n) * r // world_size for r in (rank, rank + 1))
    _write_slice(unfinished, recipe, key, first, stop, workers)
    wait()
    if rank == 0:
        for name in (DATASET_INDEX, SAMPLE_INDEX):
            _flush(os.path.join(unfinished, name))
        os.rename(unfinished, final)
    wait()
    data_set, sample = (np.load(os.path.join(final, name), mmap_mode="r") for name in (DATASET_INDEX, SAMPLE_INDEX))
    return data_set, sample


def shuffle_ahead(
    n: int, key: int, *, folder: str | os.PathLike[str] | None = None, workers: int = 1
) -> Future[NDArray[np.int64]]:
    """Compute a whole permutation in the background, knowing nothing but its length.

    Child processes do it, because a thread would wait for the interpreter at each of some hundred numpy calls per
    16,384 elements while the main thread is opening data sets.

    Args:
        n: length.
        key: 64 bits; the result equals ``permute_array(np.arange(n), n, key)``.
        folder: where the 8 bytes an element lie; the file has no name once it is complete. None: the folder for
            temporary files.
        workers: processes.

    Returns:
        The future array, ``[n]`` int64, read-only and mapped from the file.

    Example:
        >>> order = shuffle_ahead(1000, key=7)
        >>> order.result()[:3].tolist() == permute_array(np.arange(3), 1000, 7).tolist()
        True
    """
    if not 1 <= n <= MAX_LENGTH:
        raise UsageError(f"a permutation of {n} elements", fix="give a length from 1 to 2**62")
    executor = ThreadPoolExecutor(1, thread_name_prefix="shuffle-ahead")
    future = executor.submit(_shuffle, n, key, folder, max(1, workers))
    executor.shutdown(wait=False)
    return future


# -- what is computed -----------------------------------------------------------------------------------------------


def _recipe(weights: Sequence[float] | Sequence[Stage], n: int) -> Recipe:
    stages = [stage for stage in weights if isinstance(stage, Stage)]
    numbers = [weight for weight in weights if not isinstance(weight, Stage)]
    if stages and numbers:
        raise UsageError("stages and numbers among the weights", fix="give stages only, or numbers only")
    leaves = len(stages[0].weights) if stages else len(numbers)
    limit = np.iinfo(np.int16).max
    if leaves > limit:
        raise UsageError(
            f"{leaves} data sets: a blend index numbers at most {limit}, in 16 bits",
            fix="merge small data sets; or use a blend without arrays, which has no such limit",
        )
    if not 1 <= n <= MAX_LENGTH:
        raise UsageError(f"a blend index of {n} samples", fix="give a length from 1 to 2**62")
    if not stages:
        return {"counts": integer_shares(numbers, n).tolist()}
    check_stages(stages, leaves)
    return {"stages": [astuple(stage) for stage in stages], "length": n}


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


Chunk = Callable[[int, "NDArray[np.int16]", Ints], None]


def _each_chunk(recipe: Recipe, key: int, first: int, stop: int, take: Chunk) -> None:
    """Give blocks ``first .. stop`` to ``take(position of the first, data sets, samples)``, some blocks at a time."""
    if "stages" in recipe:
        blend = StagedBlend(
            [Stage(start, *map(_tuple, rest)) for start, *rest in recipe["stages"]], key, recipe["length"]
        )
        for chunk in range(first, stop, _BLOCKS_AT_ONCE):
            end = min(min(chunk + _BLOCKS_AT_ONCE, stop) * BLOCK, recipe["length"])
            leaf, sample = blend.lookup(np.arange(chunk * BLOCK, end))
            take(chunk * BLOCK, leaf.astype(np.int16), sample)
        return
    layout = Layout(BlockCounts(np.array(recipe["counts"], dtype=np.int64)), key)
    for chunk in range(first, stop, _BLOCKS_AT_ONCE):
        blocks = [layout.block(number) for number in range(chunk, min(chunk + _BLOCKS_AT_ONCE, stop))]
        data_set = np.concatenate([block.leaf for block in blocks]).astype(np.int16)
        take(chunk * BLOCK, data_set, np.concatenate([block.position for block in blocks]))


def _tuple(weights: Sequence[float] | None) -> Any:
    return None if weights is None else tuple(weights)


def _copy(columns: tuple[NDArray[Any], ...], start: int, parts: tuple[NDArray[Any], ...]) -> None:
    for column, part in zip(columns, parts, strict=True):
        column[start : start + len(part)] = part


# -- files ----------------------------------------------------------------------------------------------------------


def _make_files(folder: str, n: int) -> None:
    shutil.rmtree(folder, ignore_errors=True)  # left by a build that was killed
    os.makedirs(folder)
    for name, dtype in ((DATASET_INDEX, np.int16), (SAMPLE_INDEX, np.int64)):
        np.lib.format.open_memmap(os.path.join(folder, name), mode="w+", dtype=dtype, shape=(n,))


class _Slice:
    """Writes parts of an array file. Not through a mapping: its pages would count as this process's memory."""

    def __init__(self, path: str):
        mapped = np.load(path, mmap_mode="r")
        self._offset, self._width = mapped.offset, mapped.itemsize
        self._file = os.open(path, os.O_WRONLY)

    def write(self, start: int, values: NDArray[Any]) -> None:
        data, place = values.tobytes(), self._offset + start * self._width
        while data:  # a write may stop early, on a full disk with an error at the next
            done = os.pwrite(self._file, data, place)
            data, place = data[done:], place + done

    def close(self) -> None:
        os.close(self._file)


def _flush(path: str) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _write_slice(folder: str, recipe: Recipe, key: int, first: int, stop: int, workers: int | None) -> None:
    worth = max(1, (stop - first) * BLOCK // _WORTH_A_PROCESS)
    workers = max(1, min(workers or os.cpu_count() or 1, worth))
    bounds = [first + (stop - first) * worker // workers for worker in range(workers + 1)]
    jobs: list[dict[str, Any]] = [
        {"folder": folder, "recipe": recipe, "key": key, "first": start, "stop": end} for start, end in pairwise(bounds)
    ]
    if workers == 1:
        _write_blocks(**jobs[0])
    else:
        _run_children("blocks", jobs)


def _write_blocks(folder: str, recipe: Recipe, key: int, first: int, stop: int) -> None:
    data_sets, samples = (_Slice(os.path.join(folder, name)) for name in (DATASET_INDEX, SAMPLE_INDEX))

    def write(start: int, data_set: NDArray[np.int16], sample: Ints) -> None:
        _leave_if_alone()
        data_sets.write(start, data_set)
        samples.write(start, sample)

    try:
        _each_chunk(recipe, key, first, stop, write)
    finally:
        data_sets.close()
        samples.close()


def _shuffle(n: int, key: int, folder: str | os.PathLike[str] | None, workers: int) -> Ints:
    handle, path = tempfile.mkstemp(prefix="shuffle-", suffix=".npy", dir=folder)
    os.close(handle)
    try:
        np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=(n,))
        bounds = [n * worker // workers for worker in range(workers + 1)]
        jobs: list[dict[str, Any]] = [
            {"path": path, "n": n, "key": key, "start": start, "stop": stop} for start, stop in pairwise(bounds)
        ]
        _run_children("permutation", jobs)
        order: Ints = np.load(path, mmap_mode="r")
        return order
    finally:
        os.unlink(path)


def _write_permutation(path: str, n: int, key: int, start: int, stop: int) -> None:
    out = _Slice(path)
    for chunk in range(start, stop, _SHUFFLED_AT_ONCE):
        _leave_if_alone()
        out.write(chunk, permute_array(np.arange(chunk, min(chunk + _SHUFFLED_AT_ONCE, stop)), n, key))
    out.close()


# -- child processes ------------------------------------------------------------------------------------------------

# Plain children that get their job as JSON. Nothing of the caller is forked or imported again, nor torch: they
# start in a tenth of a second.
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from energon_lite.extras.order_arrays import serve; serve()"


#: The parent of a process that runs :func:`serve`.
_parent: int | None = None


def serve() -> None:
    """The main function of a child process."""
    global _parent
    job = json.load(sys.stdin)
    _parent = job.pop("parent")  # told, not asked for: it may be gone by now
    _leave_if_alone()
    functions: dict[str, Callable[..., None]] = {"blocks": _write_blocks, "permutation": _write_permutation}
    functions[job.pop("function")](**job)


def _run_children(function: str, jobs: Sequence[dict[str, Any]]) -> None:
    command = [sys.executable, "-c", _BOOT, *sys.path]
    children: list[subprocess.Popen[bytes]] = []
    try:
        for job in jobs:
            child = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
            children.append(child)
            assert child.stdin is not None
            with suppress(BrokenPipeError), child.stdin as pipe:  # it has ended already; its own words say why
                pipe.write(json.dumps({"function": function, "parent": os.getpid(), **job}).encode())
        for child in children:
            assert child.stderr is not None
            words = child.stderr.read().decode(errors="replace")
            if child.wait():
                raise WorkerError(
                    f"a process that writes arrays ended with {child.returncode}\n{words}",
                    fix="see what it said; if memory was short, use fewer workers",
                )
    finally:
        for child in children:
            child.kill()
            child.wait()
            if child.stderr is not None:
                child.stderr.close()


def _leave_if_alone() -> None:
    """A child whose parent was killed must not go on writing to files that another build may be about to replace."""
    if _parent is not None and os.getppid() != _parent:
        raise SystemExit("the process that asked for this is gone")


def _check_ranks(rank: int, world_size: int, barrier: object) -> None:
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} of {world_size}", fix="give 0 <= rank < world_size")
    if world_size > 1 and barrier is None:
        raise UsageError(f"{world_size} ranks without a barrier", fix="give a function that waits for all ranks")
