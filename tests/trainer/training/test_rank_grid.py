"""The grid of ranks as arithmetic: the documented example, and what holds for all sizes and orders."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.errors import TopologyError
from energon_lite.trainer.parallel.rank_grid import AXES, RankGrid, fit_sizes, layers_of_stages

ORDERS = ["-".join(names) for names in itertools.permutations(AXES)]
grids = st.builds(RankGrid, *[st.integers(1, 4)] * 4, order=st.sampled_from(ORDERS))


def test_documented_grids() -> None:
    grid = RankGrid(pp=4, dp=2, cp=1, tp=2)
    assert grid.groups("tp") == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert grid.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert grid.end_groups() == [[0, 12], [1, 13], [2, 14], [3, 15]]
    assert RankGrid(cp=4, tp=2).groups("cp") == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # The layout of the loader's documentation: data parallel 2, pipeline parallel 2, tensor parallel 2.
    grid = RankGrid(pp=2, dp=2, tp=2, order="tp-pp-dp")
    places = [grid.coordinates(rank) for rank in range(8)]
    assert [place["dp"] for place in places] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [place["pp"] for place in places] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert [place["tp"] for place in places] == [0, 1, 0, 1, 0, 1, 0, 1]


@given(grids, st.sets(st.sampled_from(AXES), min_size=1))
def test_groups_share_out_all_ranks_each_of_which_has_one_place(grid: RankGrid, axes: set[str]) -> None:
    groups = grid.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(grid.world_size))
    for group in groups:
        places = [grid.coordinates(rank) for rank in group]
        assert [grid.rank_at(place) for place in places] == group
        for axis in AXES:
            seen = {place[axis] for place in places}
            assert seen == set(range(grid.size(axis))) if axis in axes else len(seen) == 1


@pytest.mark.parametrize("order", ["tp-cp-dp", "tp-cp-dp-ep", "tp-tp-cp-dp-pp", ""])
def test_an_order_names_each_axis_once(order: str) -> None:
    with pytest.raises(TopologyError, match="does not name each axis once"):
        RankGrid(2, 2, 2, 2, order)


def test_an_axis_of_one_may_be_left_out() -> None:
    assert RankGrid(pp=2, dp=2, tp=2, order="tp-pp-dp").slow_to_fast == ("cp", "dp", "pp", "tp")
    with pytest.raises(TopologyError, match="cp is missing"):
        RankGrid(cp=2, order="tp-dp-pp")


@given(st.integers(1, 64), st.data())
def test_advice_can_be_followed(world: int, data: st.DataObject) -> None:
    sizes = {axis: data.draw(st.integers(1, 8), label=axis) for axis in ("pp", "cp", "tp")}
    try:
        dp = fit_sizes(world, **sizes)
    except TopologyError as error:
        for part in (error.fix or "").split("; "):
            if " can be " in part:
                axis, _, numbers = part.partition(" can be ")
                for number in numbers.split(", "):
                    assert fit_sizes(world, **(sizes | {axis: int(number)})) >= 1
    else:
        assert dp * sizes["pp"] * sizes["cp"] * sizes["tp"] == world


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 3))
def test_each_layer_is_on_one_stage(layers: int, pp: int, virtual: int) -> None:
    if layers < pp * virtual:
        with pytest.raises(TopologyError, match="too few"):
            layers_of_stages(layers, pp, virtual)
        return
    stages = layers_of_stages(layers, pp, virtual)
    runs = [stages[run % pp][run // pp] for run in range(pp * virtual)]
    assert [number for run in runs for number in run] == list(range(layers))
    lengths = [len(run) for run in runs]
    assert max(lengths) - min(lengths) <= 1
    if pp * virtual > 1:
        assert lengths[-1] == min(lengths), "the stage that makes the loss has not more layers than others"
