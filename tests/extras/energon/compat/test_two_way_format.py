"""What one library prepared, the other one reads: the same samples, to the last bit, in the same order.

Both write the same files, so what is read is prepared by Energon here.
"""

from __future__ import annotations

import io
import json
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from megatron.energon.tools.prepare import command as energon_command

from energon_lite.cli.main import main
from tests.testing import write_tar

FIELD_MAPS = {
    "CaptioningSample": {"image": "jpg,png", "caption": "json[text][0]"},
    "ImageClassificationSample": {"image": "seg.png", "label": "cls", "label_name": "json[meta][title]"},
    "VQASample": {"image": "npy", "context": "mp[n]", "answers": "json[text]", "answer_weights": "bin"},
}


def compare(tools: Any, root: Path, split: str, count: int, **options: Any) -> list[dict[str, Any]]:
    ours = tools.lite_samples(root, split, **options)
    assert len(ours) == count
    tools.assert_same(ours, tools.energon_samples(root, split, **options))
    return list(ours)


@pytest.mark.parametrize("sample_type", FIELD_MAPS)
def test_sample_types(shards: Path, tools: Any, sample_type: str) -> None:
    field_map = json.dumps(FIELD_MAPS[sample_type])
    tools.energon_prepare(shards, "--split-ratio", "4,0,1", "--sample-type", sample_type, "--field-map", field_map)
    for split, count in (("train", 12), ("test", 3)):
        for sample in compare(tools, shards, split, count):
            assert sample["__type__"] == sample_type


def test_splits(shards: Path, tools: Any) -> None:
    """By regular expressions, by brace patterns with exclusions, and in documents with other names."""
    tools.energon_prepare(
        shards,
        *("--split-parts", "train:train/part-{000..001}", "--split-parts", "val:(held|train/.*-002)"),
        *("--sample-type", "TextSample", "--field-map", '{"text": "txt"}', "--dataset-yaml-name", "text.yaml"),
    )
    for split in ("train", "val"):
        compare(tools, shards, split, 6, dataset_config="text.yaml")
    split_parts = {"val": ["train/part-{002..000}.tar", "{x.0,held/out}.tar"]}
    excluded = ["train/part-001.tar", "train/part-000.tar/deep.er/long/0001", "x.0.tar/deep.er/long/00{12,13}"]
    tools.write_meta(shards, "some.yaml", {"split_parts": split_parts, "exclude": excluded})
    (shards / ".nv-meta/split.yaml").unlink()
    samples = compare(tools, shards, "val", 15 - 3 - 1 - 2, dataset_config="text.yaml", split_config="some.yaml")
    assert [sample["__key__"][-2:] for sample in samples] == ["06", "07", "08", "00", "02", "14", "09", "10", "11"]


@pytest.mark.parametrize("options", [["--split-ratio", "8,1,1"], ["--split-ratio", "1,1,1", "--shuffle-tars"]])
def test_both_write_the_same_files(shards: Path, tools: Any, options: list[str]) -> None:
    """Byte for byte, where bytes matter; else the same document."""
    sample = ["--sample-type", "CaptioningSample", "--field-map", '{"image": "jpg,png", "caption": "txt"}']
    found = {}
    for name, prepare in (("energon", tools.energon_prepare), ("ours", tools.lite_prepare)):
        root = Path(shutil.copytree(shards, shards.parent / name))
        prepare(root, *options, *sample)
        info = json.loads((root / ".nv-meta/.info.json").read_text())
        found[name] = {
            "counts": list(info["shard_counts"].items()),
            "split": document(root, "split.yaml"),
            "dataset": document(root, "dataset.yaml"),
            "indexes": {path.name: path.read_bytes() for path in root.rglob("*.tar.idx")},
            "database": database(root / ".nv-meta/index.sqlite"),
        }
    assert found["ours"] == found["energon"]
    assert len(found["ours"]["indexes"]) == 5


def database(path: Path) -> dict[str, Any]:
    with closing(sqlite3.connect(path)) as connection:
        tables = {
            name: sorted(connection.execute(f"SELECT * FROM {name}").fetchall()) for name in ("samples", "sample_parts")
        }
        kinds = connection.execute("SELECT type, name, tbl_name FROM sqlite_master ORDER BY name").fetchall()
        columns = {name: connection.execute(f"PRAGMA table_info({name})").fetchall() for name in tables}
        return tables | {"kinds": kinds, "columns": columns}


def test_energon_takes_over_and_we_follow(shards: Path, tools: Any) -> None:
    """Prepared here, data changed, prepared again by Energon: our old index must not be used."""
    options = ["--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}']
    tools.lite_prepare(shards, *options)
    shutil.copy(shards / "x.0.tar", shards / "held/out.tar")  # other samples, the same number of them
    (shards / "x.0.tar").unlink()
    tools.energon_prepare(shards, *options, "--force-overwrite")
    assert (shards / ".nv-meta/energon_lite.idx").exists()
    samples = compare(tools, shards, "train", 12)
    assert samples[0]["text"].startswith("text 12")


def test_keys_that_appear_twice_and_no_database(shards: Path, tools: Any) -> None:
    """Energon refuses to prepare such a folder, but loads it when it was prepared here."""
    shutil.copy(shards / "x.0.tar", shards / "y.tar")
    options = ["--split-ratio", "1,0,0", "--sample-type", "TextSample", "--field-map", '{"text": "txt"}']
    assert "no index.sqlite: key 'deep.er/long/0012' appears twice" in tools.lite_prepare(shards, *options)
    assert not (shards / ".nv-meta/index.sqlite").exists()
    compare(tools, shards, "train", 18)


@pytest.mark.parametrize("seed", [None, 42])
def test_shards_are_divided_alike(tmp_path: Path, seed: int | None) -> None:
    from megatron.energon import BaseWebdatasetFactory as Theirs

    from energon_lite.extras.energon import BaseWebdatasetFactory as Ours
    from energon_lite.extras.energon.factories.kinds import WebdatasetMeta

    found = []
    for prepare in (Theirs.prepare_dataset, Ours.prepare_dataset):
        root = tmp_path / prepare.__module__.split(".")[0]
        for shard in range(12):
            write_tar(root / f"parts/data-{shard}.tar", [(str(shard), {"txt": b"a"})])
        ratio = [("train", 0.5), ("val", 0.3), ("other", 0.2)]
        prepare(root, ["parts/data-{0..11}.tar"], split_parts_ratio=ratio, shuffle_seed=seed, workers=1)
        splits = {name: WebdatasetMeta.from_config(root, split_part=name).split_part_files for name, _ in ratio}
        found.append({name: list(shards) for name, shards in splits.items()})
    assert found[0] == found[1]


# -- answers that were written for Energon's questions mean the same here ---------------------------------------------


def document(root: Path, name: str) -> Any:
    return yaml.safe_load((root / ".nv-meta" / name).read_text())


def prepared(root: Path, tools: Any, answers: str, *options: str, ours: bool) -> tuple[int, Path]:
    """Prepare the same shards with either, by the same standard input."""
    tools.write_shards(root)
    command = (main, ["prepare"]) if ours else (energon_command, [])
    result = CliRunner().invoke(command[0], [*command[1], str(root), "--num-workers", "1", *options], input=answers)
    return result.exit_code, root


@pytest.mark.parametrize(
    ("answers", "options"),
    [
        ("8,1,1\ny\n0\ny\njpg,png\njson[text][0]\n", []),
        ("0.5, 0.25, 0.25\n\n8\n\ntxt\n", []),
        ("8,1,1\ny\n1\ny\nseg.png\ncls\n\n", []),  # no answer leaves label_name out
        ("8,1,1\ny\n1\ny\nseg.png\nnowhere\ncls\njson[meta][title]\n", []),  # a part that is not there is asked again
        ("8,1,1\ny\n11\n", []),  # crude
        ("8,1,1\nn\n", []),
        ("8,1,1\ny\n99\n9\ny\nnpy\nmp[n]\n\n\n", []),
        ("y\n8\ny\ntxt\n", ["--split-ratio", "1,1,1"]),
        (
            "y\ntxt\n",
            ["--split-parts", "train:train/.*", "--split-parts", "val:held/.*", "--sample-type", "TextSample"],
        ),
        ("1,1,0\ny\n8\nn\n", ["--exclude", "held"]),  # a sample_loader
        ("y\n8\ny\ntxt\n", ["--split-ratio", "1,1,1", "--shuffle-tars", "--dataset-yaml-name", "other.yaml"]),
        # A sample type without a field map makes a sample_loader.py with both.
        ("", ["--non-interactive", "--split-ratio", "1,0,0", "--sample-type", "TextSample"]),
    ],
)
def test_the_same_answers(tmp_path: Path, tools: Any, answers: str, options: list[str]) -> None:
    (their_code, theirs) = prepared(tmp_path / "theirs", tools, answers, *options, ours=False)
    (our_code, ours) = prepared(tmp_path / "ours", tools, answers, *options, ours=True)
    assert their_code == our_code == 0
    names, own = ({path.name for path in (root / ".nv-meta").iterdir()} for root in (theirs, ours))
    assert names <= own and ("dataset.yaml" in names) == ("dataset.yaml" in own)
    for name in names & {"dataset.yaml", "other.yaml", "split.yaml"}:
        assert document(ours, name) == document(theirs, name)


def test_a_second_time(tmp_path: Path, tools: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    for ours in (False, True):
        root = tmp_path / str(ours)
        for answers in ("8,1,1\nn\n", "n\n", "y\n1,0,0\nn\n"):
            assert prepared(root, tools, answers, ours=ours)[0] == 0
        assert document(root, "split.yaml")["split_parts"]["val"] == []
        code, _ = prepared(root, tools, "", "--non-interactive", "--split-ratio", "1,0,0", ours=ours)
        assert code == 1
