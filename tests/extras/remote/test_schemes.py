"""A data set by its URL: of a local folder, of Energon's cache of data sets, of NVIDIA's multi-storage-client."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from energon_lite import get_val_dataset
from energon_lite.storage.prepare.prepare import prepare_dataset
from tests.testing import alone, batches_of

OPTIONS = {"split_ratio": "1,0,0", "sample_type": "TextSample", "field_map": {"text": "txt"}}


def texts_of(path: str, workers: int = 0) -> list[str]:
    dataset = get_val_dataset(path, split_part="train", batch_size=5, worker_config=alone(workers))
    return [text for batch in batches_of(dataset) for text in batch.text]


EXPECTED = [f"text {number}" for number in range(10)]


def test_file(ten: Path) -> None:
    prepare_dataset(ten, **OPTIONS)  # type: ignore[arg-type]
    assert texts_of(f"file://{ten}") == EXPECTED


def test_cached_data_sets(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare_dataset(ten, **OPTIONS)  # type: ignore[arg-type]
    (tmp_path / "cache/coco").mkdir(parents=True)
    (tmp_path / "cache/coco/1.2").symlink_to(tmp_path)
    monkeypatch.setenv("NVDATASET_CACHE_DIR", str(tmp_path / "cache"))
    assert texts_of("dss://coco@1.2/ten") == EXPECTED
    blend = tmp_path / "blend.yaml"
    blend.write_text(
        "__module__: megatron.energon\n__class__: MetadatasetV2\nsplits: {train: {path: 'dss://coco@1.2/ten'}}\n"
    )
    assert texts_of(str(blend)) == EXPECTED


@pytest.mark.usefixtures("clients")
@pytest.mark.parametrize("workers", [0, 2])
def test_multi_storage_client(ten: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    pytest.importorskip("multistorageclient")
    provider = {"storage_provider": {"type": "file", "options": {"base_path": str(tmp_path)}}}
    (tmp_path / "msc.yaml").write_text(json.dumps({"profiles": {f"here{workers}": provider}}))
    # Its clients are kept by the names of their profiles.
    monkeypatch.setenv("MSC_CONFIG", str(tmp_path / "msc.yaml"))
    monkeypatch.setenv("MSC_DISABLE_TELEMETRY", "1")
    report = prepare_dataset(f"msc://here{workers}/ten", **OPTIONS)  # type: ignore[arg-type]
    assert report.samples == 10 and (ten / ".nv-meta/.info.json").exists()
    assert texts_of(f"msc://here{workers}/ten", workers) == EXPECTED
