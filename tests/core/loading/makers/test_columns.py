"""By columns or sample by sample: the same batches to the byte, for whatever the data look like."""

from __future__ import annotations

import itertools
import json
import os
import pickle
from collections.abc import Callable, Iterable
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import DefaultTaskEncoder, Sample, TaskEncoder, edataclass
from energon_lite.errors import FatalSampleError
from energon_lite.loading.makers import job_runner
from energon_lite.loading.makers.batch_runner import BatchRunner, Job
from energon_lite.loading.makers.columns import has_default_hooks
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.outcomes import Failure
from energon_lite.samples.sample import SourceList
from energon_lite.storage import SampleDecoder
from energon_lite.storage.read.sample_reader import SampleReader
from tests.tables_by_hand import npy, png
from tests.testing import Listed, blend_of, calls_here, examples, same, train_loader, write_dataset

CAPTIONS = """\
sample_type: {__module__: megatron.energon, __class__: CaptioningSample}
field_map: {image: %s, caption: "%s"}
subflavors: {from: captions}
"""


def captions(count: int, mark: str) -> list[tuple[str, dict[str, bytes]]]:
    samples = []
    for number in range(count):
        about = {"text": [f"{mark} {number}", "x" * (number % 5)]}
        image = npy(np.full((1 + number % 3, 2), number, dtype=np.int32))
        parts = {"npy": image, "json": json.dumps(about).encode(), "txt": f"caption {number}".encode()}
        samples.append((f"{mark}{number}", parts))
    return samples


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three data sets: with three parts, with an excluded shard and sample, and one whose samples are not alike."""
    root = tmp_path_factory.mktemp("columns")
    one, two, unlike = (captions(count, mark) for count, mark in ((90, "a"), (60, "b"), (30, "c")))
    shards = {"0.tar": one[:40], "1.tar": one[40:41], "2.tar": one[41:]}
    write_dataset(root / "one", shards, dataset_yaml=CAPTIONS % ("npy", "json[text][0]"))
    yaml, exclude = CAPTIONS % ("npy", "txt"), ["0.tar/b3", "1.tar/b21", "1.tar/b59"]
    write_dataset(root / "two", {"0.tar": two[:20], "1.tar": two[20:]}, dataset_yaml=yaml, exclude=exclude)
    for number, (_, parts) in enumerate(unlike):
        if number % 4 == 0:
            parts["extra.bin"] = b"more"
        if number % 7 == 0:
            del parts["json"]
    write_dataset(root / "unlike", {"0.tar": unlike}, dataset_yaml=yaml)
    return root


def blend(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    return blend_of((folder / name, 1.0) for name in names)


def pipeline(path: Any, encoder: TaskEncoder, **arguments: Any) -> tuple[BatchRunner, list[Job]]:
    dataset = train_loader(path, task_encoder=encoder, **arguments).dataset
    return dataset.runner(), dataset.jobs(0, [(number,) for number in range(25)])


class OneByOne(DefaultTaskEncoder):
    """Its hook does nothing, but the loader cannot know."""

    def encode_sample(self, sample: Any) -> Any:
        return sample


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten of one size, then ten of other sizes."""
    sizes = [(3, 2)] * 10 + [(3 + number % 3, 2 + number % 2) for number in range(10)]
    samples = [(str(number), {"png": png(*size), "txt": b"x"}) for number, size in enumerate(sizes)]
    yaml = "sample_type: CaptioningSample\nfield_map: {image: png, caption: txt}\n"
    return write_dataset(tmp_path_factory.mktemp("pictures") / "data", {"a.tar": samples}, dataset_yaml=yaml)


@pytest.mark.parametrize("padding", [None, 0, 7.5, "list", {"image": 1}, {"image": "list"}, {"caption": 0}])
def test_unlike_pictures_are_refused_or_padded_either_way(pictures: Path, padding: Any) -> None:
    found: list[list[Any]] = []
    for encoder in (DefaultTaskEncoder(padding=padding), OneByOne(padding=padding)):
        made, jobs = pipeline(pictures, encoder, batch_size=3)
        found.append([])
        for job in jobs:
            try:
                found[-1].append(made.run(job).batch)
            except FatalSampleError as error:
                found[-1].append(str(error))
    refused = [batch for batch in found[0] if isinstance(batch, str)]
    assert same(*found)
    assert bool(refused) == (padding in (None, {"caption": 0}))
    assert all(
        "the 'image' of the samples of one batch have unequal sizes: shape [3, " in error and str(pictures) in error
        for error in refused
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_two_types_in_one_batch(folder: Path, pictures: Path, leaf_of: Callable[..., Path], workers: int) -> None:
    both = blend(folder, (str(pictures), str(leaf_of(20))))
    loader = train_loader(both, workers, batch_size=4, task_encoder=DefaultTaskEncoder())
    with loader, pytest.raises(FatalSampleError, match="samples of 2 types") as caught:
        next(iter(loader))
    words = (
        "CaptioningSample: ",
        "TextSample: a-",
        str(pictures),
        str(leaf_of(20)),
        "encode_sample",
        "cooker",
        "batch_group_criterion",
    )
    assert all(word in str(caught.value) for word in words)


@settings(max_examples=examples(40))
@given(
    names=st.lists(st.sampled_from(["one", "two", "unlike"]), min_size=1, max_size=3, unique=True),
    raw=st.booleans(),
    windows=st.sampled_from([(None, None), (8, 4), (40, 7), (1000, 100)]),
    batch_size=st.integers(1, 9),
    labels=st.sampled_from([None, {"more": [1]}]),
)
def test_the_same_to_the_byte(
    folder: Path, names: list[str], raw: bool, windows: Any, batch_size: int, labels: Any
) -> None:
    if raw:  # nothing to look into
        names = ["two" if name == "one" else name for name in names]
    arguments = _windows(windows) | {"batch_size": batch_size, "subflavors": labels}
    found = []
    for encoder in (DefaultTaskEncoder(), OneByOne()):
        if raw:
            encoder.decoder = None
        made, jobs = pipeline(blend(folder, names), encoder, **arguments)
        found.append([made.run(job) for job in jobs])
    for quick, slow in zip(*found, strict=True):
        assert same(quick.batch, slow.batch) and type(quick.batch) is type(slow.batch)
        assert quick.batch.__sources__ == slow.batch.__sources__
        assert quick.outcomes == slow.outcomes
        again = pickle.loads(pickle.dumps(quick.batch))
        assert same(again, slow.batch) and again.__sources__ == slow.batch.__sources__
        changed = pickle.loads(pickle.dumps(quick.batch))
        changed.__key__.clear()
        assert changed.__sources__ == slow.batch.__sources__
        quick.batch.__subflavors__[0].get("more", []).append(2)
        assert labels in (None, {"more": [1]})


def _windows(windows: tuple[int | None, int | None]) -> dict[str, Any]:
    return dict(zip(("shuffle_buffer_size", "max_samples_per_sequence"), windows, strict=True))


@pytest.mark.parametrize("windows", [(None, None), (40, 7)])
def test_it_is_taken_where_samples_are_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch, windows: tuple[int | None, int | None]
) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("sample by sample")

    monkeypatch.setattr(JobRunner, "make", refuse)
    made, jobs = pipeline(blend(folder, ("one", "two")), TaskEncoder(), batch_size=4, **_windows(windows))
    for job in jobs:
        made.run(job)


def test_of_large_samples_a_few_are_read_at_a_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, read = list[int](), SampleReader.read
    monkeypatch.setattr(SampleReader, "read", lambda self, some: (sizes.append(len(some)), read(self, some))[1])
    made, jobs = pipeline(str(folder / "one"), OneByOne(), batch_size=20)
    expected = [made.run(job).batch for job in jobs[:3]]
    monkeypatch.setattr(job_runner, "READ_TOGETHER", 3 * made.largest)
    sizes.clear()
    assert same([made.run(job).batch for job in jobs[:3]], expected) and max(sizes) == 3


def test_runs_are_read_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    calls = calls_here(monkeypatch, os, "preadv")
    made, jobs = pipeline(str(folder / "one"), TaskEncoder(), batch_size=3, **_windows((30, 10)))
    keys = [key for job in itertools.islice(jobs, 30) for key in made.run(job).batch.__key__]
    assert len(set(keys)) == len(keys) == 75
    assert len(calls) <= 9 + 2 + 2  # nine runs, two of them cut by the ends of shards, and a little more


def test_a_sample_that_fails_is_replaced_as_ever(tmp_path: Path) -> None:
    samples = captions(20, "d")
    samples[7][1]["npy"] = b"broken"
    samples[11][1]["json"] = b"{}"
    path = write_dataset(tmp_path / "d", {"0.tar": samples}, dataset_yaml=CAPTIONS % ("npy", "json[text][1]"))
    quick, slow = (
        [made.run(job) for job in jobs]
        for made, jobs in (pipeline(str(path), encoder, batch_size=4) for encoder in (TaskEncoder(), OneByOne()))
    )
    assert sum(isinstance(outcome, Failure) for result in quick for outcome in result.outcomes) > 4
    for one, other in zip(quick, slow, strict=True):
        assert same(one.batch, other.batch)
        assert [getattr(outcome, "reason", outcome) for outcome in one.outcomes] == [
            getattr(outcome, "reason", outcome) for outcome in other.outcomes
        ]


def test_the_sources_of_a_batch_are_as_a_tuple(folder: Path) -> None:
    sources = pipeline(str(folder / "one"), TaskEncoder(), batch_size=4)[0].run(Job(0, 0, [(0, 3, 0), (0, 5, 0)])).batch
    sources, plain = sources.__sources__, tuple(sources.__sources__)
    assert isinstance(sources, SourceList) and sources == plain and sources != [*plain] and len(sources) == 2
    assert (hash(sources), repr(sources), pickle.loads(pickle.dumps(sources))) == (hash(plain), repr(plain), plain)
    assert (sources[1], sources[:1]) == (plain[1], plain[:1]) and plain + sources == sources + sources == plain * 2


def test_only_plain_hooks_count(folder: Path) -> None:
    class Stacked(TaskEncoder):
        def batch(self, samples: list[Any]) -> Any:
            return super().batch(samples)

    assert has_default_hooks(TaskEncoder()) and has_default_hooks(DefaultTaskEncoder())
    assert not has_default_hooks(Stacked()) and not has_default_hooks(OneByOne())
    assert not has_default_hooks(DefaultTaskEncoder(batch_type=dict))
    with_code = DefaultTaskEncoder()
    with_code.decoder = SampleDecoder(handlers={"npy": torch.tensor})
    assert pipeline(str(folder / "one"), with_code, batch_size=2)[0].leaves[0].fields is None


@edataclass
class Rated(Sample):
    text: bytes
    stars: int = 3
    tags: list[str] = field(default_factory=list)


@edataclass
class Measured(Sample):
    text: bytes
    length: int = -1

    def __post_init__(self) -> None:
        self.length = len(self.text)


class Upper(Rated):
    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields | {"text": fields["text"].upper()})


class Counted(Rated):
    made = 0

    def __new__(cls, **_: Any) -> Counted:
        cls.made += 1
        return super().__new__(cls)


class Raw(Listed):
    decoder = None


@pytest.mark.parametrize("kind", [Rated, Measured, Upper, Counted])
def test_samples_are_made_as_by_their_type(tmp_path: Path, kind: type[Any]) -> None:
    document = f"sample_type: {{__module__: {__name__}, __class__: {kind.__name__}}}\nfield_map: {{text: txt}}\n"
    stored = [(f"k{number}", {"txt": b"text %d" % number}) for number in range(6)]
    write_dataset(tmp_path / "typed", {"0.tar": stored}, dataset_yaml=document)
    Counted.made = 0
    loader = train_loader(tmp_path / "typed", task_encoder=Raw(), batch_size=3, trust_code=True)
    samples = next(iter(loader))
    assert Counted.made == (3 if kind is Counted else 0)
    texts = dict(stored)
    for sample in samples:
        base = {name: getattr(sample, name) for name in ("__key__", "__restore_key__", "__subflavors__", "__sources__")}
        assert type(sample) is kind and same(sample, kind(**base, text=texts[sample.__key__]["txt"]))
    assert len({id(getattr(sample, "tags", sample)) for sample in samples}) == 3  # defaults are not shared
