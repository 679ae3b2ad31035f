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

from energon_lite import TaskEncoder
from energon_lite.errors import StateMismatchError, UsageError
from energon_lite.extras.blends import rebase_state
from tests.core.laws.conftest import Cluster
from tests.core.laws.kinds import training
from tests.testing import blend_of, examples, take, train_loader, val_loader

sizes = st.sampled_from([None, 1, 2, 3, 4, 6, 8])
topologies = st.tuples(st.integers(1, 4), st.sampled_from([0, 0, 1]))


def keys_of(batches: list[Any]) -> list[str]:
    """The samples of batches, or of single samples, in order."""
    return [key for one in batches for key in ([one.__key__] if isinstance(one.__key__, str) else one.__key__)]


def samples_of(path: Any, count: int = 120) -> list[str]:
    """The samples of a run, in order."""
    return keys_of(take(train_loader(path, batch_size=1), count))


def run(path: Any, size: int | None, topology: tuple[int, int], state: Any, steps: int) -> Any:
    """The samples of so many steps in batches of a size, and the state behind them."""
    with Cluster(training(path, batch_size=size), *topology, state) as ranks:
        found = keys_of(ranks.steps(steps))
        return found, json.loads(json.dumps(ranks.state()))


@settings(max_examples=examples(12))
@given(
    old=sizes, new=sizes, before=topologies, after=topologies, cut=st.integers(0, 9), steps=st.integers(1, 3),
    staged=st.booleans(),
)  # fmt: skip
def test_the_stream_goes_on_or_the_place_is_named(
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
    path = blend_of([(leaf_of(13, "a"), weights[0]), (leaf_of(50, "b"), weights[1])])
    whole = samples_of(path, 500)
    found, state = run(path, old, before, None, cut)
    try:
        more, _ = run(path, new, after, state, steps)
    except StateMismatchError as error:
        named = re.search(r"to micro-batch ([\d,]+) \(steps: (\d+) on (\d+) rank", error.fix or "")
        assert named and (len(found) % (new or 1))
        following, way, ranks = (int(number.replace(",", "")) for number in named.groups())
        assert (
            state["position"]
            < following
            == state["position"] + (way * ranks if ranks == 1 else following - state["position"])
        )
        rest, state = run(path, old, (ranks, 0), state, way)
        assert state["position"] >= following
        found += rest
        assert len(found) % (new or 1) == 0  # and the named place is one
        more, _ = run(path, new, after, state, steps)
    assert found + more == whole[: len(found) + len(more)]
    assert len(more) == steps * after[0] * (new or 1)


def test_passes_that_end(leaf_of: Callable[..., Path]) -> None:
    def loader(size: int | None, state: Any = None, **more: Any) -> Any:
        return val_loader(leaf_of(10), batch_size=size, **more).with_restored_state_rank(state)

    every = keys_of(list(loader(None)))
    assert len(every) == 10
    for cut in range(6):
        first = loader(2)
        found = keys_of(take(first, cut))
        state = first.save_state_rank()
        if cut in (0, 3):
            assert found + keys_of(list(loader(3, state))) == every
        elif cut == 5:  # the pass is over: the next one begins
            assert keys_of(list(loader(3, state))) == every
        else:
            way = f"to micro-batch {(to := 3 if cut < 3 else 5)} .steps: {to - cut} on 1 rank "
            with pytest.raises(StateMismatchError, match=f"(?s)no batch of 3 begins.* {way}"):
                loader(3, state)
    limited = loader(2, limit=4)
    take(limited, 1)
    with pytest.raises(StateMismatchError, match="limit of batches"):
        loader(1, limited.save_state_rank(), limit=8)


def test_a_loop_of_a_virtual_epoch_keeps_its_end(leaf_of: Callable[..., Path]) -> None:
    """Of the loop's twelve samples, four were delivered; of six, two, which count as a batch of four."""
    for loop, taken in (6, 2), (3, 1):
        one, other = (
            train_loader(leaf_of(50), batch_size=size, virtual_epoch_length=steps)
            for size, steps in ((2, loop), (4, 3))
        )
        list(one)
        take(one, taken)
        other.restore_state_rank(one.save_state_rank())
        assert len(list(other)) == 2


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
    loader, again = (train_loader(leaf_of(50), batch_size=size) for size in (old, new))
    take(loader, cut)
    state, before, after = loader.save_state_rank(), loader.dataset, again.dataset
    if cut * old % new and old != new:
        with pytest.raises(StateMismatchError, match="no batch of"):
            rebase_state(state, before, after)
    moved, report = rebase_state(state, before, after, give_up=True)
    assert report.given_up == (-cut * old % new if old != new else 0)
    assert report.batch_size == (None if old == new else (old, new))
    again.restore_state_rank(moved)
    if old != new:
        whole = samples_of(leaf_of(50))
        place = cut * old + report.given_up
        assert "rebase" not in moved  # the sequence is the same
        assert next(iter(again)).__key__ == whole[place : place + new]


def test_batches_that_hooks_make_are_rebased_behind_their_chunks(leaf_of: Callable[..., Path]) -> None:
    more = {"packing_buffer_size": 4, "chunk_size": 8, "task_encoder": Pairs(), "lanes": 2}
    loader, other = (train_loader(leaf_of(50), batch_size=size, **more) for size in (1, 2))
    shown = [key for batch in take(loader, 9) for key in batch]
    state, before, after = loader.save_state_rank(), loader.dataset, other.dataset
    with pytest.raises(StateMismatchError, match="batch_size: 1 in the state, 2 here"):
        other.restore_state_rank(state)
    with pytest.raises(UsageError, match="were not delivered yet"):
        rebase_state(state, before, after)
    moved, report = rebase_state(state, before, after, give_up=True)
    assert report.first % 8 == 0 and report.first - report.given_up <= len(shown)
    other.restore_state_rank(moved)
    rest = [key for batch in take(other, 3) for key in batch]
    whole = samples_of(leaf_of(50))
    assert set(rest) <= set(whole[report.first : report.first + 16])
