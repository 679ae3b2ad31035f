"""Law 7: whatever a hook draws from is its sample's (or batch's) own, whoever runs it; the caller's is left alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import BestFit, Capacity, Cooker, SkipSample, TaskEncoder, cooker, stateless
from energon_lite.hooks import HookContext, hook_context
from energon_lite.hooks.global_generators import failure_tolerance_of, restores_seeds
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.core.laws.kinds import dealt
from tests.testing import Listed, examples, take, train_loader


def draw(encoder: TaskEncoder | None = None) -> list[float]:
    """A number of each generator that a hook may draw from."""
    drawn = [random.random(), float(np.random.rand()), torch.rand((), dtype=torch.float64).item()]
    if encoder is not None:
        rng = encoder.rng
        drawn += [float(rng.random()), float(rng.numpy.random()), rng.random.uniform(0, 1)]
        drawn += [torch.rand((), dtype=torch.float64, generator=rng.torch).item()]
    return drawn


@cooker
def cook(sample: Any) -> Any:
    base = {name: sample[name] for name in ("__key__", "__restore_key__")}
    return base | {"text": sample["txt"].strip(), "drawn": draw()}


class Draws(TaskEncoder):
    """Every hook of a planned pipeline draws; some samples are left out, and replaced."""

    cookers = [Cooker(cook)]

    def encode_sample(self, sample: Any) -> Any:
        drawn = sample["drawn"] + draw(self)
        if drawn[-1] < 0.1:
            raise SkipSample("by chance")
        if drawn[-1] < 0.2:
            raise ValueError("by chance")
        return sample | {"drawn": drawn}

    def batch(self, samples: list[Any]) -> Any:
        names = ("__key__", "__restore_key__", "drawn")
        return {name: [sample[name] for sample in samples] for name in names} | {"batch": draw(self)}

    def encode_batch(self, batch: Any) -> Any:
        return batch | {"encoded": draw(self)}


class Lengths(Draws):
    """Batches by the lengths of encoded samples, which are drawn, too."""

    def sample_length(self, encoded: Any) -> int:
        return 1 + random.randrange(3) + int(np.random.randint(3)) + int(torch.randint(3, ()))


class Rows(Draws):
    """Batches planned by measured lengths."""

    def batch(self, samples: list[Any]) -> Any:
        return super().batch(samples) | {"drawn again": draw()}


class Packs(Draws):
    """Every hook of packing draws, and the generators among them between their results."""

    encode_sample = TaskEncoder.encode_sample

    def preencode_sample(self, sample: Any) -> Iterator[Any]:
        for part in range(random.randrange(3)):
            yield sample | {"__key__": f"{sample['__key__']}.{part}", "drawn": sample["drawn"] + draw(self)}
            if np.random.rand() < 0.1:
                raise ValueError("by chance")

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        random.shuffle(samples)
        cut = int(torch.randint(len(samples), ()))
        return [samples[:cut], samples[cut:]]

    def postencode_sample(self, sample: Any) -> Any:
        return sample | {"drawn": sample["drawn"] + draw(self)}

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        drawn = [sample["drawn"] for sample in samples]
        return {
            "__key__": "+".join(sample["__key__"] for sample in samples),
            "__restore_key__": (),
            "drawn": [drawn, draw(self)],
        }


class Groups(Draws):
    def batch_group_criterion(self, sample: Any) -> tuple[Any, int | None]:
        return random.randrange(2) + np.random.randint(2) + int(torch.randint(2, ())), None

    def encode_batch(self, batch: Any) -> Iterator[Any]:
        for part in range(random.randrange(3)):
            yield batch | {"part": part, "encoded": draw(self)}


PIPELINES: dict[str, tuple[type[TaskEncoder], dict[str, Any]]] = {
    "planned": (Draws, {"batch_size": 3}),
    "tokens": (
        Lengths,
        {"batch_size": None, "batching": BestFit(Capacity(12)), "length_column": None, "chunk_size": 24, "lanes": 12},
    ),
    "planned tokens": (Rows, {"batch_size": None, "batching": BestFit(Capacity(12)), "chunk_size": 40}),
    "packs": (Packs, {"batch_size": 2, "packing_buffer_size": 6, "chunk_size": 24, "lanes": 12}),
    "groups": (Groups, {"batch_size": 2, "chunk_size": 24, "lanes": 12}),
}


@pytest.fixture(autouse=True)
def _lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WebdatasetSource, "column", lambda self, name: 1 + np.arange(len(self), dtype=np.int64) % 6)


def _loader(path: Any, name: str, workers: int = 0, **how: Any) -> Any:
    kind, arguments = PIPELINES[name]
    return train_loader(path, workers, task_encoder=kind(), **arguments, **how)


def _batches(path: Any, name: str, *, world: int = 1, **how: Any) -> list[Any]:
    """The first batches of a run, in the order of the whole run."""
    return dealt([_loader(path, name, rank=rank, world_size=world, **how) for rank in range(world)], 12)


def _states() -> tuple[Any, ...]:
    name, words, *rest = np.random.get_state()
    return random.getstate(), name, np.asarray(words).tolist(), rest, torch.get_rng_state().tolist()


_expected: dict[str, list[Any]] = {}


def _alone(path: Any, name: str) -> list[Any]:
    if name not in _expected:
        _expected[name] = _batches(path, name)
    return _expected[name]


@pytest.fixture(autouse=True)
def _left_alone() -> Iterator[None]:
    """Nothing of what the tests do here changes the caller's generators."""
    random.seed(1)
    np.random.seed(2)
    np.random.standard_normal()  # there is half a pair left
    torch.manual_seed(3)
    before = _states()
    yield
    assert _states() == before


@pytest.mark.parametrize(
    ("world", "workers", "start", "name"),
    [
        *((*how, name) for how in [(1, 2, "fork"), (1, 8, "thread"), (3, 0, "fork")] for name in PIPELINES),
        *[(1, 1, "forkserver", "planned"), (1, 1, "spawn", "packs")],
        *(pytest.param(4, 8, "fork", name, marks=pytest.mark.nightly) for name in PIPELINES),
    ],
)
def test_equal_on_any_ranks_and_workers(crude: Any, name: str, world: int, workers: int, start: str) -> None:
    assert _batches(crude, name, world=world, workers=workers, start_method=start) == _alone(crude, name)


@settings(max_examples=examples(20))
@given(name=st.sampled_from(sorted(PIPELINES)), number=st.integers(0, 11), seeds=st.integers(0, 99))
def test_equal_when_made_again_whatever_the_caller_drew(crude: Any, name: str, number: int, seeds: int) -> None:
    batch = _alone(crude, name)[number]
    before = _states()
    random.seed(seeds)
    np.random.seed(seeds)
    torch.manual_seed(seeds)
    own = _states()
    assert _loader(crude, name).restore_sample(batch["__restore_key__"]) == batch
    assert _states() == own
    random.setstate(before[0])
    np.random.set_state((before[1], np.array(before[2], dtype=np.uint32), *before[3]))
    torch.set_rng_state(torch.tensor(before[4], dtype=torch.uint8))


class Numbers(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        return draw(self)

    def batch(self, samples: list[Any]) -> Any:
        return [*samples, draw(self)]


@pytest.mark.parametrize("workers, start", [(0, "fork"), (4, "fork"), (4, "thread")])
def test_no_number_comes_twice(leaf_of: Any, workers: int, start: Any) -> None:
    """Of two epochs, and with two seeds."""
    rows: list[list[float]] = []
    arguments: Any = {"batch_size": 4, "task_encoder": Numbers(), "start_method": start}
    for seed in (0, 1):
        with train_loader(leaf_of(100), workers, seed_offset=seed, **arguments) as loader:
            rows += [row for batch in take(loader, 50) for row in batch]
    assert len({number for row in rows for number in row}) == 500 * len(rows[0])


class Raises(TaskEncoder):
    failure_tolerance = 5

    def __init__(self, error: type[BaseException]):
        self.error = error

    def encode_sample(self, sample: Any) -> Any:
        draw()
        raise self.error


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_callers_come_back_after_an_error(leaf_of: Any, error: Any) -> None:
    with pytest.raises(Exception if error is ValueError else error):
        take(train_loader(leaf_of(20), batch_size=2, task_encoder=Raises(error)), 1)


def test_the_callers_come_back_after_an_interrupt_while_they_come_back(
    leaf_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupts = iter([KeyboardInterrupt()])
    set_state = np.random.set_state

    def interrupted(state: Any) -> None:
        for interrupt in interrupts:
            raise interrupt
        set_state(state)

    loader = train_loader(leaf_of(20), batch_size=2, task_encoder=Numbers())
    monkeypatch.setattr(np.random, "set_state", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(iter(loader))
    assert next(interrupts, None) is None


class Nested(Listed):
    """A hook that runs another loader, and draws before and after."""

    def __init__(self, path: Any):
        self.path = path

    def encode_sample(self, sample: Any) -> Any:
        drawn = draw()
        if self.path is not None:
            loader = train_loader(self.path, batch_size=2, task_encoder=Numbers())
            assert next(iter(loader)) == loader.restore_sample(("batch", 0, 0))
        return drawn + draw()


def test_a_hook_that_runs_another_loader_goes_on_with_its_own(leaf_of: Any) -> None:
    def first(path: Any) -> Any:
        return next(iter(train_loader(leaf_of(20), batch_size=2, task_encoder=Nested(path))))

    assert first(None) == first(leaf_of(20)) == first(leaf_of(30))


class Without(TaskEncoder):
    """Draws nothing global, says so, and is not seeded."""

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> Any:
        return _states()[0][1][:3]

    @stateless(restore_seeds=False)
    def batch(self, samples: list[Any]) -> Any:
        return samples


def test_a_hook_may_do_without(leaf_of: Any) -> None:
    loader = train_loader(leaf_of(20), batch_size=2, task_encoder=Without())
    assert next(iter(loader)) == [_states()[0][1][:3]] * 2


def test_marks_may_be_put_on_each_other() -> None:
    def hook(sample: Any) -> Any:
        return sample

    for mark in (stateless, cooker):
        assert restores_seeds(mark(hook))
    without = stateless(restore_seeds=False, failure_tolerance=3)(hook)
    for mark in (stateless, cooker):
        assert not restores_seeds(mark(without)) and failure_tolerance_of(mark(without)) == 3


def test_the_own_generator_is_numpys_and_more() -> None:
    def drawn() -> list[Any]:
        rng = TaskEncoder().rng
        plain = [rng.random(), rng.random(3).tolist(), rng.random(size=2, dtype=np.float32).tolist()]
        return [*plain, rng.integers(100), rng.random.choice("abcdefgh"), rng.random.random(), rng.torch.initial_seed()]

    with hook_context(HookContext(1)) as context:
        rng = TaskEncoder().rng
        numpys = np.random.Generator(np.random.Philox(key=context.seed))
        assert isinstance(rng, np.random.Generator) and isinstance(rng.random, random.Random)
        assert rng.numpy is rng and isinstance(rng.torch, torch.Generator) and rng.torch is rng.torch
        assert rng.random() == numpys.random() and rng.random(4).tolist() == numpys.random(4).tolist()
        into = np.empty(3)
        assert rng.random(out=into) is into and into.tolist() == numpys.random(3).tolist()
        rng.random.random()
        torch.rand(2, generator=rng.torch)
        assert rng.normal() == numpys.normal(), "the others draw from streams of their own"
    with hook_context(HookContext(2)):
        one = drawn()
    with hook_context(HookContext(2)):
        assert drawn() == one
