"""The laws for batches that are planned by their tokens: one global sequence, resumed anywhere, every sample once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import BestFit, Capacity, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.errors import ConfigError, SampleError, StateError, StateMismatchError, UsageError
from energon_lite.loading.executors.worker_pool import WorkerPool
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.core.laws.conftest import Cluster
from tests.core.laws.kinds import training, validation
from tests.core.laws.token_data import CAPACITY, QUIET, STRATEGIES, Tokens, dataset_of, length_of, sequences
from tests.testing import ALONE, alone, same, take, told_of

pytestmark = pytest.mark.usefixtures("known_lengths")


@QUIET
@given(strategy=STRATEGIES, chunk=st.sampled_from([11, 40, 1000]), world=st.integers(1, 5), validate=st.booleans())
def test_a_pass_has_everything_once(
    leaf_of: Callable[..., Any], strategy: dict[str, Any], chunk: int, world: int, validate: bool
) -> None:
    path = leaf_of(120)

    make, ends = (validation, {"split_part": "train"}) if validate else (training, {"repeat": False})
    build = make(path, batch_size=None, batching=strategy, chunk_size=chunk, task_encoder=Tokens(), **ends)
    with Cluster(build, world, 0) as ranks:
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


def test_micro_batches_are_as_planned_and_can_be_made_again(leaf_of: Callable[..., Any]) -> None:
    loader = get_savable_loader(dataset_of(leaf_of(120)))
    batches = take(loader, 40)
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


@pytest.mark.parametrize("batching", [{}, {"batch_size": 3, "batching": None, "chunk_size": None}])
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
    dataset = dataset_of(leaf_of(120), alone(2), virtual_epoch_length=5, **batching)
    with get_savable_loader(dataset, prefetch_factor=4) as loader:
        assert sum(len(list(loader)) for _ in range(6)) == 30
    assert len(jobs) == 30 + 2 * 4
    assert len({job.key for job in jobs}) == len(jobs)


@pytest.mark.parametrize("world", [1, 3])
def test_length_of_passes_and_of_endless_streams(leaf_of: Callable[..., Any], world: int) -> None:
    config = WorkerConfig(rank=0, world_size=world)
    loader = get_savable_loader(dataset_of(leaf_of(120), config, repeat=False))
    lengths = []
    for _ in range(4):  # each pass has its own
        lengths.append(len(loader))
        assert sum(1 for _ in loader) == lengths[-1]
    assert lengths[0] == len(loader.dataset)
    endless = dataset_of(leaf_of(120), config)
    steps = sum(len(endless.plan.make(0, number)) for number in range(4)) * 120 / (4 * endless.plan.chunk * world)
    assert abs(len(endless) - steps) <= 1.5


@pytest.mark.parametrize(("samples", "chunk"), [(5, 1024), (50, 4096), (64, 4096), (65, 8192)])
def test_64_epochs_of_small_data_are_planned_together(leaf_of: Callable[..., Any], samples: int, chunk: int) -> None:
    """Rounded up to a power of two: another number would change the order."""
    state = get_savable_loader(dataset_of(leaf_of(samples), chunk_size=None)).save_state_rank()
    assert state is not None and state["identity"]["settings"]["plan_chunk"] == chunk


def test_states_of_other_runs_are_refused(leaf_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    path = leaf_of(120)
    state = get_savable_loader(dataset_of(path)).save_state_rank()
    assert state is not None and len(json.dumps(state)) < 4096
    for other, words in (
        ({"batching": BestFit(Capacity(90))}, r"batching: .*100.* in the state, .*90"),
        ({"chunk_size": 41}, "plan_chunk: 40 in the state, 41 here"),
        ({"batch_size": 2, "batching": None, "chunk_size": None}, r"batching: .* in the state, '\(not set\)' here"),
    ):
        with pytest.raises(StateMismatchError, match=words):
            get_savable_loader(dataset_of(path, **other)).restore_state_rank(state)
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
        loader._runner.restore((0, 0, 0, 0, length_of(0), 0), 0)


def test_arguments_that_do_not_go_together(leaf_of: Callable[..., Any]) -> None:
    for arguments, words in (
        ({"batch_size": 2, "batching": BestFit(Capacity(9))}, "batch_size=2 together with batching"),
        ({"batching": 3}, "batching is a int"),
        ({"batch_size": 2, "chunk_size": 3}, "chunk_size=3 has no effect"),
        ({"batching": BestFit(Capacity(99)), "chunk_size": 0}, "plan_chunk is 0"),
        ({"batching": BestFit(Capacity(99)), "lanes": 2}, "lanes=2 has no effect"),
        ({"batching": BestFit(Capacity(99)), "packing_buffer_size": 5}, "packing_buffer_size=5"),
        ({"batching": {"strategy": "bestfit"}}, "did you mean 'best_fit'"),
    ):
        with pytest.raises((UsageError, ConfigError), match=words):
            get_train_dataset(leaf_of(7), worker_config=ALONE, **arguments)  # type: ignore[arg-type]


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
    with pytest.raises(UsageError, match="need numbers of all samples"):
        dataset_of(leaf_of(7))


def test_what_does_not_fit_is_said_once_in_words(leaf_of: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("WARNING", logger="energon_lite")
    take(get_savable_loader(dataset_of(leaf_of(120), batching=BestFit(Capacity(30), oversize="drop"))), 80)
    (told,) = told_of(caplog, "do not fit")
    assert re.search(r"batch: [\d,]+ samples? dropped, with [\d,]+ tokens \(logged once", told)


def test_nothing_fits(leaf_of: Callable[..., Any]) -> None:
    strategy = BestFit(Capacity(20), oversize="drop")

    class Long:
        def __getitem__(self, key: Any) -> Any:
            return np.full(len(key), 50)

    dataset = dataset_of(leaf_of(7), batching=strategy)
    object.__setattr__(dataset.plan, "lengths", [Long()])
    with pytest.raises(UsageError, match=r"drops .* samples in a row"):
        next(iter(get_savable_loader(dataset)))
