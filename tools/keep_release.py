"""Keep small data sets and states as the current version makes them; run it once for each release, before its tag.

    python tools/keep_release.py            # tests/house/released/<version>/, some 100 kB
    python tools/keep_release.py --again    # of a version that is not released yet

A test opens and restores what each released version has left here, for as long as there is a promise that it can.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/house/released"))

import scenarios

import energon_lite
from energon_lite.batching.strategy import PLAN_VERSION
from energon_lite.cli.main import main as command
from energon_lite.order.orders import ORDER_VERSION

ROOT = Path(__file__).resolve().parents[1]
_DOCUMENT = "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits:\n  train:\n"
_BLENDS = {
    "blend.yaml": "    blend:\n      - {path: prose, weight: 3}\n      - {path: verse, weight: 1}\n",
    "epochs.yaml": "    blend_epochized:\n      - {path: prose, repetitions: 1.5}\n      - {path: verse}\n",
    "schedule.yaml": "    blend:\n      - {path: prose, weight: {linear: {0: 0.9, 40: 0.1}}}\n"
    "      - {path: verse, weight: {linear: {0: 0.1, 40: 0.9}}}\n",
    "subset.yaml": "    subset: {range: [20%, 90%]}\n    blend:\n      - {path: prose, weight: 1}\n"
    "      - {path: verse, weight: 2}\n",
}


def _tar(path: Path, samples: list[tuple[str, str]]) -> None:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, text in samples:
            info = tarfile.TarInfo(f"{key}.txt")
            info.size = len(data := text.encode())
            tar.addfile(info, io.BytesIO(data))


def make_data(folder: Path) -> None:
    """Data sets and blends of them, prepared and measured by the commands."""
    for name, count in (("prose", 24), ("verse", 10)):
        (folder / name).mkdir(parents=True)
        texts = [(f"{name[0]}{number:02d}", " ".join(["word"] * (number * 5 % 9 + 1))) for number in range(count)]
        for shard in range(2):
            _tar(folder / name / f"shard-{shard}.tar", texts[shard * count // 2 : (shard + 1) * count // 2])
        words = ["--non-interactive", "--split-parts", "train:shard-.*", "--split-parts", "val:shard-1.*"]
        words += ["--sample-type", "TextSample", "--field-map", '{"text": "txt"}']
        _run("prepare", str(folder / name), *words)
    _run("measure", str(folder / "prose"), "--task-encoder", "scenarios:Words", "--num-workers", "0")
    lines = (json.dumps({"text": " ".join(["line"] * (number % 4 + 1))}) for number in range(15))
    (folder / "notes.jsonl").write_text("\n".join(lines) + "\n")
    os.utime(folder / "notes.jsonl", (scenarios.TIME, scenarios.TIME))
    _run("prepare", str(folder / "notes.jsonl"))
    for name, blend in _BLENDS.items():
        (folder / name).write_text(_DOCUMENT + blend)


def _run(*words: str) -> None:
    command(list(words), standalone_mode=False)


def keep(folder: Path) -> None:
    """Make all that is kept of the current version. It names no folder of this machine but a temporary one."""
    with tempfile.TemporaryDirectory() as made:
        make_data(Path(made) / "data")
        shutil.copytree(Path(made) / "data", folder / "data")
    versions = {"energon_lite": energon_lite.__version__, "order_version": ORDER_VERSION, "plan_version": PLAN_VERSION}
    runs = {name: scenarios.run(name, folder / "data") for name in scenarios.SCENARIOS}
    lines = [f"{json.dumps(name)}: {json.dumps(found, separators=(',', ':'))}" for name, found in runs.items()]
    text = f'{{"versions": {json.dumps(versions)},\n"runs": {{\n' + ",\n".join(lines) + "\n}}\n"
    (folder / "states.json").write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description="Keep data sets and states of the current version for a test.")
    parser.add_argument("--again", action="store_true", help="make those of this version anew")
    folder = ROOT / "tests/house/released" / energon_lite.__version__
    if folder.exists() and not parser.parse_args().again:
        raise SystemExit(f"{folder} is there: raise energon_lite.__version__, or say --again if it is not released")
    shutil.rmtree(folder, ignore_errors=True)
    keep(folder)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder}: {size:,} bytes")


if __name__ == "__main__":
    main()
