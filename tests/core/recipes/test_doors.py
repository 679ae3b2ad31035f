"""What users add by themselves: sources and strategies."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from energon_lite import (
    BestFit,
    ByTokens,
    Capacity,
    EnergonLiteError,
    MicroBatches,
    Reading,
    TaskEncoder,
    entry_points,
    register_source,
    register_strategy,
)
from energon_lite.batching import strategy as strategies
from energon_lite.errors import DatasetError, ShardChangedError, StateMismatchError, UsageError
from energon_lite.loading import BatchObserver
from energon_lite.storage import SampleDecoder
from energon_lite.storage.read import source as sources
from tests.testing import invoke, take, train_loader, val_loader


class Numbers:
    """``numbers://9`` has nine samples."""

    def __init__(self, url: str, split_part: str):
        self.count = int(url.partition("://")[2].partition("#")[0])
        self.identity = f"{url} {split_part}"

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> dict[str, Any]:
        return {"txt": f"text {index}".encode(), "json": json.dumps([index]).encode(), "n": index}

    def column(self, name: str) -> Any:
        return np.full(self.count, 4)


class Odd(Numbers):
    def read(self, index: int) -> Any:
        if index % 2:
            raise ValueError("even numbers only")
        return super().read(index) if index else 7


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "_registered", {})
    register_source("numbers", Numbers)
    register_source("odd", Odd)


def texts(path: Any, loader_of: Any = train_loader, start: str = "", **options: Any) -> list[str]:
    options |= {"num_workers": 2, "start_method": start} if start else {}
    with loader_of(path, batch_size=4, **options) as loader:
        return [text for batch in loader for text in batch["txt"]]


@pytest.mark.parametrize("start", ["", "fork", "spawn", "thread"])
@pytest.mark.slow
def test_an_epoch_of_a_source(start: str) -> None:
    found = texts("numbers://9", start=start, repeat=False)
    assert sorted(found) == [f"text {n}" for n in range(9)] and found != sorted(found)
    assert found == texts("numbers://9", repeat=False)
    assert found != texts("numbers://9#other", repeat=False)  # another identity, another order
    assert texts("numbers://3", val_loader) == ["text 0", "text 1", "text 2"]


def test_parts_are_decoded_by_their_names() -> None:
    (batch,) = val_loader("numbers://2", batch_size=2)
    assert (batch["txt"], batch["json"], batch["n"]) == (["text 0", "text 1"], [[0], [1]], [0, 1])
    assert batch["__key__"] == ["0", "1"] and batch["__sources__"][1].dataset_path == "numbers://2"

    class Raw(TaskEncoder):
        decoder: SampleDecoder | None = None

    (batch,) = val_loader("numbers://1", batch_size=1, task_encoder=Raw())
    assert batch["txt"] == [b"text 0"] and batch["n"] == [0]


def test_a_state_of_another_source_is_refused() -> None:
    def loader(path: str) -> Any:
        return train_loader(path, batch_size=2)

    with loader("numbers://50") as one, loader("numbers://50") as again, loader("numbers://50#new") as other:
        take(one, 4)
        again.restore_state_rank(one.save_state_rank())
        assert next(iter(again))["__restore_key__"] == next(iter(one))["__restore_key__"]
        assert {address.dataset for address in one.samples_at(0)} == {"numbers://50"}
        with pytest.raises(StateMismatchError):
            other.restore_state_rank(one.save_state_rank())


def test_subsets_and_lengths_of_a_source() -> None:
    part = {"path": "numbers://10", "subset": {"range": [4, 7]}}
    document = {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"val": part}}
    assert texts(document, val_loader) == ["text 4", "text 5", "text 6"]
    batching = {"strategy": "best_fit", "capacity": 8}
    with val_loader("numbers://5", batching=batching) as loader:
        assert [len(batch["txt"]) for batch in loader] == [2, 2, 1]
    register_source("bare", type("Bare", (Numbers,), {"column": None}))
    with pytest.raises(UsageError, match=r"has no column 'length'[\s\S]*give it a method column\(name\)"):
        val_loader("bare://3", batching=batching)


def test_samples_of_a_source_that_fail_are_counted(tmp_path: Path) -> None:
    with val_loader("odd://5", batch_size=2, quarantine=tmp_path / "bad.jsonl") as loader:
        assert [n for batch in loader for n in batch["n"]] == [2, 4]
        reasons = " ".join(reason["reason"] for reason in loader.stats()["reasons"])
        assert loader.stats()["failed"] == 3
    assert "even numbers only" in reasons and "read returned a int" in reasons
    lines = [json.loads(line) for line in (tmp_path / "bad.jsonl").read_text().splitlines()]
    assert [(line["path"], line["key"]) for line in lines] == [("odd://5", "0"), ("odd://5", "1"), ("odd://5", "3")]


def test_sources_that_cannot_be() -> None:
    with pytest.raises(EnergonLiteError, match="no samples in 'train'"):
        texts("numbers://0")
    with pytest.raises(UsageError, match="'numbers' is registered already"):
        register_source("numbers", Odd)
    with pytest.raises(UsageError, match="has no measured skips"):
        texts("numbers://4", reading=Reading(use_measured_skips=True))
    register_source("numbers", Numbers)  # the same again
    for scheme in ("file", "my scheme", ""):
        with pytest.raises(UsageError, match="not a scheme of a source"):
            register_source(scheme, Numbers)
    register_source("rows", Numbers, extensions=(".rows",))
    with pytest.raises(UsageError, match=r"another source has the extensions \['.rows'\]"):
        register_source("lines", Numbers, extensions=(".rows", ".lines"))
    register_source("absent", lambda url, split_part: None)  # type: ignore[arg-type, return-value]
    with pytest.raises(DatasetError, match="the identity of the source, a NoneType, is None"):
        texts("absent://4")


class Growing(Numbers):
    """Has another identity each time it is opened, as a table to which rows are added."""

    opened = 0

    def __init__(self, url: str, split_part: str):
        super().__init__(url, split_part)
        type(self).opened += 1
        self.identity += f" {self.opened}"


def test_a_source_that_changed_meanwhile_ends_the_run() -> None:
    register_source("growing", Growing)
    with pytest.raises(ShardChangedError, match=r"is 'growing://8 train [23]' now, and was 'growing://8 train 1'"):
        texts("growing://8", start="fork")


@pytest.mark.parametrize("identity", [None, "", 5])
def test_an_identity_that_tells_nothing_is_refused(identity: Any) -> None:
    def open_it(url: str, split_part: str) -> Numbers:
        source = Numbers(url, split_part)
        source.identity = identity
        return source

    register_source("anyone", open_it)
    with pytest.raises(DatasetError, match=r"the identity of the source, a .*, is"):
        texts("anyone://4")


@pytest.mark.parametrize("values", [[1, 2, 3], [1] * 5, None, [[1]] * 4])
def test_a_column_has_a_number_for_each_sample(values: Any) -> None:
    class Wrong(Numbers):
        def column(self, name: str) -> Any:
            return values

    register_source("wrong", Wrong)
    batching = ByTokens(BestFit(Capacity(8)), length_column="tokens")
    with pytest.raises(EnergonLiteError, match="column 'tokens' of the source has the shape"):
        train_loader("wrong://4", batching=batching)


@pytest.fixture
def no_new_strategies() -> Iterator[None]:
    with patch.dict(strategies.STRATEGIES), patch.dict(strategies._NAMES):
        yield


@dataclass(frozen=True)
class Twos:
    skip: int = 0

    def plan(self, lengths: Any, *, seed: int = 0, key_lengths: Any = None) -> MicroBatches:
        numbers = np.arange(self.skip, len(lengths))
        return MicroBatches.of([numbers[at : at + 2] for at in range(0, len(numbers), 2)], lengths, packed=False)


@pytest.mark.usefixtures("no_new_strategies")
@pytest.mark.parametrize("column", ["length", None])
def test_a_strategy_of_ones_own(column: str | None) -> None:
    register_strategy("twos")(Twos)
    made = []
    for strategy in (Twos(), {"strategy": "twos", "skip": 0}):
        batching = ByTokens(strategy, length_column=column, length_field=None if column else "txt")
        with val_loader("numbers://5", batching=batching) as loader:
            made.append([batch["n"] for batch in loader])
            state = loader.save_state_rank()
            loader.restore_state_rank(state)
    assert made[0] == made[1] == [[0, 1], [2, 3], [4]]


@pytest.mark.usefixtures("no_new_strategies")
def test_strategies_that_cannot_be() -> None:
    register_strategy("twos")(Twos)
    register_strategy("twos")(Twos)

    @dataclass
    class Melted:
        def plan(self, lengths: Any, *, seed: int = 0, key_lengths: Any = None) -> Any: ...

    for cls, words in ((Melted, "not a strategy"), (int, "not a strategy"), (type("Other", (Twos,), {}), "is taken")):
        with pytest.raises(UsageError, match=rf"{words}[\s\S]*fix: "):
            register_strategy("twos")(cls)
    with pytest.raises(UsageError, match="'twos' is the name of a strategy, not a file"):
        val_loader("numbers://5", batching=ByTokens("twos"))


def test_micro_batches_of_groups() -> None:
    lengths = np.array([5, 7, 1, 2])
    made = MicroBatches.of([[3, 0], [1]], lengths, packed=True)
    assert [part.tolist() for part in made] == [[3, 0], [1]] and made.length.tolist() == [2, 5, 7]
    assert (made.counts.dropped_samples, made.counts.dropped_tokens) == (1, 1)
    assert len(MicroBatches.of([], lengths, packed=True)) == 0
    for groups in ([[0], []], [[0, 1], [1]]):
        with pytest.raises(UsageError, match="empty, or a sample is in two"):
            MicroBatches.of(groups, lengths, packed=True)
    for index in (-1, 4):
        with pytest.raises(UsageError, match="not one of the 4 of the plan"):
            MicroBatches.of([[index]], lengths, packed=True)


class Sized(BatchObserver):
    def __init__(self, name: str):
        self.name = name

    def stats(self) -> dict[str, Any]:
        return {}


def test_observers_that_cannot_be() -> None:
    for observer in (Sized, 7):
        with pytest.raises(UsageError, match="which is no BatchObserver"):
            val_loader("numbers://5", observers=[observer])
    for observers in ([Sized("batches")], [Sized("a"), Sized("a")]):
        with val_loader("numbers://5", observers=observers) as loader, pytest.raises(UsageError, match="has an entry"):
            loader.stats()
    with val_loader("numbers://5", observers=Sized("alone")) as loader:
        assert loader.stats()["alone"] == {}


@pytest.mark.parametrize(
    ("module", "named", "says"),
    [
        ("COMMANDS = {'prepare': None}", "guest", "adds a command 'prepare', which is one of the core"),
        ("COMMANDS = {'a': None}", "twice", "COMMANDS of guest_of_tests has 'a', which another package has, too"),
        ("COMMAND = {}", "guest", "guest_of_tests has none of the tables of entries"),
        ("import no_such_module", "guest", "No module named 'no_such_module'"),
        ("COMMANDS = {'mine': Command('json:absent', '')}", "mine", "json has no 'absent'"),
        (
            "COMMANDS = {'mine': Command('guest_of_tests:late', '')}\n__getattr__ = lambda name: [].first",
            "mine",
            "'list' object has no attribute 'first'",
        ),
        ("COMMANDS = {'mine': Command('json:loads', '')}", "mine", "the command 'mine' is a function, not a click"),
    ],
)
def test_guests_that_cannot_be(
    module: str, named: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another distribution is wrong: each message names it, or its module."""
    (tmp_path / "guest_of_tests.py").write_text(f"from energon_lite.entry_points import Command\n{module}\n")
    (tmp_path / "guest-1.0.dist-info").mkdir()
    (tmp_path / "guest-1.0.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: guest\nVersion: 1.0\n")
    (tmp_path / "guest-1.0.dist-info/entry_points.txt").write_text(
        "[energon_lite]\nguest = guest_of_tests\n" + "twin = guest_of_tests\n" * (named == "twice")
    )
    monkeypatch.syspath_prepend(tmp_path)
    for cached in (entry_points._guests, entry_points._merged):
        cached.cache_clear()
    try:
        result = invoke("mine" if named == "mine" else "-h")
        assert result.exit_code and says in result.output
    finally:
        sys.modules.pop("guest_of_tests", None)
        for cached in (entry_points._guests, entry_points._merged):
            cached.cache_clear()
