"""What each released version has left behind: its data sets open, and its states go on as they would have then.

The promise is in docs/versions.md; ``tools/keep_release.py`` keeps what is tested here.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import energon_lite
from energon_lite import WorkerConfig, get_loader, get_processing_dataset
from energon_lite.errors import StateError

sys.path.insert(0, str(Path(__file__).parent))

import scenarios

HERE = Path(__file__).parent
RELEASES = sorted(path.name for path in HERE.iterdir() if (path / "states.json").exists())


@lru_cache
def kept(release: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((HERE / release / "states.json").read_text())
    return found


def is_promised(release: str, current: str) -> bool:
    """Whether the current version has to go on with states of a release."""
    then, now = release.split("."), current.split(".")
    return then[:2] == now[:2] if then[0] == "0" else then[0] == now[0]


@pytest.fixture
def data(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """The data sets of a release, as it prepared them."""
    folder: Path = shutil.copytree(HERE / request.param / "data", tmp_path / "data", copy_function=shutil.copyfile)
    os.utime(folder / "notes.jsonl", (scenarios.TIME, scenarios.TIME))
    return folder


@pytest.mark.parametrize(
    ("data", "release", "name"),
    [(release, release, name) for release in RELEASES for name in kept(release)["runs"]],
    indirect=["data"],
)
def test_states_go_on(data: Path, release: str, name: str) -> None:
    run = kept(release)["runs"][name]
    try:
        found = scenarios.run(name, data, run["states"])
    except StateError as refused:
        assert not is_promised(release, energon_lite.__version__), refused
        assert "version" in str(refused)
        return
    assert found["next"] == run["next"]
    if is_promised(release, energon_lite.__version__):
        assert found["states"] == run["states"]


@pytest.mark.parametrize(("data", "release"), [(release, release) for release in RELEASES], indirect=["data"])
def test_data_sets_open_as_they_are(data: Path, release: str, caplog: pytest.LogCaptureFixture) -> None:
    before = {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
    alone, found = WorkerConfig(rank=0, world_size=1, num_workers=0), {}
    with caplog.at_level(logging.INFO, logger="energon_lite"):
        for name in ("prose", "verse", "notes.jsonl"):
            loader = get_loader(
                get_processing_dataset(data / name, task_encoder=scenarios.Words(), worker_config=alone)
            )
            found[name] = [(sample["key"], len(sample["tokens"])) for sample in loader]
    assert found["prose"] == [(f"p{number:02d}", number * 5 % 9 + 1) for number in range(24)]
    assert found["verse"] == [(f"v{number:02d}", number * 5 % 9 + 1) for number in range(10)]
    assert found["notes.jsonl"] == [(str(number), number % 4 + 1) for number in range(15)]
    if is_promised(release, energon_lite.__version__):
        assert before == {path: path.read_bytes() for path in data.rglob("*") if path.is_file()}
        assert not [record for record in caplog.records if "index" in record.getMessage()]


def test_what_is_kept_is_small_and_of_its_version() -> None:
    assert RELEASES
    for release in RELEASES:
        assert kept(release)["versions"]["energon_lite"] == release
        files = [path for path in (HERE / release).rglob("*") if path.is_file()]
        assert sum(path.stat().st_size for path in files) < 200_000


@pytest.mark.parametrize(
    ("release", "current", "promised"),
    [("0.1.0", "0.1.7", True), ("0.1.0", "0.2.0", False), ("1.2.0", "1.9.1", True), ("1.9.1", "2.0.0", False)],
)
def test_the_promise(release: str, current: str, promised: bool) -> None:
    assert is_promised(release, current) is promised
