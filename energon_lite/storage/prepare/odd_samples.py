"""Detection of samples whose headers look broken: a part without bytes, a missing part, or a part twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import listed
from energon_lite.storage.index.packed_index import PackedIndex

__all__ = ["odd_sample_notes", "usual_parts"]

#: Samples of a kind that are named; further ones are only counted.
_NAMED = 1000
#: Samples that are examined together.
_BLOCK = 1 << 20


def usual_parts(numbers: NDArray[np.int64], names: Sequence[str], samples: int) -> frozenset[str]:
    """Return the parts that nearly all samples have: at least 98 of 100.

    Args:
        numbers: the number of each part's name.
        names: the names, by number.
        samples: number of samples.

    Example:
        >>> usual_parts(np.array([0, 1, 0, 1, 0]), ["jpg", "txt"], 3)
        frozenset({'jpg'})
    """
    counts = np.bincount(numbers, minlength=len(names)).tolist()
    return frozenset(name for name, count in zip(names, counts, strict=True) if count >= 0.98 * samples)


def odd_sample_notes(index: PackedIndex) -> Iterator[str]:
    """Describe apparent defects of a data set; each kind is followed by its samples as ``shard: key.part``.

    Args:
        index: the packed index of the data set.
    """
    usual = usual_parts(index.parts[:][:, 2], index.part_names, len(index)) if len(index) else frozenset()
    known = np.array([name in usual for name in index.part_names], dtype=bool)
    kinds: dict[str, list[NDArray[np.int64]]] = {}
    for start in range(0, len(index), _BLOCK):
        for what, pairs in _odd(index, known, start, min(start + _BLOCK, len(index))):
            kinds.setdefault(what, []).append(pairs)
    for what, blocks in kinds.items():
        pairs = np.concatenate(blocks)
        samples, parts = pairs[:_NAMED].T.tolist()
        rows = (np.searchsorted(index.shards[:, 3], samples, side="right") - 1).tolist()
        names = [f"{index.key(sample)}.{index.part_names[part]}" for sample, part in zip(samples, parts, strict=True)]
        named = [f"{index.shard_names[row]}: {name}" for row, name in zip(rows, names, strict=True)]
        having = "1 sample has" if len(pairs) == 1 else f"{len(pairs):,} samples have"
        yield f"{having} {what}: {listed(named, _NAMED, len(pairs))}"


def _odd(
    index: PackedIndex, known: NDArray[np.bool_], start: int, stop: int
) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Kind and ``[n, 2]`` (sample, number of the part's name) of the defects in a range of samples."""
    first = index.samples[start : stop + 1][:, 0]
    parts = index.parts[int(first[0]) : int(first[-1])]
    owners = np.repeat(np.arange(start, stop), np.diff(first))
    empty = np.flatnonzero(parts[:, 1] == 0)
    if len(empty):
        yield "a part without bytes", np.stack([owners[empty], parts[empty, 2]], 1)
    # A sample with an unusual part does not count as lacking one: the unusual part may replace it.
    plain = np.ones(stop - start, dtype=bool)
    plain[owners[~known[parts[:, 2]]] - start] = False
    for number in np.flatnonzero(known).tolist():
        lacks = plain.copy()
        lacks[owners[parts[:, 2] == number] - start] = False
        if lacks.any():
            missing = np.flatnonzero(lacks) + start
            what = f"no part {index.part_names[number]!r}, which nearly all others have"
            yield what, np.stack([missing, np.full(len(missing), number)], 1)
    both = np.sort(owners * len(known) + parts[:, 2])
    doubled = both[1:][both[1:] == both[:-1]]
    if len(doubled):
        yield "a part more than once", np.stack(np.divmod(doubled, len(known)), 1)
