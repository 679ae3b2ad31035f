"""Programs written for Energon, run unchanged under its names here, and by Energon itself: they print the same."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from energon_lite.extras.energon import MetadatasetV2
from energon_lite.extras.energon.compat import INTERNAL, MODULES, VERSION
from energon_lite.extras.energon.compat.install import resolve
from energon_lite.extras.energon.compat.names import AHEAD_MODULES
from tests.fork_server import run_program
from tests.testing import write_tar

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[4]
OURS = ("-m", "energon_lite.extras.energon")
ENVIRONMENT = {"PYTHONPATH": str(ROOT), "MSC_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}

OWN_LOADER = """
def sample_loader(raw):
    return {"__key__": raw["__key__"], "image": raw["png"], "caption": raw["txt"][::-1]}


def part_filter(part):
    return part in ("png", "txt")
"""


def run(arguments: Sequence[str | Path], *, cwd: Path = ROOT, code: int = 0) -> str:
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 300}
    done = run_program([*map(str, arguments)], env={**os.environ, **ENVIRONMENT}, cwd=cwd, **options)
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout if code == 0 else done.stderr


def results(arguments: Sequence[str | Path]) -> dict[str, Any]:
    return dict(json.loads(run(arguments).strip().splitlines()[-1]))


def write_captions(root: Path, tools: Any, shards: int = 6, first: int = 0, each: int = 10, train: int = 4) -> None:
    """Shards of pictures with texts, prepared by Energon, with several ways to read them."""
    captions = {"sample_type": {"__module__": "megatron.energon", "__class__": "CaptioningSample"}}
    functions = {"sample_loader": "sample_loader.py:sample_loader", "part_filter": "sample_loader.py:part_filter"}
    own = {"__module__": "own_dataset", "__class__": "ChatWebdataset"}
    for shard in range(shards):
        numbers = range(first + shard * each, first + (shard + 1) * each)
        parts = ({"png": tools.image_bytes(number, "png"), "txt": f"text {number}".encode()} for number in numbers)
        samples = [(f"k{number:03d}", part) for number, part in zip(numbers, parts, strict=True)]
        write_tar(root / f"s{shard}.tar", samples)
    splits = [f"train:s[0-{train - 1}].tar", f"val:s[{train}-{shards - 1}].tar"]
    tools.energon_prepare(root, "--split-parts", splits[0], "--split-parts", splits[1])
    tools.write_meta(root, "dataset.yaml", captions | {"field_map": {"image": "png", "caption": "txt"}})
    tools.write_meta(root, "own_loader.yaml", captions | functions)
    tools.write_meta(root, "own_class.yaml", own | {"field_map": {"conversation": "txt", "images": "png"}})
    (root / ".nv-meta" / "sample_loader.py").write_text(OWN_LOADER)


@pytest.fixture
def captions(tmp_path: Path, tools: Any) -> Path:
    write_captions(tmp_path / "theirs" / "data", tools)
    write_captions(tmp_path / "theirs" / "more", tools, 3, 60, 4, 2)
    shutil.copytree(tmp_path / "theirs", tmp_path / "ours")
    return tmp_path


@pytest.mark.slow
def test_the_pages_of_the_documentation(captions: Path) -> None:
    ours = results([*OURS, PROGRAMS / "pages.py", captions / "ours"])
    theirs = results([PROGRAMS / "pages.py", captions / "theirs"])
    assert len(ours) == 6
    for page in theirs:
        assert ours[page] == theirs[page], page


def test_code_of_data_sets_is_trusted_as_by_energon_unless_told_otherwise(captions: Path, tmp_path: Path) -> None:
    (tmp_path / "own_dataset.py").write_text((PROGRAMS / "own_dataset.py").read_text())
    code = (
        "import megatron.energon as e\n"
        f"e.get_val_dataset({str(captions / 'ours' / 'data')!r}, batch_size=1, dataset_config='own_class.yaml',"
        " worker_config=e.WorkerConfig(rank=0, world_size=1, num_workers=0))\n"
    )
    assert "TrustError" in run([*OURS, "--no-trust-code", "-c", code], cwd=tmp_path, code=1)
    run([*OURS, "-c", code], cwd=tmp_path)


SPAWNING = """
import multiprocessing, pickle, sys
import megatron.energon
from megatron.energon import TextSample
from megatron.energon.flavors.captioning import CaptioningSample

sample = CaptioningSample(__key__="k", __restore_key__=(), image=None, caption="a")

def child(queue, sample):
    import megatron.energon.task_encoder.base
    queue.put((megatron.energon.TextSample.__module__, type(sample).__name__, sys.argv[1:]))

if __name__ == "__main__":
    for method in ("spawn", "forkserver", "fork"):
        context = multiprocessing.get_context(method)
        queue = context.Queue()
        process = context.Process(target=child, args=(queue, sample))
        process.start()
        print(*queue.get(timeout=120))
        process.join()
    old = b"cmegatron.energon.flavors.base_dataset\\nSample\\n."  # a pickle that Energon wrote
    print(pickle.loads(old).__module__)
"""


def test_children_and_pickles_find_the_names(tmp_path: Path) -> None:
    (tmp_path / "spawning.py").write_text(SPAWNING)
    lines = run([*OURS, "spawning.py", "x"], cwd=tmp_path).splitlines()
    ours = "energon_lite.samples"
    assert lines == [f"{ours}.modalities CaptioningSample ['x']"] * 3 + [f"{ours}.sample"]


def test_modules_code_and_other_parts_of_megatron(tmp_path: Path) -> None:
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").write_text("HERE = 'core'\n")
    (tmp_path / "tool.py").write_text(
        "import sys\nimport megatron.core, megatron.energon\nfrom megatron.energon import WorkerConfig\n"
        "print(megatron.core.HERE, WorkerConfig.__module__, __name__, sys.argv[1:])\n"
    )
    expected = "core energon_lite.worker_config __main__ ['-x', '1']\n"
    for how in (["-m", "tool"], ["tool.py"]):
        assert run([*OURS, *how, "-x", "1"], cwd=tmp_path) == expected
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "script.py").write_text("import sys\nprint(sys.path[0], __builtins__.__name__)\n")
    assert run([*OURS, "elsewhere/script.py"], cwd=tmp_path) == f"{tmp_path / 'elsewhere'} builtins\n"


#: In one process: ways to call the command, what is absent and what to write instead, and the way back to Energon.
NAMES = """
import sys
from energon_lite.errors import UsageError
from energon_lite.extras.energon import install, uninstall
from energon_lite.extras.energon.compat import MODULES, PARTLY
from energon_lite.extras.energon.__main__ import main

print(main([]), main(["absent.py"]))
main(["-c", "import sys, megatron.energon.flavors.webdataset; print(sys.argv)", "y"])
install()
import importlib.metadata
path, sys.path = sys.path, []  # as where Energon itself is not installed
print(importlib.metadata.version("megatron_energon"), importlib.metadata.metadata("megatron-energon")["Name"])
sys.path = path
import megatron.energon as e, megatron.energon.edataclass, megatron.energon.wrappers.skip
from megatron.energon.edataclass import edataclass  # a name that is a module, too
assert e.edataclass is edataclass and callable(edataclass)
for module in ("media.extractor", "media.filesystem_prepare", *PARTLY):  # internal otherwise
    exec(f"from megatron.energon.{module} import {', '.join((MODULES | PARTLY)[module].split())}")
for line in (
    "from megatron.energon.metadataset.loader import MockJsonParser",
    "import megatron.energon.flavors.webdataset.itar",
    "from megatron.energon import nothing",
    "import megatron.energon.nothing",
    "e.nothing",
):
    try:
        exec(line)
    except (ImportError, AttributeError) as error:
        print(str(error).replace(chr(10), " "))
uninstall()
import megatron.energon as b
print(e is b, getattr(e, "__file__", None), b.__file__[-11:])
try:
    install()
except UsageError as error:
    print(error.what)
"""


def test_absent_names_say_what_to_write_and_all_can_be_undone() -> None:
    codes, argv, version, *absent, undone, again = run(["-c", NAMES]).splitlines()
    assert version == f"{VERSION} megatron-energon"  # programs ask for it before they choose names
    assert (codes, argv, undone) == ("2 2", "['-c', 'y']", "False None __init__.py")
    expected = ["use yaml", "is internal to Energon", "cannot import name 'nothing'"]
    expected += ["No module named 'megatron.energon.nothing'", "has no attribute 'nothing'"]
    assert all(words in line for line, words in zip(absent, expected, strict=True)), absent
    assert "has been imported already" in again


@pytest.mark.slow
def test_a_packing_encoder_with_its_own_cookers_and_the_script_that_writes_its_data(tmp_path: Path) -> None:
    path = PROGRAMS / "packing_cookers.py"
    ours, theirs = results([*OURS, path, tmp_path / "ours"]), results([path, tmp_path / "theirs"])
    assert (ours.pop("library"), theirs.pop("library")) == ("energon_lite", "megatron")
    assert ours["torch loader"]
    for workers in (0, 2):
        paths = [Path(one[f"limited, {workers} workers"].pop(0)).name for one in (ours, theirs)]
        assert paths == ["talk", "talk"]
    assert all(ours[f"train, {workers} workers"]["exact"] for workers in (0, 2))
    val = ours.pop("val, 2 workers"), theirs.pop("val, 2 workers")  # which buffers are whose differs in a blend
    keys = [sorted(key for batch in one for pack in batch["keys"] for key in pack.split(",")) for one in val]
    assert keys[0] == keys[1] and len(keys[0]) == 24
    assert ours == theirs


#: What somebody does who wants to hear of hangs.
HANGING = """
import sys, time
import energon_lite.extras.energon
energon_lite.extras.energon.install()
from megatron.energon import DefaultTaskEncoder, WorkerConfig, get_loader, get_val_dataset
from megatron.energon.wrappers.watchdog_dataset import WatchdogDataset

class Slow(DefaultTaskEncoder):
    decoder = None

    def encode_sample(self, sample):
        while sample["__key__"] == "2" and not hangs:  # until somebody has heard of it
            time.sleep(0.01)
        return sample

    def batch(self, samples):
        return len(samples)

hangs = []
WatchdogDataset._watchdog_trigger = lambda: hangs.append(1)
config = WorkerConfig(rank=0, world_size=1, num_workers=0)
slow = get_val_dataset(sys.argv[1], split_part="train", batch_size=4, task_encoder=Slow(), worker_config=config)
print(list(get_loader(slow, watchdog_timeout_seconds=0.5)), hangs)
"""


def test_hangs_are_heard_of(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f'{{"n": {number}}}\n' for number in range(12)))
    assert run(["-c", HANGING, tmp_path / "a.jsonl"]) == "[4, 4, 4] [1]\n"


#: What programs for Energon's development branch import.
AHEAD = """
import sys
import torch
from megatron.energon import DefaultTaskEncoder, Recipe, WorkerConfig, get_processing_dataset, get_savable_loader
from megatron.energon import get_train_dataset
from megatron.energon.dataloader import DataLoader, ForkDataLoaderWorker, ThreadDataLoaderWorker
from megatron.energon.recipe.loader import traverse_recipe


class Asker(DefaultTaskEncoder):
    def encode_sample(self, sample):
        assert torch.utils.data.get_worker_info().num_workers == 2
        return sample


def main(path, recipe):
    text = "{__module__: megatron.energon, __class__: Recipe, splits: {train: {path: " + path + "}}}"
    open(recipe, "w").write(text)
    print([one.path.name for one in traverse_recipe(recipe, split_part="train")], Recipe.__name__)
    given = {"batch_size": 2, "worker_config": WorkerConfig(rank=0, world_size=1, num_workers=2), "repeat": False}
    asked = get_train_dataset(recipe, task_encoder=Asker(), **given)
    with get_savable_loader(asked, multiprocessing_context="forkserver") as loader:
        print(len(list(loader)))
    for kind in (ForkDataLoaderWorker, ThreadDataLoaderWorker):
        with DataLoader(get_train_dataset(recipe, **given), worker_type=kind) as loader:
            print(len(loader), len(list(loader)))


if __name__ == "__main__":
    main(*sys.argv[1:])
"""


def test_names_of_the_development_branch_are_there() -> None:
    for module, names in AHEAD_MODULES.items():
        assert not any(module.startswith(f"{start}.") for start in INTERNAL)
        for name in names.split():
            assert resolve(name, module) is not None
            assert module not in MODULES or name not in MODULES[module].split(), f"{module}.{name} is in 7.4.1, too"
    assert resolve("Recipe") is MetadatasetV2


def test_a_program_for_the_development_branch(leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(AHEAD)
    printed = run([*OURS, tmp_path / "program.py", leaf_of(5), tmp_path / "a.yaml"])
    assert printed == "['a-5'] MetadatasetV2\n3\n3 3\n3 3\n"
