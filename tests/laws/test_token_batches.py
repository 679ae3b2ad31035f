"""The laws for batches that are planned by their tokens: one global sequence, resumed anywhere, every sample once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon_lite import (
    BestFit,
    Capacity,
    ConfigError,
    SampleError,
    StateError,
    StateMismatchError,
    TaskEncoder,
    TokenSequence,
    TopologyError,
    UnknownLengthError,
    UsageError,
    WorkerConfig,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    pack_sequences,
    stateless,
)
from energon_lite.batching.plans_ahead import PlansAhead
from energon_lite.loading.executors.worker_pool import WorkerPool
from energon_lite.loading.states.merge import merged, redistributed
from energon_lite.storage.read.webdataset import WebdatasetSource

CAPACITY = 100


def length_of(index: int) -> int:
    """Tokens of sample ``index`` of any leaf: 1 to 60."""
    return index * 37 % 60 + 1


class Tokens(TaskEncoder):
    """Sequences of known lengths, whose tokens say which sample they are of, and packed batches."""

    longer = 0

    @stateless
    def encode_sample(self, sample: Any) -> TokenSequence:
        leaf, index = sample.__restore_key__[1:3]
        tokens = torch.arange(length_of(index) + self.longer) + 1000 * (index + 1000 * leaf)
        return TokenSequence.derive_from(sample, tokens=tokens, labels=tokens)

    @stateless
    def batch(self, samples: list[TokenSequence]) -> Any:
        return pack_sequences(samples, pad=-1)

    def empty_batch(self, like: Any, rows: int) -> Any:
        return pack_sequences([], pad=-1)


@pytest.fixture(autouse=True)
def _lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    def column(self: WebdatasetSource, name: str) -> np.ndarray:
        return np.array([length_of(index) for index in range(len(self))], dtype=np.int64)

    monkeypatch.setattr(WebdatasetSource, "column", column)


def alone() -> WorkerConfig:
    return WorkerConfig(rank=0, world_size=1, num_workers=0)


def tokens_of(batches: list[Any]) -> list[list[int]]:
    return [batch.tokens[0].tolist() for batch in batches]


def sequences(batches: list[Any]) -> list[list[int]]:
    """The tokens of micro-batches that have any."""
    return [tokens for tokens in tokens_of(batches) if tokens]


STRATEGIES = st.sampled_from(
    [
        {"strategy": "best_fit", "capacity": CAPACITY, "open_bins": 3},
        {"strategy": "bfd", "capacity": CAPACITY},
        {"strategy": "bfd", "capacity": 50, "oversize": "split"},
        {"strategy": "sorted_window", "capacity": CAPACITY, "batches": 4},
        {"strategy": "concat_split", "tokens": 64},
        {"strategy": "capacity", "capacity": 45, "oversize": "drop"},
        {"strategy": "fixed", "batch_size": 3},
        {"strategy": "max_length", "batch_size": 3, "max_length": 20, "oversize": "truncate"},
        {"strategy": "length_difference", "batch_size": 4, "max_difference": 5},
    ]
)
SEGMENTS = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from([0, 0, 0, 0, 2]), st.integers(0, 8)), min_size=1, max_size=4
)
QUIET = settings(deadline=None, max_examples=examples(20), suppress_health_check=[HealthCheck.function_scoped_fixture])


@QUIET
@given(
    blend=st.lists(st.tuples(st.sampled_from([7, 50, 120]), st.sampled_from([0.3, 1.0])), min_size=1, max_size=3),
    strategy=STRATEGIES,
    chunk=st.sampled_from([11, 40, 1000]),
    segments=SEGMENTS,
)
def test_any_chain_of_topologies_is_the_uninterrupted_run(
    cluster: Any,
    write_blend: Callable[..., Any],
    blend: Any,
    strategy: dict[str, Any],
    chunk: int,
    segments: list[tuple[int, int, int]],
) -> None:
    metadataset = write_blend(blend)

    def build(config: WorkerConfig) -> Any:
        return get_train_dataset(
            metadataset,
            batch_size=None,
            batching=strategy,
            plan_chunk=chunk,
            worker_config=config,
            task_encoder=Tokens(),
        )

    total = sum(world * steps for world, _, steps in segments)
    with cluster(build, 1, 0) as alone:
        expected = tokens_of(alone.steps(total))
    found: list[list[int]] = []
    state = None
    for world, workers, steps in segments:
        with cluster(build, world, workers, state) as ranks:
            found += tokens_of(ranks.steps(steps))
            state = json.loads(json.dumps(ranks.state()))
            assert merged(redistributed(state, 3)) == state
    assert found == expected


@QUIET
@given(strategy=STRATEGIES, chunk=st.sampled_from([11, 40, 1000]), world=st.integers(1, 5), validate=st.booleans())
def test_a_pass_has_everything_once(
    cluster: Any, leaf_of: Callable[..., Any], strategy: dict[str, Any], chunk: int, world: int, validate: bool
) -> None:
    path = leaf_of(120)

    def build(config: WorkerConfig) -> Any:
        common: dict[str, Any] = {"batching": strategy, "plan_chunk": chunk, "worker_config": config}
        common["task_encoder"] = Tokens()
        if validate:
            return get_val_dataset(path, split_part="train", batch_size=None, **common)
        return get_train_dataset(path, batch_size=None, repeat=False, **common)

    with cluster(build, world, 0) as ranks:
        for _ in range(2):  # two passes
            batches = [list(loader) for loader in ranks.loaders]
            assert len({len(own) for own in batches}) == 1  # in step
            assert all(own[: len(own) - 1] == [batch for batch in own[:-1] if batch.num_tokens] for own in batches)
            found = sorted(token for own in batches for tokens in sequences(own) for token in tokens)
            limit = strategy.get("max_length", 60)
            shown = [index for index in range(120) if length_of(index) <= 45 or strategy["strategy"] != "capacity"]
            expected = [1000 * index + token for index in shown for token in range(min(length_of(index), limit))]
            assert found == sorted(expected)
        counts = ranks.loaders[0].stats()["planned"]
        assert counts["dropped_samples"] == 2 * (120 - len(shown))
        assert counts["truncated_samples"] == 2 * sum(length_of(index) > limit for index in range(120))


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
            plan_chunk=chunk,
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
        return dataset_of(path, config, batching=strategy, plan_chunk=chunk, repeat=False, micro_batches_per_step=step)

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
            return dataset_of(leaf_of(120), config, plan_chunk=1000, micro_batches_per_step=step)

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
        dataset_of(path, micro_batches_per_step=3, batching=None, plan_chunk=None)
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


def dataset_of(path: Any, config: WorkerConfig | None = None, encoder: TaskEncoder | None = None, **more: Any) -> Any:
    arguments: dict[str, Any] = {"batch_size": None, "batching": BestFit(Capacity(CAPACITY)), "plan_chunk": 40, **more}
    return get_train_dataset(path, worker_config=config or alone(), task_encoder=encoder or Tokens(), **arguments)


def test_micro_batches_are_as_planned_and_can_be_made_again(leaf_of: Callable[..., Any], same: Any) -> None:
    loader = get_savable_loader(dataset_of(leaf_of(120)))
    batches = [batch for batch, _ in zip(loader, range(40), strict=False)]
    assert all(batch.num_tokens <= CAPACITY for batch in batches)
    assert sum(batch.num_tokens for batch in batches) / (len(batches) * CAPACITY) > 0.85
    keys = [batch.__restore_key__ for batch in batches]
    assert keys[0] == ("batch", 0, 0, 0) and len(set(keys)) == 40 and keys[-1][2] > 0
    for number in (0, 7, 39):
        assert same(loader.restore_sample(json.loads(json.dumps(keys[number]))), batches[number])
    sample = loader.restore_sample(batches[3].sample_ids[0])
    assert sample.tokens.tolist() == batches[3].tokens[0, : len(sample.tokens)].tolist()
    for wrong in (("batch", 0, 3), ("sample", 9, 0, 0, 0), ("chunk", 0, 0)):
        with pytest.raises(UsageError, match="not a restore key"):
            loader.restore_sample(wrong)


@pytest.mark.parametrize("batching", [{}, {"batch_size": 3, "batching": None, "plan_chunk": None}])
def test_no_job_is_thrown_away_where_a_loop_ends(
    leaf_of: Callable[..., Any], batching: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was submitted before its turn belongs to the next loop."""
    jobs: list[Any] = []
    submit = WorkerPool.submit

    def counted(pool: WorkerPool, job: Any) -> int:
        jobs.append(job)
        return submit(pool, job)

    monkeypatch.setattr(WorkerPool, "submit", counted)
    monkeypatch.setattr(WorkerPool, "ahead", lambda pool, wished: wished)  # else more of what is tiny
    config = WorkerConfig(rank=0, world_size=1, num_workers=2)
    dataset = dataset_of(leaf_of(120), config, virtual_epoch_length=5, **batching)
    with get_savable_loader(dataset, prefetch_factor=4) as loader:
        assert sum(len(list(loader)) for _ in range(6)) == 30
    assert len(jobs) == 30 + 2 * 4
    assert len({job.key for job in jobs}) == len(jobs)


def test_loops_of_an_endless_stream(leaf_of: Callable[..., Any]) -> None:
    loader = get_savable_loader(dataset_of(leaf_of(120), virtual_epoch_length=7))
    assert len(loader) == 7
    first, second = list(loader), list(loader)
    assert len(first) == len(second) == 7
    other = get_savable_loader(dataset_of(leaf_of(120)))
    assert tokens_of(first + second) == tokens_of([batch for batch, _ in zip(other, range(14), strict=False)])
    with pytest.raises(UnknownLengthError):
        len(other)


def test_a_loop_that_was_left_goes_on(leaf_of: Callable[..., Any]) -> None:
    loader = get_savable_loader(dataset_of(leaf_of(120), repeat=False))
    whole = tokens_of(list(get_savable_loader(dataset_of(leaf_of(120), repeat=False))))
    for number, _ in enumerate(loader):
        if number == 4:
            break
    state = loader.save_state_rank()
    assert tokens_of(list(loader)) == whole[5:]
    loader.restore_state_rank(state)
    assert tokens_of(list(loader)) == whole[5:]
    assert tokens_of(list(loader)) != whole  # the next epoch has an order of its own


def test_drop_last_and_limit(cluster: Any, leaf_of: Callable[..., Any]) -> None:
    def build(config: WorkerConfig) -> Any:
        return dataset_of(leaf_of(120), config, repeat=False, batch_drop_last=True)

    count = len(list(get_savable_loader(dataset_of(leaf_of(120), repeat=False))))
    with cluster(build, 4, 0) as ranks:
        batches = [list(loader) for loader in ranks.loaders]
    assert count % 4 and [len(own) for own in batches] == [count // 4] * 4
    assert all(batch.num_tokens for own in batches for batch in own)
    limited = get_val_dataset(
        leaf_of(120),
        split_part="train",
        batch_size=None,
        batching=BestFit(Capacity(CAPACITY)),
        limit=3,
        worker_config=alone(),
        task_encoder=Tokens(),
    )
    loader = get_savable_loader(limited)
    assert len(list(loader)) == 3 and len(list(loader)) == 3


def test_states_of_other_runs_are_refused(leaf_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path = leaf_of(120)
    state = get_savable_loader(dataset_of(path)).save_state_rank()
    assert state is not None and len(json.dumps(state)) < 4096
    with pytest.raises(StateMismatchError, match=r"batching: .*100.* in the state, .*90"):
        get_savable_loader(dataset_of(path, batching=BestFit(Capacity(90)))).restore_state_rank(state)
    with pytest.raises(StateMismatchError, match="plan_chunk: 40 in the state, 41 here"):
        get_savable_loader(dataset_of(path, plan_chunk=41)).restore_state_rank(state)
    fixed = get_train_dataset(path, batch_size=2, worker_config=alone())
    with pytest.raises(StateMismatchError, match=r"batching: .* in the state, '\(not set\)' here"):
        get_savable_loader(fixed).restore_state_rank(state)
    for place in ([-1, 0], [0, -1], [0], 3):
        with pytest.raises(StateError, match=f"damaged: place is {re.escape(str(place))}"):
            get_savable_loader(dataset_of(path)).restore_state_rank({**state, "place": place})
    monkeypatch.setattr(WebdatasetSource, "column", lambda self, name: np.full(len(self), 9))
    with pytest.raises(StateMismatchError, match="other data, weight or settings"):
        get_savable_loader(dataset_of(path)).restore_state_rank(state)


def test_a_sample_longer_than_planned_is_left_out_and_counted(leaf_of: Callable[..., Any]) -> None:
    encoder = Tokens()
    encoder.longer = 1
    loader = get_savable_loader(dataset_of(leaf_of(7), encoder=encoder, repeat=False))
    assert sum(batch.num_tokens for batch in loader) == 0
    stats = loader.stats()
    assert stats["samples"] == 0 and stats["failed"] == 7
    assert "its batch was planned for" in str(stats["reasons"])
    with pytest.raises(SampleError, match="measure the lengths again"):
        loader._pipeline.restore((0, 0, 0, 0, length_of(0), 0), 0)


def test_arguments_that_do_not_go_together(leaf_of: Callable[..., Any]) -> None:
    path, config = leaf_of(7), alone()
    for arguments, words in (
        ({"batch_size": 2, "batching": BestFit(Capacity(9))}, "batch_size=2 together with batching"),
        ({"batch_size": None, "batching": 3}, "batching is a int"),
        ({"batch_size": 2, "plan_chunk": 3}, "chunk_size=3 has no effect"),
        ({"batch_size": None, "batching": BestFit(Capacity(99)), "plan_chunk": 0}, "plan_chunk is 0"),
        ({"batch_size": None, "batching": BestFit(Capacity(99)), "lanes": 2}, "lanes=2 has no effect"),
        ({"batch_size": None, "batching": BestFit(Capacity(99)), "packing_buffer_size": 5}, "packing_buffer_size=5"),
    ):
        with pytest.raises(UsageError, match=words):
            get_train_dataset(path, worker_config=config, **arguments)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="did you mean 'best_fit'"):
        get_train_dataset(path, worker_config=config, batch_size=None, batching={"strategy": "bestfit"})


def test_a_strategy_from_a_file(leaf_of: Callable[..., Any], tmp_path: Any) -> None:
    (tmp_path / "batching.yaml").write_text("strategy: best_fit\ncapacity: 100\n")
    dataset = dataset_of(leaf_of(120), batching=tmp_path / "batching.yaml")
    assert dataset.plan.strategy == BestFit(Capacity(100))
    assert "batches by best_fit (capacity 100, unit packed_tokens" in str(dataset)
    (tmp_path / "batching.yaml").write_text("strategy: [")
    with pytest.raises(ConfigError, match="not valid YAML"):
        dataset_of(leaf_of(120), batching=str(tmp_path / "batching.yaml"))


def test_no_column(leaf_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    with pytest.raises(UsageError, match="need the lengths of all samples"):
        dataset_of(leaf_of(7))


def test_nothing_fits(leaf_of: Callable[..., Any]) -> None:
    strategy = BestFit(Capacity(20), oversize="drop")

    class Long:
        def __getitem__(self, key: Any) -> Any:
            return np.full(len(key), 50)

    dataset = dataset_of(leaf_of(7), batching=strategy)
    object.__setattr__(dataset.plan, "lengths", [Long()])
    with pytest.raises(UsageError, match="samples in a row are above the capacity"):
        next(iter(get_savable_loader(dataset)))


def test_chunks_are_made_ahead_and_errors_come_when_they_are_due() -> None:
    made: list[int] = []

    def make(pass_number: int, number: int) -> int:
        made.append(number)
        if number == 9:
            raise UsageError("no")
        return number

    plans = PlansAhead(make)
    plans.prepare(0, 3)
    assert plans.get(0, 3) == 3 and plans.get(0, 3) == 3 and made == [3]
    plans.prepare(0, 9)
    with pytest.raises(UsageError):
        plans.get(0, 9)
    for number in range(10, 20):
        plans.get(0, number)
    assert len(plans._made) == 4
