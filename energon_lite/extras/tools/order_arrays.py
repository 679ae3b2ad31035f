"""The order as arrays on disk: Megatron's blend index, and a shuffle computed ahead of time.

No other part of the library needs them. The blend index is the pair that Megatron-Core's blended data set reads: the
data set of each sample, and its number in that data set's own stream. The counts are exact at the end (largest
remainder, as in Lyuwen Fu, "Finding efficiency gains in data loading procedure in Megatron Core framework", 2024), and
at the end of each block of 4,096 samples they are within one sample of their share. Each block can be computed alone,
so all cores and all ranks write slices at once, each in bounded memory, and the bytes do not depend on the division of
work.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError, WorkerError
from energon_lite.order.blend import Layout, integer_shares
from energon_lite.order.block_counts import BLOCK, BlockCounts
from energon_lite.order.orders import ChangingWeights
from energon_lite.order.permutation import MAX_LENGTH, permute_array
from energon_lite.storage.files.atomic_file import flush_files
from energon_lite.topology import cores_per_rank

#: Names of the two files of a blend index.
DATASET_INDEX = "dataset_index.npy"
SAMPLE_INDEX = "dataset_sample_index.npy"

#: Most blocks that are written at once: 2.5 MiB.
_BLOCKS_AT_ONCE = 64
#: The shortest slice in samples that gets its own process.
_WORTH_A_PROCESS = 1 << 20

Ints = NDArray[np.int64]
#: Input of the arrays: the counts of each data set, or weights that change and the length, or the length of a
#: permutation; and the key.
Recipe = dict[str, Any]


def build_blend_index(
    weights: Sequence[float] | ChangingWeights,
    n: int,
    path: str | os.PathLike[str] | None = None,
    *,
    key: int = 0,
    workers: int | None = None,
    rank: int | None = None,
    world_size: int = 1,
    barrier: Callable[[], object] | None = None,
) -> tuple[NDArray[np.int16], Ints]:
    """Write a blend of ``n`` samples as two arrays.

    Args:
        weights: one positive number per data set; only ratios count. Or weights that change: counts are then
            within one sample of the integral of the share, also at the end.
        n: total number of samples.
        path: the new folder, which appears when both files in it are complete; None: arrays in memory, computed by this
            process alone.
        key: key of the interleaving; the counts do not depend on it.
        workers: number of processes of this rank; None: one per core. A short array uses fewer.
        rank, world_size, barrier: for sharing the work with other processes that see the same folder and make the same
            call. ``barrier()`` returns when all of them have called it. By default, ranks are those of torch's default
            process group, if there is one; each writes a slice.

    Returns:
        ``(data set of each sample [n] int16, its number in that data set's stream [n] int64)``, read-only and mapped
        from the files where there are files. Numbers go 0, 1, 2, ... in each data set, to its count.

    Raises:
        UsageError: more than 32,767 data sets, a weight that is not positive, an existing folder, or ranks without a
            barrier.

    Example:
        >>> data_set, sample = build_blend_index([3, 1], 8)
        >>> np.bincount(data_set).tolist(), sample[data_set == 1].tolist()
        ([6, 2], [0, 1])
    """
    recipe = _recipe(weights, n) | {"key": key}
    dist = sys.modules.get("torch.distributed")  # not imported here: child processes do without torch
    if rank is None and path is not None and dist is not None and dist.is_available() and dist.is_initialized():
        rank, world_size, barrier = dist.get_rank(), dist.get_world_size(), dist.barrier
    rank = rank or 0
    if not 0 <= rank < world_size:
        raise UsageError(f"rank {rank} of {world_size}", fix="give 0 <= rank < world_size")
    if world_size > 1 and barrier is None:
        raise UsageError(f"{world_size} ranks without a barrier", fix="give a function that waits for all ranks")
    if path is None:
        data_set, sample = np.empty(n, dtype=np.int16), np.empty(n, dtype=np.int64)
        for start, (leaves, positions) in _chunks(recipe, 0, _blocks(n)):
            data_set[start : start + len(leaves)] = leaves
            sample[start : start + len(leaves)] = positions
        return data_set, sample
    final = os.path.abspath(os.fspath(path))
    if os.path.exists(final):
        raise UsageError("the path exists already", where=final, fix="remove it, or give another path")
    wait = barrier or (lambda: None)
    unfinished = os.path.join(os.path.dirname(final), f".{os.path.basename(final)}.unfinished")
    paths = [os.path.join(unfinished, name) for name in (DATASET_INDEX, SAMPLE_INDEX)]
    if rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)  # remains of a killed build
        os.makedirs(unfinished)
        for file, dtype in zip(paths, (np.int16, np.int64), strict=True):
            np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=(n,))
    wait()
    first, stop = (_blocks(n) * r // world_size for r in (rank, rank + 1))
    worth = max(1, (stop - first) * BLOCK // _WORTH_A_PROCESS)
    workers = max(1, min(workers or cores_per_rank(), worth))
    if workers == 1:
        with _opened(paths) as files:
            _fill(files, recipe, first, stop)
    else:
        _fill_in_children(paths, recipe, first, stop, workers)
    wait()
    if rank == 0:
        flush_files(paths)
        os.rename(unfinished, final)
    wait()
    data_set, sample = (np.load(os.path.join(final, name), mmap_mode="r") for name in (DATASET_INDEX, SAMPLE_INDEX))
    return data_set, sample


def shuffle_ahead(
    n: int, key: int, *, folder: str | os.PathLike[str] | None = None, workers: int = 1
) -> Future[NDArray[np.int64]]:
    """Compute a whole permutation in the background, from its length and a key alone.

    Child processes compute it, because a thread would wait for the interpreter lock at each of some hundred numpy calls
    per 16,384 elements while the main thread opens data sets.

    Args:
        n: length.
        key: 64-bit key; the result equals ``permute_array(np.arange(n), n, key)``.
        folder: folder for the 8 bytes per element; the file has no name once it is complete. None: the folder for
            temporary files.
        workers: number of processes.

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


# -- computation --------------------------------------------------------------------------------------------------


def _recipe(weights: Sequence[float] | ChangingWeights, n: int) -> Recipe:
    weights = weights.tolist() if isinstance(weights, np.ndarray) else weights
    leaves = len(weights) if isinstance(weights, Sequence) else weights.leaves
    limit = np.iinfo(np.int16).max
    if leaves > limit:
        raise UsageError(
            f"{leaves} data sets: a blend index numbers at most {limit}, in 16 bits",
            fix="merge small data sets; or use a blend without arrays, which has no such limit",
        )
    if not 1 <= n <= MAX_LENGTH:
        raise UsageError(f"a blend index of {n} samples", fix="give a length from 1 to 2**62")
    if isinstance(weights, Sequence):
        return {"counts": integer_shares(weights, n)}
    weights.blend(leaves, 0)  # raises the errors
    return {"changing": weights, "length": n}


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def _chunks(recipe: Recipe, first: int, stop: int) -> Iterator[tuple[int, list[NDArray[Any]]]]:
    """Yield the columns of blocks ``first .. stop``, some blocks at a time, each with the position of its first row."""
    key = recipe["key"]
    weights: ChangingWeights | None = recipe.get("changing")
    blend = None if weights is None else weights.blend(weights.leaves, key, recipe["length"])
    layout = "counts" in recipe and Layout(BlockCounts(np.asarray(recipe["counts"], dtype=np.int64)), key)
    for chunk in range(first, stop, _BLOCKS_AT_ONCE):
        last = min(chunk + _BLOCKS_AT_ONCE, stop)
        start = chunk * BLOCK
        if layout:
            blocks = [layout.block(number) for number in range(chunk, last)]
            data_set = np.concatenate([block.leaf for block in blocks]).astype(np.int16)
            yield start, [data_set, np.concatenate([block.position for block in blocks])]
            continue
        rows = np.arange(start, min(last * BLOCK, recipe["length"]))
        if blend:
            leaf, sample = blend.lookup(rows)
            yield start, [leaf.astype(np.int16), sample]
        else:
            yield start, [permute_array(rows, recipe["length"], key)]


# -- files ----------------------------------------------------------------------------------------------------------


@contextmanager
def _opened(paths: Sequence[str]) -> Iterator[list[tuple[int, int]]]:
    """Yield the descriptor of each array file and the offset of its elements."""
    with ExitStack() as ends:
        # Not written through a mapping, whose pages would count as this process's memory.
        yield [
            (ends.enter_context(open(path, "r+b", buffering=0)).fileno(), np.load(path, mmap_mode="r").offset)
            for path in paths
        ]


def _fill(files: Sequence[tuple[int, int]], recipe: Recipe, first: int, stop: int, parent: int | None = None) -> None:
    """Write blocks ``first .. stop`` into array files, one for each column.

    A child has files, not paths: if its ``parent`` was killed, another build may have put its own files there.
    """
    for start, columns in _chunks(recipe, first, stop):
        if parent is not None and os.getppid() != parent:
            raise SystemExit("the process that requested this has ended")
        for (file, offset), values in zip(files, columns, strict=True):
            rest, place = values.tobytes(), offset + start * values.itemsize
            while rest:
                written = os.pwrite(file, rest, place)
                rest, place = rest[written:], place + written


def _shuffle(n: int, key: int, folder: str | os.PathLike[str] | None, workers: int) -> Ints:
    handle, path = tempfile.mkstemp(prefix="shuffle-", suffix=".npy", dir=folder)
    os.close(handle)
    try:
        np.lib.format.open_memmap(path, mode="w+", dtype=np.int64, shape=(n,))
        _fill_in_children([path], {"length": n, "key": key}, 0, _blocks(n), workers)
        return np.load(path, mmap_mode="r")
    finally:
        os.unlink(path)


# -- child processes ------------------------------------------------------------------------------------------------

# Plain child processes that get their job by a pipe. They do not fork or import the caller as multiprocessing would,
# nor import torch: they start in a tenth of a second.
_BOOT = "import sys; sys.path[:] = sys.argv[1:]; from energon_lite.extras.tools.order_arrays import serve; serve()"


def serve() -> None:
    """Run a job in a child process."""
    _fill(**pickle.load(sys.stdin.buffer))


def _fill_in_children(paths: Sequence[str], recipe: Recipe, first: int, stop: int, workers: int) -> None:
    """Run :func:`_fill` in ``workers`` processes."""
    bounds = [first + (stop - first) * worker // workers for worker in range(workers + 1)]
    with _opened(paths) as files, ExitStack() as ends:
        # The parent's number is passed and not queried, because the parent may be gone by then.
        job = {"files": files, "recipe": recipe, "parent": os.getpid()}
        children: list[subprocess.Popen[bytes]] = []
        for start, end in pairwise(bounds):
            child = subprocess.Popen(
                [sys.executable, "-c", _BOOT, *sys.path],
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=[file for file, _ in files],
            )
            children.append(ends.enter_context(child))  # closes its pipes and waits for it
            ends.callback(child.kill)
            assert child.stdin is not None
            with suppress(BrokenPipeError), child.stdin as pipe:  # it has ended already; stderr has the reason
                pickle.dump(job | {"first": start, "stop": end}, pipe)
        for child in children:
            assert child.stderr is not None
            words = child.stderr.read().decode(errors="replace")
            if child.wait():
                raise WorkerError(
                    f"a process that writes arrays ended with {child.returncode}\n{words}",
                    fix="see its output; if memory was short, use fewer workers",
                )
