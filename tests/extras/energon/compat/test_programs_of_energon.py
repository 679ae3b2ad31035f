"""Programs written for Energon, run unchanged under its names here, and by Energon itself: they print the same."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "programs"
ROOT = Path(__file__).parents[4]
OURS = ("-m", "energon_lite.extras.energon")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "MSC_DISABLE_TELEMETRY": "1", "OMP_NUM_THREADS": "1"}

OWN_LOADER = """
def sample_loader(raw):
    return {"__key__": raw["__key__"], "image": raw["png"], "caption": raw["txt"][::-1]}


def part_filter(part):
    return part in ("png", "txt")
"""


def run(arguments: Sequence[str | Path], *, cwd: Path = ROOT, code: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, *map(str, arguments)], env=ENVIRONMENT, cwd=cwd, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == code, done.stderr[-3000:]
    return done.stdout if code == 0 else done.stderr


def results(arguments: Sequence[str | Path]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(arguments).strip().splitlines()[-1])
    return found


def write_captions(root: Path, shards: int, first: int, per_shard: int, train: int, tools: Any) -> None:
    """Shards of pictures with texts, prepared by Energon, with several ways to read them."""
    root.mkdir(parents=True)
    captioning = {"__module__": "megatron.energon", "__class__": "CaptioningSample"}
    number = first
    for shard in range(shards):
        with tarfile.open(root / f"s{shard}.tar", "w") as tar:
            for _ in range(per_shard):
                tools.add(tar, f"k{number:03d}.png", tools.image_bytes(number, "png"))
                tools.add(tar, f"k{number:03d}.txt", f"text {number}".encode())
                number += 1
    splits = [f"train:s[0-{train - 1}].tar", f"val:s[{train}-{shards - 1}].tar"]
    tools.energon_prepare(root, "--split-parts", splits[0], "--split-parts", splits[1])
    documents = {
        "dataset.yaml": {"sample_type": captioning, "field_map": {"image": "png", "caption": "txt"}},
        "crude.yaml": {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"},
        "own_loader.yaml": {
            "sample_type": captioning,
            "sample_loader": "sample_loader.py:sample_loader",
            "part_filter": "sample_loader.py:part_filter",
        },
        "own_class.yaml": {
            "__module__": "own_dataset",
            "__class__": "ChatWebdataset",
            "field_map": {"conversation": "txt", "images": "png"},
        },
    }
    for name, document in documents.items():
        tools.write_meta(root, name, document)
    (root / ".nv-meta" / "sample_loader.py").write_text(OWN_LOADER)


@pytest.fixture
def captions(tmp_path: Path, tools: Any) -> Path:
    write_captions(tmp_path / "theirs" / "data", 6, 0, 10, 4, tools)
    write_captions(tmp_path / "theirs" / "more", 3, 60, 4, 2, tools)
    shutil.copytree(tmp_path / "theirs", tmp_path / "ours")
    return tmp_path


@pytest.mark.slow
def test_a_multimodal_trainer(captions: Path) -> None:
    data = captions / "ours" / "data"
    shutil.copy(data / ".nv-meta" / "crude.yaml", data / ".nv-meta" / "dataset.yaml")
    program = PROGRAMS / "megatron_lm.py"
    ours = results([*OURS, program, data, captions / "ours.pt"])
    theirs = results([program, data, captions / "theirs.pt"])
    assert (ours.pop("library"), theirs.pop("library")) == ("energon_lite", "megatron")
    assert ours["exact"] and ours["same evaluation"] and ours["torch loader"]
    evaluated = ours.pop("evaluated"), theirs.pop("evaluated")  # which of them fit into three batches differs
    assert all(set(one) <= {f"k{number:03d}" for number in range(40, 60)} and len(one) > 8 for one in evaluated)
    assert ours == theirs


@pytest.mark.slow
def test_the_pages_of_the_documentation(captions: Path) -> None:
    ours = results([*OURS, PROGRAMS / "pages.py", captions / "ours"])
    theirs = results([PROGRAMS / "pages.py", captions / "theirs"])
    assert len(ours) == 19
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
    lines = run(["-m", "energon_lite.extras.energon", "spawning.py", "x"], cwd=tmp_path).splitlines()
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
        assert run(["-m", "energon_lite.extras.energon", *how, "-x", "1"], cwd=tmp_path) == expected
    code = "import sys, megatron.energon.flavors.webdataset; print(sys.argv)"
    assert run(["-m", "energon_lite.extras.energon", "-c", code, "y"], cwd=tmp_path) == "['-c', 'y']\n"
    assert "there is no such script" in run(["-m", "energon_lite.extras.energon", "absent.py"], code=2)
    assert "usage" in run(["-m", "energon_lite.extras.energon"], code=2)


def test_what_is_not_there_says_what_to_write() -> None:
    code = "import energon_lite.extras.energon as c; c.install(); import megatron.energon as e\n{}"
    for line, words in (
        ("from megatron.energon.metadataset.loader import MockJsonParser", "use yaml"),
        ("import megatron.energon.flavors.webdataset.itar", "is internal to Energon"),
        ("from megatron.energon import nothing", "cannot import name 'nothing'"),
        ("import megatron.energon.nothing", "No module named 'megatron.energon.nothing'"),
        ("e.nothing", "has no attribute 'nothing'"),
    ):
        assert words in run(["-c", code.format(line)], code=1)
    code = "import megatron.energon; import energon_lite.extras.energon as c; c.install()"
    assert "has been imported already" in run(["-c", code], code=1)
    code = (
        "import energon_lite.extras.energon as c; c.install(); c.install();"
        " import megatron.energon as a; c.uninstall();"
        " import megatron.energon as b; print(a is b, a.__file__ if hasattr(a, '__file__') else None, b.__file__[-11:])"
    )
    assert run(["-c", code]) == "False None __init__.py\n"
