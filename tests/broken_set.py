"""A data set of which some samples are broken, each in a way of its own."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
from PIL import Image

from tests.testing import write_tar

__all__ = ["FIELDS", "KINDS", "write_broken_set"]

#: What may be wrong with a sample; the kind and the part by which ``lint`` names it.
KINDS = {
    "truncated jpeg": ("decode", "jpg"),
    "wrong json": ("decode", "json"),
    "missing part": ("missing part", "txt"),
    "empty part": ("empty part", "txt"),
    "bad utf-8": ("decode", "txt"),
    "wrong npy": ("decode", "npy"),
    "double key": ("duplicate key", ""),
}
FIELDS = '{"image": "jpg", "caption": "txt"}'


def write_broken_set(
    root: Path, *, shards: int = 4, per_shard: int = 175, every: int = 100
) -> dict[tuple[str, str], str]:
    """Write shards of images, texts, JSON and arrays; every hundredth sample is broken.

    Returns:
        The kind of what is wrong, by shard and key.
    """
    image, array = io.BytesIO(), io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(image, "jpeg")
    np.save(array, np.arange(5))
    kinds, truth = list(KINDS), {}
    for shard in range(shards):
        name = f"s{shard}.tar"
        samples = []
        for number in range(shard * per_shard, (shard + 1) * per_shard):
            parts = {"jpg": image.getvalue(), "txt": b"a text", "json": json.dumps([number]).encode()}
            parts["npy"] = array.getvalue()
            key = f"{number:06d}"
            if number % every == every // 2:
                kind = kinds[number // every % len(kinds)]
                key = f"{number - 20:06d}" if kind == "double key" else key
                truth[name, key] = kind
                _break(parts, kind)
            samples.append((key, parts))
        write_tar(root / name, samples)
    return truth


def _break(parts: dict[str, bytes], kind: str) -> None:
    if kind == "truncated jpeg":
        parts["jpg"] = parts["jpg"][:-100]
    elif kind == "wrong json":
        parts["json"] = b'{"a": '
    elif kind == "missing part":
        del parts["txt"]
    elif kind == "empty part":
        parts["txt"] = b""
    elif kind == "bad utf-8":
        parts["txt"] = b"abc\xff"
    elif kind == "wrong npy":
        parts["npy"] = parts["npy"][:-3]
