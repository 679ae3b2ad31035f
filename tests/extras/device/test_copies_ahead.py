"""Batches on their way to a device: one ahead, in order, and no state knows of it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import (
    SavableDataLoader,
    SkipSample,
    TaskEncoder,
)
from energon_lite.errors import UsageError
from energon_lite.extras.device.copies import DeviceCopy, DevicePrefetcher, Underway
from tests.testing import examples, train_loader, val_loader


class FakeCopy(DeviceCopy):
    """A device that notes what is asked of it."""

    overlaps = True  # type: ignore[assignment]  # there is nothing to wait for

    def __init__(self) -> None:
        super().__init__("cpu")
        self.log: list[tuple[str, Any]] = []

    def start(self, batch: Any, then: Callable[[Any], Any] | None = None) -> Underway:
        self.log.append(("start", _name(batch)))
        return Underway(batch, None)

    def finish(self, underway: Underway) -> Any:
        self.log.append(("finish", _name(underway.batch)))
        return underway.batch


class Packs(TaskEncoder):
    """As many batches as the content wants: packs of samples whose numbers have the same last digit."""

    def encode_sample(self, sample: Any) -> Any:
        if int(sample.text[2:]) % 7 == 3:
            raise SkipSample("three")
        return sample

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        by_digit: dict[str, list[Any]] = {}
        for sample in samples:
            by_digit.setdefault(sample.text[-1], []).append(sample)
        return list(by_digit.values())

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return {"text": [sample.text for sample in samples]}


def _name(batch: Any) -> Any:
    return None if batch is None else str(batch["text"] if isinstance(batch, dict) else batch.text)


KINDS: dict[str, Callable[..., SavableDataLoader]] = {
    "train": partial(train_loader, batch_size=4, virtual_epoch_length=5),
    "val": partial(val_loader, batch_size=4),
    "packed": partial(train_loader, batch_size=2, packing_buffer_size=8, task_encoder=Packs(), repeat=False),
}


def _loader(path: Any, kind: str, workers: int = 0, *, ahead: bool = True) -> SavableDataLoader:
    loader = KINDS[kind](path, workers)
    if ahead:
        loader._path = DevicePrefetcher(FakeCopy(), loader._path)
    return loader


def _plain(path: Any, kind: str, loops: int = 1) -> list[Any]:
    """The names of all batches of some loops, without a device."""
    with _loader(path, kind, ahead=False) as loader:
        return [_name(batch) for _ in range(loops) for batch in loader]


def _log(loader: SavableDataLoader) -> list[tuple[str, Any]]:
    return loader._path.copy.log  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", KINDS)
def test_the_next_copy_begins_before_a_batch_is_handed_out(leaf_of: Any, kind: str) -> None:
    with _loader(leaf_of(30), kind) as loader:
        names = []
        for batch in loader:
            names.append(_name(batch))
            assert _log(loader)[-1] == ("finish", names[-1])
    expected: list[tuple[str, Any]] = [("start", names[0])]
    for name, following in zip(names, [*names[1:], None], strict=True):
        expected += [("start", following)] if following is not None else []
        expected += [("finish", name)]
    assert _log(loader) == expected and len(names) >= 5


@pytest.mark.parametrize("kind", KINDS)
def test_batches_states_and_counts_are_those_without_it(leaf_of: Any, kind: str) -> None:
    with _loader(leaf_of(30), kind) as ahead, _loader(leaf_of(30), kind, ahead=False) as plain:
        for _ in range(3):  # loops
            for one, other in zip(ahead, plain, strict=True):
                assert _name(one) == _name(other)
                assert ahead.is_last() == plain.is_last()
                states = [loader.save_state_rank() for loader in (ahead, plain)]
                if kind == "packed":  # the lane may know already that its chunk has nothing left to give
                    assert all(state.pop("cursors") for state in states if state is not None)
                assert states[0] == states[1]
                stats = [loader.stats() for loader in (ahead, plain)]
                for name in ("samples", "batches", "reasons", "datasets"):
                    assert stats[0][name] == stats[1][name]


@settings(max_examples=examples(50))
@given(kind=st.sampled_from([*KINDS]), cuts=st.lists(st.integers(0, 9), min_size=1, max_size=5), data=st.data())
def test_the_resume_law_holds(leaf_of: Any, kind: str, cuts: list[int], data: st.DataObject) -> None:
    """Cut anywhere, go on in the same loader or in another one, with one ahead or without: the undisturbed sequence."""
    expected, found, loader = _plain(leaf_of(30), kind, 12), list[Any](), _loader(leaf_of(30), kind)
    for cut in cuts:
        found += _taken(loader, cut)
        match data.draw(st.sampled_from(["go on", "restore", "close", "cpu", "another", "another"])):
            case "restore":
                state = loader.save_state_rank()
                _taken(loader, 2)
                loader.restore_state_rank(state)
            case "close":
                loader.close()
            case "cpu":
                loader.to("cpu")
            case "another":
                state = loader.save_state_rank()
                loader.close()
                loader = _loader(leaf_of(30), kind, ahead=data.draw(st.booleans()))
                loader.restore_state_rank(state)
    loader.close()
    assert found == expected[: len(found)] and len(found) == sum(cuts)


def _taken(loader: SavableDataLoader, count: int) -> list[Any]:
    """The names of so many batches, in as many loops as it takes."""
    names: list[Any] = []
    while len(names) < count:
        for batch in loader:
            names.append(_name(batch))
            if len(names) == count:
                break
    return names


def test_with_workers(leaf_of: Any) -> None:
    with _loader(leaf_of(30), "train", 2) as loader:
        assert [_name(batch) for batch in loader] == _plain(leaf_of(30), "train")


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_what_goes_wrong_ahead_comes_after_the_batch_in_hand(
    leaf_of: Any, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a state would count a batch that nobody got."""
    expected = _plain(leaf_of(30), "train")
    loader = _loader(leaf_of(30), "train")
    take = loader._dataset_iterator.take
    calls = iter(range(100))

    def failing() -> Any:
        if next(calls) == 2:
            raise error
        return take()

    monkeypatch.setattr(loader._dataset_iterator, "take", failing)
    found = []
    with pytest.raises(error):
        for batch in loader:
            found.append(_name(batch))
    assert found == expected[:2]
    state = loader.save_state_rank()
    assert state is not None and state["position"] == 2
    found += [_name(batch) for batch in loader]
    assert found == expected


def test_on_the_cpu_batches_stay_what_they_are(leaf_of: Any) -> None:
    with _loader(leaf_of(30), "train", ahead=False) as plain, _loader(leaf_of(30), "train") as loader:
        assert loader.to("cpu") is loader
        for one, other in zip(loader, plain, strict=True):
            assert one == other and type(one) is type(other)
            copy = DeviceCopy("cpu")
            assert copy.finish(copy.start(one)) is one


def test_a_device_without_streams_gets_copies(leaf_of: Any) -> None:
    class Tensors(TaskEncoder):
        def batch(self, samples: list[Any]) -> Any:
            return {"text": [sample.text for sample in samples], "nested": {"x": [torch.ones(2)]}}

    with train_loader(leaf_of(30), batch_size=2, task_encoder=Tensors()).to("meta") as loader:
        batch = next(iter(loader))
        assert batch["nested"]["x"][0].device.type == "meta" and len(batch["text"]) == 2
        assert loader.save_state_rank()["position"] == 1


@pytest.mark.parametrize("name", ["gpu", *(["cuda"] if not torch.cuda.is_available() else [])])
def test_no_such_device(leaf_of: Any, name: str) -> None:
    with _loader(leaf_of(30), "train") as loader, pytest.raises(UsageError, match=f"cannot go to the device '{name}'"):
        loader.to(name)
