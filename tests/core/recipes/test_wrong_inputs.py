"""What a person sees who got something wrong: the message says what, where, and what to do. From the outermost call."""

from __future__ import annotations

import logging
import os
import shutil
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from energon_lite import (
    CaptioningSample,
    Chunks,
    DefaultTaskEncoder,
    EnergonLiteError,
    Reading,
    Sample,
    TaskEncoder,
    TextSample,
    WorkerConfig,
    get_loader,
    get_savable_loader,
    get_train_dataset,
    get_val_dataset,
    get_val_datasets,
)
from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.loading import recipes
from tests.testing import ALONE, train_loader, val_loader, write_dataset

Spoil = Callable[[Path], Any]


def _edit(name: str, old: str, new: str) -> Spoil:
    def spoil(path: Path) -> None:
        file = path / ".nv-meta" / name
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new))

    return spoil


WRONG_FOLDERS: dict[str, tuple[Spoil, list[str]]] = {
    "not prepared": (lambda path: shutil.rmtree(path / ".nv-meta"), ["images", "energon-lite prepare"]),
    "half prepared": (lambda path: (path / ".nv-meta" / ".info.json").unlink(), ["images", "energon-lite prepare"]),
    "no folder": (lambda path: shutil.rmtree(path), ["images"]),
    "no split.yaml": (lambda path: (path / ".nv-meta" / "split.yaml").unlink(), ["split.yaml", "prepare"]),
    "no dataset.yaml": (lambda path: (path / ".nv-meta" / "dataset.yaml").unlink(), ["dataset.yaml", "prepare"]),
    "missing shard": (lambda path: (path / "b.tar").unlink(), ["b.tar", "energon-lite prepare"]),
    "truncated tar": (lambda path: os.truncate(path / "a.tar", 3000), ["a.tar", "byte"]),
    "no tar at all": (lambda path: (path / "a.tar").write_bytes(b"hello" * 500), ["a.tar"]),
    "unknown split": (_edit("split.yaml", '"train"', '"training"'), ["split.yaml", "'train'", "training"]),
    "empty split": (_edit("split.yaml", '"train": ["a.tar", "b.tar"]', '"train": []'), ["train", "split.yaml"]),
    "everything excluded": (
        _edit("split.yaml", '"exclude": []', '"exclude": ["a.tar", "b.tar"]'),
        ["train", "split.yaml", "exclude"],
    ),
    "columns of parts": (
        _edit("dataset.yaml", "field_map:", "columns: {a: b}\nfield_map:"),
        ["dataset.yaml", "tar shards have parts, not columns"],
    ),
    "a field of nothing": (_edit("dataset.yaml", "image: png", "image: 'png['"), ["dataset.yaml", "image", "'png['"]),
    "a part that no sample has": (
        _edit("dataset.yaml", "image: png", "image: jpg"),
        ["dataset.yaml", "field 'image'", "'jpg'", "it has: 'png', 'txt'"],
    ),
}


@pytest.mark.parametrize("case", WRONG_FOLDERS)
def test_a_folder_that_is_not_as_it_should_be(images: Path, case: str) -> None:
    spoil, words = WRONG_FOLDERS[case]
    spoil(images)
    with pytest.raises(EnergonLiteError) as caught:
        get_train_dataset(images, batch_size=2, worker_config=ALONE)
    text = str(caught.value)
    for word in words:
        assert word in text, text
    assert caught.value.where and caught.value.fix, text


def _call(images: Path, **kwargs: Any) -> Any:
    return get_train_dataset(images, **({"batch_size": 2, "worker_config": ALONE} | kwargs))


class Packs(TaskEncoder):
    def select_samples_to_pack(self, samples: list[Any]) -> Any:
        return [samples]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


def _hooks(base: type[TaskEncoder] = TaskEncoder, **hooks: Any) -> dict[str, Any]:
    return {"task_encoder": type("Wrong", (base,), hooks)()}


def _packs(**hooks: Any) -> dict[str, Any]:
    return {"packing_buffer_size": 4} | _hooks(Packs, **hooks)


def _yields(self: Any, value: Any) -> Any:
    yield value


def _returns(self: Any, value: Any) -> Any:
    return value


#: What is given to ``get_train_dataset``, or a call; and words of the message.
WRONG_CALLS: dict[str, tuple[dict[str, Any] | Callable[[Path], Any], list[str]]] = {
    "batch size 0": ({"batch_size": 0}, ["batch_size is 0"]),
    "batch size as text": ({"batch_size": "4"}, ["batch_size is '4'"]),
    "half a sample": ({"batch_size": 1.5}, ["batch_size is 1.5", "give an integer"]),
    "packing without hooks": (
        {"packing_buffer_size": 5},
        ["packing_buffer_size=5", "no select_samples_to_pack and no pack_selected_samples"],
    ),
    "packing with no buffer": ({"packing_buffer_size": 0}, ["packing_buffer_size is 0"]),
    "chunks of planned batches": ({"chunks": Chunks(size=5)}, ["chunk_size=5 has no effect", "planned"]),
    "lanes of planned batches": ({"chunks": Chunks(lanes=4)}, ["lanes=4 has no effect"]),
    "chunks as a number": ({"chunks": 5}, ["chunks is 5", "give a Chunks(...)"]),
    "no place": ({"worker_config": None}, ["worker_config is None", "give a WorkerConfig(...)"]),
    "no lanes": (lambda path: Chunks(lanes=0), ["lanes is 0"]),
    "an unknown remainder": (lambda path: Chunks(remainder="kepe"), ["'kepe'", "did you mean 'keep'"]),
    "negative window": ({"shuffle_buffer_size": -5}, ["shuffle_buffer_size is -5"]),
    "virtual epochs of one pass": ({"repeat": False, "virtual_epoch_length": 5}, ["virtual_epoch_length is 5"]),
    "no encoder": ({"task_encoder": object()}, ["task_encoder is a object", "TaskEncoder"]),
    "class, not instance": ({"task_encoder": TaskEncoder}, ["is the class TaskEncoder", "an instance"]),
    "samples of another type": (
        {"reading": Reading(sample_type=TextSample)},
        ["are CaptioningSample, not TextSample", "sample_type=CaptioningSample"],
    ),
    # Hooks, which are refused before anything is read.
    "aux": (
        _hooks(cook_crude_sample=lambda self, sample, cooker, aux, more: sample),
        ["called with (sample, cooker, aux)"],
    ),
    "two first hooks": (
        _hooks(encode_sample=_returns, preencode_sample=_returns),
        ["both encode_sample and preencode_sample"],
    ),
    "half a packing": (
        _hooks(select_samples_to_pack=_returns) | {"packing_buffer_size": 4},
        ["has no pack_selected_samples"],
    ),
    "selection yields": (_packs(select_samples_to_pack=_yields), ["select_samples_to_pack is a gener"]),
    "late yields": (_packs(postencode_sample=_yields), ["postencode_sample is a generator: the samples"]),
    "criterion yields": (_hooks(batch_group_criterion=_yields), ["batch_group_criterion is a generator"]),
    "group yields": (
        _hooks(batch_group_criterion=_returns, batch=_yields),
        ["batch is a generator: a group makes one batch"],
    ),
    "buffers never full": (_packs() | {"chunks": Chunks(size=3)}, ["chunk_size is 3, but packing_buffer_size 4"]),
    "no chunk": (_packs() | {"chunks": Chunks(size=0)}, ["chunk_size is 0"]),
    "groups hand nothing over": (
        _hooks(batch_group_criterion=_returns) | {"chunks": Chunks(remainder="carry")},
        ['"carry" needs batches of batch_size samples, without batch_group_criterion'],
    ),
    # Other calls.
    "rank as text": (lambda path: WorkerConfig(rank=0, world_size="2"), ["world_size is '2'"]),  # type: ignore[arg-type]
    "seed of 65 bits": (lambda path: WorkerConfig(0, 1, seed_offset=1 << 64), ["seed_offset is 1844", "64 bits"]),
    "rank out of range": (lambda path: WorkerConfig(rank=4, world_size=4), ["rank 4 of 4"]),
    "negative workers": (lambda path: WorkerConfig(rank=0, world_size=4, num_workers=-1), ["num_workers is -1"]),
    "loop without a loader": (lambda path: [*_call(path)], ["get_loader(dataset)"]),
    "the DataLoader of torch": (
        lambda path: next(iter(DataLoader(_call(path), batch_size=None))),
        ["get_loader(dataset)"],
    ),
    "no JSONL": (lambda path: _call(path / "x.jsonl"), ["no such JSONL file", "x.jsonl", "check the path"]),
    "loader of a path": (get_loader, ["a loader of a"]),
    "prefetch nothing": (lambda path: get_loader(_call(path), prefetch_factor=0), ["prefetch_factor is 0"]),
    "misspelt loader keyword": (lambda path: get_loader(_call(path), prefetch=2), ["'prefetch'", "'prefetch_factor'"]),
    "limit 0": (lambda path: val_loader(path, batch_size=2, limit=0), ["limit is 0"]),
    "split of a leaf": (
        lambda path: _call({"splits": {"train": {"path": str(path), "split_part": "trian"}}}),
        ["'trian'", "did you mean 'train'?"],
    ),
}


@pytest.mark.parametrize("case", WRONG_CALLS)
def test_a_call_that_cannot_work(images: Path, case: str) -> None:
    wrong, words = WRONG_CALLS[case]
    with pytest.raises(EnergonLiteError) as caught:
        _call(images, **wrong) if isinstance(wrong, dict) else wrong(images)
    for word in words:
        assert word in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize("workers", [0, 2])
def test_broken_samples_are_skipped_counted_and_reported(
    images: Path, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), val_loader(images, workers, batch_size=4) as loader:
        keys = [key for batch in loader for key in batch.__key__]
        stats = loader.stats()
    assert keys == [str(number) for number in range(12) if number not in (5, 8)]
    assert stats["failed"] == 2 and stats["samples"] == 10
    reasons = {reason["stage"] + " " + reason["reason"] for reason in stats["reasons"]}
    assert any("DecodeError" in reason and "png" in reason for reason in reasons)
    assert any("FieldAccessError" in reason and "txt" in reason for reason in reasons)
    assert "2 failed" in caplog.text and "a.tar" in caplog.text and "'5'" in caplog.text


def test_an_entry_that_no_sample_has_ends_the_run_with_a_short_message(tmp_path: Path) -> None:
    samples = [(str(number), {"json": b'{"caption": "x"}'}) for number in range(5)]
    yaml = "sample_type: TextSample\nfield_map: {text: 'json[captoin]'}\n"
    with pytest.raises(FatalSampleError) as caught:
        next(iter(get_savable_loader(_call(write_dataset(tmp_path / "data", {"a.tar": samples}, dataset_yaml=yaml)))))
    text = str(caught.value)
    for word in ("field 'text'", "'captoin'", "did you mean 'caption'?", "data[train]", "failure_tolerance"):
        assert word in text
    assert len(text.splitlines()) < 10


@pytest.mark.parametrize("wanted", [CaptioningSample, Sample, None])
def test_samples_of_the_wanted_type(images: Path, wanted: type | None) -> None:
    common: dict[str, Any] = {"batch_size": 2, "worker_config": ALONE, "reading": Reading(sample_type=wanted)}
    datasets = [get_train_dataset(images, **common), get_val_dataset(images, **common)]
    datasets += [dataset for dataset, _ in get_val_datasets(images, **common)]
    assert all(isinstance(next(iter(get_loader(dataset))), CaptioningSample) for dataset in datasets)


def test_without_a_guest_of_keywords_unknown_ones_are_refused(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipes, "keyword_guests", dict)
    dataset = _call(images)
    for wrong, near in (("batching_", "batching"), ("chunk", "chunks")):
        with pytest.raises(UsageError, match=rf"has no argument {wrong!r}[\s\S]*did you mean {near!r}\?"):
            _call(images, **{wrong: 1})
    with pytest.raises(UsageError, match="get_loader has no argument 'log_evry'"):
        get_loader(dataset, prefetch_factor=1, log_evry=3)


@pytest.mark.parametrize("base", [TaskEncoder, DefaultTaskEncoder])
def test_an_encoder_may_name_its_types(images: Path, base: Any) -> None:
    class Captions(base[CaptioningSample, dict[str, Any], dict[str, Any], list[str]]):  # type: ignore[misc]
        def encode_sample(self, sample: CaptioningSample) -> dict[str, Any]:
            return {"caption": sample.caption}

        def encode_batch(self, batch: dict[str, Any]) -> list[str]:
            return list(batch["caption"])

    batch = next(iter(get_loader(_call(images, task_encoder=Captions()))))
    assert len(batch) == 2 and all(isinstance(caption, str) for caption in batch)


# -- tracebacks: of mistakes whose messages say all, they have the caller's frames, and one of the library


def _own(error: BaseException) -> int:
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    return sum("/energon_lite/" in file for file in files)


def test_tracebacks_of_a_data_set(leaf_of: Any, tmp_path: Path) -> None:
    document = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {blend: [{weigth: 1}]}}\n"
    (tmp_path / "blend.yaml").write_text(document)
    for path, more in ((tmp_path / "blend.yaml", {}), (tmp_path / "none", {}), (leaf_of(3, "t"), {"lenes": 2})):
        for make in (get_train_dataset, get_val_dataset):
            with pytest.raises(EnergonLiteError) as caught:
                make(path, batch_size=2, worker_config=ALONE, **more)
            assert _own(caught.value) == 1


def test_tracebacks_of_a_state(leaf_of: Any) -> None:
    with train_loader(leaf_of(9, "t"), batch_size=2) as loader, pytest.raises(EnergonLiteError) as caught:
        loader.restore_state_rank({"version": "none"})
    assert _own(caught.value) == 1
