"""Joined data sets: one address and one key for each sample, whatever is excluded or skipped; keys that are matched."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import TextSample, entry_points, get_loader, get_savable_loader, get_val_dataset
from energon_lite.errors import (
    ConfigError,
    DataIndexError,
    DatasetError,
    EmptyDatasetError,
    StateMismatchError,
    TrustError,
    UsageError,
)
from energon_lite.extras.energon import load_dataset, traverse_metadataset
from energon_lite.extras.energon.joins import SampleKeys, match_keys
from energon_lite.storage.index import key_index
from energon_lite.storage.index.columns import write_column
from energon_lite.storage.index.index_cache import cache_folder
from energon_lite.storage.index.packed_index import PackedIndex
from tests.core.storage.test_packed_index import scan_of
from tests.testing import ALONE, alone, train_loader

JOINER = {"__module__": "joiner_of_these_tests", "__function__": "pair"}
CODE = """
from energon_lite import Sample, TextSample, edataclass

def pair(one, two):
    return TextSample.derive_from(one, text=f"{one.text}+{'-' if two is None else two.text}")

@edataclass
class Pair(Sample):
    one: TextSample
    two: TextSample | None

@edataclass
class Counted(Sample):
    text: str
    count: int
    @classmethod
    def from_joined(cls, *samples):
        return cls.derive_from(samples[0], text=samples[0].text, count=len(samples))

def lines(one, two):
    return one | {"other": two and two["json"]}

def nothing(*samples):
    return 7

SEVEN = 7
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("ENERGON_LITE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "code").mkdir()
    (tmp_path / "code/joiner_of_these_tests.py").write_text(CODE)
    monkeypatch.syspath_prepend(str(tmp_path / "code"))
    yield tmp_path / "cache"
    sys.modules.pop("joiner_of_these_tests", None)


def shards(numbers: Iterable[int], prefix: str, per: int = 4) -> dict[str, list[Any]]:
    samples = [(f"k{number:02d}", {"txt": f"{prefix}{number}".encode()}) for number in numbers]
    return {f"s{at // per}.tar": samples[at : at + per] for at in range(0, len(samples), per)}


@pytest.fixture
def room(tmp_path: Path, write_dataset: Any) -> Path:
    """``one`` has the keys 0 to 11, three shards; ``two`` has 20, 18, ..., 0, three shards."""
    splits = {"train": ["s0.tar", "s1.tar"], "val": ["s2.tar"]}
    write_dataset(tmp_path / "one", shards(range(12), "a"), splits=splits)
    write_dataset(tmp_path / "two", shards(range(20, -1, -2), "b"))
    return tmp_path


def join(room: Path, split: str = "train", one: Any = None, **more: Any) -> dict[str, Any]:
    """``one`` is joined with ``two``, and what each of them, or the join, says besides."""
    two = {"path": str(room / "two"), "nonmatch": "skip"} | more.pop("two", {})
    members = [{"path": str(room / "one")} | (one or {}), two]
    return {"splits": {split: {"join": members, "joiner": JOINER} | more}}


#: What ``nonmatch`` says of a member.
NONE, ERROR = ({"nonmatch": kind} for kind in ("none", "error"))
#: The join of the two, where nothing else is said.
MATCHES = ["a0+b0", "a2+b2", "a4+b4", "a6+b6"]


def opened(document: Any, split: str = "train", **options: Any) -> Any:
    options = {"worker_config": ALONE, "trust_code": True} | options
    return get_val_dataset(document, split_part=split, **options)


def texts(document: Any, split: str = "train", **options: Any) -> list[str]:
    return [sample.text for sample in get_loader(opened(document, split, **options))]


def joined_by(room: Path, name: str, kind: str = "__class__") -> dict[str, Any]:
    """The join with another joiner of these tests."""
    return join(room, joiner={"__module__": "joiner_of_these_tests", kind: name})


def test_what_has_no_match(room: Path) -> None:
    assert texts(join(room)) == MATCHES
    assert texts(join(room, two=NONE))[:3] == ["a0+b0", "a1+-", "a2+b2"]
    with pytest.raises(
        DatasetError, match=r"4 of 8 samples of .*one have no sample of the same key here, such as 'k01'"
    ):
        texts(join(room, two=ERROR))


def test_a_join_has_a_factory(room: Path) -> None:
    given: dict[str, Any] = {"training": False, "split_part": "train", "worker_config": ALONE, "trust_code": True}
    (loaded,) = load_dataset(join(room)).get_datasets(**given).datasets
    assert [sample.text for sample in get_loader(loaded.dataset.build())] == MATCHES


def test_an_edited_split_is_noticed(room: Path) -> None:
    assert texts(join(room)) == MATCHES
    for name, shards, excluded, left in (
        ("one", ["s2.tar", "s0.tar"], "s0.tar/k02", ["a8+b8", "a10+b10", "a0+b0"]),
        ("one", ["s2.tar", "s0.tar"], "s2.tar", ["a0+b0", "a2+b2"]),
        ("two", ["s0.tar", "s1.tar", "s2.tar"], "s2.tar/k02", ["a0+b0"]),
    ):
        split = {"split_parts": {"train": shards}, "exclude": [excluded]}
        (room / name / ".nv-meta/split.yaml").write_text(json.dumps(split))
        assert texts(join(room)) == left
    assert texts(join(room, two=NONE)) == ["a0+b0", "a1+-", "a2+-", "a3+-"]


def test_subsets(room: Path) -> None:
    """They are parts of what is joined: after what is skipped."""
    assert texts(join(room, subset={"range": ["50%", "100%"]})) == ["a4+b4", "a6+b6"]
    assert texts(join(room, subset={"range": [1, 3]})) == ["a2+b2", "a4+b4"]
    blend = {"splits": {"train": {"blend": [join(room)["splits"]["train"]], "subset": {"range": ["0%", "25%"]}}}}
    assert texts(blend) == ["a0+b0"]
    half = {"subset": {"range": ["0%", "50%"]}}
    assert texts(join(room, one=half)) == ["a0+b0", "a2+b2"]
    with pytest.raises(EmptyDatasetError, match="the join has no samples"):
        texts(join(room, one=half, two={"split_part": "val", "subset": {"range": [0, 1]}}))
    with pytest.raises(ConfigError, match="beyond the end"):
        texts(join(room, subset={"range": [1, 5]}))


def test_names_types_and_labels(room: Path) -> None:
    members = {
        "one": {"path": str(room / "one"), "subflavors": {"who": "one", "own": 1}},
        "two": {"path": str(room / "two"), "nonmatch": "none", "subflavors": {"who": "two"}},
    }
    document = joined_by(room, "Pair")
    document["splits"]["train"] |= {"join": members, "subflavors": {"join": True, "who": "all"}}
    first, second, *_ = get_loader(opened(document, subflavors={"called": 2}, batch_size=None))
    assert (first.__key__, first.one.text, first.two.text) == ("k00", "a0", "b0") and second.two is None
    assert first.__subflavors__ == first.one.__subflavors__ == {"who": "all", "own": 1, "join": True, "called": 2}
    assert first.two.__subflavors__ == {"who": "all", "join": True, "called": 2}
    assert [source.shard_name for source in first.__sources__] == ["s0.tar", "s2.tar"]
    counted = joined_by(room, "Counted")
    assert [sample.count for sample in get_loader(opened(counted))] == [2, 2, 2, 2]
    counted["splits"]["train"]["joiner"] = {"__module__": "megatron.energon.flavors", "__class__": "TextSample"}
    assert texts(counted, trust_code=False, sample_type=TextSample) == ["b0", "b2", "b4", "b6"]


def test_trust(room: Path) -> None:
    with pytest.raises(TrustError, match="the joiner is code that would have to be imported"):
        opened(join(room), trust_code=False)
    for name, says in (("nothng", "cannot import 'nothng'"), ("SEVEN", "SEVEN is not a function")):
        with pytest.raises(ConfigError, match=says):
            texts(joined_by(room, name, "__function__"))


def test_without_the_extra(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entry_points, "metadataset_keys", dict)
    (room / "joined.yaml").write_text(json.dumps(join(room)))
    with pytest.raises(ConfigError, match="read by the extra 'energon', which is not installed") as error:
        texts(room / "joined.yaml")
    assert error.value.where == f"{room}/joined.yaml:1"


def test_a_state_of_other_matches_is_refused(room: Path) -> None:
    """What a join gives in a run, saved and restored anywhere, is compared with plain code by
    ``tests/core/laws/test_oracle.py``."""

    def loader() -> Any:
        return train_loader(join(room), batch_size=2, trust_code=True)

    state = loader().save_state_rank()
    loader().restore_state_rank(state)
    (room / "two/.nv-meta/split.yaml").write_text(json.dumps({"split_parts": {"train": ["s2.tar"]}}))
    with pytest.raises(StateMismatchError):
        loader().restore_state_rank(state)


def test_other_workers(room: Path, cache: Path) -> None:
    """A source can be sent to another process, which sees that the table is the one it was made with; threads have
    their own."""
    dataset = opened(join(room), worker_config=alone(2), batch_size=2)
    with get_savable_loader(dataset, start_method="thread") as loader:
        assert [text for batch in loader for text in batch.text] == MATCHES
    sent = pickle.dumps(dataset.leaves[0].source)
    assert len(sent) < 8192
    received = pickle.loads(sent)
    assert (len(received), received.key(3), received.fingerprint) == (4, "k06", dataset.leaves[0].source.fingerprint)
    shard, number = received.locate(3)  # k06 is in the second shard of the first data set
    assert (received.shard_names[shard], number) == ("s1.tar", 6)
    (table,) = Path(cache, "joins").glob("*.join")
    members = [{"path": str(room / "two")}, {"path": str(room / "one"), "nonmatch": "skip"}]
    swapped = opened({"splits": {"train": {"join": members, "joiner": JOINER}}}).leaves[0].source
    assert (swapped.key(1), swapped.locate(1)) == ("k04", (2, 8))  # the first data set has more samples
    for again in (None, join(room, two=NONE)):
        table.unlink(missing_ok=True)
        if again:
            Path(opened(again).leaves[0].source._table_path).rename(table)
        with pytest.raises(DataIndexError, match="was removed, or made again"):
            pickle.loads(sent).key(0)
    with pytest.raises(DataIndexError, match="no column 'length'"):
        received.column("length")


def test_the_table_is_made_once(room: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert texts(join(room))
    (table,) = Path(cache_folder(), "joins").glob("*.join")
    made = table.stat().st_mtime_ns
    assert table.read_bytes()[12:16] == b"\1\0\0\0"  # its format
    assert texts(join(room, subset={"range": ["0%", "50%"]})) and table.stat().st_mtime_ns == made
    table.write_bytes(table.read_bytes()[:-3])
    assert texts(join(room)) == MATCHES and table.stat().st_mtime_ns != made


def test_what_cannot_be_joined(room: Path, write_dataset: Any) -> None:
    samples = {"a.tar": [("k00", {"txt": b"x"})], "b.tar": [("k00", {"txt": b"y"})]}
    write_dataset(room / "two", samples)
    with pytest.raises(DatasetError, match="cannot be joined; repeated is 'k00'"):
        texts(join(room))
    with pytest.raises(UsageError, match="joined data sets have no measured skips"):
        texts(join(room), use_measured_skips=True)


def test_a_joiner_that_returns_no_sample(room: Path) -> None:
    dataset = opened(joined_by(room, "nothing", "__function__"))
    assert not any(get_loader(dataset))  # in validation a sample that fails is counted, and its place stays empty


def test_samples_that_are_not_alike(room: Path, write_dataset: Any) -> None:
    """Where samples cannot be read together, they are read one by one, of that data set only."""
    two = shards(range(12), "b")
    two["s1.tar"][1][1]["json"] = b"{}"
    write_dataset(room / "two", two)
    assert texts(join(room), batch_size=None)[:2] == ["a0+b0", "a1+b1"] and len(texts(join(room))) == 8


def test_lines(room: Path) -> None:
    """JSONL files, too, whose keys are numbers of lines."""
    (room / "x.jsonl").write_text('{"n": 0}\n{"n": 1}\n')
    (room / "y.jsonl").write_text('{"m": 5}\n')
    members = [{"path": str(room / "x.jsonl")}, {"path": str(room / "y.jsonl"), "nonmatch": "none"}]
    document = joined_by(room, "lines", "__function__")
    document["splits"]["train"]["join"] = members
    assert [sample["other"] for sample in get_loader(opened(document))] == [{"m": 5}, None]


def test_filters(room: Path) -> None:
    """One of the join holds for its first data set, one of a member for that one; what they leave out has no match."""
    write_column(room / "one", "length", np.arange(12))
    write_column(room / "two", "length", np.arange(11))  # of the samples 20, 18, ..., 0
    assert texts(join(room, filter="tokens >= 3")) == ["a4+b4", "a6+b6"]
    two = NONE | {"filter": "tokens <= 8"}
    assert texts(join(room, two=two)) == ["a0+-", "a1+-", "a2+-", "a3+-", "a4+b4", "a5+-", "a6+b6", "a7+-"]
    one = {"filter": "tokens < 6"}
    assert texts(join(room, one=one, two=two)) == ["a0+-", "a1+-", "a2+-", "a3+-", "a4+b4", "a5+-"]
    assert texts(join(room, one=one, two=two, filter="tokens > 3")) == ["a4+b4", "a5+-"]
    with pytest.raises(DatasetError, match="no column 'score'"):
        texts(join(room, filter="score > 1"))


def test_the_listing_has_all_data_sets(room: Path) -> None:
    document = room / "joined.yaml"
    document.write_text(json.dumps(join(room, subflavors={"a": 1}, shuffle_over_epochs_multiplier=2)))
    found = traverse_metadataset(document, split_part="train")
    assert [Path(str(one.path)).name for one in found] == ["one", "two"]
    assert all(one.subflavors == {"a": 1} and one.shuffle_over_epochs_multiplier == 2 for one in found)


def keys_of(names: list[str], chosen: list[int] | None = None) -> SampleKeys:
    scan = scan_of("s.tar", [(name, []) for name in names])
    samples = np.arange(len(names)) if chosen is None else np.array(chosen, dtype=np.int64)
    return SampleKeys(PackedIndex.from_scans([scan]), samples)


NAMES = st.lists(st.text("ab0/ü", max_size=12), unique=True, max_size=40)


@given(NAMES, NAMES, st.randoms())
def test_it_is_what_a_dict_says(ours: list[str], theirs: list[str], dice: object) -> None:
    chosen = list(range(len(theirs)))
    dice.shuffle(chosen)  # type: ignore[attr-defined]
    chosen = chosen[: len(chosen) // 2 + 1]
    there = {theirs[number]: place for place, number in enumerate(chosen)}
    found = match_keys(keys_of(ours), keys_of(theirs, chosen))
    assert found.tolist() == [there.get(name, -1) for name in ours]


def test_blocks_and_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_BLOCK", 7)
    names = [f"{'long' * (n % 9)}{n}" for n in range(5000)]
    far = list(range(0, 5000, 499))  # so far apart that they are read one by one
    assert match_keys(keys_of(names, far), keys_of(names)).tolist() == far
    assert match_keys(keys_of(names), keys_of(names[::-1])).tolist() == list(range(5000))[::-1]


def test_hashes_that_meet_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_index, "_factors", lambda count, words: np.ones((words, count), dtype=np.uint64))
    names = ["ab", "ba", "c", "abc", "cab"]  # anagrams have one hash
    keys = keys_of(names)
    assert keys.twice() == []
    assert match_keys(keys_of(["cab", "x", "ba"]), keys).tolist() == [4, -1, 1]


def test_keys_that_are_there_twice() -> None:
    assert keys_of(["a", "b", "a", "c", "b", "a"]).twice() == ["a", "b"]
    assert keys_of(["a", "b", "a"], [0, 1]).twice() == []
    assert keys_of([]).twice() == [] and match_keys(keys_of(["a"]), keys_of([])).tolist() == [-1]
