"""Tars and prepared folders made by hand, byte for byte the same each time."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

Parts = dict[str, bytes]


def write_tar(path: Path, samples: Sequence[tuple[str, Parts]]) -> None:
    """A tar of ``(key, {part: bytes})``, byte for byte the same each time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for key, parts in samples:
            for name, data in parts.items():
                info = tarfile.TarInfo(f"{key}.{name}")
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))


TEXT_YAML = """\
__module__: megatron.energon
__class__: StandardWebdatasetFactory
sample_type:
  __module__: megatron.energon
  __class__: TextSample
field_map:
  text: txt
"""


def write_dataset(
    path: Path,
    shards: dict[str, Sequence[tuple[str, Parts]]],
    *,
    splits: dict[str, list[str]] | None = None,
    dataset_yaml: str = TEXT_YAML,
    exclude: Sequence[str] = (),
) -> Path:
    """A prepared folder: tars and the small files of ``.nv-meta`` (the index is built when it is opened)."""
    for name, samples in shards.items():
        write_tar(path / name, samples)
    meta = path / ".nv-meta"
    meta.mkdir(parents=True, exist_ok=True)
    counts = {name: len(samples) for name, samples in shards.items()}
    (meta / ".info.json").write_text(json.dumps({"energon_version": "7.4.1", "shard_counts": counts}))
    split = {"split_parts": splits or {"train": list(shards), "val": list(shards)}, "exclude": list(exclude)}
    (meta / "split.yaml").write_text(json.dumps(split))  # JSON is YAML
    (meta / "dataset.yaml").write_text(dataset_yaml)
    return path


def text_dataset(path: Path, count: int, *, shards: int = 1, prefix: str = "") -> Path:
    """``count`` text samples with keys ``{prefix}0, {prefix}1, ...`` whose text is their key."""
    samples = [(f"{prefix}{number}", {"txt": f"{prefix}{number}".encode()}) for number in range(count)]
    size = -(-count // shards)
    return write_dataset(
        path, {f"shard-{i:03d}.tar": samples[i * size : (i + 1) * size] for i in range(shards) if samples[i * size :]}
    )
