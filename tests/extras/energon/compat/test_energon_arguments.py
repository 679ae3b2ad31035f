"""What Energon's own classes take, these take: code that was written for them fails where something cannot work, and
says what to do, instead of at its import."""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import megatron.energon
import numpy as np
import pytest
import torch

import energon_lite
from energon_lite import (
    ByTokens,
    Capacity,
    DefaultTaskEncoder,
    Sample,
    TaskEncoder,
    TextSample,
    WorkerConfig,
    edataclass,
    get_train_dataset,
)
from energon_lite.batching import SortedWindow
from energon_lite.errors import SampleError, UsageError
from energon_lite.extras.energon.compat import hooks
from energon_lite.extras.energon.compat import loaders as compat
from energon_lite.extras.energon.compat.install import tell_torch
from energon_lite.loading.executors import worker_process
from energon_lite.storage import SampleDecoder
from tests.testing import ALONE, same, take, train_loader, val_loader

CRUDE = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"


@pytest.fixture
def crude(tmp_path: Path, write_dataset: Callable[..., Path]) -> Path:
    shard = [(str(number), {"txt": b"a", "mp4": b"film", "blob": b"?"}) for number in range(4)]
    return write_dataset(tmp_path / "crude", {"0.tar": shard}, dataset_yaml=CRUDE)


def taken_by(function: Callable[..., Any]) -> dict[str, Any]:
    """The keywords of a function, and their defaults."""
    parameters = inspect.signature(function).parameters
    return {
        name: None if one.default is one.empty else one.default
        for name, one in parameters.items()
        if not name.startswith("_") and name not in ("self", "fn")
    }


@pytest.mark.parametrize("name", ["get_train_dataset", "get_val_dataset", "get_val_datasets"])
def test_data_sets_are_called_as_theirs(leaf_of: Any, name: str) -> None:
    theirs = taken_by(getattr(megatron.energon, name))
    assert {"split_part", "batch_size", "packing_buffer_size", "task_encoder"} <= theirs.keys()
    given = {key: value for key, value in theirs.items() if key not in ("path", "kwargs", "task_encoder")}
    more = {"dataset_config": "dataset.yaml", "split_config": "split.yaml", "subflavors": {}, "parallel_shard_iters": 4}
    getattr(energon_lite, name)(leaf_of(10), **given | more | {"worker_config": ALONE, "batch_size": 2})


@pytest.mark.parametrize("name", ["get_loader", "get_savable_loader"])
def test_loaders_are_called_as_theirs(leaf_of: Any, name: str) -> None:
    theirs = taken_by(getattr(megatron.energon, name))
    assert {"prefetch_factor", "watchdog_timeout_seconds", "fail_on_timeout"} <= theirs.keys()
    dataset = get_train_dataset(leaf_of(10), batch_size=2, worker_config=ALONE)
    given = {key: value for key, value in theirs.items() if key != "dataset"}
    for more in ({}, {"fail_on_timeout": True, "worker_config": ALONE}):
        with getattr(energon_lite, name)(dataset, **given | more) as loader:
            next(iter(loader))


def debugged(path: Path, workers: int, level: int = 1) -> WorkerConfig:
    options: dict[str, Any] = {"worker_debug_path": str(path), "worker_log_level": level}
    return WorkerConfig(rank=0, world_size=1, num_workers=workers, **options)


@pytest.mark.parametrize(("start_method", "workers"), [("main", 0), ("fork", 2), ("thread", 2)])
def test_each_process_has_a_debug_file_with_a_line_for_each_batch(
    leaf_of: Any, tmp_path: Path, start_method: str, workers: int
) -> None:
    config = debugged(tmp_path / "debug" / "{worker_id}_{pid}.jsonl", workers)
    options: dict[str, Any] = {"split_part": "train", "batch_size": 2, "start_method": start_method}
    with val_loader(leaf_of(20), worker_config=config, **options) as loader:
        keys = [batch.__key__ for batch in loader]
    files = sorted(tmp_path.glob("debug/*.jsonl"))
    names = [file.stem.partition("_") for file in files]
    assert [number for number, *_ in names] == ["0", "1", "2"][: 1 + workers]
    assert all(process.isdecimal() for *_, process in names)
    loaded, *own = ([json.loads(line) for line in file.read_text().splitlines()] for file in files)
    assert [line["keys"] for line in loaded[1:]] == keys
    assert [one[0]["t"] for one in own] == ["Worker.__init__"] * workers
    made = sorted((line["idx"], line["keys"]) for lines in own for line in lines[1:])
    assert made == list(enumerate(keys if workers else []))
    for number, lines in enumerate(own):
        assert {line["worker_number"] for line in lines} == {number}


def test_all_share_a_debug_file_without_a_field(leaf_of: Any, tmp_path: Path) -> None:
    with train_loader(leaf_of(20), batch_size=2, worker_config=debugged(tmp_path / "debug.jsonl", 2)) as loader:
        next(iter(loader))
    assert len((tmp_path / "debug.jsonl").read_text().splitlines()) == 2


def test_a_debug_path_and_a_log_level_need_each_other(
    leaf_of: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with train_loader(leaf_of(10), batch_size=2, worker_config=debugged(tmp_path / "0.jsonl", 0, level=0)) as loader:
        next(iter(loader))
    assert not list(tmp_path.glob("*.jsonl")) and "worker_debug_path" not in caplog.text
    with caplog.at_level(logging.WARNING), train_loader(leaf_of(10), batch_size=2, worker_log_level=2):
        assert "worker_debug_path" in caplog.text


def test_a_debug_path_with_another_field() -> None:
    with pytest.raises(UsageError, match=r"worker_debug_path.*step"):
        WorkerConfig(rank=0, world_size=1, worker_debug_path="debug_{step}.jsonl", worker_log_level=1)


def test_the_handler_of_restored_samples(leaf_of: Any) -> None:
    seen: list[Any] = []

    class Bad(TaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            raise ValueError("bad")

    config = WorkerConfig(
        rank=0, world_size=1, restore_error_handler=lambda error, sample, sources: seen.append((error, sample))
    )
    loader = train_loader(leaf_of(10), batch_size=2, worker_config=config, task_encoder=Bad())
    with loader, pytest.raises(SampleError, match="bad"):
        loader.restore_sample(("sample", 0, 1, 0, 0))
    ((error, key),) = seen
    assert isinstance(error, SampleError) and key == ("sample", 0, 1, 0, 0)


def built_with(path: Path, decoder: SampleDecoder) -> None:
    encoder = TaskEncoder()
    encoder.decoder = decoder
    get_train_dataset(path, batch_size=2, worker_config=ALONE, task_encoder=encoder)


@pytest.mark.parametrize("form", ["AVDecoder", "torch", "pyav", None])
def test_forms_of_films(leaf_of: Any, crude: Path, form: str | None) -> None:
    for options in ({}, {"video_decode_audio": True}, {"guess_content": True}, {"handlers": {"mp4": len}}):
        built_with(crude, SampleDecoder(av_decode=form, **options))
        built_with(leaf_of(10), SampleDecoder(av_decode=form, **options))


def test_a_form_of_films_that_nobody_knows() -> None:
    with pytest.raises(UsageError, match="av_decode 'AVDecode' is unknown") as error:
        SampleDecoder(av_decode="AVDecode")
    assert "'AVDecoder'" in str(error.value.fix)


# -- torch's information about a worker, in hooks ---------------------------------------------------------------------


class Teller(TaskEncoder):
    """Batches say which worker made them, as torch tells it."""

    def batch(self, samples: list[Any]) -> Any:
        info = torch.utils.data.get_worker_info()
        return "none" if info is None else f"{info.id - ALONE.rank_worker_id()} of {info.num_workers}"


@pytest.mark.parametrize(("method", "told"), [("fork", True), ("fork", False), ("thread", True), ("thread", False)])
def test_torch_tells_hooks_of_their_worker(
    leaf_of: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch, method: str, told: bool
) -> None:
    monkeypatch.setattr(worker_process, "on_begin", tell_torch if told else None)
    with train_loader(leaf_of(50), 2, batch_size=2, task_encoder=Teller(), start_method=method) as loader:
        found = {*take(loader, 8)}
    assert found == {"0 of 2" if told else "none"}
    assert torch.utils.data.get_worker_info() is None  # in the trainer, which shares its process with threads
    with train_loader(leaf_of(50), batch_size=2, task_encoder=Teller()) as loader:
        assert next(iter(loader)) == "none"


# -- a loader is torch's, which makes tensors of arrays, and lists of tuples, except within objects of other types -----


def arrays_of(lib: Any) -> Any:
    def batch(self: Any, samples: list[Any]) -> dict[str, Any]:
        sample = samples[0]
        sample.text = np.arange(2)
        return {"array": np.arange(3.0), "number": np.float32(2), "pair": (1, [np.ones(2)]), "sample": sample}

    return type("Arrays", (lib.DefaultTaskEncoder,), {"batch": batch})()


@pytest.mark.parametrize("make", ["get_loader", "get_savable_loader"])
def test_batches_are_converted_as_by_the_loader_of_torch(shards: Path, tools: Any, make: str) -> None:
    tools.energon_prepare(shards, "--split-ratio", "1,0,0", "--skip-dataset-yaml")
    kind = {"__module__": "megatron.energon", "__class__": "TextSample"}
    tools.write_meta(shards, "dataset.yaml", {"sample_type": kind, "field_map": {"text": "txt"}})
    batches = []
    for lib, loaders in ((hooks, compat), (megatron.energon, megatron.energon)):
        config = loaders.WorkerConfig(rank=0, world_size=1, num_workers=0)
        options = {"split_part": "train", "batch_size": 2, "worker_config": config, "task_encoder": arrays_of(lib)}
        (batch, *_) = getattr(loaders, make)(loaders.get_val_dataset(str(shards), **options))
        batches.append(batch)
    ours, theirs = batches
    assert same(ours.pop("sample").text, theirs.pop("sample").text)
    assert same(ours, theirs) and isinstance(ours["array"], torch.Tensor) and type(ours["pair"]) is list


@pytest.mark.parametrize("name", ["get_loader", "get_savable_loader"])
def test_signatures_of_loaders_tell_what_they_take(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(lib, name)).parameters for lib in (compat, megatron.energon))
    for key, one in theirs.items():
        assert (ours[key].kind, ours[key].default) == (one.kind, one.default), key


# -- a pipeline of wrappers, such as one that sorts a pool by length: refused, with advice ----------------------------


@edataclass
class Tokens(Sample):
    tokens: torch.Tensor


class Encoder(DefaultTaskEncoder[TextSample, Tokens, Tokens, Tokens]):
    padding = 0

    def encode_sample(self, sample: TextSample) -> Tokens:
        return Tokens.derive_from(sample, tokens=torch.full([int(sample.text[2:]) * 29 % 64 + 1], 7))


def builder(method: str) -> Encoder:
    made: Encoder = type("Builder", (Encoder,), {method: lambda self, *given, **more: None})()
    return made


def test_the_refusal_names_what_to_use_and_that_is_enough(leaf_of: Any) -> None:
    with pytest.raises(UsageError, match=r"Builder\.build_train_datasets would not be called") as refused:
        get_train_dataset(leaf_of(64), batch_size=4, worker_config=ALONE, task_encoder=builder("build_train_datasets"))
    fix = str(refused.value.fix)
    assert "batch_group_criterion that returns (class of the length, None)" in fix
    batching = eval(fix.rpartition("batching=")[2], {**globals()})  # the advice, to the letter
    assert batching == ByTokens(SortedWindow(Capacity(12_000, "padded_tokens")), length_column=None)
    assert len(next(iter(train_loader(leaf_of(64), batching=batching, task_encoder=Encoder()))).tokens) > 4


#: Methods of the pipeline, and what to use instead.
ADVICE = {
    "build_batch": "encode_batch",
    "build_cook_crude_sample": "cookers",
    "build_encode_sample": "preencode_sample",
    "build_val_datasets": "get_val_dataset",
}


@pytest.mark.parametrize(("method", "instead"), ADVICE.items())
def test_each_method_of_the_pipeline_has_its_own_advice(leaf_of: Any, method: str, instead: str) -> None:
    with pytest.raises(UsageError, match=f"{method} would not be called") as refused:
        get_train_dataset(leaf_of(64), batch_size=4, worker_config=ALONE, task_encoder=builder(method))
    assert instead in str(refused.value.fix)
