"""Hooks that are seeded only if they draw get the same numbers as those that are always seeded."""

from __future__ import annotations

import random
import zlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import Cooker, SkipSample, TaskEncoder, cooker, stateless
from energon_lite.hooks import LendingScope
from energon_lite.hooks.global_generators import Marks
from tests.core.laws.kinds import dealt
from tests.testing import Listed, examples, take, train_loader

#: Ways to draw a number, or to change a state, that all have to be noticed.
DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "gauss": lambda: random.gauss(0, 1),
    "bits": lambda: random.getrandbits(1),
    "624 words": lambda: random.getrandbits(624 * 32),
    "shuffle": lambda: random.shuffle([1, 2, 3]),
    "seed": lambda: random.seed(5),
    "rand": np.random.rand,
    "normal": np.random.normal,
    "permutation": lambda: np.random.permutation(4).tolist(),
    "numpy seed": lambda: np.random.seed(5),
    "other bits": lambda: getattr(np.random, "set_bit_generator")(np.random.PCG64(1)),  # noqa: B009
    "torch": lambda: torch.rand(()).item(),
    "torch normal": lambda: torch.randn(()).item(),
    "torch seed": lambda: torch.manual_seed(5).initial_seed(),
}


def _number(sample: Any) -> int:
    """A number that is equal for equal data."""
    return zlib.crc32(sample["txt"].encode() if isinstance(sample, dict) else sample.text)


class Sometimes(TaskEncoder):
    """Hooks that draw, fail and skip for some of the samples, and change what they are given."""

    decoder = None

    def __init__(self, way: str, every: int, fails: int):
        self.way, self.every, self.fails = way, every, fails

    def _drawn(self, number: int) -> list[Any]:
        if not self.every or number % self.every:
            return []
        DRAWS[self.way]()
        return [random.random(), np.random.normal(), torch.rand(()).item()]

    def encode_sample(self, sample: Any) -> Any:
        number = _number(sample)
        drawn = [*self._drawn(number), self.rng.integers(100), self.rng.random.random()]
        sample.text += b"!"
        if self.fails and number % self.fails == 1:
            raise (SkipSample if drawn[0] < 0.5 else ValueError)("by chance")
        return sample.text, drawn, self.current_sample_index

    def batch(self, samples: list[Any]) -> Any:
        drawn = self._drawn(sum(zlib.crc32(text) for text, *_ in samples))
        if drawn and drawn[0] < 0.3:
            raise ValueError("by chance")
        return [*samples, drawn]


class AlwaysSeeded(Sometimes):
    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        return super().encode_sample(sample)

    @stateless(restore_seeds=True)
    def batch(self, samples: list[Any]) -> Any:
        return super().batch(samples)


def _batches(path: Any, encoder: Any, workers: int = 0, world: int = 1, start: Any = "fork") -> list[Any]:
    how: Any = {"task_encoder": encoder, "batch_size": 4, "world_size": world, "start_method": start}
    return dealt([train_loader(path, workers, rank=rank, **how) for rank in range(world)], 24)


@settings(max_examples=examples(30))
@given(
    way=st.sampled_from(sorted(DRAWS.keys() - {"other bits"})),  # which no hook may leave
    every=st.sampled_from([0, 1, 2, 13, 29]),
    fails=st.sampled_from([0, 3, 11]),
    how=st.sampled_from([(1, 0, "fork"), (2, 0, "fork"), (1, 2, "fork"), (1, 2, "thread"), (2, 2, "fork")]),
)
def test_equal_to_hooks_that_are_always_seeded(leaf_of: Any, way: str, every: int, fails: int, how: Any) -> None:
    """Over ranks, workers and kinds of workers, whether hooks draw never, always, or depending on the data."""
    world, workers, start = how
    random.seed(1)
    np.random.seed(2)
    np.random.standard_normal()  # there is half a pair left
    torch.manual_seed(3)
    before = random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()
    seeded = _batches(leaf_of(100), AlwaysSeeded(way, every, fails))
    found = _batches(leaf_of(100), Sometimes(way, every, fails), workers, world, start)
    assert found == seeded
    assert (random.getstate(), repr(np.random.get_state()), torch.get_rng_state().tolist()) == before


class Counts(Listed):
    """Counts calls, and the states that samples were given."""

    def __init__(self, draws_from: int):
        self.draws_from = draws_from
        self.calls = Counter[str]()
        self.states = set[int]()

    def encode_sample(self, sample: Any) -> Any:
        self.calls[sample.__key__] += 1
        if len(self.calls) > self.draws_from:
            random.random()
        else:
            self.states.add(torch.initial_seed())
        return sample.__key__


@pytest.mark.parametrize("draws_from, twice", [(0, 0), (3, 0), (9, 4), (40, 4), (100, 0)])
def test_hooks_run_again_at_most_once_and_never_if_they_draw_at_first(
    leaf_of: Any, draws_from: int, twice: int
) -> None:
    encoder = Counts(draws_from)
    batches = take(train_loader(leaf_of(60), task_encoder=encoder, batch_size=4), 15)
    assert len({key for batch in batches for key in batch}) == 60
    assert sum(count == 2 for count in encoder.calls.values()) <= twice and max(encoder.calls.values()) <= 2
    assert (encoder.calls.total() > 60) == bool(twice)
    if draws_from == 100:  # none draws: only those of the first batch are seeded
        assert len(encoder.states) == 4 + 1, "those of the first batch, and the caller's"


@cooker
def cook(sample: Any) -> Any:
    drawn = [random.random()] if _number(sample) % 7 == 0 else []
    return {"__key__": sample["__key__"], "__restore_key__": sample["__restore_key__"], "drawn": drawn}


class Cooks(Listed):
    cookers = [Cooker(cook)]

    def encode_sample(self, sample: Any) -> Any:
        return sample | {"more": sample["drawn"] and [torch.rand(()).item()]}


class CooksSeeded(Cooks):
    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        return super().encode_sample(sample)


def test_cookers_are_watched_too(crude: Any) -> None:
    assert _batches(crude, Cooks()) == _batches(crude, CooksSeeded())


class Reads(Listed):
    """Reads a state without drawing, and so has to ask for seeds."""

    @stateless(restore_seeds=True)
    def encode_sample(self, sample: Any) -> Any:
        return torch.initial_seed(), random.getstate()[1][:3]


def test_hooks_that_read_states_ask_for_seeds(leaf_of: Any) -> None:
    alone = _batches(leaf_of(60), Reads())
    assert len({seed for batch in alone for seed, _ in batch}) == 24 * 4
    assert _batches(leaf_of(60), Reads(), workers=2) == alone


@pytest.mark.parametrize("way", DRAWS)
def test_every_draw_is_noticed(way: str) -> None:
    with LendingScope() as scope:
        scope.hold()
        marks = Marks()
        assert not marks.changed()
        DRAWS[way]()
        assert marks.changed()


def test_the_half_of_a_pair_that_another_hook_left_is_no_draw_unnoticed() -> None:
    with LendingScope() as scope:
        scope.seed(7)
        np.random.normal(), random.gauss(0, 1), torch.randn(())
        for draw in (np.random.normal, lambda: random.gauss(0, 1), lambda: torch.randn(())):
            marks = Marks()
            draw()
            assert marks.changed()
