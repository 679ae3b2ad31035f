"""The laws for steps of micro-batches by tokens that are evened out: the same ones, whoever takes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.errors import StateMismatchError, TopologyError, UsageError
from tests.core.laws.token_data import QUIET, SEGMENTS, STRATEGIES, Tokens, alone, dataset_of, sequences, tokens_of
from tests.testing import examples

pytestmark = pytest.mark.usefixtures("known_lengths")


@settings(QUIET, max_examples=examples(8))
@given(
    strategy=STRATEGIES,
    chunk=st.sampled_from([11, 40, 1000]),
    step=st.sampled_from([1, 2, 6, 12]),
    segments=SEGMENTS,
    data=st.data(),
)
def test_steps_that_are_evened_out_go_on_on_any_ranks(
    cluster: Any,
    leaf_of: Callable[..., Any],
    strategy: dict[str, Any],
    chunk: int,
    step: int,
    segments: list[tuple[int, int, int]],
    data: st.DataObject,
) -> None:
    """What the ranks of each turn get together does not depend on how many ranks there were before, or are now."""
    path = leaf_of(120)

    def build(config: WorkerConfig, size: int | None = step) -> Any:
        return get_train_dataset(
            path,
            batch_size=None,
            batching=strategy,
            chunk_size=chunk,
            micro_batches_per_step=size,
            worker_config=config,
            task_encoder=Tokens(),
        )

    worlds = [world for world in range(1, step + 1) if step % world == 0]
    chain = [(data.draw(st.sampled_from(worlds)), workers, steps) for _, workers, steps in segments]
    with cluster(build, 1, 0) as alone:
        expected = tokens_of(alone.steps(sum(world * steps for world, _, steps in chain)))
    state, position = None, 0
    for world, workers, steps in chain:
        with cluster(build, world, workers, state) as ranks:
            for _ in range(steps):
                turn = tokens_of(ranks.step())
                assert sorted(turn) == sorted(expected[position : position + world])
                position += world
            state = json.loads(json.dumps(ranks.state()))


@QUIET
@given(strategy=STRATEGIES, chunk=st.sampled_from([11, 40, 1000]), world=st.integers(1, 4), turns=st.integers(1, 3))
def test_a_step_that_is_evened_out_keeps_its_samples(
    cluster: Any, leaf_of: Callable[..., Any], strategy: dict[str, Any], chunk: int, world: int, turns: int
) -> None:
    """A pass in whole steps: those of the plan, chunk by chunk; as many turns on each rank, everything once."""
    path, size = leaf_of(120), world * turns

    def build(config: WorkerConfig, step: int | None = size) -> Any:
        return dataset_of(path, config, batching=strategy, chunk_size=chunk, repeat=False, micro_batches_per_step=step)

    with cluster(build, world, 0) as ranks:
        batches = [list(loader) for loader in ranks.loaders]
    assert len({len(own) for own in batches}) == 1 and len(batches[0]) % turns == 0
    dealt = [batch for turn in zip(*batches, strict=True) for batch in turn]
    steps = [dealt[first : first + size] for first in range(0, len(dealt), size)]
    planned: list[list[Any]] = []
    last = None
    for batch in get_savable_loader(build(alone(), None)):
        if batch.__restore_key__[2] != last or len(planned[-1]) == size:
            planned.append([])
        last = batch.__restore_key__[2]
        planned[-1].append(batch)

    def tokens(step: list[Any]) -> list[int]:
        return sorted(token for tokens in sequences(step) for token in tokens)

    assert [tokens(step) for step in steps] == [tokens(step) for step in planned]


def test_the_micro_batches_of_a_step_cost_nearly_the_same(cluster: Any, leaf_of: Callable[..., Any]) -> None:
    """Squared lengths of what the ranks of a turn get, mean over largest: evened out, and as planned."""

    def balance(step: int | None) -> float:
        def build(config: WorkerConfig) -> Any:
            return dataset_of(leaf_of(120), config, chunk_size=1000, micro_batches_per_step=step)

        with cluster(build, 4, 0) as ranks:
            turns = [[batch.cu_seqlens.diff().square().sum().item() for batch in ranks.step()] for _ in range(30)]
        assert step is None or all(turn == sorted(turn, reverse=number % 2 == 0) for number, turn in enumerate(turns))
        return sum(sum(turn) / 4 / max(turn) for turn in turns) / len(turns)

    even, as_planned = balance(8), balance(None)
    assert 1 - even < 0.6 * (1 - as_planned), (even, as_planned)  # three samples to a micro-batch leave little choice


def test_steps_and_ranks_that_do_not_go_together(leaf_of: Callable[..., Any]) -> None:
    path = leaf_of(120)
    config = WorkerConfig(rank=0, world_size=3, num_workers=0)
    with pytest.raises(TopologyError, match="8 micro-batches of a step cannot be shared evenly by 3"):
        dataset_of(path, config, micro_batches_per_step=8)
    with pytest.raises(UsageError, match="micro_batches_per_step is 0"):
        dataset_of(path, micro_batches_per_step=0)
    with pytest.raises(UsageError, match="micro_batches_per_step=3 needs a column"):
        dataset_of(path, micro_batches_per_step=3, length_column=None)
    with pytest.raises(UsageError, match="micro_batches_per_step=3 has no effect without batching"):
        dataset_of(path, micro_batches_per_step=3, batching=None, chunk_size=None)
    state = get_savable_loader(dataset_of(path, micro_batches_per_step=6)).save_state_rank()
    with pytest.raises(StateMismatchError, match="micro_batches_per_step"):
        get_savable_loader(dataset_of(path, micro_batches_per_step=12)).restore_state_rank(state)
    assert "steps of 6 micro-batches" in str(dataset_of(path, micro_batches_per_step=6))


def test_samples_of_a_step_that_is_evened_out(cluster: Any, leaf_of: Callable[..., Any]) -> None:
    """Every second turn is assigned the other way round, which ``samples_at`` knows; from any place in the pass."""

    def build(config: WorkerConfig) -> Any:
        return dataset_of(leaf_of(120), config, micro_batches_per_step=8)

    with cluster(build, 2, 0) as ranks, cluster(build, 2, 0) as others:
        steps = [ranks.step() for _ in range(20)]
        for number, batches in enumerate(steps):
            for loader in (ranks.loaders[0], others.loaders[1]):  # behind the step, and before it
                planned = loader.samples_at(number, all_ranks=True)
                for rank, batch in enumerate(batches):
                    own = [sample.restore_key for sample in planned if sample.rank == rank]
                    assert own == [tuple(key) for key in batch.sample_ids], (number, rank)


def test_a_micro_batch_of_a_step_again_from_its_key(leaf_of: Callable[..., Any], same: Any) -> None:
    loader = get_savable_loader(dataset_of(leaf_of(120), micro_batches_per_step=6))
    batches = [batch for batch, _ in zip(loader, range(40), strict=False)]
    other = get_savable_loader(dataset_of(leaf_of(120), micro_batches_per_step=6))
    for number in (0, 7, 39):
        assert same(other.restore_sample(batches[number].__restore_key__), batches[number])
