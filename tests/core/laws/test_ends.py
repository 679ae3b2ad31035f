"""Law 5 for passes that end early, by a limit or without what is not full: the same on any ranks, also on others than
those on which the pass began."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader
from energon_lite.errors import StateError, TopologyError
from energon_lite.extras.energon import BatchDataset, LimitDataset, MapDataset, RepeatDataset
from tests.core.laws.content_encoders import Content
from tests.core.laws.kinds import validation
from tests.core.laws.oracle import on_ranks
from tests.testing import examples, told_of, val_loader


class Names(TaskEncoder):
    """Batches of names."""

    def batch(self, samples: list[Any]) -> Any:
        return {"__key__": [sample.text for sample in samples]}


class Yielded(Names):
    """The same, but nobody knows before how many there are."""

    def encode_sample(self, sample: Any) -> Any:
        yield sample


KINDS: dict[str, dict[str, Any]] = {
    "planned": {"batch_size": 3, "task_encoder": Names()},
    "tokens": {
        "batch_size": None,
        "task_encoder": Names(),
        "batching": {"strategy": "fixed", "batch_size": 3},
        "chunk_size": 20,
    },
    "hooks": {"batch_size": 3, "task_encoder": Yielded(), "chunk_size": 9, "lanes": 12},
}
chains = st.lists(st.tuples(st.sampled_from([1, 2, 3, 4]), st.integers(1, 3)), min_size=1, max_size=4)


pytestmark = pytest.mark.usefixtures("known_lengths")


def _steps(leaf: Any, kind: str, chain: list[tuple[int, int]], **arguments: Any) -> list[list[list[str]]]:
    """The names in each rank's batch, step by step: so many steps on each number of ranks, and then to the end of the
    pass on the last one."""
    steps: list[list[list[str]]] = []
    states: Any = None
    for number, (world, count) in enumerate(chain):
        most = 1000 if number + 1 == len(chain) else count

        def work(rank: int, world: int = world, most: int = most, states: Any = states) -> Any:
            loader = val_loader(leaf, rank=rank, world_size=world, **KINDS[kind], **arguments)
            if states is not None:
                loader.restore_state_global(states)
            batches = [batch["__key__"] for _, batch in zip(range(most), loader, strict=False)]
            return batches, loader.save_state_rank()

        per_rank, states = zip(*on_ranks(world, work), strict=True)
        if states[0]["pass_number"]:
            break  # the pass was over before
        steps += map(list, zip(*per_rank, strict=True))
    return steps


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(20))
@given(chain=chains, limit=st.sampled_from([1, 4, 5, 6, 7, 8, 9, 100]))
def test_a_limit_is_the_same_on_the_ranks_that_go_on(
    leaf_of: Any, kind: str, chain: list[tuple[int, int]], limit: int
) -> None:
    whole = _steps(leaf_of(120, "a"), kind, [(chain[0][0], 1000)])
    assert _steps(leaf_of(120, "a"), kind, [(chain[0][0], 1000)], limit=limit) == whole[:limit]
    expected = [batch for step in whole[:limit] for batch in step if batch]
    parts = _steps(leaf_of(120, "a"), kind, chain, limit=limit)
    assert [batch for step in parts for batch in step if batch] == expected


@pytest.mark.parametrize("kind", KINDS)
def test_before_a_pass_its_limit_is_that_of_any_ranks(leaf_of: Any, kind: str) -> None:
    resumed = _steps(leaf_of(120, "a"), kind, [(2, 0), (4, 1000)], limit=3)
    assert resumed == _steps(leaf_of(120, "a"), kind, [(4, 1000)], limit=3) and len(resumed) == 3


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=examples(20))
@given(chain=chains, size=st.sampled_from([30, 31, 37, 48, 59, 60]))
def test_with_drop_last_each_step_is_full(leaf_of: Any, kind: str, chain: list[tuple[int, int]], size: int) -> None:
    steps = _steps(leaf_of(size, "a"), kind, chain, batch_drop_last=True)
    assert steps and all(step and all(step) for step in steps)
    names = [name for step in steps for batch in step for name in batch]
    assert len(set(names)) == len(names) and (kind == "hooks" or len(names) >= size - 24)


def test_the_first_two_samples_need_not_go_together(leaf_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that has none left gets a batch without samples, whatever the first ones do to the batch hook."""

    class Picky(Names):
        def batch(self, samples: list[Any]) -> Any:
            if samples[0].text == "a-0":
                raise ValueError("not this one")
            return super().batch(samples)

    monkeypatch.setitem(KINDS, "picky", {"batch_size": 2, "task_encoder": Picky()})
    steps = _steps(leaf_of(10, "a"), "picky", [(4, 1000)])
    assert steps == [[[], ["a-2", "a-3"], ["a-4", "a-5"], ["a-6", "a-7"]], [["a-8", "a-9"], [], [], []]]


def test_rows_of_tokens_that_stay_in_a_batch_without_samples_are_told(leaf_of: Any, caplog: Any) -> None:
    class Joined(Rows):
        def batch(self, samples: list[Any]) -> Any:
            return {**super().batch(samples), "tokens": torch.arange(40)}

    caplog.set_level(logging.WARNING, "energon_lite")
    for _ in range(2):
        loader = val_loader(leaf_of(5), rank=1, world_size=2, batch_size=5, task_encoder=Joined())
        assert [(len(batch["x"]), len(batch["tokens"])) for batch in loader] == [(0, 40)]
    (told,) = told_of(caplog, "keeps its tensors")
    assert told.startswith("Joined") and "of length 40" in told and "empty_batch(self, like, rows)" in told


def test_a_batch_without_samples_may_be_what_the_hook_is_given(leaf_of: Any) -> None:
    """Each is made of the same one: neither the hook's changes nor the trainer's are in the next one."""

    class Emptied(Rows):
        def empty_batch(self, like: Any, rows: int) -> Any:
            assert len(like["x"]) == rows
            like["x"] = like["x"][:0]
            return like

    loader = val_loader(leaf_of(5), rank=1, world_size=2, batch_size=5, task_encoder=Emptied())
    assert [len(batch.pop("x")) for _ in range(3) for batch in loader] == [0, 0, 0]


class Rows(TaskEncoder):
    """Batches with a tensor."""

    def encode_sample(self, sample: Any) -> Any:
        return {"__key__": sample.text, "x": torch.ones(2)}


def _rows(leaf: Any, wrapped: Callable[[Any], Any]) -> list[list[int]]:
    """Rows of the tensors that each of two ranks gets of five samples in batches of two."""
    inner = [val_loader(leaf, rank=n, world_size=2, batch_size=2, task_encoder=Rows()).dataset for n in range(2)]
    return [[len(tensor) for tensor in get_savable_loader(wrapped(one))] for one in inner]


def test_a_batch_of_batches_has_no_rows_for_a_rank_that_has_none_left(leaf_of: Any) -> None:
    """Rows of batches that are put together are not the items: an empty one must not show the first samples again."""

    def joined(batches: list[Any]) -> Any:
        return torch.cat([batch["x"] for batch in batches])

    def doubled(batch: Any) -> Any:
        return {"x": 2 * batch["x"]}

    assert _rows(leaf_of(5, "a"), lambda inner: BatchDataset(inner, 3, joined)) == [[5], [0]]
    assert _rows(leaf_of(5, "a"), lambda inner: BatchDataset(MapDataset(inner, doubled), 3, joined)) == [[5], [0]]


def test_a_function_is_given_the_batch_without_samples_too(leaf_of: Any) -> None:
    assert _rows(leaf_of(5, "a"), lambda inner: MapDataset(inner, lambda batch: batch["x"])) == [[2, 1], [2, 0]]


def test_repetitions_go_on_on_other_ranks_and_limits_where_they_can_be_divided(leaf_of: Any) -> None:
    inside = validation(leaf_of(30, "a"), chunk_size=5, lanes=6, **Content(groups=2).arguments())

    def items(world: int, steps: int, wrapped: Callable[[Any], Any], states: Any = None) -> tuple[list[Any], list[Any]]:
        def work(rank: int) -> Any:
            one = get_savable_loader(wrapped(inside(WorkerConfig(rank=rank, world_size=world))))
            if states is not None:
                one.restore_state_global(states)
            return [item["__key__"] for item in islice(one, steps)], one.save_state_rank()

        done = on_ranks(world, work)
        return [key for step in zip(*(keys for keys, _ in done), strict=True) for key in step if key], [
            state for _, state in done
        ]

    five, four = (partial(LimitDataset, length=length) for length in (5, 4))
    alone, _ = items(1, 40, RepeatDataset)
    for world, after in ((1, 3), (3, 2), (2, 6)):
        before, states = items(world, 9, RepeatDataset)
        behind, _ = items(after, 3, RepeatDataset, states)
        assert before + behind == alone[: len(before) + len(behind)]
    _, states = items(2, 2, five)
    assert len(items(1, 99, five, states)[0]) == 6  # of 10 micro-batches, 4 were delivered
    _, states = items(1, 1, four)
    with pytest.raises(TopologyError, match="3 micro-batches are left of a limit that began on 1 ranks"):
        items(2, 99, four, states)
    for loops in (None, [], [1, 1], ["no"], [-1]):
        with pytest.raises(StateError, match="the state is damaged: loops"):
            items(1, 99, four, [{**states[0], "loops": loops}])
