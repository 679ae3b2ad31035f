"""One law for each kind of batches: cut anywhere, restored on any ranks and workers, as often as you like, what is
delivered is the uninterrupted run. Worker processes are real."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import SkipSample, TaskEncoder, WorkerConfig, get_train_dataset
from energon_lite.loading.states.merge import merged, redistributed

# Test folders are no packages; the helper beside this file is imported by its plain name.
from tests.core.laws.content_encoders import Content
from tests.testing import examples

LANES = 12


class Noise(TaskEncoder):
    """Samples with randomness of their own, in batches with more of it."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        return {"__key__": sample.__key__, "__restore_key__": (), "noise": [float(self.rng.random())]}

    def batch(self, samples: list[Any]) -> dict[str, Any]:
        noise = [float(self.rng.random()), *(number for sample in samples for number in sample["noise"])]
        return {"__key__": [sample["__key__"] for sample in samples], "__restore_key__": (), "noise": noise}


class Skipping(Noise):
    """Leaves out one sample of four, or fails."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        if not self.rng.integers(4):
            raise SkipSample if self.rng.integers(2) else ValueError("broken")
        return super().encode_sample(sample)

    def empty_batch(self, like: Any, rows: int) -> dict[str, Any]:
        return {"__key__": [], "__restore_key__": (), "noise": []}


def _content(content: Content) -> Callable[..., dict[str, Any]]:
    return lambda: {"chunk_size": 3 * (content.packing or 4), "lanes": LANES, **content.arguments()}


#: Arguments of each kind, made anew for each data set.
KINDS: dict[str, Callable[..., dict[str, Any]]] = {
    "planned": lambda: {"batch_size": 3, "task_encoder": Noise()},
    "single": lambda: {"batch_size": None, "task_encoder": Noise()},
    "skipping": lambda: {"batch_size": 3, "task_encoder": Skipping()},
    "generator": _content(Content(yields=True, batch_size=2)),
    "generator that skips": _content(Content(yields=True, skips=4, batch_yields=True)),
    "packed": _content(Content(packing=5, batch_size=2, late=True)),
    "packed, single": _content(Content(packing=4, batch_size=None, pack_yields=True)),
    "grouped": _content(Content(groups=3, batch_size=2)),
    "packed and grouped": _content(Content(packing=4, groups=2, batch_size=None, skips=9)),
    "tokens": lambda: {
        "batch_size": None,
        "plan_chunk": 30,
        "batching": {"strategy": "best_fit", "capacity": 120},
        "task_encoder": Noise(),
    },
    "tokens that skip": lambda: {
        "batch_size": None,
        "plan_chunk": 25,
        "batching": {"strategy": "sorted_window", "capacity": 120, "batches": 3},
        "task_encoder": Skipping(),
    },
}
#: World sizes that divide the lanes, and workers: mostly some.
topologies = st.tuples(st.sampled_from([1, 2, 3, 4]), st.sampled_from([0, 1, 1, 2]))
chains = st.lists(st.tuples(topologies, st.integers(0, 7)), min_size=1, max_size=3)
#: Where the last state is restored, each time anew.
resumed = st.lists(topologies, min_size=2, max_size=2)


pytestmark = pytest.mark.usefixtures("known_lengths")


def _plain(batches: list[Any]) -> list[Any]:
    """What is in batches, but for how they can be made again."""
    return [{name: value for name, value in batch.items() if name != "__restore_key__"} for batch in batches]


def _run(cluster: Any, build: Any, topology: tuple[int, int], states: Any, steps: int) -> tuple[list[Any], list[Any]]:
    """The batches of some steps, and the states of all ranks."""
    with cluster(build, *topology) as ranks:
        for loader in ranks.loaders:
            if states is not None:
                loader.restore_state_global(states)
        found = _plain(ranks.steps(steps))
        return found, json.loads(json.dumps([loader.save_state_rank() for loader in ranks.loaders]))


def _check(cluster: Any, write_blend: Any, kind: str, chain: Any, topologies: Any, steps: int) -> None:
    blend = write_blend([(13, 1.0), (50, 2.5), (5, 0.5)])

    def build(config: WorkerConfig) -> Any:
        return get_train_dataset(blend, worker_config=config, **KINDS[kind]())

    total = sum(world * count for (world, _), count in chain)
    expected, _ = _run(cluster, build, (1, 0), None, total + 4 * steps)
    found: list[Any] = []
    states: Any = None
    for topology, count in chain:
        batches, states = _run(cluster, build, topology, states, count)
        found += batches
    assert found == expected[:total]
    for world, workers in topologies:  # the same states each time: as they are, and redistributed to other ranks
        again, _ = _run(cluster, build, (world, workers), states, steps)
        assert again == expected[total : total + world * steps]
        states = redistributed(merged(states), world)


@settings(max_examples=examples(10))
@given(kind=st.sampled_from(sorted(KINDS)), chain=chains, again=resumed, steps=st.integers(0, 4))
def test_cut_anywhere_and_resumed_twice(
    cluster: Any, write_blend: Any, kind: str, chain: Any, again: Any, steps: int
) -> None:
    _check(cluster, write_blend, kind, chain, again, steps)


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(22))
def test_cut_anywhere_and_resumed_twice_very_often(cluster: Any, write_blend: Any, part: int) -> None:
    @settings(max_examples=examples(100))
    @given(kind=st.sampled_from(sorted(KINDS)), chain=chains, again=resumed, steps=st.integers(0, 4))
    def holds(kind: str, chain: Any, again: Any, steps: int) -> None:
        _check(cluster, write_blend, kind, chain, again, steps)

    holds()


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_each_kind_once(cluster: Any, write_blend: Any, kind: str) -> None:
    _check(cluster, write_blend, kind, [((2, 1), 3), ((3, 2), 2)], [(4, 1), (1, 0)], 3)
