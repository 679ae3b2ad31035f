"""Units of prepare, measure, lint and tokenize as tasks of Ray, on four nodes on this machine."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from energon_lite import TaskEncoder
from energon_lite.storage import sharded_work as job_work
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.sharded_work import Outcome, Work
from tests.servers import ray_cluster
from tests.testing import invoke, output_of, text_dataset, until, write_tar

ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow
HERE = "tests.extras.remote_workers.test_ray_tasks"
PREPARE = ["prepare", "--non-interactive", "--split-ratio", "8,1,1", "--sample-type", "TextSample"]
PREPARE += ["--field-map", '{"text": "txt"}']


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Four nodes of one processor."""
    with ray_cluster(4, num_cpus=1) as made:
        yield made


@pytest.fixture
def idle(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """From its call on, this process does no unit itself whose work is in a room of the package."""
    perform = job_work._perform

    def refuse(room: str) -> None:
        def here(work: Work[Any, Any], unit: Any) -> Outcome:
            assert not type(work).__module__.startswith(room)
            return perform(work, unit)

        monkeypatch.setattr(job_work, "_perform", here)

    return refuse


class Letters(TaskEncoder):
    """Measures texts."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        return {"__key__": sample.__key__, "tokens": list(range(1 + int(sample.__key__.split("-")[1]) % 17))}

    def sample_costs(self, encoded: dict[str, Any]) -> dict[str, Any]:
        return {"cost": sum(encoded["tokens"]), "all": encoded["tokens"]}


class Slow(Letters):
    """Takes its time."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        time.sleep(0.001)
        return super().encode_sample(sample)


def _files(folder: Path) -> dict[str, bytes]:
    """Contents of all files but the data set's random name, and the database that Energon's tools read."""
    paths = (path for path in folder.rglob("*") if path.is_file() and path.suffix not in (".uuid", ".sqlite"))
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def _results(folder: Path, *commands: Sequence[object]) -> dict[str, bytes]:
    """Files of a copy of a folder, always at the same path, after some commands on it."""
    copy = folder.parent / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(folder, copy)
    for name, *options in commands:
        output_of(name, copy, *options)
    return _files(copy)


def test_files_are_those_of_one_process(cluster: Any, tmp_path: Path, idle: Callable[[str], None]) -> None:
    for shard in range(9):
        write_tar(
            tmp_path / f"raw/{shard}.tar",
            [(f"a-{n:04}", {"txt": b"x" * n}) for n in range(40 * shard, 40 * shard + 40)],
        )
    commands = [PREPARE, ["measure", "--task-encoder", f"{HERE}:Letters"], ["measure", "--column", "bytes=txt"]]
    expected = _results(tmp_path / "raw", *([*command, "--num-workers", "1"] for command in commands))
    idle("energon_lite")
    assert _results(tmp_path / "raw", *([*command, "--ray"] for command in commands)) == expected


def test_lint_finds_what_it_finds_in_one_process(cluster: Any, tmp_path: Path, idle: Callable[[str], None]) -> None:
    text_dataset(tmp_path / "data", 50, shards=5)
    shard = sorted((tmp_path / "data").glob("*.tar"))[2]
    content = bytearray(shard.read_bytes())
    content[512] = 0xFF  # no text
    shard.write_bytes(content)
    one = invoke("lint", tmp_path / "data", "--num-workers", 1)
    idle("energon_lite")
    other = invoke("lint", tmp_path / "data", "--ray")
    assert one.exit_code == other.exit_code != 0
    assert one.output == other.output


def test_tokenize_writes_what_one_process_writes(cluster: Any, tmp_path: Path, idle: Callable[[str], None]) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    pytest.importorskip("energon_lite.trainer.tokenizing")
    words = {"[UNK]": 0} | {f"w{number}": 1 + number for number in range(50)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "books.txt").write_text("".join(f"w{n % 50} w{n % 7}\n" for n in range(400)))
    common = ["-t", tmp_path / "tokenizer.json", "--task", "pt", "--text-records", "line", "--records-per-shard", 50]
    common += ["--begin-token", "", "--end-token", "w1"]
    found = []
    for output, more in (("one", ["--num-workers", 1]), ("other", ["--ray"])):
        output_of("tokenize", tmp_path / "books.txt", "-o", tmp_path / output, *common, *more)
        files = _files(tmp_path / output)
        times = [name for name in files if name.startswith(".nv-meta/energon_lite.")]  # they have those of the shards
        lengths = WebdatasetSource.open(tmp_path / output).column("length")[:].tolist()
        idle("energon_lite.trainer")
        found.append(({name: files[name] for name in files.keys() - {*times}}, lengths))
    assert found[0] == found[1]
    assert len(list(tmp_path.glob("one/*.tar"))) == 8


@pytest.mark.parametrize("command", [["measure", "--task-encoder", f"{HERE}:Slow"], PREPARE], ids=lambda one: one[0])
def test_nodes_that_are_killed_in_the_middle_cost_nothing(tmp_path: Path, cluster: Any, command: list[str]) -> None:
    """Two, when the command has two results."""
    data, found = tmp_path / "data", list[dict[str, bytes]]()
    if command is PREPARE:
        for shard in range(60):
            write_tar(data / f"{shard:02}.tar", [(f"a-{shard}-{n}", {"txt": b"x" * n}) for n in range(2000)])
    else:
        text_dataset(data, 4000, shards=2, prefix="a-")
    expected = _results(data, [*command, "--num-workers", 1])
    thread = Thread(target=lambda: found.append(_results(data, [*command, "--ray"])))
    thread.start()
    assert until(lambda: not thread.is_alive() or len([*tmp_path.glob("copy/.nv-meta/**/*.result")]) >= 2, 300)
    try:
        for node in sorted(cluster.worker_nodes, key=str)[2:]:
            cluster.remove_node(node, allow_graceful=False)
        thread.join()
    finally:
        for _ in range(4 - len(cluster.worker_nodes)):
            cluster.add_node(num_cpus=1)
    assert found == [expected]
