"""Data sets with everything that has to mean the same in both libraries, and how each of them reads one."""

from __future__ import annotations

import io
import json
import os
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
import yaml
from PIL import Image

import energon_lite
from tests.testing import output_of, same

os.environ.setdefault("MSC_DISABLE_TELEMETRY", "1")


def image_bytes(number: int, kind: str) -> bytes:
    """An image of a size and mode that depend on its number."""
    generator = np.random.default_rng(number)
    mode = ["RGB", "L", "RGBA"][number % 3] if kind == "png" else "RGB"
    shape = (3 + number % 4, 5, {"RGB": 3, "RGBA": 4}.get(mode, 1))
    pixels = generator.integers(0, 256, shape, dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels.squeeze(-1) if mode == "L" else pixels, mode).save(buffer, kind)
    return buffer.getvalue()


def array_bytes(number: int) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, np.arange(number % 5, dtype=np.int32))
    return buffer.getvalue()


def parts_of(number: int) -> dict[str, bytes]:
    """Parts of all formats that both libraries decode; every second image is a PNG, the others JPEG."""
    kind = "png" if number % 2 else "jpg"
    about = {"text": [f"caption {number}", "other"], "meta": {"title": f"title {number}", "id": number}}
    return {
        kind: image_bytes(number, "png" if number % 2 else "jpeg"),
        "json": json.dumps(about).encode(),
        "txt": f"text {number} ü".encode(),
        "cls": str(number % 3).encode(),
        "npy": array_bytes(number),
        "mp": msgpack.packb({"n": number, "raw": b"\x00\x01"}),
        "seg.png": image_bytes(number, "png"),
        "bin": bytes([number, 255]),
    }


def write_shards(root: Path, per_shard: int = 3) -> Path:
    """Five shards in subfolders, in three tar formats, with folders in keys and members that belong to no sample."""
    number = 0
    formats = [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT]
    for shard, name in enumerate(
        ["train/part-000.tar", "train/part-001.tar", "train/part-002.tar", "held/out.tar", "x.0.tar"]
    ):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with tarfile.open(path, "w", format=formats[shard % 3]) as tar:
            add(tar, "__meta__/about.txt", b"not a sample")
            folder = tarfile.TarInfo("deep.er")
            folder.type = tarfile.DIRTYPE
            tar.addfile(folder)
            for _ in range(per_shard):
                key = f"deep.er/{'long' * (30 if number % 4 == 3 else 1)}/{number:04d}"
                for part, data in parts_of(number).items():
                    add(tar, f"{key}.{part}", data)
                if number % 3 == 1:
                    add(tar, "LICENSE", b"not a part")
                number += 1
    return root


def add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def write_meta(root: Path, name: str, document: Mapping[str, Any]) -> None:
    (root / ".nv-meta" / name).write_text(yaml.safe_dump(dict(document)))


def energon_prepare(root: Path, *options: str) -> str:
    """Run ``energon prepare`` in this process; returns what it printed."""
    from click.testing import CliRunner
    from megatron.energon.tools.prepare import command

    result = CliRunner().invoke(command, [str(root), "--non-interactive", "--num-workers", "1", *options])
    assert result.exit_code == 0, result.output
    return result.output


def lite_prepare(root: Path, *options: str) -> str:
    """Run ``energon-lite prepare`` in this process; returns what it printed."""
    return output_of("prepare", root, "--non-interactive", *options)


def energon_samples(root: Path, split: str, **options: Any) -> list[dict[str, Any]]:
    """All samples of a split as Energon reads them, as plain dicts."""
    import megatron.energon as lib

    @lib.edataclass
    class Cooked(lib.Sample):  # type: ignore[misc]
        crude: dict[str, Any]

    @lib.stateless
    def cook(sample: dict[str, Any]) -> Cooked:
        return Cooked(**lib.basic_sample_keys(sample), crude=dict(sample))

    class Encoder(lib.TaskEncoder):  # type: ignore[misc]
        decoder = lib.SampleDecoder()
        cookers = [lib.Cooker(cook)]

    return _samples(lib, root, split, Encoder(), options)


def lite_samples(root: Path, split: str, **options: Any) -> list[dict[str, Any]]:
    """All samples of a split as we read them, as plain dicts."""

    class Encoder(energon_lite.DefaultTaskEncoder):
        def encode_sample(self, sample: Any) -> Any:
            return sample

    return _samples(energon_lite, root, split, Encoder(), options)


def _samples(lib: Any, root: Path, split: str, encoder: Any, options: dict[str, Any]) -> list[dict[str, Any]]:
    config = lib.WorkerConfig(rank=0, world_size=1, num_workers=0)
    options |= {"split_part": split, "worker_config": config, "batch_size": None, "task_encoder": encoder}
    return [plain(sample) for sample in lib.get_loader(lib.get_val_dataset(str(root), **options))]


def plain(sample: Any) -> dict[str, Any]:
    """A sample as a dict, without what is each library's own (restore key, absolute path, sample number)."""
    import dataclasses

    crude = getattr(sample, "crude", sample)
    if isinstance(crude, dict):
        values = dict(crude)
    else:
        values = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        values["__type__"] = type(sample).__name__
    del values["__restore_key__"]
    values["__sources__"] = [(source.shard_name, source.file_names) for source in values["__sources__"]]
    return values


def assert_same(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> None:
    """Equal to the last bit and in the same order."""
    assert [sample["__key__"] for sample in ours] == [sample["__key__"] for sample in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert equal(one[name], other[name]), (one["__key__"], name, one[name], other[name])


def equal(one: Any, other: Any) -> bool:
    """Equality to the last bit, and of types."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[name], other[name]) for name in one)
    return same(one, other)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "data")


@pytest.fixture(scope="session")
def tools() -> Any:
    """The functions of this file, for tests that are imported without packages."""
    import sys

    return sys.modules[__name__]
