"""What the benchmark scripts share: tiny data sets, fresh processes, medians, tables.

Nothing here asserts anything about time. A number means something only beside others from the same machine and hour, so
every script alternates what it compares and prints medians with the smallest and the largest value.
"""

from __future__ import annotations

import io
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

__all__ = ["fresh_process", "machine", "make_blend", "make_dataset", "spread", "table", "write_shards"]


def make_dataset(folder: Path, samples: int, payload: int = 200) -> Path:
    """A prepared data set of text samples in one shard.

    Args:
        samples: how many.
        payload: bytes of text in each.
    """
    from energon_lite.storage.prepare import prepare_dataset

    folder.mkdir(parents=True)
    with tarfile.open(folder / "shard-000.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
        for number in range(samples):
            text = f"{folder.name} {number} ".ljust(payload, "x").encode()
            info = tarfile.TarInfo(f"{number:06d}.txt")
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text))
    prepare_dataset(folder, split_parts={"train": ".*"}, sample_type="TextSample", field_map={"text": "txt"}, workers=1)
    return folder


def write_shards(
    folder: Path, samples: Iterable[dict[str, bytes]], per_shard: int, sample_type: str, field_map: dict[str, str]
) -> Path:
    """A prepared data set of these samples in tar shards; what prepare writes serves Megatron-Energon too."""
    from energon_lite.storage.prepare import prepare_dataset

    folder.mkdir(parents=True)
    stream = enumerate(samples)
    while chunk := list(itertools.islice(stream, per_shard)):
        with tarfile.open(folder / f"{chunk[0][0] // per_shard:03d}.tar", "w", format=tarfile.USTAR_FORMAT) as tar:
            for number, parts in chunk:
                for name, data in parts.items():
                    info = tarfile.TarInfo(f"{number:07d}.{name}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    prepare_dataset(folder, split_parts={"train": ".*"}, sample_type=sample_type, field_map=field_map)
    return folder


def make_blend(folder: Path, sizes: Sequence[int]) -> Path:
    """A metadataset that blends data sets of these sizes, with weights 1, 2, 3, 1, 2, 3, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, samples in enumerate(sizes):
        make_dataset(folder / f"leaf-{number:03d}", samples)
        entries.append({"path": f"leaf-{number:03d}", "weight": float(1 + number % 3)})
    document = {
        "__module__": "megatron.energon",
        "__class__": "MetadatasetV2",
        "splits": {"train": {"blend": entries}},
    }
    path = folder / "blend.yaml"
    path.write_text(json.dumps(document, indent=2))  # JSON is YAML
    return path


def fresh_process(*arguments: str, code: str | None = None) -> Any:
    """Run a script (or ``code``) in a new interpreter; returns what its last line of output says, as JSON."""
    command = [sys.executable, "-c", code] if code is not None else [sys.executable, *arguments]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def spread(values: Sequence[float], digits: int = 2) -> str:
    """``median (min-max)``."""
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f}-{max(values):.{digits}f})"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A plain text table."""
    texts = [list(map(str, header)), *(list(map(str, row)) for row in rows)]
    widths = [max(len(row[column]) for row in texts) for column in range(len(header))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in texts]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def machine() -> str:
    """One line on where the numbers come from."""
    import torch

    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return (
        f"{platform.machine()}, {os.cpu_count()} cores{load}, Python {platform.python_version()}, "
        f"torch {torch.__version__}"
    )
