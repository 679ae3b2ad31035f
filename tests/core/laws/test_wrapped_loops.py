"""Limited, repeated and cut into epochs: what naive code makes of the loops that each rank gets of the data set inside.

Of every kind of data set whose batches have no numbers, on any number of ranks, cut and restored anywhere.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset, stateless
from energon_lite.errors import StateError, TopologyError
from energon_lite.extras.energon import EpochizeDataset, LimitDataset, RepeatDataset
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.core.laws.content_encoders import Content, contents
from tests.testing import examples

#: Steps that are compared at most.
STEPS = 16


class Sized(TaskEncoder):
    """Of each sample its name, and something that was drawn."""

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        return {"__key__": sample.text, "noise": self.rng.integers(1000)}

    def sample_length(self, encoded: Any) -> int:
        return int(encoded["__key__"][2:]) * 37 % 60 + 1

    @stateless
    def batch(self, samples: list[Any]) -> dict[str, Any]:
        return {"__key__": [f"{one['__key__']}:{one['noise']}" for one in samples]}


@pytest.fixture(autouse=True)
def _lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WebdatasetSource, "column", lambda self, name: np.arange(len(self)) * 37 % 60 + 1)


@dataclass(frozen=True)
class Inside:
    """A data set to be wrapped."""

    build: Callable[..., Any]
    options: dict[str, Any]
    content: Content | None = None

    def dataset(self, leaf: Path, rank: int, world: int, workers: int = 0) -> Any:
        config = WorkerConfig(rank=rank, world_size=world, num_workers=workers)
        batching = {"strategy": "best_fit", "capacity": 100}
        hooks: dict[str, Any] = {"task_encoder": Sized(), "batch_size": None, "batching": batching, "chunk_size": 12}
        hooks = hooks if self.content is None else self.content.arguments()
        return self.build(leaf, worker_config=config, **hooks, **self.options)


by_content = st.builds(
    lambda content, chunk, lanes: (content, {"chunk_size": chunk * (content.packing or 3), "lanes": lanes}),
    contents,
    st.integers(1, 4),
    st.sampled_from([2, 6]),
)
by_tokens = st.sampled_from([(None, {}), (None, {"length_column": None, "lanes": 6})])
planned = st.sampled_from([(Content(), {}), (Content(batch_size=None), {})])
insides = st.builds(
    lambda kind, how: Inside(how[0], {**kind[1], **how[1]}, kind[0]),
    st.one_of(by_content, by_content, by_tokens, planned),
    st.sampled_from(
        [
            (get_val_dataset, {}),
            (get_val_dataset, {"limit": 2}),
            (get_train_dataset, {"repeat": False}),
            (get_train_dataset, {}),
            (get_train_dataset, {"virtual_epoch_length": 3}),
        ]
    ),
)
wrapper = st.one_of(
    st.tuples(st.just("limit"), st.integers(1, 9)),
    st.tuples(st.just("repeat"), st.sampled_from([None, 1, 2, 3])),
    st.tuples(st.just("epoch"), st.integers(1, 9)),
)


def wrapped(dataset: Any, trees: list[tuple[str, Any]]) -> Any:
    for kind, count in trees:
        if kind == "repeat":
            dataset = RepeatDataset(dataset, repeats=count)
        else:
            dataset = (LimitDataset if kind == "limit" else EpochizeDataset)(dataset, count)
    return dataset


class Naive:
    """The loops of a rank, by the simplest code: ``loop()`` is the next one, ``reset()`` begins with the first again.

    Args:
        loops: of the data set inside.
        trees: the wrappers, from the inside out.
    """

    def __init__(self, loops: list[list[Any]], trees: list[tuple[str, Any]]):
        self.loops, self.kind, self.count, self.next = loops, *(trees[-1] if trees else ("", 0)), 0
        self.inner = Naive(loops, trees[:-1]) if trees else self
        self.running: Iterator[Any] = iter(())

    def reset(self) -> None:
        self.next, self.running = 0, iter(())
        if self.kind:
            self.inner.reset()

    def loop(self) -> Iterator[Any]:
        if not self.kind:
            self.next += 1
            yield from self.loops[self.next - 1]
        elif self.kind == "limit":
            self.inner.reset()
            yield from islice(self.inner.loop(), self.count)
        elif self.kind == "repeat":
            for _ in range(self.count or STEPS):
                yield from self.inner.loop()
        else:
            for _ in range(self.count):
                if (step := next(self.running, None)) is None:
                    self.running = self.inner.loop()
                    step = next(self.running)
                yield step


def shown(item: Any) -> tuple[str]:
    """A batch as a text that tells it from all others; of a rank that has none left, an empty one."""
    return (repr(None if item is None else (item["__key__"], item.get("noise")) if item["__key__"] else None),)


def loops_of(loader: Any, steps: int = STEPS) -> list[list[Any]]:
    """What the next ``for`` loops have, up to so many steps."""
    found: list[list[Any]] = []
    while steps > 0:
        found.append([shown(item) for item in islice(loader, steps)])
        steps -= len(found[-1])
        if not found[-1]:
            return []
    return found


@settings(max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    inside=insides,
    trees=st.lists(wrapper, min_size=1, max_size=3),
    world=st.sampled_from([1, 1, 2]),
    size=st.integers(6, 30),
    cut=st.integers(0, STEPS),
)
def test_it_is_what_naive_code_makes_of_the_loops_inside(
    on_ranks: Any, leaf_of: Any, inside: Inside, trees: list[tuple[str, Any]], world: int, size: int, cut: int
) -> None:
    leaf = leaf_of(size, "a")
    if inside.content is not None and not inside.content.decides:
        world = 1  # of several ranks, the items of all are one sequence

    def loader(rank: int, trees: list[tuple[str, Any]]) -> Any:
        return get_savable_loader(wrapped(inside.dataset(leaf, rank, world), trees))

    inner = on_ranks(world, lambda rank: loops_of(loader(rank, []), STEPS + 1))
    if not all(inner):
        return  # hooks that leave nothing
    expected = []
    for loops in inner:
        naive, found = Naive(loops, trees), list[list[Any]]()
        while (left := STEPS - sum(map(len, found))) > 0:
            found.append(list(islice(naive.loop(), left)))
        expected.append(found)
    assert on_ranks(world, lambda rank: loops_of(loader(rank, trees))) == expected

    def begin(rank: int) -> Any:
        one = loader(rank, trees)
        return (loops_of(one, cut) if cut else []), json.loads(json.dumps(one.save_state_rank()))

    begun = on_ranks(world, begin)

    def go_on(rank: int) -> Any:
        one = loader(rank, trees)
        one.restore_state_global([state for _, state in begun])
        return loops_of(one, STEPS - cut)

    rest = on_ranks(world, go_on)
    for (before, _), behind, whole in zip(begun, rest, expected, strict=True):
        assert [item for loop in (*before, *behind) for item in loop] == [item for loop in whole for item in loop]
        ends = np.cumsum([len(loop) for loop in whole]).tolist()
        parts = np.cumsum([len(loop) for loop in (*before, *behind)]).tolist()
        assert sorted({*ends, cut} - {0}) == sorted({*parts, cut} - {0})  # loops end where they would have ended


class Several(TaskEncoder):
    """A generator, as validation of Megatron-LM's multimodal example has one."""

    def encode_sample(self, sample: Any) -> Iterator[str]:
        yield sample.text

    def batch(self, samples: list[str]) -> list[str]:
        return samples


@pytest.mark.parametrize("workers", [0, 2])
def test_five_batches_of_a_generator_are_five(leaf_of: Any, workers: int) -> None:
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    one = get_val_dataset(leaf_of(18, "a"), worker_config=config, batch_size=4, task_encoder=Several())
    names = [f"a-{number}" for number in range(18)]
    batches = [names[at : at + 4] for at in range(0, 18, 4)]
    for dataset, wanted in (
        (LimitDataset(one, length=5), batches),
        (LimitDataset(one, length=3), batches[:3]),
        (LimitDataset(RepeatDataset(one), length=7), [*batches, *batches[:2]]),
        (RepeatDataset(one, repeats=2), batches * 2),
        (RepeatDataset(LimitDataset(one, 2), repeats=2), batches[:2] * 2),
    ):
        with get_savable_loader(dataset) as loader:
            assert list(loader) == wanted == list(loader), str(dataset)
    limited = get_val_dataset(leaf_of(18, "a"), worker_config=config, batch_size=4, task_encoder=Several(), limit=3)
    with get_savable_loader(limited) as loader:
        assert list(loader) == batches[:3] == list(loader)
    assert len(LimitDataset(RepeatDataset(one), length=7)) == 7
    assert RepeatDataset(one).is_endless and not LimitDataset(RepeatDataset(one), 7).is_endless


def test_repetitions_go_on_on_other_ranks_and_limits_where_they_can_be_divided(on_ranks: Any, leaf_of: Any) -> None:
    leaf, inside = leaf_of(30, "a"), Inside(get_val_dataset, {"chunk_size": 5, "lanes": 6}, Content(groups=2))

    def items(world: int, steps: int, trees: list[tuple[str, Any]], states: Any = None) -> tuple[list[Any], list[Any]]:
        def work(rank: int) -> Any:
            one = get_savable_loader(wrapped(inside.dataset(leaf, rank, world), trees))
            if states is not None:
                one.restore_state_global(states)
            return [item["__key__"] for item in islice(one, steps)], one.save_state_rank()

        done = on_ranks(world, work)
        return [key for step in zip(*(keys for keys, _ in done), strict=True) for key in step if key], [
            state for _, state in done
        ]

    alone, _ = items(1, 40, [("repeat", None)])
    for world, after in ((1, 3), (3, 2), (2, 6)):
        before, states = items(world, 9, [("repeat", None)])
        behind, _ = items(after, 3, [("repeat", None)], states)
        assert before + behind == alone[: len(before) + len(behind)]
    _, states = items(2, 2, [("limit", 5)])
    assert len(items(1, 99, [("limit", 5)], states)[0]) == 6  # of 10 micro-batches, 4 were delivered
    _, states = items(1, 1, [("limit", 4)])
    with pytest.raises(TopologyError, match="3 micro-batches are left of a limit that began on 1 ranks"):
        items(2, 99, [("limit", 4)], states)
    for loops in (None, [], [1, 1], ["no"], [-1]):
        with pytest.raises(StateError, match="the state is damaged: loops"):
            items(1, 99, [("limit", 4)], [{**states[0], "loops": loops}])
