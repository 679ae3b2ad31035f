"""Another micro-batch size on resume: the samples go on as if nothing had happened, or it is said where they can."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.errors import StateMismatchError, UsageError
from energon_lite.extras.blends import rebase_state
from tests.testing import ALONE, examples

sizes = st.sampled_from([None, 1, 2, 3, 4, 6, 8])
topologies = st.tuples(st.integers(1, 4), st.sampled_from([0, 0, 1]))


def keys_of(batches: list[Any]) -> list[str]:
    """The samples of batches, or of single samples, in order."""
    return [key for one in batches for key in ([one.__key__] if isinstance(one.__key__, str) else one.__key__)]


def builder(path: Any, size: int | None, **more: Any) -> Callable[[WorkerConfig], Any]:
    return lambda config: get_train_dataset(path, batch_size=size, worker_config=config, **more)


def samples_of(path: Any, count: int = 120) -> list[str]:
    """The samples of a run, in order."""
    loader = get_savable_loader(builder(path, 1)(ALONE))
    return keys_of([batch for _, batch in zip(range(count), loader, strict=False)])


def run(cluster: Any, build: Any, topology: tuple[int, int], state: Any, steps: int) -> tuple[list[str], Any]:
    with cluster(build, *topology, state) as ranks:
        found = keys_of(ranks.steps(steps))
        return found, json.loads(json.dumps(ranks.state()))


@settings(max_examples=examples(12))
@given(
    old=sizes, new=sizes, before=topologies, after=topologies, cut=st.integers(0, 9), steps=st.integers(1, 3),
    staged=st.booleans(),
)  # fmt: skip
def test_the_stream_goes_on_or_the_place_is_named(
    cluster: Any,
    leaf_of: Callable[..., Path],
    old: int | None,
    new: int | None,
    before: Any,
    after: Any,
    cut: int,
    steps: int,
    staged: bool,
) -> None:
    weights = [{"linear": {0: 1, 40: 3}}, {"linear": {0: 3, 40: 1}}] if staged else [2, 1]
    leaves = [
        {"path": str(leaf_of(13, "a")), "weight": weights[0]},
        {"path": str(leaf_of(50, "b")), "weight": weights[1]},
    ]
    path = {"splits": {"train": {"blend": leaves}}}
    whole = samples_of(path, 500)
    found, state = run(cluster, builder(path, old), before, None, cut)
    try:
        more, _ = run(cluster, builder(path, new), after, state, steps)
    except StateMismatchError as error:
        named = re.search(r"to micro-batch ([\d,]+) \(steps: (\d+) on (\d+) rank", error.fix or "")
        assert named and (len(found) % (new or 1))
        following, way, ranks = (int(number.replace(",", "")) for number in named.groups())
        assert (
            state["position"]
            < following
            == state["position"] + (way * ranks if ranks == 1 else following - state["position"])
        )
        rest, state = run(cluster, builder(path, old), (ranks, 0), state, way)
        assert state["position"] >= following
        found += rest
        assert len(found) % (new or 1) == 0  # and the named place is one
        more, _ = run(cluster, builder(path, new), after, state, steps)
    assert found + more == whole[: len(found) + len(more)]
    assert len(more) == steps * after[0] * (new or 1)


@pytest.mark.parametrize(("old", "new"), [((4, 1), (1, 4)), ((1, 4), (2, 2)), ((2, 4), (8, 1)), ((2, 2), (1, 1))])
def test_global_batches_keep_their_samples(
    cluster: Any, leaf_of: Callable[..., Path], old: tuple[int, int], new: tuple[int, int]
) -> None:
    """Whatever the micro-batches, ranks and steps are of which a global batch of 8 is made."""
    leaf, length = leaf_of(50), 8

    def global_batches(one: tuple[int, int], state: Any, count: int) -> tuple[list[set[str]], Any]:
        size, world = one
        keys, state = run(cluster, builder(leaf, size), (world, 0), state, count * length // (size * world))
        return [set(keys[first : first + length]) for first in range(0, len(keys), length)], state

    expected, _ = global_batches((8, 1), None, 6)
    first, state = global_batches(old, None, 3)
    then, _ = global_batches(new, state, 3)
    assert first + then == expected


def test_passes_that_end(leaf_of: Callable[..., Path]) -> None:
    whole = [f"a{number}" for number in range(10)]

    def loader(size: int | None, state: Any = None, **more: Any) -> Any:
        made = get_savable_loader(get_val_dataset(leaf_of(10), batch_size=size, worker_config=ALONE, **more))
        made.restore_state_rank(state)
        return made

    every = keys_of(list(loader(None)))
    assert len(every) == len(whole)
    for cut in range(6):
        first = loader(2)
        begun = iter(first)
        found = keys_of([next(begun) for _ in range(cut)])
        state = first.save_state_rank()
        if cut in (0, 3):
            assert found + keys_of(list(loader(3, state))) == every
        elif cut == 5:  # the pass is over: the next one begins
            assert keys_of(list(loader(3, state))) == every
        else:
            with pytest.raises(StateMismatchError, match="no batch of 3 begins"):
                loader(3, state)
    begun = iter(limited := loader(2, limit=4))
    next(begun)
    with pytest.raises(StateMismatchError, match="limit of batches"):
        loader(1, limited.save_state_rank(), limit=8)


def test_other_differences_are_all_told(leaf_of: Callable[..., Path]) -> None:
    one = get_savable_loader(builder(leaf_of(50), 2)(ALONE))
    next(iter(one))
    other = get_savable_loader(builder(leaf_of(50), 4)(WorkerConfig(rank=0, world_size=1, seed_offset=3)))
    with pytest.raises(StateMismatchError, match=r"(?s)batch_size: 2 in the state, 4 here.*seed: 0 in the state, 3"):
        other.restore_state_rank(one.save_state_rank())


def test_a_loop_of_a_virtual_epoch_keeps_its_end(leaf_of: Callable[..., Path]) -> None:
    def loader(size: int, loop: int, world: int = 1) -> Any:
        config = WorkerConfig(rank=0, world_size=world)
        return get_savable_loader(builder(leaf_of(50), size, virtual_epoch_length=loop)(config))

    one = loader(2, 6)
    list(one)
    begun = iter(one)
    next(begun), next(begun)
    other = loader(4, 3)
    other.restore_state_rank(one.save_state_rank())
    assert len(list(other)) == 2  # four samples of the loop's twelve were delivered


class Pairs(TaskEncoder):
    """Packs two samples each."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[first : first + 2] for first in range(0, len(samples), 2)]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {"__key__": [sample.__key__ for sample in samples]}

    def batch(self, samples: list[Any]) -> Any:
        return [key for sample in samples for key in sample["__key__"]]


@settings(max_examples=examples(15))
@given(old=st.integers(1, 6), new=st.integers(1, 6), cut=st.integers(0, 9))
def test_rebase_may_pass_over_what_is_in_between(leaf_of: Callable[..., Path], old: int, new: int, cut: int) -> None:
    before, after = (builder(leaf_of(50), size)(ALONE) for size in (old, new))
    loader = get_savable_loader(before)
    batches = iter(loader)
    for _ in range(cut):
        next(batches)
    state = loader.save_state_rank()
    if cut * old % new and old != new:
        with pytest.raises(StateMismatchError, match="no batch of"):
            rebase_state(state, before, after)
    moved, report = rebase_state(state, before, after, give_up=True)
    assert report.given_up == (-cut * old % new if old != new else 0)
    assert report.batch_size == (None if old == new else (old, new))
    again = get_savable_loader(after)
    again.restore_state_rank(moved)
    if old != new:
        whole = samples_of(leaf_of(50))
        place = cut * old + report.given_up
        assert "rebase" not in moved  # the sequence is the same
        assert next(iter(again)).__key__ == whole[place : place + new]


def test_batches_that_hooks_make_are_rebased_behind_their_chunks(leaf_of: Callable[..., Path]) -> None:
    def build(size: int) -> Any:
        more = {"packing_buffer_size": 4, "chunk_size": 8, "task_encoder": Pairs(), "lanes": 2}
        return builder(leaf_of(50), size, **more)(ALONE)

    loader = get_savable_loader(build(1))
    batches = iter(loader)
    shown = [key for _ in range(9) for key in next(batches)]
    state = loader.save_state_rank()
    other = get_savable_loader(build(2))
    with pytest.raises(StateMismatchError, match="batch_size: 1 in the state, 2 here"):
        other.restore_state_rank(state)
    with pytest.raises(UsageError, match="were not delivered yet"):
        rebase_state(state, build(1), build(2))
    moved, report = rebase_state(state, build(1), build(2), give_up=True)
    assert report.first % 8 == 0 and report.first - report.given_up <= len(shown)
    other.restore_state_rank(moved)
    rest = [key for _, batch in zip(range(3), other, strict=False) for key in batch]
    whole = samples_of(leaf_of(50))
    assert set(rest) <= set(whole[report.first : report.first + 16])
