"""Deletion law: without any one guest, all that is left imports; without all of them, the core's tests pass."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import energon_lite

PACKAGE = Path(energon_lite.__file__).parent
TESTS = Path(__file__).parents[1]
EXTRAS = sorted(path.name for path in (PACKAGE / "extras").iterdir() if (path / "__init__.py").exists())
#: Guests by the folder that is deleted.
GUESTS = ["trainer", *(f"extras/{name}" for name in EXTRAS)]
#: Folders of `tests/core` with quick tests.
QUICK = ["config", "documents", "hooks", "recipes"]
#: Tests that use guests through doors: joins, quarantine, and Energon's keywords.
_CALLS = "tests/core/recipes/test_wrong_inputs.py::test_a_call_that_cannot_work"
THROUGH_DOORS = (
    "tests/core/config/test_mutated_documents.py::test_mutated_documents",
    "tests/core/recipes/test_doors.py::test_samples_of_a_source_that_fail_are_counted",
    *(f"{_CALLS}[{case}]" for case in ("buffers never full", "no chunk", "groups hand nothing over")),
)
#: Packages that are optional, or not installed everywhere: modules that need them may fail to import.
OPTIONAL = {"torchvision", "lance", "torchtitan", "ray", "verl", "wandb", "mfusepy", "tensordict"}

#: Packages of others that modules need, imported once for all copies.
OTHERS = ("torch", "torch.distributed.checkpoint", "transformers", "lightning.pytorch", "accelerate", "av", "pyarrow")
#: Imports all modules below each copy of the package; prints what fails, except for a lack of optional packages.
IMPORT_ALL = f"""
import importlib, os, pkgutil, sys

for name in {OTHERS}:
    try:
        importlib.import_module(name)
    except ImportError:
        pass
for copy in sys.argv[1:]:
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        continue
    sys.path.insert(0, copy)
    import energon_lite
    found = pkgutil.walk_packages(energon_lite.__path__, "energon_lite.", onerror=lambda name: None)
    names = [module.name for module in found if not module.name.endswith("__main__")]
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:
            lacking = (getattr(error.__cause__, "name", None) or getattr(error, "name", "") or "").partition(".")[0]
            if lacking not in {sorted(OPTIONAL)}:
                print(f"{{copy}}: {{name}}: {{error!r}}")
    print(copy, "has", len(names), "modules", flush=True)
    os._exit(0)
"""
#: Uses the core as a newcomer does.
USE = """
import sys
from pathlib import Path
import webdataset
from click.testing import CliRunner
from energon_lite import ReadAhead, Reading, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.cli.main import main
from energon_lite.errors import UsageError

folder = Path(sys.argv[1])
with webdataset.TarWriter(str(folder / "a.tar")) as tar:
    for number in range(20):
        tar.write({"__key__": f"{number:03}", "txt": str(number)})
options = ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "TextSample"]
done = CliRunner().invoke(main, ["prepare", str(folder), *options, "--field-map", '{"text": "txt"}'])
assert done.exit_code == 0, done.output
assert CliRunner().invoke(main, ["--help"]).exit_code == 0
config = WorkerConfig(rank=0, world_size=1, num_workers=2)
batches = []
for stop in (5, 10):
    loader = get_savable_loader(get_train_dataset(folder, batch_size=3, worker_config=config))
    if batches:
        loader.restore_state_rank(state)
    with loader:
        batches += [batch.__key__ for _, batch in zip(range(stop - len(batches)), loader)]
        state = loader.save_state_rank()
again = get_savable_loader(get_train_dataset(folder, batch_size=3, worker_config=config))
with again:
    assert batches == [batch.__key__ for _, batch in zip(range(10), again)]
(folder / "chats.jsonl").write_text("{}\\n")
for path, more, extra in (
    ("s3://bucket/data", {}, "remote"),
    ("s3://bucket/blend.yaml", {}, "remote"),
    (folder, {"reading": Reading(read_ahead=ReadAhead())}, "remote"),
    (folder / "chats.jsonl", {}, "formats"),
):
    try:
        get_train_dataset(path, batch_size=3, worker_config=config, **more)
    except UsageError as error:
        assert f"extra '{extra}', which is not installed" in str(error), error
    else:
        raise AssertionError(path)
"""


def without(folder: Path, *deleted: str) -> dict[str, str]:
    """Environment in which a copy of the package, without some of its folders, is found first."""
    copy = folder / "energon_lite"
    shutil.copytree(PACKAGE, copy, copy_function=os.symlink)  # with what is compiled
    for name in deleted:
        shutil.rmtree(copy / name)
    # The finder of an editable installation would find the folders that the copy lacks.
    finders = '[finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]'
    (folder / "sitecustomize.py").write_text(f"import sys\n\nsys.meta_path[:] = {finders}\n")
    return os.environ | {"PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}


def run(code: str, folder: Path, environment: dict[str, str], *arguments: object) -> str:
    command = [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_the_rest_imports_without_a_guest(tmp_path: Path) -> None:
    copies = {name: tmp_path / name.translate({47: "-", 32: "-"}) for name in (*GUESTS, "extras trainer")}
    for name, copy in copies.items():
        environment = without(copy, *name.split())
    (empty := tmp_path / "empty").mkdir()
    shutil.copy(copy / "sitecustomize.py", empty)
    said = run(IMPORT_ALL, empty, environment | {"PYTHONPATH": str(empty)}, *copies.values()).splitlines()
    counts = {line.split()[0]: int(line.split()[2]) for line in said if line.endswith(" modules")}
    assert len(said) == len(counts) == len(copies), "\n".join(said)
    assert min(counts.values()) == counts[str(copy)] > 100


@pytest.mark.slow
def test_the_core_alone(tmp_path: Path) -> None:
    environment = without(tmp_path, "extras", "trainer")
    (data := tmp_path / "data").mkdir()
    run(USE, data, environment, data)
    copied = list(copy_tests(tmp_path))
    assert len(copied) > 12
    options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not nightly"]
    options += [f"--deselect={name}" for name in THROUGH_DOORS]
    shutil.copy(TESTS.parent / "pyproject.toml", tmp_path)
    code = "import pytest, sys; sys.exit(pytest.main(sys.argv[1:]))"
    run(code, tmp_path, environment | {"HYPOTHESIS_PROFILE": "check"}, *options, *copied)


def copy_tests(folder: Path) -> Iterator[Path]:
    """Copy the tests, and yield the paths of those that use the core only, relative to the folder."""
    shutil.copytree(TESTS, folder / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in QUICK:
        for path in sorted((TESTS / "core" / name).glob("test_*.py")):
            if not needs_guests(path):
                yield path.relative_to(TESTS.parent)


@cache
def needs_guests(path: Path) -> bool:
    """True if a test file, or a helper of tests that it imports, imports a guest or names one in a string."""
    left, seen = [path], set[Path]()
    while left:
        file = left.pop()
        if file in seen or not file.exists():
            continue
        seen.add(file)
        text = file.read_text()
        if "energon_lite.extras" in text or "energon_lite.trainer" in text:
            return True
        imported = [node.module or "" for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
        left += [TESTS.parent / f"{name.replace('.', '/')}.py" for name in imported if name.startswith("tests.")]
        left.append(file.with_name("conftest.py"))
    return False
