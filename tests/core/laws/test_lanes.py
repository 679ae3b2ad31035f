"""Laws 1, 2, 3 where content decides: packs, groups, generators and skips, cut anywhere, on any ranks and workers."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.errors import SampleError, StateError, StateMismatchError, TopologyError
from energon_lite.loading.executors.executor import Executor
from energon_lite.loading.makers.chunk_job import START, Carried, Item, Made, Tail
from energon_lite.loading.makers.outcomes import Result
from tests.core.laws.conftest import Cluster
from tests.core.laws.content_encoders import Content
from tests.core.laws.kinds import contents, training
from tests.testing import ALONE, examples, take, train_loader

#: Positions of a chunk, in buffers of packing if there are any.
chunk_sizes = st.integers(1, 12)


def _plain(batches: list[Any]) -> list[Any]:
    return [{name: value for name, value in batch.items() if name != "__restore_key__"} for batch in batches]


def _dataset(leaf: Any, content: Content, chunk: int, config: WorkerConfig, **arguments: Any) -> Any:
    size = chunk * content.packing if content.packing else 4 * chunk
    return get_train_dataset(leaf, chunk_size=size, worker_config=config, **content.arguments(), **arguments)


@settings(max_examples=examples(25))
@given(
    content=contents.filter(lambda one: one.batch_size and not (one.groups or one.batch_yields or one.encoded_yields)),
    chunk=st.none() | chunk_sizes,
    lanes=st.sampled_from([None, 2, 6]),
    workers=st.sampled_from([0, 0, 0, 2]),
)
def test_batches_of_an_endless_run_are_full(
    leaf_of: Any, content: Content, chunk: int | None, lanes: int | None, workers: int
) -> None:
    size = None if chunk is None else chunk * (content.packing or 4)
    with Cluster(training(leaf_of(50), chunk_size=size, lanes=lanes, **content.arguments()), 2, workers) as ranks:
        batches = ranks.steps(20 if lanes is None else 40)
    assert {len(batch["__key__"]) for batch in batches} == {content.batch_size}


@pytest.mark.parametrize("content", [Content(yields=True, encoded_yields=True), Content(packing=4, batch_yields=True)])
def test_cut_between_a_chunk_and_the_one_that_gets_its_remainder(leaf_of: Any, content: Content) -> None:
    """Other chunks of the lane are between them. A remainder may be part of several batches, or become none."""

    def counted(loader: Any) -> Counter[str]:
        return Counter({kind: loader.stats()[kind] for kind in ("samples", "skipped", "failed", "dropped")})

    arguments = replace(content, skips=9).arguments()
    whole, other = (train_loader(leaf_of(50), chunk_size=4, lanes=1, **arguments) for _ in range(2))
    states, counts, batches = [whole.save_state_rank()], [counted(whole)], list[Any]()
    for _ in range(40):
        batches += take(whole, 1)
        states.append(whole.save_state_rank())
        counts.append(counted(whole))
    for batch in batches:
        assert other.restore_sample(json.loads(json.dumps(batch["__restore_key__"]))) == batch
    with pytest.raises(SampleError, match=r"no batch at \(99, 0, 0, 0, 0, 0\) of chunk 0 in pass 0"):
        other.restore_sample(["chunk", 0, 0, 99, 0, 0, 0, 0, 0])
    for cut in range(20):
        before = counted(other)
        other.restore_state_rank(json.loads(json.dumps(states[cut])))
        assert take(other, 20) == batches[cut : cut + 20] and other.save_state_rank() == states[cut + 20]
        assert counted(other) - before == counts[cut + 20] - counts[cut]


# -- what is encoded again ------------------------------------------------------------------------------------------


def _calls_after_a_restore(leaf: Any, content: Content, chunk_size: int, cut: int, *names: str) -> Counter[str]:
    """Calls of hooks for the next batch after ``cut`` batches and a restore."""

    def loader(encoder: Any) -> Any:
        arguments = content.arguments() | {"task_encoder": encoder, "chunk_size": chunk_size, "lanes": 1}
        return train_loader(leaf, **arguments)

    def counted(name: str, hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
        return lambda argument: (calls.update([name]), hook(argument))[1]

    calls, encoder = Counter[str](), content.encoder()
    for name in names:
        setattr(encoder, name, counted(name, getattr(encoder, name)))
    first = loader(content.encoder())
    take(first, cut)
    again = loader(encoder).with_restored_state_rank(first.save_state_rank())
    assert _plain([next(iter(again))]) == _plain([next(iter(first))])
    return calls


def test_generators_encode_only_what_was_not_delivered(leaf_of: Any) -> None:
    content = Content(yields=True, batch_size=3)  # each position yields 0, 1 or 2
    calls = [_calls_after_a_restore(leaf_of(500, "a"), content, 400, cut, "encode_sample") for cut in (0, 20, 90)]
    assert all(2 <= one["encode_sample"] <= 12 for one in calls)


def test_packing_packs_only_what_was_not_delivered(leaf_of: Any) -> None:
    content = Content(packing=60, batch_size=2, late=True)
    hooks = ("preencode_sample", "select_samples_to_pack", "postencode_sample", "pack_selected_samples")
    calls = _calls_after_a_restore(leaf_of(500, "a"), content, 120, 10, *hooks)
    assert calls["preencode_sample"] == 60 and calls["select_samples_to_pack"] == 1  # one buffer, for the selection
    assert calls["pack_selected_samples"] == 2 and calls["postencode_sample"] <= 6  # two packs of at most three


def test_a_buffer_that_is_used_up_is_not_read_again(leaf_of: Any) -> None:
    content = Content(packing=60, batch_size=1, late=True)
    hooks = ("preencode_sample", "select_samples_to_pack")
    calls = [_calls_after_a_restore(leaf_of(500, "a"), content, 120, cut, *hooks) for cut in range(16, 32)]
    assert calls == [{"select_samples_to_pack": 1, "preencode_sample": 60}] * len(
        calls
    )  # also where the next one begins


def test_groups_batch_only_what_was_not_delivered(leaf_of: Any) -> None:
    content = Content(groups=3, batch_size=2)
    calls = _calls_after_a_restore(leaf_of(500, "a"), content, 80, 20, "encode_sample", "batch")
    assert calls["batch"] == 1 and 40 < calls["encode_sample"] <= 80


def test_each_lane_has_its_next_chunk_made_before_its_turn(leaf_of: Any) -> None:
    build = partial(_dataset, leaf_of(500), Content(yields=True, batch_size=2), 4, lanes=6)
    with Cluster(build, 1, 1) as ranks:  # with one worker, so much as one chunk before its turn
        ranks.steps(6)
        streams = ranks.loaders[0]._dataset_iterator.feed._streams.values()
        assert [len(stream.tickets) for stream in streams] == [1] * 6


def test_what_is_handed_over_keeps_no_whole_chunk_in_memory() -> None:
    message = torch.arange(1000.0)
    item = Item({"tokens": message[-10:]}, (0, 0, 0, 0), (1, 0, 0, 0), ((0, 0, 0),), 0)
    carried = Carried(Tail(0, START), Tail(0, START), [item], [])

    class Elsewhere(Executor):
        def submit(self, job: Any) -> int:
            return 0

        def result(self, ticket: int) -> Any:
            return Result([Made(None, is_batch=False, rows=1, carried=carried)])

    (made,) = Elsewhere().batches(0)
    tokens = made.carried.items[0].value["tokens"]
    assert torch.equal(tokens, message[-10:]) and tokens.data_ptr() != message[-10:].data_ptr()


# -- states ---------------------------------------------------------------------------------------------------------

PACKED_GROUPS = Content(packing=7, groups=2, batch_size=2, late=True)


def _saved(leaf: Any, world: int, steps: int, **arguments: Any) -> list[Any]:
    with Cluster(lambda config: _dataset(leaf, PACKED_GROUPS, 2, config, **arguments), world, 0) as ranks:
        ranks.steps(steps)
        return ranks.states()


def _loader(leaf: Any, rank: int, world: int, **arguments: Any) -> Any:
    return get_savable_loader(_dataset(leaf, PACKED_GROUPS, 2, WorkerConfig(rank=rank, world_size=world), **arguments))


def test_lanes_are_those_of_the_first_run(leaf_of: Any) -> None:
    states = _saved(leaf_of(50, "a"), 6, 4, lanes=6)
    assert [state["lanes"] for state in states] == [6] * 6
    for world in (1, 2, 3, 6):
        _loader(leaf_of(50, "a"), world - 1, world).restore_state_global(states)
    with pytest.raises(TopologyError, match=r"6 lanes cannot be divided among 4 .*\n.*use 1, 2, 3, 6 ranks"):
        _loader(leaf_of(50, "a"), 0, 4).restore_state_global(states)
    with pytest.raises(StateMismatchError, match="lanes: 6 in the state, 12 here"):
        _loader(leaf_of(50, "a"), 0, 2, lanes=12).restore_state_global(states)
    with pytest.raises(TopologyError, match=r"5 lanes cannot be divided among 2 .*\n.*use 1, 5 ranks"):
        _loader(leaf_of(50, "a"), 0, 2, lanes=5)


def test_a_run_that_says_nothing_of_lanes_can_grow_and_shrink(leaf_of: Any) -> None:
    leaf = leaf_of(50, "a")
    for world, others in {1: (2, 3, 4, 8, 24), 3: (1, 2, 4, 6, 12), 4: (1, 3, 8), 16: (8, 12, 32, 48)}.items():
        states = _saved(leaf, world, 1)
        assert all(len(json.dumps(state)) <= 4096 for state in states)
        for other in others:
            _loader(leaf, other - 1, other).restore_state_global(states)


def test_states_that_do_not_go_together_are_named(leaf_of: Any) -> None:
    leaf = leaf_of(50, "a")
    states = _saved(leaf, 4, 3, lanes=4)
    loader = _loader(leaf, 0, 2)
    with pytest.raises(StateMismatchError, match=r"1 of 4 lanes are in none of the 3 states: 2"):
        loader.restore_state_global([states[0], states[1], states[3]])
    with pytest.raises(StateMismatchError, match=r"1 of 4 lanes, and not those of rank 0 of 2: 0, 2"):
        loader.restore_state_rank(states[1])
    changed = states[0] | {"cursors": [[0, 8, [1]]]}
    with pytest.raises(StateMismatchError, match="lane 0 is at another place in state 4 than in state 0"):
        loader.restore_state_global([*states, changed])
    loader.restore_state_global([*states, states[2], None])  # a tensor-parallel peer's, and one that saves none
    for edit in ({"lanes": 0}, *({"cursors": rows} for rows in ([[0]], [[1, 2, []]], [[0, -4, []]], 5))):
        with pytest.raises(ValueError, match="damaged"):
            loader.restore_state_rank(states[0] | edit)
    for tail in ("x", [], [0, 1], [9], [1] * 8, [-1, 3]):  # at chunk 4 of lane 0, of 4 lanes
        with pytest.raises(StateError, match="damaged"):
            loader.restore_state_rank(states[0] | {"cursors": [[0, 4, [1], tail]]})
    with pytest.raises(StateError, match=r"damaged: cursors is .chunk \d has tails"):  # they are of groups
        loader.restore_state_rank(states[0] | {"cursors": [[lane, 4 + lane, [], [1]] for lane in range(4)]})
    with pytest.raises(StateError, match="damaged: ranks is 0"):
        loader.restore_state_global([state | {"ranks": 0} for state in states])


def test_planned_and_content_decided_states_do_not_mix(leaf_of: Any) -> None:
    (state,) = _saved(leaf_of(50, "a"), 1, 3)
    planned, kinds = train_loader(leaf_of(50, "a"), batch_size=2), ["content-decided", "planned"]
    for loader, other in ((planned, state), (_loader(leaf_of(50, "a"), 0, 1), planned.save_state_rank())):
        with pytest.raises(
            StateMismatchError, match="one of {} batches, and this loader one of {} batches".format(*kinds)
        ):
            loader.restore_state_rank(other)
        kinds.reverse()


@pytest.mark.parametrize("change", [{"chunk": 3}, {"packing": 6}, {"groups": 0}, {"remainder": "drop"}])
def test_what_decides_the_batches_is_checked(leaf_of: Any, change: dict[str, Any]) -> None:

    def loader(chunk: int = 2, remainder: str = "keep", **changes: Any) -> Any:
        content = replace(PACKED_GROUPS, **changes)
        return get_savable_loader(_dataset(leaf_of(50, "a"), content, chunk, ALONE, chunk_remainder=remainder))

    with pytest.raises(StateMismatchError, match=r"chunk_size|groups|chunk_remainder"):
        loader(**change).restore_state_rank(loader().save_state_rank())
