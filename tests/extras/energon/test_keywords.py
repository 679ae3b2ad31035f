"""What can be said in groups can be said flat, as Energon's users write it; but nothing twice."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from energon_lite import (
    BestFit,
    ByTokens,
    Capacity,
    Chunks,
    ReadAhead,
    Reading,
    TaskEncoder,
    TextSample,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
)
from energon_lite.errors import UsageError
from energon_lite.extras.energon.keywords import KEYWORDS
from energon_lite.loading.recipes import DatasetOptions
from tests.testing import ALONE, alone

BY_TEXT = ByTokens(BestFit(Capacity(20)), length_column=None, length_field="text")
BEST_FIT = {"strategy": "best_fit", "capacity": 20}
DOCUMENTS = {"dataset_config": "other.yaml", "split_config": "other_split.yaml"}
READING = Reading(
    **DOCUMENTS, subflavors={"kind": "a"}, sample_type=TextSample, trust_code=True, read_ahead=ReadAhead(requests=2)
)


class Yields(TaskEncoder):
    def encode_sample(self, sample: TextSample) -> Any:
        yield sample


def _call(path: Path, function: Callable[..., Any] = get_train_dataset, **kwargs: Any) -> Any:
    return function(path, worker_config=ALONE, **kwargs)


#: Flat, and in groups.
SAME: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "reading": (
        {"batch_size": 2, **vars(READING), "length_field": None, "max_images": None},
        {"batch_size": 2, "reading": READING},
    ),
    "chunks": (
        {"batch_size": 2, "task_encoder": Yields(), "chunk_size": 4, "chunk_remainder": "keep", "lanes": 3},
        {"batch_size": 2, "task_encoder": Yields(), "chunks": Chunks(size=4, remainder="keep", lanes=3)},
    ),
    "tokens": (
        {"batching": BEST_FIT, "length_column": None, "length_field": "text", "chunk_size": 5, "lanes": 2},
        {"batching": BY_TEXT, "chunks": Chunks(size=5, lanes=2)},
    ),
    "some of a group": (
        {"batch_size": 2, "task_encoder": Yields(), "chunks": Chunks(size=4), "lanes": 3, "chunk_size": None},
        {"batch_size": 2, "task_encoder": Yields(), "chunks": Chunks(size=4, lanes=3)},
    ),
}


@pytest.fixture
def path(leaf_of: Any) -> Path:
    leaf: Path = leaf_of(10, "groups")
    for name, other in zip(("dataset.yaml", "split.yaml"), DOCUMENTS.values(), strict=True):
        (leaf / ".nv-meta" / other).write_text((leaf / ".nv-meta" / name).read_text())
    return leaf


@pytest.mark.parametrize("function", [get_train_dataset, get_val_dataset])
@pytest.mark.parametrize("case", SAME)
def test_flat_keywords_fill_the_groups(path: Path, case: str, function: Callable[..., Any]) -> None:
    one, other = (_call(path, function, **arguments) for arguments in SAME[case])
    assert one.identity == other.identity
    with get_savable_loader(one) as first, get_savable_loader(other) as second:
        batch, same = (next(iter(loader)) for loader in (first, second))
        assert (batch.__key__, batch.__subflavors__) == (same.__key__, same.__subflavors__)
        assert first.save_state_rank() == second.save_state_rank()


def test_each_field_has_a_flat_name() -> None:
    lone: Any = object()
    lones = ("chunk_size", "length_column", "length_field", "costs", "max_images", "micro_batches_per_step")
    flat = dict.fromkeys([*lones, *(one.name for one in fields(Reading))], lone)
    flat |= {"chunk_remainder": "keep", "lanes": 48}
    options = DatasetOptions(Yields(), ByTokens({"strategy": "fixed"}), Chunks(), Reading())
    _, batching, chunks, reading = KEYWORDS.of_dataset(get_train_dataset, flat, options)
    assert batching is not None and batching.strategy == {"strategy": "fixed"}
    values = [getattr(group, one.name) for group in (batching, chunks, reading) for one in fields(group)]
    assert chunks is not None and (chunks.remainder, chunks.lanes) == ("keep", 48)
    assert values.count(lone) == len(values) - 3


TWICE: dict[str, tuple[dict[str, Any], str]] = {
    "beside its group": (
        {"batch_size": 2, "lanes": 4, "chunks": Chunks(lanes=8)},
        r"lanes=4 and chunks=Chunks\(lanes=8\): the setting is given twice",
    ),
    "beside the same": ({"batch_size": 2, "trust_code": True, "reading": Reading(trust_code=True)}, "given twice"),
    "lengths": ({"batching": BY_TEXT, "length_field": "caption"}, "length_field='caption' and batching=ByTokens"),
}


@pytest.mark.parametrize("case", TWICE)
@pytest.mark.parametrize("function", [get_train_dataset, get_val_dataset, get_val_datasets])
def test_nothing_is_said_twice(path: Path, case: str, function: Callable[..., Any]) -> None:
    arguments, words = TWICE[case]
    with pytest.raises(UsageError, match=words) as error:
        _call(path, function, **arguments)
    assert "leave out" in str(error.value.fix)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("chunksize", "chunk_size"), ("lane", "lanes"), ("subflavor", "subflavors"), ("batch", "batching")],
)
@pytest.mark.parametrize("function", [get_train_dataset, get_val_dataset, get_val_datasets])
def test_a_misspelt_keyword_has_a_neighbour(path: Path, wrong: str, near: str, function: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match=f"{function.__name__} has no argument {wrong!r}") as error:
        _call(path, function, batch_size=2, **{wrong: 1})
    assert error.value.fix == f"did you mean {near!r}?"


def test_signatures() -> None:
    train, val = inspect.signature(get_train_dataset), inspect.signature(get_val_dataset)
    assert len(train.parameters) <= 16 and inspect.signature(get_val_datasets).parameters == val.parameters
    groups = {"batching", "chunks", "reading"}
    assert groups <= train.parameters.keys() and groups <= val.parameters.keys()


def test_a_leaf_by_its_description(path: Path) -> None:
    arguments: dict[str, Any] = {"worker_config": ALONE, "batch_size": 3, "subflavors": {"n": 1}}
    ((dataset, leaf),) = get_val_datasets(path, **arguments)
    assert get_val_dataset(leaf, **arguments).identity == dataset.identity and leaf.subflavors == {"n": 1}
    with pytest.raises(TypeError, match="worker_config"):
        get_val_datasets(path, batch_size=3)  # type: ignore[call-arg]


def test_an_error_handler_that_energon_ignores_is_ignored_aloud(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _call(path, batch_size=2, handler=print)
    assert "handler" in caplog.text and "global_error_handler" in caplog.text


def test_what_energon_would_take_otherwise_is_refused(path: Path) -> None:
    """What is accepted: ``compat/test_energon_arguments.py``."""
    with pytest.raises(UsageError, match="worker_config belongs to the data set"):
        get_loader(_call(path, batch_size=2), worker_config=alone(3))
    with pytest.raises(UsageError, match="image_decode 'torchrbg' is unknown") as error:
        _call(path, batch_size=2, image_decode="torchrbg")
    assert "did you mean 'torchrgb'" in str(error.value.fix)
