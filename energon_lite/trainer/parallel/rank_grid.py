"""The ranks of a run as a grid, by arithmetic alone: coordinates, groups and layers of each rank.

Nothing here communicates, so it works for any number of ranks: ``examples/layout.py`` prints it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import TopologyError

#: Pipeline, data, context and tensor parallel axes.
AXES = ("pp", "dp", "cp", "tp")
#: Fastest varying axis first. Tensor-parallel peers communicate most, so they are neighbours.
DEFAULT_ORDER = "tp-cp-dp-pp"


@dataclass(frozen=True)
class RankGrid:
    """Sizes of the four axes, and the order in which ranks are counted along them.

    Args:
        pp, dp, cp, tp: number of ranks along each axis.
        order: the axes, fastest varying first, joined by ``-``. Axes of size 1 may be left out.

    Raises:
        TopologyError: ``order`` names an unknown axis, names one twice, or leaves out one of size > 1.

    Example:
        >>> RankGrid(pp=4, dp=2, cp=1, tp=2).groups("dp")[:3]
        [[0, 2], [1, 3], [4, 6]]
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    order: str = DEFAULT_ORDER

    def __post_init__(self) -> None:
        names = self.order.split("-")
        missing = [axis for axis in AXES if axis not in names and self.size(axis) > 1]
        if set(names) - set(AXES) or len(set(names)) < len(names) or missing:
            what = f"order {self.order!r} does not name each axis once"
            fix = f"give pp, dp, cp and tp, the fastest varying first, e.g. {DEFAULT_ORDER} or tp-pp-dp"
            raise TopologyError(what + (f": {missing[0]} is missing" if missing else ""), fix=fix)

    def size(self, axis: str) -> int:
        """Return the number of ranks along ``axis``."""
        return {"pp": self.pp, "dp": self.dp, "cp": self.cp, "tp": self.tp}[axis]

    @property
    def world_size(self) -> int:
        return self.pp * self.dp * self.cp * self.tp

    @property
    def slow_to_fast(self) -> tuple[str, ...]:
        """All four axes, the slowest varying first. Axes that ``order`` leaves out come first."""
        names = self.order.split("-")
        return (*(axis for axis in AXES if axis not in names), *reversed(names))

    @cached_property
    def ranks(self) -> NDArray[np.intp]:
        """All ranks, ``[pp, dp, cp, tp]``."""
        counted = np.arange(self.world_size).reshape([self.size(axis) for axis in self.slow_to_fast])
        return counted.transpose([self.slow_to_fast.index(axis) for axis in AXES])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank along each axis."""
        place = np.unravel_index(rank, [self.size(axis) for axis in self.slow_to_fast])
        return dict(zip(self.slow_to_fast, map(int, place), strict=True))

    def rank_at(self, place: dict[str, int]) -> int:
        """Return the rank with these coordinates; the inverse of :meth:`coordinates`."""
        return int(self.ranks[tuple(place[axis] for axis in AXES)])

    def groups(self, *axes: str) -> list[list[int]]:
        """Return the ranks that differ along ``axes`` only, group by group; groups and their ranks are sorted."""
        last = np.moveaxis(self.ranks, [AXES.index(axis) for axis in axes], range(-len(axes), 0))
        grouped: list[list[int]] = last.reshape(-1, math.prod(map(self.size, axes))).tolist()
        return sorted(map(sorted, grouped))

    def end_groups(self) -> list[list[int]]:
        """Return the first and last stage of each pipeline, which share a tied embedding."""
        return sorted(self.ranks[[0, -1]].reshape(2, -1).T.tolist())


def layers_of_stages(layers: int, pp: int, virtual: int = 1) -> list[list[list[int]]]:
    """Return the layers of each pipeline stage: for each of its chunks, the layer numbers from 0.

    The layers are divided into ``pp * virtual`` runs, of which each stage gets every ``pp``-th. If the division is not
    even, the middle runs are one longer: the first run also embeds, the last one also computes the loss.

    Raises:
        TopologyError: there are fewer layers than runs.

    Example:
        >>> layers_of_stages(8, pp=2, virtual=2)
        [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]
    """
    runs = pp * virtual
    if layers < runs:
        sizes = ", ".join(str(size) for size in range(1, layers // virtual + 1))
        raise TopologyError(
            f"{layers} layers are too few for {pp} stages with {virtual} chunks each",
            fix=f"use pp of {sizes}" if sizes else f"use at most {layers} chunks",
        )
    each, more = divmod(layers, runs)
    first_longer = (runs - more) // 2
    lengths = [each + (first_longer <= run < first_longer + more) for run in range(runs)]
    numbers = [run.tolist() for run in np.split(np.arange(layers), np.cumsum(lengths)[:-1])]
    return [numbers[stage::pp] for stage in range(pp)]


def fit_sizes(world: int, *, pp: int = 1, dp: int | None = None, cp: int = 1, tp: int = 1) -> int:
    """Return the data-parallel size with which the sizes fill ``world`` ranks.

    Raises:
        TopologyError: there is none; the message lists, for each axis, the sizes that fit the others.
    """
    given = {"pp": pp, "cp": cp, "tp": tp} | ({} if dp is None else {"dp": dp})
    shown = ", ".join(f"{axis}={size}" for axis, size in given.items())
    for axis, size in given.items():
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise TopologyError(f"{axis}={size!r} is not a number of ranks", fix="give a whole number >= 1")
    if not _fit(world, given):
        fitting = {axis: [n for n in range(1, world + 1) if _fit(world, given | {axis: n})] for axis in given}
        advice = [f"{axis} can be {', '.join(map(str, sizes))}" for axis, sizes in fitting.items() if sizes]
        fix = "; ".join(advice) or "use sizes whose product divides the world size"
        fix += "; or start another number of ranks (torchrun --nproc-per-node)"
        raise TopologyError(f"{shown} do not fill a world of {world} ranks", fix=fix)
    return dp or world // math.prod(given.values())


def _fit(world: int, given: dict[str, int]) -> bool:
    """Return whether the product of the sizes is the world size or, with ``dp`` left open, divides it."""
    product = math.prod(given.values())
    return product == world if "dp" in given else world % product == 0
