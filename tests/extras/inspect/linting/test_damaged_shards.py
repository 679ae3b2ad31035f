"""Whatever happens to a shard, it is examined to its end, and a sample that is not named can be read."""

from __future__ import annotations

import io
import os
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.extras.inspect.lint_checks import examine_shard
from energon_lite.extras.inspect.lint_command import lint, spans_of
from energon_lite.extras.inspect.lint_work import Span, Target
from energon_lite.storage.prepare import PrepareOptions, index_again
from tests.accidents import damaged
from tests.testing import contents_of, examples, write_dataset

SAMPLES = [(f"{number:02d}", {"txt": b"text %d" % number, "cls": b"%d" % number}) for number in range(12)]


@dataclass(repr=False)
class Whole:
    """A shard, and the files that stand beside it."""

    shard: bytes
    files: dict[str, bytes]


@pytest.fixture(scope="module")
def whole() -> Whole:
    with tempfile.TemporaryDirectory() as folder:
        path = write_dataset(Path(folder) / "set", {"a.tar": SAMPLES})
        index_again(str(path), PrepareOptions(sqlite=False))
        files = contents_of(path)
    return Whole(files.pop("a.tar"), files)


@pytest.mark.parametrize("has_index", [True, False])
@settings(max_examples=examples(60), deadline=None)
@given(data=st.data())
def test_damage(whole: Whole, has_index: bool, data: st.DataObject) -> None:
    shard, files = whole.shard, whole.files
    with tempfile.TemporaryDirectory() as folder:
        for name, contents in files.items():
            if has_index or not name.endswith("energon_lite.idx"):
                path = Path(folder, name)
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(contents)
        contents = damaged(data, shard)
        Path(folder, "a.tar").write_bytes(contents)
        target = Target(LeafSpec(folder, "train"), {"a.tar": 12})
        report = lint(target, workers=1)
        assert not [problem for problem in report.problems if problem.kind == "lint"], report.problems
        named = {problem.key for problem in report.broken}
        if contents == shard:
            assert not report.broken and report.samples == 12
        if has_index:
            assert lost(shard, contents) <= named
        if lost(shard, contents):
            assert report.broken


def lost(shard: bytes, contents: bytes) -> set[str]:
    """The keys of samples with a part whose header is none any more, or that is not there as a whole."""
    with tarfile.open(fileobj=io.BytesIO(shard)) as tar:
        return {
            member.name.partition(".")[0]
            for member in tar
            if not is_header(contents[member.offset : member.offset_data])
            or len(contents) < member.offset_data + member.size
        }


def is_header(block: bytes) -> bool:
    try:
        return bool(tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape"))
    except tarfile.HeaderError:
        return False


def test_spans() -> None:
    target = Target(LeafSpec("/x", "train"), {"a": 0, "b": 512, "c": 513})
    assert spans_of(target) == [
        Span("a", 0, 512, True),
        Span("b", 0, 512, True),
        Span("c", 0, 512, False),
        Span("c", 512, 1024, True),
    ]


def test_a_shard_that_grew_and_one_that_is_empty(tmp_path: Path) -> None:
    write_dataset(tmp_path, {"a.tar": SAMPLES})
    state = examine_shard(str(tmp_path), "a.tar", 3, None)
    assert state.scan is not None and state.scan.samples == 12
    assert "it has 12 samples, and had 3" in state.findings[0][1]
    report = lint(Target(LeafSpec(str(tmp_path), "train"), {"a.tar": 3}), workers=1)
    assert report.samples == 12  # the last span goes on to the end
    os.truncate(tmp_path / "a.tar", 0)
    state = examine_shard(str(tmp_path), "a.tar", 12, None)
    assert state.scan is None and "empty file" in state.findings[-1][1]
