"""Faults that Megatron-Energon is known to have, in order and state; none of them may come up here.

Each test is about one fault, which its first line describes, and does what brings it to light.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.errors import EmptyDatasetError, StateMismatchError
from tests.testing import nightly_but


class Packs(TaskEncoder):
    """Two samples make a pack."""

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[at : at + 2] for at in range(0, len(samples), 2)]

    def postencode_sample(self, sample: Any) -> Any:
        return {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__, "late": self.rng.random()}

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {
            "__key__": "+".join(sample["__key__"] for sample in samples),
            "__restore_key__": (),
            "late": torch.tensor(sum(sample["late"] for sample in samples)),
        }


class Groups(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        return {"__key__": sample.__key__, "__restore_key__": sample.__restore_key__, "x": torch.tensor(0.0)}

    def batch_group_criterion(self, sample: Any) -> Any:
        return len(sample["__key__"]), 2


MANNERS: dict[str, Callable[[], dict[str, Any]]] = {
    "planned": lambda: {"batch_size": 3},
    "packed": lambda: {"batch_size": 2, "packing_buffer_size": 6, "task_encoder": Packs()},
    "grouped": lambda: {"batch_size": None, "task_encoder": Groups()},
}


def _loader(path: Any, *, rank: int = 0, world: int = 1, workers: int = 0, manner: str = "planned", **more: Any) -> Any:
    config = WorkerConfig(rank=rank, world_size=world, num_workers=workers)
    arguments = MANNERS[manner]() | more
    return get_savable_loader(get_train_dataset(path, worker_config=config, **arguments))


def _keys(batches: Any) -> list[Any]:
    return [batch["__key__"] if isinstance(batch, dict) else batch.__key__ for batch in batches]


def _take(loader: Any, count: int) -> list[Any]:
    return _keys(batch for _, batch in zip(range(count), loader, strict=False))


def _blend(kind: str, *entries: dict[str, Any]) -> dict[str, Any]:
    split = {kind: [{"path": str(entry.pop("path")), **entry} for entry in entries]}
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": split, "val": split}}


@pytest.mark.parametrize("workers", nightly_but({0, 2}, [0, 2, 3]))
@pytest.mark.parametrize("manner", MANNERS)
def test_saving_again_before_every_worker_has_delivered(manner: str, workers: int, leaf_of: Any) -> None:
    """1. Saved soon after a resume, workers that had delivered nothing since then fell back to their beginning."""
    parts = [7, 1, 1, 0, 2, 1, 1, 4]
    with _loader(leaf_of(200), manner=manner) as undisturbed:
        expected = _take(undisturbed, sum(parts))
    found: list[Any] = []
    state: Any = None
    for count in parts:
        with _loader(leaf_of(200), manner=manner, workers=workers) as loader:
            loader.restore_state_rank(state)
            found += _take(loader, count)
            state = json.loads(json.dumps(loader.save_state_rank()))
    assert found == expected


@pytest.mark.parametrize("workers", [0, 2])
def test_fractional_repetitions_in_later_epochs(workers: int, leaf_of: Any) -> None:
    """6. Of 1.5 repetitions of 100 samples only the first epoch had 150, the following ones 100."""
    blend = _blend("blend_epochized", {"path": leaf_of(100), "repetitions": 1.5})
    with _loader(blend, workers=workers, batch_size=1, repeat=False) as loader:
        epochs = [[key for keys in _keys(loader) for key in keys] for _ in range(4)]
    assert [len(epoch) for epoch in epochs] == [150] * 4
    seen: Counter[str] = Counter()
    for number, epoch in enumerate(epochs):
        seen.update(epoch)
        if number % 2:
            assert set(seen.values()) == {3 * (number + 1) // 2}, "two epochs are three repetitions"


def test_the_mixing_ratio_of_a_subset(leaf_of: Any) -> None:
    """7. In an epoch-wise blend a tenth of a data set was mixed in as if all of it were there."""
    tenth = {"path": leaf_of(200, "a"), "repetitions": 1, "subset": {"range": ["0%", "10%"]}}
    blend = _blend("blend_epochized", tenth, {"path": leaf_of(20, "b"), "repetitions": 1})
    with _loader(blend, batch_size=1, repeat=False) as loader:
        for _ in range(3):
            keys = [key for keys in _keys(loader) for key in keys]
            assert len(set(keys)) == len(keys) == 40
            # Mixed as 200 to 20, the first half would have 18 of the subset, and the last quarter none.
            for start in range(0, 40, 10):
                assert 3 <= sum(key.startswith("a-") for key in keys[start : start + 10]) <= 7


@pytest.mark.parametrize("manner", MANNERS)
@pytest.mark.parametrize("listed", [False, True])
def test_a_single_state_on_other_ranks(listed: bool, manner: str, leaf_of: Any) -> None:
    """10. A global state in one file could not be dealt out to other ranks, and whose turn was next was lost."""
    more = {} if manner == "planned" else {"lanes": 6}
    with _loader(leaf_of(200), manner=manner, **more) as alone:
        expected = _take(alone, 24)
    with _loader(leaf_of(200), manner=manner, **more) as alone:
        assert _take(alone, 6) == expected[:6]
        state = alone.save_state_global()
    for world in (2, 3):
        ranks = [_loader(leaf_of(200), manner=manner, rank=rank, world=world, **more) for rank in range(world)]
        for loader in ranks:
            loader.restore_state_global([state] if listed else state)
        iterators = [iter(loader) for loader in ranks]
        found = [key for _ in range(18 // world) for key in _keys(next(one) for one in iterators)]
        assert found == expected[6:]


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another data set": ({"path": ("b", 200)}, "other data"),
    "a data set that has grown": ({"path": ("a", 201)}, "200 in the state, 201 here"),
    "another shuffle buffer": ({"shuffle_buffer_size": 50, "max_samples_per_sequence": 5}, "shuffle_buffer_size"),
    "other sequences": ({"shuffle_buffer_size": 99, "max_samples_per_sequence": 9}, "max_samples_per_sequence: 5"),
    "another batch size": ({"batch_size": 4}, "batch_size: 3 in the state, 4 here"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_the_state_of_another_run(case: str, leaf_of: Any) -> None:
    """12. States of other data and other settings were accepted without a word."""
    own = {"shuffle_buffer_size": 99, "max_samples_per_sequence": 5}
    change, words = CHANGES[case]
    with _loader(leaf_of(200, "a"), **own) as loader:
        _take(loader, 2)
        state = loader.save_state_rank()
    tag, count = change.get("path", ("a", 200))
    settings = {name: value for name, value in change.items() if name != "path"}
    with _loader(leaf_of(count, tag), **(own | settings)) as other:
        with pytest.raises(StateMismatchError, match=words):
            other.restore_state_rank(state)
        assert other.save_state_rank()["position"] == 0


@pytest.mark.parametrize("nested", [False, True])
def test_a_data_set_that_comes_twice_in_a_blend(nested: bool, leaf_of: Any, tmp_path: Path) -> None:
    """13. Both gave the same samples in the same order, so that half of all draws were a repetition."""
    leaf = leaf_of(100)
    blend = _blend("blend", {"path": leaf, "weight": 1}, {"path": leaf, "weight": 1})
    if nested:
        (tmp_path / "inner.yaml").write_text(json.dumps(_blend("blend", {"path": leaf, "weight": 1})))
        blend = _blend("blend", {"path": leaf, "weight": 1}, {"path": tmp_path / "inner.yaml", "weight": 1})
    with _loader(blend, batch_size=1) as loader:
        keys = [key for keys in _take(loader, 100) for key in keys]
    assert len(set(keys)) > 60  # 51 with the fault, 75 on average without
    assert max(Counter(keys).values()) <= 2


@pytest.mark.parametrize("samples", [1, 2, 5])
@pytest.mark.parametrize("kind", ["train", "val", "blend"])
def test_fewer_samples_than_workers(kind: str, samples: int, leaf_of: Any) -> None:
    """15. Data that did not reach every worker ended the run when it began."""
    config = WorkerConfig(rank=0, world_size=1, num_workers=6)
    names = {f"a-{number}" for number in range(samples)}
    if kind == "val":
        loader = get_savable_loader(get_val_dataset(leaf_of(samples), batch_size=1, worker_config=config))
    else:
        blend = _blend("blend", {"path": leaf_of(samples), "weight": 1}, {"path": leaf_of(1, "b"), "weight": 1})
        dataset = get_train_dataset(leaf_of(samples) if kind == "train" else blend, batch_size=1, worker_config=config)
        loader = get_savable_loader(dataset)
        names |= {"b-0"} if kind == "blend" else set()
    with loader:
        keys = [key for keys in _take(loader, 24) for key in keys]
    assert set(keys) == names
    assert len(keys) == (samples if kind == "val" else 24)


def test_a_data_set_without_samples(leaf_of: Any, tmp_path: Path, write_dataset: Callable[..., Path]) -> None:
    """15. An empty data set was an assertion without a word."""
    path = write_dataset(tmp_path / "empty", {"s.tar": [("0", {"txt": b"x"})]}, exclude=["s.tar/0"])
    for target in (path, _blend("blend", {"path": leaf_of(5), "weight": 1}, {"path": path, "weight": 1})):
        with pytest.raises(EmptyDatasetError, match="no samples in split 'train'") as caught:
            _loader(target)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize("workers", [0, 2])
def test_loops_over_what_has_ended(workers: int, leaf_of: Any) -> None:
    """16. A stream that had ended was not begun again, and limits could not be told whether to go back to the start."""
    with _loader(leaf_of(10), workers=workers, batch_size=3, repeat=False) as passes:
        assert [sorted(key for keys in _keys(passes) for key in keys) for _ in range(3)] == [
            sorted(f"a-{number}" for number in range(10))
        ] * 3
    with _loader(leaf_of(10), workers=workers, batch_size=3) as endless:
        expected = _take(endless, 21)
    with _loader(leaf_of(10), workers=workers, batch_size=3, virtual_epoch_length=7) as loops:
        assert [keys for _ in range(3) for keys in _keys(loops)] == expected  # each goes on where the last one ended
    config = WorkerConfig(rank=0, world_size=1, num_workers=workers)
    with get_savable_loader(get_val_dataset(leaf_of(10), batch_size=3, limit=2, worker_config=config)) as limited:
        first = [[f"a-{number}" for number in range(at, at + 3)] for at in (0, 3)]
        assert [_keys(limited) for _ in range(3)] == [first] * 3  # validation always begins at the start


def test_the_state_does_not_grow_with_the_data(tmp_path: Path, write_dataset: Callable[..., Path]) -> None:
    """18. The state held the list of all pieces still to be read, times the epochs shuffled together."""
    sizes = []
    for number, (shards, epochs) in enumerate([(1, 1), (64, 1), (64, 10_000)]):
        path = write_dataset(
            tmp_path / str(number),
            {f"s{at}.tar": [(f"{at}-{i}", {"txt": b""}) for i in range(4)] for at in range(shards)},
        )
        more = {"shuffle_buffer_size": 2, "max_samples_per_sequence": 1, "shuffle_over_epochs_multiplier": epochs}
        with _loader(path, workers=2, **more) as loader:
            _take(loader, 10)
            sizes.append(len(json.dumps(loader.save_state_rank())))
    assert max(sizes) - min(sizes) <= 8, sizes  # a digit or two
