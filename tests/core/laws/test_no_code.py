"""Law 8: reading data or state never runs code that came with it, unless the caller or the process trusts it. And what
is refused when a state does not fit."""

from __future__ import annotations

import copy
import gzip
import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import EpsImagePlugin

from energon_lite import SavableDataLoader, trust
from energon_lite.errors import (
    ConfigError,
    DatasetError,
    DecodeError,
    EnergonLiteError,
    FatalSampleError,
    StateError,
    StateMismatchError,
    TrustError,
    UsageError,
)
from energon_lite.storage import SampleDecoder
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.samples.image_decoding import IMAGE_EXTENSIONS
from energon_lite.storage.tar_scan import scan_shard
from tests.testing import CRUDE_YAML, TEXT_YAML, train_loader, val_loader, write_dataset


class _Bomb:
    """Unpickling this creates a folder."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("name", ["pkl", "pickle", "pyd", "pth"])
def test_pickled_parts_are_not_loaded(tmp_path: Path, name: str) -> None:
    bomb = tmp_path / "bomb"
    samples = [(str(number), {name: pickle.dumps(_Bomb(bomb))}) for number in range(3)]
    path = write_dataset(tmp_path / "data", {"a.tar": samples}, dataset_yaml=TEXT_YAML.replace("txt", name))
    with pytest.raises(FatalSampleError, match="is a pickle, which can run code"):
        list(val_loader(path, batch_size=2))
    assert not bomb.exists()


_POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


def _iptc(content: bytes) -> bytes:
    """A picture as IPTC wraps it, as which Pillow opens whatever ``content`` is."""
    fields = [((3, 20), b"\0\x08"), ((3, 30), b"\0\x08"), ((3, 60), b"\1\0"), ((3, 120), b"\5"), ((8, 10), content)]
    return b"".join(bytes([0x1C, *tag]) + len(data).to_bytes(2, "big") + data for tag, data in fields)


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there if a program called ``gs`` was started."""
    program, marker = tmp_path / "bin" / "gs", tmp_path / "started"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # where Pillow found one before
    return marker


def test_the_fake_ghostscript_is_found(ghostscript: Path) -> None:
    with pytest.raises(DecodeError):
        SampleDecoder(trust_code=True).decode("eps", _POSTSCRIPT)
    assert ghostscript.exists()


@pytest.mark.parametrize("content", [_POSTSCRIPT, _iptc(_POSTSCRIPT)], ids=["postscript", "iptc"])
def test_no_picture_starts_a_program(ghostscript: Path, content: bytes) -> None:
    """Pillow goes by what the bytes are; whatever the name is, these bytes are no picture."""
    for extension in sorted(IMAGE_EXTENSIONS | {"eps", "ps"}):
        for part, data in ((extension, content), (f"{extension}.gz", gzip.compress(content))):
            for form in ("pil", "torchrgb", "l8"):
                with pytest.raises(DecodeError, match=r"not an image|is not run"):
                    SampleDecoder(image_decode=form).decode(part, data)
            with pytest.raises(ValueError, match=r"not an image|is not run"):
                (SampleDecoder().function(part) or bytes)(data)
    assert not ghostscript.exists()


@pytest.mark.parametrize("part", ["png", "png.gz", "jpg"])
def test_postscript_with_another_name_is_no_sample(tmp_path: Path, ghostscript: Path, part: str) -> None:
    data = gzip.compress(_POSTSCRIPT) if part.endswith("gz") else _POSTSCRIPT
    yaml = f"sample_type: ImageSample\nfield_map: {{image: {part}}}\n"
    path = write_dataset(tmp_path / "data", {"a.tar": [(str(n), {part: data}) for n in range(3)]}, dataset_yaml=yaml)
    with pytest.raises(FatalSampleError, match="not an image as the name means"):
        list(val_loader(path, batch_size=1))
    assert not ghostscript.exists()


@given(data=st.binary(max_size=60), kind=st.sampled_from([*IMAGE_EXTENSIONS, "npy", "npz", "json", "mp", "txt.gz"]))
def test_random_bytes_are_a_value_or_an_error_of_ours(data: bytes, kind: str) -> None:
    try:
        SampleDecoder().decode(kind, data)
    except DecodeError as error:
        assert repr(kind.removesuffix(".gz")) in str(error) or repr(kind) in str(error)


# -- a folder from elsewhere ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("absolute", [True, False])
@pytest.mark.parametrize("with_index", [True, False])
def test_a_data_set_reads_nothing_outside_of_its_folder(tmp_path: Path, absolute: bool, with_index: bool) -> None:
    """Its own description names a file elsewhere, for which it may bring an index, too."""
    outside = write_dataset(tmp_path / "home", {"key.tar": [("0", {"txt": b"private"})]}) / "key.tar"
    name = str(outside) if absolute else "../home/key.tar"
    path = write_dataset(tmp_path / "data", {"a.tar": [("0", {"txt": b"x"})]}, splits={"val": ["a.tar", name]})
    (path / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": {"a.tar": 1, name: 1}}))
    if with_index:
        scans = [scan_shard(str(path), "a.tar"), replace(scan_shard(str(outside.parent), "key.tar"), name=name)]
        PackedIndex.from_scans(scans).write(str(path / ".nv-meta" / "energon_lite.idx"))
    with pytest.raises(DatasetError, match="outside of the data set's folder") as caught:
        list(val_loader(path, batch_size=1))
    assert "private" not in str(caught.value)


def test_links_of_the_file_system_are_followed(tmp_path: Path) -> None:
    """Shards that are links to another disk are common; whoever may write links here may write anything."""
    outside = write_dataset(tmp_path / "disk", {"a.tar": [("0", {"txt": b"x"})]})
    path = write_dataset(tmp_path / "data", {"b.tar": [("1", {"txt": b"y"})]}, splits={"val": ["a.tar", "b.tar"]})
    (path / "a.tar").symlink_to(outside / "a.tar")
    (path / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": {"a.tar": 1, "b.tar": 1}}))
    (batch,) = val_loader(path, batch_size=2)
    assert batch.text == ["x", "y"]


@pytest.mark.parametrize("name", ["dataset.yaml", "split.yaml", ".info.json", "index.uuid"])
def test_files_of_a_data_set_that_are_no_text(tmp_path: Path, name: str) -> None:
    path = write_dataset(tmp_path / "data", {"a.tar": [("0", {"txt": b"x"})]})
    (path / ".nv-meta" / name).write_bytes(b"\xff\xfe\0")
    with pytest.raises((DatasetError, ConfigError), match=re.escape(name)):
        val_loader(path, batch_size=1)


@pytest.mark.parametrize(
    "yaml",
    [
        "__module__: os\n__class__: system\n",
        "sample_type: {__module__: evil, __class__: Sample}\nfield_map: {text: txt}\n",
        "sample_type: TextSample\nsample_loader: evil.py\npart_filter: [txt]\n",
        "sample_type: !!python/object/apply:os.mkdir [bomb]\nfield_map: {text: txt}\n",
    ],
)
def test_yaml_runs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, yaml: str) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_dataset(tmp_path / "data", {"a.tar": [("0", {"txt": b"x"})]}, dataset_yaml=yaml)
    (path / ".nv-meta" / "evil.py").write_text("import os\nos.mkdir('bomb')\ndef sample_loader(s): return {}\n")
    with pytest.raises((TrustError, UsageError, ValueError), match=r"dataset\.yaml"):
        val_loader(path, batch_size=1)
    assert not (tmp_path / "bomb").exists()


def test_a_trusted_part_filter_chooses_the_parts(tmp_path: Path) -> None:
    yaml = f"{CRUDE_YAML}part_filter: mine.py:wanted\n"
    path = write_dataset(tmp_path / "data", {"a.tar": [("0", {"txt": b"x", "bin": b"y"})]}, dataset_yaml=yaml)
    (path / ".nv-meta" / "mine.py").write_text("def wanted(part): return part == 'txt'\n")
    (sample,) = val_loader(path, trust_code=True)
    assert sample["txt"] == "x" and "bin" not in sample


def test_trusted_code_is_run_when_the_caller_says_so(tmp_path: Path) -> None:
    yaml = "sample_type: TextSample\nsample_loader: mine.py:load\npart_filter: [txt]\n"
    path = write_dataset(tmp_path / "data", {"a.tar": [("0", {"txt": b"x", "bin": b"y"})]}, dataset_yaml=yaml)
    (path / ".nv-meta" / "mine.py").write_text("def load(raw): return {'text': raw['txt'] * 2}\n")
    with pytest.raises(TrustError, match="trust_code=True"):
        val_loader(path, batch_size=1)
    assert [batch.text for batch in val_loader(path, batch_size=1, trust_code=True)] == [["xx"]]


# -- states that do not fit -----------------------------------------------------------------------------------------


def _loader(path: Any, **arguments: Any) -> SavableDataLoader:
    return train_loader(path, **{"batch_size": 2, **arguments})


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"batch_size": 3}, "batch_size: 2 in the state, 3 here"),
        ({"shuffle_buffer_size": 10}, "shuffle_buffer_size: None in the state, 10 here"),
        ({"max_samples_per_sequence": 5}, "max_samples_per_sequence: None in the state, 5 here"),
        ({"seed_offset": 7}, "seed: 0 in the state, 7 here"),
        ({"split_part": "val"}, "split_part: 'train' in the state, 'val' here"),
        ({"repeat": False}, "repeat: True in the state, False here"),
        ({"batch_size": 4, "seed_offset": 3}, r"(?s)batch_size: 2 in the state, 4 here.*seed: 0 in the state, 3"),
        ({"shuffle_over_epochs_multiplier": 2}, r"data set 0 \(.*a-20, 20 samples"),
    ],
)
def test_another_configuration_is_named(leaf_of: Any, changed: dict[str, Any], words: str) -> None:
    loader = _loader(leaf_of(20, "a"))
    next(iter(loader))
    state = loader.save_state_rank()
    with pytest.raises(StateMismatchError, match=words):
        _loader(leaf_of(20, "a"), **changed).restore_state_rank(state)


def test_other_data_is_named(leaf_of: Any, write_blend: Callable[..., Any]) -> None:
    state = _loader(leaf_of(20, "a")).save_state_rank()
    with pytest.raises(StateMismatchError, match="samples in all data sets: 20 in the state, 21 here"):
        _loader(leaf_of(21, "a")).restore_state_rank(state)
    with pytest.raises(StateMismatchError, match="number of data sets: 1 in the state, 2 here") as caught:
        _loader(write_blend([(20, 1.0), (5, 1.0)])).restore_state_rank(state)
    assert "data set 0" not in str(caught.value)  # marks are of each data set, and there is none for the second one
    unmarked = {**state, "identity": {**state["identity"], "marks": None}}
    with pytest.raises(StateMismatchError, match="20 in the state, 21 here"):
        _loader(leaf_of(21, "a")).restore_state_rank(unmarked)


def test_the_leaf_that_differs_is_named(write_blend: Callable[..., Any]) -> None:
    leaves = [(5, 1.0)] * 6
    state = _loader(write_blend(leaves)).save_state_rank()
    changed = [*leaves[:3], (6, 1.0), *leaves[4:]]
    with pytest.raises(StateMismatchError, match=r"data set 3 \(.*d-6, 6 samples") as caught:
        _loader(write_blend(changed)).restore_state_rank(state)
    assert "data set 2" not in str(caught.value)
    with pytest.raises(StateMismatchError, match=r"data set 0 \("):  # all of the shares change with one weight
        _loader(write_blend([(5, 2.0), *leaves[1:]])).restore_state_rank(state)


def test_what_may_change_may_change(leaf_of: Any) -> None:
    state = _loader(leaf_of(20, "a")).save_state_rank()
    other = {"rank": 3, "world_size": 5, "num_workers": 2, "virtual_epoch_length": 7}
    _loader(leaf_of(20, "a"), **other).restore_state_rank(state)


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda state: state | {"version": 99}, "format version 99.*reads version 1"),
        (lambda state: state | {"order_version": 3}, "order version 3.*other samples"),
        (lambda state: {k: v for k, v in state.items() if k != "identity"}, "does not say what it belongs to"),
    ],
)
def test_future_states_are_refused(leaf_of: Any, edit: Callable[[Any], Any], words: str) -> None:
    """What is damaged in other ways: ``tests/core/loading/states``."""
    loader = _loader(leaf_of(20, "a"))
    next(iter(loader))
    before = loader.save_state_rank()
    with pytest.raises(StateError, match=words) as caught:
        loader.restore_state_rank(edit(copy.deepcopy(before)))
    assert caught.value.fix
    assert loader.save_state_rank() == before  # a refusal changes nothing


def test_states_of_many_ranks(leaf_of: Any) -> None:
    loader = _loader(leaf_of(20, "a"))
    iterator = iter(loader)
    next(iterator)
    one = loader.save_state_rank()
    next(iterator)
    two = loader.save_state_rank()
    loader.restore_state_global([one, None, one])
    assert loader.save_state_rank() == one
    two_steps = r"not at the same step:\n    state 0: pass 0, micro-batch 1\n    state 1"
    with pytest.raises(StateMismatchError, match=two_steps):
        loader.restore_state_global([one, two])
    with pytest.raises(StateError, match="not a loader state"):
        loader.restore_state_global("x")  # type: ignore[arg-type]
    assert loader.save_state_global() == one
    for nothing in (None, [None, None], []):
        with pytest.raises(StateError, match="there is no state"):
            loader.restore_state_global(nothing)
    assert loader.save_state_rank() == one


PICKLED = pickle.dumps([1, 2])
CHILD = (
    "from energon_lite.storage import SampleDecoder; import pickle; "
    "print(SampleDecoder().decode('pkl', pickle.dumps(5)))"
)


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(trust, "_default", False)
    monkeypatch.setenv("ENERGON_LITE_TRUST_CODE", "0")
    return trust.trust_by_default


def test_nothing_is_trusted_unasked(trusting: Any) -> None:
    for decoder in (SampleDecoder(), SampleDecoder(trust_code=False)):
        with pytest.raises(EnergonLiteError, match="pickle"):
            decoder.decode("pkl", PICKLED)
    assert SampleDecoder(trust_code=True).decode("pkl", PICKLED) == [1, 2]


def test_the_processs_rule_holds_where_nothing_is_said(trusting: Any) -> None:
    before, refusing = SampleDecoder(), SampleDecoder(trust_code=False)
    trusting()
    assert before.decode("pkl", PICKLED) == [1, 2] and before.function("pkl")(PICKLED) == [1, 2]
    with pytest.raises(EnergonLiteError, match="pickle"):
        refusing.decode("pkl", PICKLED)
    trusting(False)
    with pytest.raises(EnergonLiteError, match="pickle"):
        before.decode("pkl", PICKLED)


def test_processes_that_it_starts_have_the_same_rule(trusting: Any) -> None:
    trusting()
    assert subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True).stdout == "5\n"
    trusting(False)
    refused = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True)
    assert refused.returncode and "pickle" in refused.stderr
