"""``energon-lite init``: the project runs as it is, is resumed, and goes on on two ranks."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from energon_lite.cli import init
from energon_lite.cli.main import all_commands
from tests.testing import output_of, refusal_of
from tests.trainer.parallel.rank_processes import run_ranks

ROOT = Path(__file__).parents[3]
QUICKSTART = (ROOT / "docs" / "quickstart.md").read_text()
FILES = ["README.md", "blend.yaml", "encoder.py", "make_data.py", "model.py", "train.py"]


@contextlib.contextmanager
def others_named(*names: str) -> Iterator[None]:
    """Modules of these names are imported anew, as those of the project; others come back behind it."""
    others = {name: sys.modules.pop(name) for name in names if name in sys.modules}
    try:
        yield
    finally:
        for name in names:
            sys.modules.pop(name, None)
        sys.modules.update(others)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("init") / "first"
    with others_named("encoder"):
        assert "python train.py" in output_of("init", folder)
    return folder


@pytest.fixture
def project(written: Path, tmp_path: Path) -> Path:
    """A project, as the command writes it."""
    return Path(shutil.copytree(written, tmp_path / "project"))


def run(project: Path, *arguments: str) -> list[str]:
    """What ``python train.py ...`` prints, in this process: it has imported torch already."""
    before, threads, printed = os.getcwd(), torch.get_num_threads(), io.StringIO()
    os.chdir(project)
    try:
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.syspath_prepend(str(project))
            patch.setattr(sys, "argv", ["train.py", *arguments])
            with others_named("encoder", "model"):
                runpy.run_path("train.py", run_name="__main__")
    finally:
        os.chdir(before)
        torch.set_num_threads(threads)
    return printed.getvalue().splitlines()


def test_it_writes_what_it_says(project: Path) -> None:
    assert sorted(one.name for one in project.iterdir() if one.is_file()) == FILES
    for name in FILES:
        if name.endswith(".py"):
            compile((project / name).read_text(), name, "exec")
    assert all((project / "data" / name / ".nv-meta" / "split.yaml").is_file() for name in ("shapes", "sums"))


def test_the_commands_of_its_readme_run_again_and_change_nothing(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand there; a checkpoint of before still fits."""
    commands = init._commands((project / "README.md").read_text())
    assert [command.split()[:2] for command in commands] == [
        ["python", "make_data.py"],
        ["energon-lite", "prepare"],
        ["energon-lite", "prepare"],
        ["energon-lite", "measure"],
        ["energon-lite", "measure"],
    ]
    before = {path: path.read_bytes() for path in project.rglob("*.tar")}
    monkeypatch.chdir(project)
    runpy.run_path("make_data.py", run_name="__main__")
    assert before and before == {path: path.read_bytes() for path in project.rglob("*.tar")}
    with others_named("encoder"):
        for command in commands[1:]:
            output_of(*shlex.split(command)[1:])


@pytest.mark.slow
def test_it_trains_and_goes_on(project: Path) -> None:
    """Resumed with another number of workers, it is where a run is that was never stopped."""
    first = run(project, "--steps", "10", "--workers", "0")
    assert re.match(r"step 1: loss 5\.\d+, \d+ samples in 2\d\d tokens", first[0])
    on = run(project, "--steps", "20", "--workers", "1")
    assert on[0] == "goes on at step 10" and float(on[-1].split()[-1]) < float(first[-1].split()[-1])
    whole = run(project, "--steps", "20", "--workers", "0", "--checkpoint", "whole.pt")
    assert whole[-1] == on[-1]
    one, other = (torch.load(project / name, weights_only=True) for name in ("checkpoint.pt", "whole.pt"))
    assert one["loader"] == other["loader"]
    assert all(torch.equal(one["model"][name], other["model"][name]) for name in one["model"])


@pytest.mark.slow
def test_it_goes_on_on_two_ranks_and_back(project: Path, tmp_path: Path) -> None:
    own = ("--workers", "0", "--checkpoint", "two.pt")
    run(project, "--steps", "5", *own)
    first, other = run_ranks(2, lambda rank: run(project, "--steps", "10", *own), folder=tmp_path)
    assert first[0] == "goes on at step 5" and first[-1].startswith("validation: loss ") and not other
    assert run(project, "--steps", "12", *own)[0] == "goes on at step 10"
    assert torch.load(project / "two.pt", weights_only=True)["step"] == 12


@pytest.mark.nightly
def test_its_commands_run_as_they_stand(project: Path) -> None:
    """In a shell."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    blocks = re.findall(r"```sh\n(.*?)```", (project / "README.md").read_text(), re.S)
    printed = ""
    for block in [*blocks[:2], blocks[2].rstrip() + " --html page.html"]:
        shell = ["bash", "-ec", block]
        printed += subprocess.run(
            shell, cwd=project, env=environment, capture_output=True, text=True, check=True
        ).stdout
    assert "goes on at step 200" in printed and printed.count("validation: loss") == 3
    assert len(blocks) == 3 and (project / "page.html").is_file()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("mine")
    assert "has train.py already" in refusal_of("init", tmp_path)
    assert (tmp_path / "train.py").read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def test_without_pillow_it_says_so_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "find_spec", lambda name: None)
    assert "energon-lite[image]" in refusal_of("init", tmp_path / "new") and not (tmp_path / "new").exists()
    output_of("init", tmp_path / "new", "--no-data")
    assert sorted(one.name for one in (tmp_path / "new").iterdir()) == FILES


def test_the_quickstart_begins_with_it() -> None:
    assert "init" in all_commands() and "energon-lite init first" in QUICKSTART
    assert "torchrun --nproc-per-node 2 train.py" in QUICKSTART
