"""The laws that hold for each kind of batches: cut anywhere, restored on any ranks and workers, as often as you like,
what is delivered is the uninterrupted run, digests included; each batch can be made again from its key; and a state is
plain, below 4 KiB, and saved in under a millisecond, with all that can make it large. Worker processes are real."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader
from energon_lite.errors import FatalSampleError, SampleError, UsageError
from energon_lite.extras.blends import rebase_state
from energon_lite.loading.saved_states import merged, redistributed
from tests.core.laws.conftest import Cluster
from tests.core.laws.content_encoders import Content
from tests.core.laws.kinds import KINDS, Pipeline, training
from tests.core.laws.naive_items import plain
from tests.testing import blend_of, examples, same, train_loader, val_loader

pytestmark = pytest.mark.usefixtures("known_lengths")

#: Segments of a run: which of the possible numbers of ranks, workers (mostly none, because each takes some 20 ms to
#: start), steps until it is saved and stopped (0: before the first batch), and whether the states are dealt to other
#: ranks before they are restored.
segments = st.lists(
    st.tuples(st.integers(0, 11), st.sampled_from([0, 0, 0, 0, 0, 1, 2]), st.integers(0, 9), st.booleans()),
    min_size=1,
    max_size=4,
)


@contextmanager
def starving() -> Iterator[None]:
    """Reject what makes no batches: chunks that are too small for one, say."""
    try:
        yield
    except FatalSampleError as error:
        assume("did not give a single batch" not in str(error))
        raise


def delivered(ranks: Any, steps: int) -> list[tuple[Any, int]]:
    """The micro-batches of so many steps, as plain data, each with its digest."""
    return [
        (plain(batch), loader.digest)
        for _ in range(steps)
        for batch, loader in zip(ranks.step(), ranks.loaders, strict=True)
    ]


def check_chain(leaf_of: Any, pipeline: Pipeline, parts: list[tuple[int, int, int, bool]]) -> None:
    build, worlds = pipeline.builder(leaf_of), pipeline.worlds
    chain = [(worlds[choice % len(worlds)], *part) for choice, *part in parts]
    with Cluster(build, 1, 0) as alone:
        with starving():
            expected = delivered(alone, sum(world * steps for world, _, steps, _ in chain))
    digests = {digest for _, digest in expected}
    assert len(expected) < 12 or len(digests) > len(expected) // 2  # else they would say nothing
    found, states = list[Any](), None
    for world, workers, steps, dealt in chain:
        with Cluster(build, world, workers, states) as ranks:
            before = ranks.states()
            assert states is None or dealt or merged(before) == merged(states)  # before the first batch
            found += delivered(ranks, steps)
            states = json.loads(json.dumps(ranks.states()))
            assert states == ranks.states()  # plain data, and saving changes nothing
            if pipeline.lanes is None:
                assert states == states[:1] * world
        if dealt:
            states = redistributed(merged(states), world % 3 + 1 if pipeline.lanes is None else worlds[-1])
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(10))
@given(data=st.data(), parts=segments)
def test_any_chain_of_topologies_is_the_uninterrupted_run(
    leaf_of: Any, kind: str, data: st.DataObject, parts: Any
) -> None:
    check_chain(leaf_of, data.draw(KINDS[kind]), parts)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(8))
@given(data=st.data(), workers=st.sampled_from([0, 0, 1, 2]))
def test_each_batch_again_from_its_key(leaf_of: Any, kind: str, data: st.DataObject, workers: int) -> None:
    check_keys(leaf_of, data.draw(KINDS[kind]), data, workers)


def check_keys(leaf_of: Any, pipeline: Pipeline, data: st.DataObject, workers: int = 0) -> None:
    build = pipeline.builder(leaf_of)
    with Cluster(build, pipeline.worlds[-1] if pipeline.lanes else 2, workers) as ranks:
        with starving():
            batches = ranks.steps(8)
    chosen = data.draw(st.lists(st.sampled_from(batches), min_size=1, max_size=8, unique_by=id))
    # Another loader, that never ran, on another rank of another world; the key went through JSON.
    other = get_savable_loader(build(WorkerConfig(rank=0, world_size=pipeline.worlds[-1])))
    before = other.save_state_rank()
    for batch in chosen:
        key = batch["__restore_key__"] if isinstance(batch, dict) else batch.__restore_key__
        assert same(other.restore_sample(json.loads(json.dumps(key))), batch)
    assert other.save_state_rank() == before


def test_indices_that_hooks_can_ask_for(leaf_of: Any) -> None:
    class Asks(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            return {"sample": self.current_sample_index, "text": sample.text}

        def encode_batch(self, batch: Any) -> Any:
            return batch | {"batch": self.current_batch_index}

    with Cluster(training(leaf_of(5, "a"), batch_size=3, task_encoder=Asks()), 2, 1) as ranks:
        batches = ranks.steps(5)
    assert [batch["batch"] for batch in batches] == list(range(10))
    numbers = [number for batch in batches for number in batch["sample"]]
    assert sorted(numbers) == list(range(30))  # 6 epochs of 5, each number once
    for batch in batches:
        for number, text in zip(batch["sample"], batch["text"], strict=True):
            assert text == f"a-{number % 5}"


def test_asking_outside_of_a_hook_is_an_error() -> None:
    encoder = TaskEncoder()
    with pytest.raises(UsageError, match="outside of a hook"):
        encoder.rng  # noqa: B018
    with pytest.raises(UsageError, match="outside of a hook"):
        encoder.current_batch_index  # noqa: B018


def test_a_sample_that_fails_says_so_when_it_is_made_again(leaf_of: Any) -> None:
    class Fails(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            raise ValueError("no")

    loader = train_loader(leaf_of(5, "a"), batch_size=3, task_encoder=Fails())
    with pytest.raises(SampleError, match="encode_sample: ValueError: no") as caught:
        loader.restore_sample(("sample", 0, 3, 0, 0))
    assert "a-5[train], a-3" in str(caught.value) and 'raise ValueError("no")' in str(caught.value)


@pytest.mark.parametrize(
    "key",
    [
        (),
        ("batch", 0),
        ("sample", 99, 0, 0, 0),
        ("sample", 0, 5, 0, 0),
        ("batch", 0, -1),
        ("Webdataset", 5),
        ("batch", "0", "1"),
    ],
)
def test_foreign_keys_are_refused(leaf_of: Any, key: Any) -> None:
    with pytest.raises(UsageError, match="not a restore key"):
        val_loader(leaf_of(5, "a"), batch_size=2).restore_sample(key)


LIMIT = 4096
PACKED_GROUPS = Content(packing=7, groups=2, batch_size=2, late=True)


@pytest.fixture
def hundred(leaf_of: Any) -> dict[str, Any]:
    """A blend of 100 leaves."""
    return blend_of((leaf_of(5 + number % 7, "a"), 1 + number / 7) for number in range(100))


def check(loader: Any, state: Any, tmp_path: Path, limit: int = LIMIT) -> None:
    """Its size and its kind."""
    text = json.dumps(state)
    assert len(text) <= limit
    assert json.loads(text) == state == msgpack.unpackb(msgpack.packb(state))
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    loader.restore_state_rank(json.loads(text))
    assert loader.save_state_rank() == state


@pytest.mark.parametrize(("packs", "world"), [(True, 1), (True, 8), (False, 16)])
def test_a_hundred_leaves(hundred: Any, tmp_path: Path, packs: bool, world: int) -> None:
    arguments: Any = {"chunk_size": 21, "lanes": 64, **PACKED_GROUPS.arguments()} if packs else {"batch_size": 128}
    arguments |= {"shuffle_buffer_size": 100_000, "max_samples_per_sequence": 10_000, "seed_offset": 123456}
    with train_loader(hundred, 2, rank=world - 1, world_size=world, **arguments) as loader:
        times = []
        for _ in zip(range(40 if packs else 20), loader, strict=False):  # workers are busy
            start = time.thread_time()
            state: Any = loader.save_state_rank()
            times.append(time.thread_time() - start)
        assert min(times) < 1e-3
        check(loader, state, tmp_path, LIMIT if packs else 1024)
        if not packs:
            check(loader, state | {"position": 10**15}, tmp_path, 1024)
            return
        assert len(state["cursors"]) == 64 // world
        # Far into the run, in the middle of all chunks.
        lanes = [[row[0], row[0] + 64 * 10**9, [14, 0, 2, 0, 3, 1]] for row in state["cursors"]]
        check(loader, state | {"position": 10**12, "cursors": lanes}, tmp_path)
        if world == 1:
            assert merged(redistributed(state, 16)) == state


def test_after_a_rebase_of_a_hundred_leaves(hundred: Any, tmp_path: Path) -> None:
    """With more than a billion samples of each leaf behind it."""
    changed = json.loads(json.dumps(hundred))
    changed["splits"]["train"]["blend"][7]["weight"] = 50
    old, new = (train_loader(blend, batch_size=128) for blend in (hundred, changed))
    state, report = rebase_state((old.save_state_rank() or {}) | {"position": 10**10}, old.dataset, new.dataset)
    assert {leaf.change for leaf in report.leaves} == {"stays"} and min(one.shown for one in report.leaves) > 10**9
    check(new, state, tmp_path)
