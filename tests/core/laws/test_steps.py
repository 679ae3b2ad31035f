"""What a step has is known before it is made, and steps can be passed over without moving anything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import UsageError
from energon_lite.extras.blends import rebase_state
from energon_lite.storage.read.sample_reader import SampleReader
from tests.core.laws.conftest import Cluster
from tests.core.laws.kinds import Noise, training
from tests.testing import examples, take, train_loader, val_loader


class Groups(Noise):
    def batch_group_criterion(self, sample: Any) -> Any:
        return int(sample["__key__"].split("-")[1]) % 3, None


KINDS: dict[str, dict[str, Any]] = {
    "planned": {"batch_size": 3},
    "single": {"batch_size": None},
    "tokens": {"batch_size": None, "chunk_size": 20, "batching": {"strategy": "bfd", "capacity": 100}},
    "even tokens": {
        **{"batch_size": None, "chunk_size": 40, "micro_batches_per_step": 12},
        "batching": {"strategy": "best_fit", "capacity": 100},
    },
    "groups": {"batch_size": 3, "chunk_size": 24, "lanes": 12},
}
worlds = st.sampled_from([1, 2, 3, 4])


pytestmark = pytest.mark.usefixtures("known_lengths")


def keys(batches: list[Any]) -> list[list[str]]:
    return [batch["__key__"] if isinstance(batch["__key__"], list) else [batch["__key__"]] for batch in batches]


def loader_of(path: Any, kind: str, rank: int = 0, world: int = 1, skip: Any = (), **more: Any) -> Any:
    get = val_loader if more.pop("validate", False) else train_loader
    own = {"task_encoder": Groups() if kind == "groups" else Noise(), **KINDS[kind]}
    return get(path, rank=rank, world_size=world, skip_steps=skip, **own, **more)


# -- which samples --------------------------------------------------------------------------------------------------


@settings(max_examples=examples(32))
@given(
    kind=st.sampled_from(["planned", "planned", "single", "tokens", "even tokens"]),
    first=worlds,
    second=worlds,
    before=st.integers(0, 9),
    at=st.integers(0, 9),
)
def test_what_a_step_has_is_known_without_reading(
    leaf_of: Any, kind: str, first: int, second: int, before: int, at: int
) -> None:
    """From any place of the run, on any ranks, steps behind and ahead."""
    path = leaf_of(50, "a")
    build = training(path, task_encoder=Noise(), **KINDS[kind])
    with Cluster(build, first, 0) as ranks:
        ranks.steps(before)
        state = ranks.state()
    with Cluster(build, second, 0, state) as ranks:
        start = state["position"] // second
        batches = keys(ranks.steps(10))
        loaders = [loader_of(path, kind, rank, second) for rank in range(second)]
    for loader in loaders:
        loader.restore_state_rank(state)
    take(loaders[-1], at)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SampleReader, "sample", None)
        patch.setattr(SampleReader, "read", None)
        for step in range(10):
            expected = batches[step * second : (step + 1) * second]
            for rank, loader in enumerate(loaders):
                own = loader.samples_at(start + step)
                assert [sample.key for sample in own] == expected[rank] and {one.rank for one in own} <= {rank}
            of_all = loaders[-1].samples_at(start + step, all_ranks=True)
            assert [sample.key for sample in of_all] == [key for own in expected for key in own]
    for sample in of_all:
        assert loaders[0].restore_sample(sample.restore_key)["__key__"] == sample.key
        assert sample.shard.startswith("shard-") and sample.dataset == str(path)


@pytest.mark.parametrize("kind", ["planned", "tokens"])
@pytest.mark.parametrize("validate", [False, True])
def test_passes_that_end(leaf_of: Any, kind: str, validate: bool) -> None:
    more: dict[str, Any] = {"split_part": "train"}
    more |= {"validate": True} if validate else {"repeat": False}
    loader = loader_of(leaf_of(50, "a"), kind, 0, 2, **more)
    passes = [keys(list(loader)) for _ in range(3)]
    for number, one in enumerate(passes):
        assert [[s.key for s in loader.samples_at(n, pass_number=number)] for n in range(len(one))] == one
        with pytest.raises(UsageError, match=f"no step {len(one)} in pass {number}"):
            loader.samples_at(len(one), pass_number=number)
    assert [sample.key for sample in loader.samples_at(1)] == passes[2][1]  # of the pass that is running


def test_pieces_say_which_tokens(leaf_of: Any) -> None:
    more: Any = {"batching": {"strategy": "concat_split", "tokens": 64}, "chunk_size": 11}
    loader = train_loader(leaf_of(50, "a"), task_encoder=Noise(), **more)
    samples = [sample for step in range(20) for sample in loader.samples_at(step)]
    cut = [sample for sample in samples if sample.length is not None]
    assert cut and any(sample.start for sample in cut) and len(cut) < len(samples)


def test_steps_that_are_not_there(leaf_of: Any) -> None:
    path = leaf_of(50, "a")
    for kind in ("planned", "tokens"):
        for step, number in ((-1, 0), (0, 1)):
            with pytest.raises(UsageError, match=f"no step {step} in pass {number}"):
                loader_of(path, kind).samples_at(step, pass_number=number)
    with pytest.raises(UsageError, match="decided by the hooks"):
        loader_of(path, "groups").samples_at(0)
    old, new = loader_of(path, "planned"), loader_of(leaf_of(7, "b"), "planned")
    new.restore_state_rank(rebase_state(old.save_state_rank() | {"position": 9}, old.dataset, new.dataset)[0])
    assert len(new.samples_at(9)) == 3
    with pytest.raises(UsageError, match="before the blend was changed"):
        new.samples_at(8)


def test_far_out_at_once(leaf_of: Any) -> None:
    loader = loader_of(leaf_of(50, "a"), "planned", 1, 64)
    assert len(loader.samples_at(10**14, all_ranks=True)) == 3 * 64


# -- passing over ---------------------------------------------------------------------------------------------------


@settings(max_examples=examples(19))
@given(
    kind=st.sampled_from(sorted(KINDS)),
    world=st.integers(1, 3),
    workers=st.sampled_from([0, 0, 0, 0, 0, 0, 2]),
    skip=st.sets(st.integers(0, 14)),
    cut=st.integers(0, 8),
)
def test_steps_that_are_passed_over_move_nothing_else(
    leaf_of: Any, kind: str, world: int, workers: int, skip: set[int], cut: int
) -> None:
    path = leaf_of(50, "a")

    def steps(skip: Any, count: int, states: Any = None) -> tuple[list[Any], list[Any]]:
        found, saved = [], []
        for rank in range(world):
            with loader_of(path, kind, rank, world, skip, num_workers=workers) as loader:
                loader.restore_state_rank(None if states is None else states[rank])
                found.append(keys(take(loader, count)))
                saved.append(json.loads(json.dumps(loader.save_state_rank())))
        return [list(one) for one in zip(*found, strict=True)], saved

    everything, _ = steps((), 16 + len(skip))
    expected = [step for number, step in enumerate(everything) if number not in skip]
    assert steps(skip, 16)[0] == expected[:16]
    # Saved and restored in between, with the same steps to be passed over.
    first, states = steps(skip, cut)
    assert first + steps(skip, 16 - cut, states)[0] == expected[:16]
    # A state from before, restored by a loader that passes over more.
    position = states[0]["position"] // world
    later = [step for number, step in enumerate(everything) if number >= position and number != position + 1]
    assert steps([position + 1], 4, states)[0] == later[:4]


@pytest.mark.parametrize("kind", ["planned", "tokens"])
def test_in_passes_that_end(leaf_of: Any, kind: str) -> None:
    def loader(skip: Any = ()) -> Any:
        return loader_of(leaf_of(50, "a"), kind, skip=skip, repeat=False)

    whole = loader()
    one, other = (keys(list(whole)) for _ in range(2))
    last = len(one) - 1
    some = loader([0, 3, last, last + 5, (1, 1)])
    assert keys(list(some)) == [batch for number, batch in enumerate(one) if number not in (0, 3, last)]
    assert keys(list(some)) == [batch for number, batch in enumerate(other) if number != 1]
    nothing = loader(range(len(one)))
    assert list(nothing) == [] and keys(list(nothing)) == other


def test_what_is_passed_over_is_not_read(leaf_of: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    original = SampleReader.read

    def counted(self: SampleReader, indices: Any) -> Any:
        read.extend(indices)
        return original(self, indices)

    monkeypatch.setattr(SampleReader, "read", counted)
    loader = loader_of(leaf_of(50, "a"), "planned", 0, 1, range(1, 10_000))
    planned = [sample.index for step in (0, 10_000) for sample in loader.samples_at(step)]
    take(loader, 2)
    assert read == planned


def test_wrong_steps(leaf_of: Any) -> None:
    for wrong in ([-1], ["3"], [(1, 2, 3)], [(0, -1)]):
        with pytest.raises((UsageError), match="among skip_steps"):
            loader_of(leaf_of(50, "a"), "planned", 0, 1, wrong)
