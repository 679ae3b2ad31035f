"""Files of the formats, made by hand or by pyarrow."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np


def png(width: int, height: int, color: Any = 0, mode: str = "RGB") -> bytes:
    """A picture of one color."""
    from PIL import Image

    stream = io.BytesIO()
    Image.new(mode, (width, height), color).save(stream, "PNG")
    return stream.getvalue()


def npy(values: Any) -> bytes:
    """An array as a file of numpy's."""
    stream = io.BytesIO()
    np.save(stream, values)
    return stream.getvalue()


def write_table(path: Path, table: Any, rows: int = 4) -> Path:
    """A table as Parquet, as an Arrow file (``.arrow``) or as an Arrow stream (``.stream.arrow``)."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=rows, write_page_checksum=True)
        return path
    make = pa.ipc.new_stream if path.name.endswith(".stream.arrow") else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, make(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=rows)
    return path


def write_megatron(
    path: Path, documents: Sequence[Sequence[Sequence[int]]], dtype: str = "<i4", modes: Sequence[int] | None = None
) -> Path:
    """``path.bin`` and ``path.idx`` of documents, which are lists of sequences of tokens."""
    codes = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<f8": 6, "<f4": 7, "<u2": 8}
    sequences = [np.array(one, dtype) for document in documents for one in document]
    lengths = np.array([len(one) for one in sequences], "<i4")
    ends = np.cumsum([0, *(one.nbytes for one in sequences)], dtype="<i8")
    firsts = np.cumsum([0, *(len(document) for document in documents)], dtype="<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, codes[dtype], len(sequences), len(firsts))
    index = head + lengths.tobytes() + ends[:-1].astype("<i8").tobytes() + firsts.astype("<i8").tobytes()
    path.parent.mkdir(parents=True, exist_ok=True)
    Path(f"{path}.idx").write_bytes(index + (b"" if modes is None else np.array(modes, "i1").tobytes()))
    Path(f"{path}.bin").write_bytes(b"".join(one.tobytes() for one in sequences))
    return path


def write_mds(
    folder: Path,
    columns: dict[str, tuple[str, int | None]],
    shards: Sequence[Sequence[Sequence[bytes]]],
    pack: Any = None,
    compression: str | None = None,
) -> Path:
    """An MDS folder of samples that are encoded already; ``columns``: encoding and size by name."""
    folder.mkdir(parents=True, exist_ok=True)
    entries = []
    for number, samples in enumerate(shards):
        made = []
        for sample in samples:
            sizes = [len(one) for one, (_, size) in zip(sample, columns.values(), strict=True) if size is None]
            made.append(np.array(sizes, "<u4").tobytes() + b"".join(sample))
        offsets = np.cumsum([8 + 4 * len(made) + 2, *map(len, made)]).astype("<u4")
        data = np.uint32(len(made)).tobytes() + offsets.tobytes() + b"{}" + b"".join(made)
        name = f"shard.{number:05}.mds"
        zipped = None
        if pack is None:
            (folder / name).write_bytes(data)
        else:
            zipped = {"basename": f"{name}.{compression}", "bytes": len(pack(data)), "hashes": {}}
            (folder / zipped["basename"]).write_bytes(pack(data))
        entries.append(
            {
                "column_names": list(columns),
                "column_encodings": [encoding for encoding, _ in columns.values()],
                "column_sizes": [size for _, size in columns.values()],
                "compression": compression,
                "format": "mds",
                "hashes": [],
                "raw_data": {"basename": name, "bytes": len(data), "hashes": {}},
                "samples": len(made),
                "size_limit": 1 << 26,
                "version": 2,
                "zip_data": zipped,
            }
        )
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": entries}))
    return folder
