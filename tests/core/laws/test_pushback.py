"""Packing that pushes samples back into the buffer: nothing is lost, and a run may be cut anywhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_lite import SkipSample, TaskEncoder
from energon_lite.errors import FatalSampleError, StateError
from energon_lite.extras.blends import rebase_state
from energon_lite.hooks import PackedSamplesOutput
from tests.core.laws.kinds import Pipeline
from tests.core.laws.test_elastic import check_chain, check_keys
from tests.testing import examples, take, train_loader, val_loader

ROOM = 20


def size_of(key: str) -> int:
    return int(key.partition("-")[2]) * 7 % 11 + 1


class Sized(TaskEncoder):
    """Samples have sizes, and all hooks but the selection draw random numbers.

    Args:
        skips: each so many-th sample is left out.
    """

    failure_tolerance = 0

    def __init__(self, skips: int = 0):
        self.skips = skips

    def preencode_sample(self, sample: Any) -> Any:
        number = int(sample.__key__.partition("-")[2])
        if self.skips and number % self.skips == 1:
            raise SkipSample("not this one")

        made = {"__key__": sample.__key__, "size": size_of(sample.__key__), "drawn": float(self.rng.random())}
        return made | {"__restore_key__": sample.__restore_key__}

    def postencode_sample(self, sample: Any) -> Any:
        return {**sample, "late": float(self.rng.random())}

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        noise = [float(self.rng.random()), *(sample[name] for sample in samples for name in ("drawn", "late"))]
        return {"__key__": [sample["__key__"] for sample in samples], "__restore_key__": (), "noise": noise}

    def batch(self, samples: list[Any]) -> Any:
        packs, noise = ([pack[name] for pack in samples] for name in ("__key__", "noise"))
        return {"packs": packs, "noise": noise, "__restore_key__": ()}


class Full(Sized):
    """The library selects."""

    pack_capacity = ROOM

    def sample_length(self, sample: Any) -> int:
        return int(sample["size"])


class Greedy(Sized):
    """Fills packs one after the other; the last one, which may have room left, goes back."""

    def select_samples_to_pack(self, samples: list[Any]) -> Any:
        packs: list[list[Any]] = [[]]
        room = ROOM + int(self.rng.integers(3))
        for sample in samples:
            if sum(one["size"] for one in packs[-1]) + sample["size"] > room:
                packs.append([])
            packs[-1].append(sample)
        if len(packs) > 1:
            return PackedSamplesOutput(packs=packs[:-1], pushback=tuple(packs[-1]))
        return packs  # there is nothing to come, or the buffer is small


class Backwards(Greedy):
    """What goes back is not the end of the buffer."""

    def select_samples_to_pack(self, samples: list[Any]) -> Any:
        return super().select_samples_to_pack(samples[::-1])


def fails_late(key: str, skips: int) -> bool:
    return bool(skips) and int(key.partition("-")[2]) % skips == 2


def encoder(kind: type[Sized], skips: int, yields: bool) -> TaskEncoder:
    """One of a kind, whose samples come twice if it ``yields``; some of them fail after that."""

    def twice(self: Any, sample: Any) -> Iterator[Any]:
        made = kind.preencode_sample(self, sample)
        yield made
        yield {**made, "__key__": made["__key__"] + "'", "drawn": made["drawn"] + 1}
        if fails_late(sample.__key__, skips):
            raise ValueError("twice is enough")

    cls: type[Sized] = type("Twice", (kind,), {"preencode_sample": twice}) if yields else kind
    return cls(skips)


def arguments_of(size: int | None, buffer: int, chunk: int) -> dict[str, Any]:
    return {"batch_size": size, "packing_buffer_size": buffer, "chunk_size": chunk}


KINDS = st.sampled_from([Full, Full, Greedy, Backwards])
PIPELINES = st.builds(
    Pipeline,
    st.just([(50, 1.0)]),
    st.fixed_dictionaries(
        {
            "batch_size": st.none() | st.integers(1, 3),
            "packing_buffer_size": st.integers(4, 9),
            "chunk_size": st.sampled_from([9, 16, 30]),
            "task_encoder": st.builds(partial, st.just(encoder), KINDS, st.sampled_from([0, 3, 7]), st.booleans()),
        }
    ),
    st.just(12),
)


#: As those of all laws, on few ranks.
SEGMENTS = st.lists(
    st.tuples(st.integers(0, 3), st.sampled_from([0, 0, 1]), st.integers(0, 7), st.booleans()), min_size=1, max_size=3
)


@settings(max_examples=examples(25))
@given(data=st.data(), pipeline=PIPELINES, parts=SEGMENTS)
def test_cut_anywhere(leaf_of: Callable[..., Path], data: st.DataObject, pipeline: Pipeline, parts: Any) -> None:
    check_chain(leaf_of, pipeline, parts)
    check_keys(leaf_of, pipeline, data)


@settings(max_examples=examples(25))
@given(
    kind=KINDS,
    buffer=st.integers(4, 12),
    chunk=st.sampled_from([12, 16, 50]),
    skips=st.sampled_from([0, 3, 7]),
    yields=st.booleans(),
    cut=st.integers(0, 20),
)
@example(kind=Greedy, buffer=8, chunk=50, skips=3, yields=True, cut=8)  # the cut is inside a sample that fails late
def test_nothing_is_lost(
    leaf_of: Callable[..., Path], kind: type[Sized], buffer: int, chunk: int, skips: int, yields: bool, cut: int
) -> None:
    """An epoch: each sample is in a pack, also those that were pushed back; also around a cut, and from the keys."""
    arguments: Any = arguments_of(1, buffer, chunk) | {"task_encoder": encoder(kind, skips, yields), "lanes": 1}
    packs: list[list[str]] = []
    state, counts = None, Counter[str]()
    for stop in (cut, 1000):
        loader = val_loader(leaf_of(50), **arguments).with_restored_state_rank(state)
        taken = 0
        for batch in islice(loader, stop):
            packs += batch["packs"]
            assert loader.restore_sample(batch["__restore_key__"]) == batch
            taken += 1
        state = loader.save_state_rank()
        counts.update({name: loader.stats()[name] for name in ("skipped", "failed")})
        assert loader.stats()["dropped"] == 0
    if not taken and cut:  # the cut was at the end: another epoch was begun
        return
    kept = [f"a-{number}" for number in range(50) if not (skips and number % skips == 1)]
    expected = Counter(key + mark for key in kept for mark in (("", "'") if yields else ("",)))
    if sum(map(len, packs)) == sum(expected.values()):
        assert Counter(key for pack in packs for key in pack) == expected
        assert counts["skipped"] == 50 - len(kept)
        assert counts["failed"] == sum(yields and fails_late(key, skips) for key in kept)
    else:  # the cut was behind the last batch, and the next epoch came as well
        assert Counter(key for pack in packs for key in pack) == Counter(dict.fromkeys(expected, 2))
    assert all(len(pack) == 1 or sum(size_of(key.strip("'")) for key in pack) <= ROOM + 2 for pack in packs)


@pytest.mark.parametrize("kind", [Full, Greedy])
def test_each_state_of_a_pass_can_be_restored(leaf_of: Callable[..., Path], kind: type[Sized]) -> None:
    arguments: Any = arguments_of(1, 8, 16) | {"task_encoder": encoder(kind, 0, False), "lanes": 1}
    loader = val_loader(leaf_of(50), **arguments)
    for state in [loader.save_state_rank() for _ in loader]:
        assert val_loader(leaf_of(50), **arguments).with_restored_state_rank(state).save_state_rank() == state


class Numbers(TaskEncoder):
    """Samples are numbers: integers that are equal are one object in Python, and floats are not."""

    def __init__(self, kind: type):
        self.preencode_sample = lambda sample: kind(size_of(sample.__key__))

    def select_samples_to_pack(self, samples: list[Any]) -> Any:
        return PackedSamplesOutput([samples[:4], samples[4:8]], pushback=samples[9:])  # one is left out

    def postencode_sample(self, sample: Any) -> Any:
        return sample, float(self.rng.random())

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples


def test_samples_that_are_one_object(leaf_of: Callable[..., Path]) -> None:
    """Each is counted, and has its own random numbers."""
    found = []
    for kind in (float, int):
        with val_loader(leaf_of(50), packing_buffer_size=12, task_encoder=Numbers(kind), chunk_size=24) as loader:
            found.append(
                ([(pack, loader.digest) for pack in loader], loader.stats()["samples"], loader.stats()["dropped"])
            )
    assert found[0] == found[1] and found[0][1] > 30 and sum(found[0][1:]) == 50


@pytest.mark.parametrize("kind", [Full, Greedy])
def test_behind_what_was_begun(leaf_of: Callable[..., Path], kind: type[Sized]) -> None:
    """Another batch size begins behind all chunks that were begun; what is passed over is known."""
    for steps in (0, 7, 40):
        more: Any = {"task_encoder": kind(), "lanes": 12}
        loader, again = (train_loader(leaf_of(50), **arguments_of(size, 6, 16), **more) for size in (2, 3))
        delivered = sum(len(pack) for batch in take(loader, steps) for pack in batch["packs"])
        before = loader.save_state_rank() or {}
        later = [end[1] for row in before["cursors"] for end in row[3:] if end[0] < 0]
        assert bool(later) == (steps == 40) and max(later, default=-1) < 0  # begin with carried samples
        state, report = rebase_state(before, loader.dataset, again.dataset, give_up=True)
        assert delivered + report.given_up >= report.first == -(-report.first // 16) * 16
        assert report.given_up <= report.first - delivered + 12 * 4 * 6  # ends that count for both sizes of batches
        assert all(len(batch["packs"]) == 3 for batch in take(again.with_restored_state_rank(state), 20))


WRONG: list[list[Any]] = [
    [0, 0, [-1]],  # there is nothing before the first chunk
    [0, 12_000, [-(1 << 40)]],
    [0, 0, [0, -1]],
    [0, 0, [[-1]]],
    [0, 12_000, [], [4, -(1 << 40)]],
    [0, 0, [], [-4, 1]],  # later chunks that begin where they always do
    [0, 0, [], [-4]],
    [0, 0, [], [0, -1]],
]


@pytest.mark.parametrize("row", WRONG, ids=str)
def test_places_that_cannot_be(leaf_of: Callable[..., Path], row: list[Any]) -> None:
    loader = train_loader(leaf_of(50), **arguments_of(2, 6, 16), task_encoder=Full(), lanes=12)
    state = loader.save_state_rank() or {}
    with pytest.raises(StateError, match="damaged"):
        loader.restore_state_rank({**state, "cursors": [row, *state["cursors"][1:]]})


class Stubborn(Greedy):
    """Pushes everything back."""

    def select_samples_to_pack(self, samples: list[Any]) -> Any:
        return PackedSamplesOutput([], pushback=samples)


class Rest(Greedy):
    """A pack of the first sample and a half of the second one, of which the rest goes back."""

    def select_samples_to_pack(self, samples: list[Any]) -> Any:
        if len(samples) < 2:
            return [samples]
        half = {**samples[1], "__key__": samples[1]["__key__"] + "/"}
        return PackedSamplesOutput([[samples[0], half]], pushback=[dict(half), *samples[2:]])


def test_a_selection_that_makes_nothing(leaf_of: Callable[..., Path]) -> None:
    arguments: Any = arguments_of(1, 4, 8) | {"lanes": 1, "task_encoder": Stubborn()}
    with pytest.raises(FatalSampleError, match="pushed back 4 samples, as many as a buffer has"):
        next(iter(train_loader(leaf_of(50), **arguments)))
    loader = val_loader(leaf_of(3), **arguments)
    assert list(loader) == [] and loader.stats()["dropped"] == 3
    assert "pushed back at the end of a chunk" in loader.stats()["reasons"][0]["reason"]


def test_the_rest_of_a_sample_is_counted_with_its_first_part(leaf_of: Callable[..., Path]) -> None:
    loader = val_loader(leaf_of(7), **arguments_of(1, 3, 20), task_encoder=Rest())
    packs = [pack for batch in loader for pack in batch["packs"]]
    assert {key.strip("/") for pack in packs for key in pack} == {f"a-{number}" for number in range(7)}
    assert loader.stats()["samples"] == 7 and loader.stats()["dropped"] == 0
