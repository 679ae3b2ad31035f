"""JSONL files as data sets: as Energon reads them, alone and in blends, and with all that shards can."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from energon_lite import (
    BestFit,
    Capacity,
    Cooker,
    TaskEncoder,
    TextSample,
    basic_sample_keys,
    get_loader,
    get_train_dataset,
    stateless,
)
from energon_lite.extras.energon.epath import EPath
from energon_lite.extras.energon.factories.kinds import IJsonlIndexReader, IJsonlIndexWriter
from tests.testing import ALONE, output_of, refusal_of, take, train_loader, val_loader


def write(path: Path, count: int, name: str = "text") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    records = [{"text": f"{name} {number}", "tokens": [number] * (number % 9 + 1)} for number in range(count)]
    path.write_text("\n".join(json.dumps(record) + "\n" * (record["tokens"][0] % 3) for record in records))
    return path


@stateless
def cook(sample: Any) -> TextSample:
    return TextSample(**basic_sample_keys(sample), text=sample["json"]["text"])


class Texts(TaskEncoder):
    cookers = [Cooker(cook)]


class Tokens(TaskEncoder):
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        return {"tokens": np.array(sample["json"]["tokens"])}


def test_offsets_of_lines_are_read_and_written_by_tools_of_users(tmp_path: Path, tools: Any) -> None:
    from megatron.energon.flavors.jsonl import ijsonl

    path = write(tmp_path / "chats.jsonl", 25)
    tools.energon_prepare(path)
    index, theirs = path.with_suffix(".jsonl.idx"), list(ijsonl.IJsonlIndexReader(path))
    before = index.read_bytes()
    with IJsonlIndexReader(path) as offsets:
        assert list(offsets) == theirs == [offsets[at] for at in range(len(offsets))]
        assert json.loads(path.read_bytes()[offsets[7] : offsets[8]])["text"] == "text 7"
        with pytest.raises(IndexError, match="26 offsets"):
            offsets[26]
    assert IJsonlIndexReader.count_samples(str(path)) == 25
    assert IJsonlIndexReader.size(path) == path.stat().st_size
    with pytest.raises(KeyError), IJsonlIndexWriter(EPath(path)) as broken:
        broken.append(0)
        raise KeyError
    assert index.read_bytes() == before
    index.unlink()
    with IJsonlIndexWriter(EPath(path)) as made:
        for offset in theirs:
            made.append(offset)
    assert index.read_bytes() == before
    assert len(tools.lite_samples(path, "train")) == 25


def test_blended_shuffled_and_resumed(tmp_path: Path, leaf_of: Callable[[int, str], Path]) -> None:
    write(tmp_path / "a.jsonl", 30, "a")
    write(tmp_path / "b/b.jsonl", 20, "b")
    c = str(leaf_of(10, "c"))
    blend = tmp_path / "blend.yaml"
    leaves = [{"path": path, "repetitions": times} for path, times in (("a.jsonl", 1), ("b/b.jsonl", 2), (c, 3))]
    blend.write_text(json.dumps({"splits": {"train": {"blend_epochized": leaves}}}))

    def loader(workers: int) -> Any:
        return train_loader(blend, workers, batch_size=4, task_encoder=Texts(), repeat=False)

    def texts(batches: Any) -> list[list[str]]:
        return [list(batch.text) for batch in batches]

    with loader(0) as whole:
        batches = texts(whole)
    times = {f"a {n}": 1 for n in range(30)} | {f"b {n}": 2 for n in range(20)} | {f"c-{n}": 3 for n in range(10)}
    assert Counter(itertools.chain(*batches)) == times
    with loader(2) as first:
        begun = texts(take(first, 9))
        state = first.save_state_rank()
    with loader(1) as second:
        second.restore_state_rank(state)
        assert begun + texts(second) == batches


def test_a_line_that_is_broken_is_skipped_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 5)
    with path.open("ab") as file:
        file.write(b'\n{"text": "cut o')
    quarantine = tmp_path / "bad.jsonl"
    with val_loader(path, batch_size=3, task_encoder=Texts(), quarantine=quarantine) as loader:
        assert [batch.text for batch in loader] == [["text 0", "text 1", "text 2"], ["text 3", "text 4"]]
    (line,) = [json.loads(text) for text in quarantine.read_text().splitlines()]
    assert line["key"] == "5" and "a.jsonl" in json.dumps(line) and "a.jsonl/a.jsonl" not in json.dumps(line)


def test_prepared_by_command_and_planned_by_lengths(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", 50)
    with path.open("a") as file:
        file.write("\n[1, 2]\n")
    output = output_of("prepare", path, "--length-field", "json.tokens", "--no-progress")
    assert "51 samples" in output and "1 line without a JSON object" in output
    assert sorted(found.name for found in tmp_path.iterdir()) == [
        "a.jsonl", "a.jsonl.energon_lite.columns", "a.jsonl.energon_lite.idx", "a.jsonl.idx",
    ]  # fmt: skip
    assert "--split-ratio: a JSONL file" in refusal_of("prepare", path, "--split-ratio", "8,1,1", "--non-interactive")
    options: dict[str, Any] = {"batch_size": None, "batching": BestFit(Capacity(12)), "repeat": False}
    dataset = get_train_dataset(path, task_encoder=Tokens(), worker_config=ALONE, **options)
    batches = [[len(tokens) for tokens in batch["tokens"]] for batch in get_loader(dataset)]
    assert all(sum(batch) <= 12 for batch in batches)
    assert Counter(itertools.chain(*batches)) == Counter(number % 9 + 1 for number in range(50))
    assert "best_fit" in output_of("plan", path, "--capacity", 12)
    assert "a.jsonl" in output_of("info", path) and "51" in output_of("info", path)
