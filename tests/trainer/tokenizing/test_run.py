"""Whole runs: the same bytes from any number of processes, interrupted or not; and the tars that they write."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import tarfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from energon_lite import get_loader, get_val_dataset
from energon_lite.errors import ConfigError, EmptyDatasetError, UsageError
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.sharded_job import Ranks
from energon_lite.trainer.tokenizing import run
from energon_lite.trainer.tokenizing.run import Input, tokenize_files
from energon_lite.trainer.tokenizing.shards import ArrayTar, npy
from energon_lite.trainer.tokenizing.tasks import Task
from energon_lite.trainer.tokenizing.tokenize_command import read_metadata
from tests.accidents import killed_at, killed_at_every_step
from tests.fork_server import ForkedProgram
from tests.testing import ALONE, command, nightly_but, output_of, until


@pytest.fixture(scope="module")
def few_chats(chats: Path) -> Path:
    """Enough for two shards of twenty, for what is made again after each of many steps."""
    path = chats.parent / "few.jsonl"
    path.write_text("\n".join(chats.read_text().split("\n")[:40]))
    return path


def _bytes(folder: Path) -> dict[str, str]:
    """Digest of each file, but for those that name times or folders."""
    skipped = {".info.json", "index.uuid", "energon_lite.idx", "tokenize.json", "length.col", "loss_tokens.col"}
    return {
        str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.name not in skipped
    }


def _make(chats: Path, tokenizer: Path, output: Path, length: int = 30, **settings: Any) -> Any:
    inputs = [Input((str(chats),), Task(max_length=length))]
    return tokenize_files(inputs, str(tokenizer), str(output), **{"records_per_shard": 7, "workers": 1, **settings})


@pytest.fixture(scope="module")
def reference(chats: Path, tokenizer_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("reference")
    report = _make(chats, tokenizer_folder, folder)
    assert (report.shards, report.made, report.counts.records) == (29, 29, 200)
    assert (report.counts.examples, report.counts.left_out) == (198, 2)
    problems = [(number, problem[:15]) for _, number, problem in report.problems]
    assert problems == [(18, "not JSON: Expec"), (34, "no field 'respo")]
    return _bytes(folder)


def test_the_result_can_be_loaded(chats: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    report = _make(chats, tokenizer_folder, tmp_path, split_ratio="8,1,1")
    found = []
    for part in ("train", "val", "test"):
        dataset = get_val_dataset(tmp_path, split_part=part, batch_size=None, worker_config=ALONE)
        found += list(get_loader(dataset))
    assert len(found) == report.counts.examples
    assert sum(len(sample["tokens.npy"]) for sample in found) == report.counts.tokens
    by_key = {sample["__key__"]: sample for sample in found}
    sample = by_key["00000-000000001"]
    record = json.loads(chats.read_text().splitlines()[0])
    text = bytes(token for token in sample["tokens.npy"].tolist() if token < 256).decode()
    assert text == record["prompt"] + record["response"]
    assert sum(sample["mask.npy"].tolist()) == len(record["response"]) + 1
    counted = sum(int(sample["mask.npy"].sum()) for sample in found)
    assert WebdatasetSource.open(tmp_path).column("loss_tokens")[:].sum() == counted


def test_a_folder_stands_for_the_files_in_it(few_chats: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    lines = few_chats.read_text().split("\n")
    (tmp_path / "in/deep").mkdir(parents=True)
    parts = [("in/a.jsonl", lines[:10]), ("in/deep/B.JSONL", lines[10:]), ("in/c.bin", ["no record"])]
    for name, some in parts:
        (tmp_path / name).write_text("\n".join(some))
    for number, inputs in enumerate((tmp_path / "in", tmp_path / "in/a.jsonl", tmp_path / "in/d*/*")):
        report = _make(inputs, tokenizer_folder, tmp_path / f"out-{number}")
        assert report.counts.records == [40, 10, 30][number]


def test_workers_and_ranks_make_the_same_bytes(
    chats: Path, tokenizer_folder: Path, tmp_path: Path, reference: dict[str, str]
) -> None:
    _make(chats, tokenizer_folder, tmp_path / "workers", workers=2)

    def rank(number: int) -> None:
        _make(chats, tokenizer_folder, tmp_path / "ranks", ranks=Ranks(number, 3))

    others = [multiprocessing.get_context("fork").Process(target=rank, args=(number,)) for number in (1, 2)]
    for process in others:
        process.start()
    rank(0)
    for process in others:
        process.join(200)
        assert process.exitcode == 0
    assert _bytes(tmp_path / "workers") == _bytes(tmp_path / "ranks") == reference


@pytest.mark.parametrize("before", nightly_but({0, 1}, ["nothing", "a data set", "one that was never finished"]))
@pytest.mark.usefixtures("quick_disk")
@pytest.mark.slow
def test_killed_at_every_step_it_goes_on_to_the_same_end_and_old_and_new_are_not_mixed(
    few_chats: Path, tokenizer_folder: Path, tmp_path: Path, before: str
) -> None:
    """What either call finds is its own, whole, or refused."""
    old, folder, probe = (tmp_path / name for name in ("old", "killed", "probe"))
    force = before != "nothing"

    def make(folder: Path, length: int, **settings: Any) -> Any:
        return _make(few_chats, tokenizer_folder, folder, length, records_per_shard=20, **settings)

    def made(folder: Path, length: int, **settings: Any) -> Any:
        counts = make(folder, length, **settings).counts
        return _bytes(folder), list(WebdatasetSource.open(folder).column("length")), counts

    expected = {8: made(old, 8), 30: made(tmp_path / "new", 30)}
    assert expected[8] != expected[30]
    if before == "one that was never finished":
        shutil.rmtree(old)
        assert killed_at(15, lambda: make(old, 8)) and (old / "tokens-000000.tar").exists()

    def again() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if force:
            shutil.copytree(old, folder)

    kills = refused = 0
    for killed in killed_at_every_step(lambda: make(folder, 30, force_overwrite=force), again):
        kills += killed
        for length in expected:
            shutil.rmtree(probe, ignore_errors=True)
            if folder.exists():
                shutil.copytree(folder, probe)
            try:
                found = made(probe, length)
            except UsageError:
                refused += 1
            else:
                assert found == expected[length]
        assert made(folder, 30, force_overwrite=force) == expected[30]
    assert kills > 20 and refused > 5


def test_other_settings_are_not_mixed_in(chats: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    def stop(*told: Any) -> None:
        if told[2].startswith("shard 3/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _make(chats, tokenizer_folder, tmp_path, progress=stop)
    with pytest.raises(UsageError, match="begun with other settings or files: records_per_shard differ"):
        _make(chats, tokenizer_folder, tmp_path, records_per_shard=8)
    seen: list[Any] = []
    report = _make(chats, tokenizer_folder, tmp_path, progress=lambda *told: seen.append(told))
    assert report.made == report.shards - 3 and seen[-1] == (200, 200, "shard 29/29, 0.0 M tokens")
    once_more = _make(chats, tokenizer_folder, tmp_path)
    assert (once_more.made, once_more.counts, once_more.problems) == (0, report.counts, report.problems)
    with pytest.raises(UsageError, match="there is another data set here already"):
        _make(chats, tokenizer_folder, tmp_path, records_per_shard=8)
    again = _make(chats, tokenizer_folder, tmp_path, records_per_shard=50, force_overwrite=True)
    assert (again.shards, len(list(tmp_path.glob("*.tar")))) == (4, 4)


def test_nothing_at_all_says_why(tokenizer_folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "wrong.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n' * 3)
    with pytest.raises(EmptyDatasetError, match="no field 'prompt'; there are: question, answer") as error:
        _make(path, tokenizer_folder, tmp_path / "out", records_per_shard=1)
    assert "--prompt-field" in str(error.value)
    with pytest.raises(UsageError, match="records_per_shard is 0"):
        _make(path, tokenizer_folder, tmp_path / "out", records_per_shard=0)
    with pytest.raises(UsageError, match="there are no files to tokenise"):
        _make(tmp_path / "*.parquet", tokenizer_folder, tmp_path / "out")
    with pytest.raises(UsageError, match="is not a ratio"):
        _make(path, tokenizer_folder, tmp_path / "never", split_ratio="8;1")
    assert not (tmp_path / "never").exists()


@pytest.mark.parametrize("before", ["nothing", "a data set"])
@pytest.mark.parametrize("failure", ["no example", "interrupt"])
def test_a_run_that_made_nothing_blocks_nothing(
    chats: Path, tokenizer_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str, before: str
) -> None:
    out = tmp_path / "out"
    force = before == "a data set"
    if force:
        _make(chats, tokenizer_folder, out)
    if failure == "interrupt":

        def stop(*_: Any) -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
            patch.setattr(run, "write_shard", stop)
            _make(chats, tokenizer_folder, out, records_per_shard=8, force_overwrite=force)
    else:
        wrong = [Input((str(chats),), Task(prompt=("question",)))]
        with pytest.raises(EmptyDatasetError):
            tokenize_files(wrong, str(tokenizer_folder), str(out), records_per_shard=7, force_overwrite=force)
    report = _make(chats, tokenizer_folder, out, records_per_shard=9)
    assert (report.counts.examples, report.made) == (198, report.shards)
    assert len(list(out.glob("*.tar"))) == report.shards == 23


def test_the_field_of_a_text_is_found(tokenizer_folder: Path, tmp_path: Path) -> None:
    records = [{"text": "ab", "content": "not me"}, {"content": "abc"}, {"body": "a"}]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    words = ["tokenize", tmp_path / "texts.jsonl", "-t", tokenizer_folder, "-o", tmp_path / "out", "--task", "pt"]
    said = output_of(*words, "--num-workers", 1)
    assert "3 records -> 2 examples with 9 tokens" in said
    assert "no field 'text' or 'content'; there are: body" in said
    assert "3 records -> 1 example with 3 tokens" in output_of(*words, "--text-field", "body", "--force-overwrite")


def test_metadata_file_with_two_tasks(chats: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("once upon a time")
    document = {
        "inputs": [
            {"files": str(chats), "max_length": 30},
            {"files": ["*.txt"], "task": "pt", "max_length": 5, "too_long": "split"},
        ]
    }
    for name, text in (("meta.json", json.dumps(document)), ("meta.yaml", json.dumps(document))):
        (tmp_path / name).write_text(text)
        inputs = read_metadata(str(tmp_path / name))
        assert [one.task.kind for one in inputs] == ["sft", "pt"]
        report = tokenize_files(inputs, str(tokenizer_folder), str(tmp_path / f"out-{name}"), workers=1)
        assert report.counts.examples == 198 + 4  # 18 tokens with begin and end


@pytest.mark.parametrize(
    "text, words",
    [
        ("inputs: []", "at least one input"),
        ("input: []", "inputs"),
        ("inputs: [{task: pt}]", "files"),
        ("inputs: [{files: a.txt, promt: x}]", "did you mean 'prompt'"),
        ("inputs: [{files: a.txt, task: rl}]", "the task is 'rl'"),
        ("inputs: [{files: a.txt, text_records: page}]", "one of file, line"),
        ("inputs: [{files: 3}]", "names"),
    ],
)
def test_metadata_files_that_are_wrong(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "meta.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words) as error:
        read_metadata(str(path))
    assert f"{path}:1" in str(error.value)


def test_the_command_shows_what_it_did(chats: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    options = ["-t", tokenizer_folder, "-o", tmp_path / "out", "--num-workers", 1]
    done = output_of("tokenize", chats, *options)
    assert "200 records -> 198 examples with " in done
    assert "2 records left out:" in done and "record 18: not JSON" in done
    assert "1 shard of them there already" in output_of("tokenize", chats, *options)
    status, said = command("tokenize", *options)
    assert status == 1 and "either FILES or --metadata" in said


def test_ctrl_c_leaves_no_process(chats: Path, tokenizer_folder: Path, tmp_path: Path) -> None:
    """The run is a process group, as a terminal makes one; all of it is interrupted."""
    words = ["-m", "energon_lite.cli.main", "tokenize", str(chats), "-t", str(tokenizer_folder)]
    words += ["-o", str(tmp_path / "out"), "--num-workers", "2", "--records-per-shard", "1"]
    with ForkedProgram(words, start_new_session=True, stderr=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        work = tmp_path / "out" / ".tokenize"
        until(lambda: len([*work.glob("*")]) > 3 or process.poll() is not None)
        os.killpg(process.pid, signal.SIGINT)
        process.communicate(timeout=200)

    def gone() -> bool:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, 0)
            return False
        return True

    assert until(gone), "a process stayed"


# -- the tars that are written -----------------------------------------------------------------------------------------

names = st.text("abc-_.0123456789", min_size=1, max_size=100)
arrays = st.builds(
    lambda length, dtype: np.arange(length).astype(dtype),
    st.integers(0, 3000) | st.sampled_from([0, 1, 192, 193, 448]),
    st.sampled_from(["u1", "u2", "i4", "i8", "f4"]),
)


@given(st.lists(st.tuples(names, arrays), max_size=12))
def test_the_bytes_are_those_of_tarfile(members: list[tuple[str, np.ndarray]]) -> None:
    expected, found = io.BytesIO(), io.BytesIO()
    with tarfile.open(fileobj=expected, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, array in members:
            data = io.BytesIO()
            np.lib.format.write_array(data, array, version=(1, 0))
            assert npy(array) == data.getvalue()
            info = tarfile.TarInfo(name)
            info.size = data.tell()
            data.seek(0)
            tar.addfile(info, data)
    ours = ArrayTar(found)
    for name, array in members:
        ours.add(name, array)
    ours.finish()
    assert found.getvalue() == expected.getvalue()


def test_a_name_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="101"):
        ArrayTar(io.BytesIO()).add("n" * 101, np.zeros(1))
