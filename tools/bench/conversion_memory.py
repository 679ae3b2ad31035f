"""Peak memory of converting weights, both ways, beside the size of the largest tensor.

A random Llama is written as safetensors files, tensor by tensor. Each conversion runs in a process of its own that
reads the peak of its resident memory (``VmHWM``) before and after; the difference is what the conversion needed, the
code that it imports included. "tensors whole" is with a checkpoint in which each tensor is one rectangle, as a trainer
on one rank saves it; otherwise rectangles have up to 64 MiB. The mark: below 2 times the largest tensor.

    python tools/bench/conversion_memory.py                # 0.1 GB
    python tools/bench/conversion_memory.py --gigabytes 1
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from energon_lite.trainer.conversion.huggingface_folder import divide, huggingface_name, index_json, model_shapes
from energon_lite.trainer.conversion.language_config import huggingface_config
from energon_lite.trainer.conversion.safetensors_file import TensorType, write_safetensors
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.parallel.shards import Box

#: Run in a process of its own; prints the growth of the peak in bytes.
_CHILD = """
import re, sys, torch
from energon_lite.trainer.conversion.export import native_to_huggingface
from energon_lite.trainer.conversion.from_huggingface import huggingface_to_native
from energon_lite.trainer.conversion.export import native_to_file

def peak():
    with open("/proc/self/status") as status:
        return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", status.read())[1])

torch.set_num_threads(1)
before = peak()
way, source, target = sys.argv[1:4]
if way == "to-native":
    huggingface_to_native(source, target, read_bytes=int(sys.argv[4]))
elif way == "there-and-back":
    huggingface_to_native(source, target, read_bytes=int(sys.argv[4]))
    native_to_huggingface(target, target + "-back")
elif way == "to-file":
    native_to_file(source, target)
else:
    native_to_huggingface(source, target)
print(peak() - before)
"""


def model_of(nbytes: float, layers: int) -> ModelConfig:
    """A Llama of about so many bytes in float32, whose embeddings are its largest tensors."""
    width = 64
    while True:
        config = ModelConfig(
            hidden_size=width + 64,
            num_layers=layers,
            num_heads=8,
            num_kv_heads=2,
            ffn_size=3 * (width + 64),
            vocab_size=16 * (width + 64) + 1,
        )
        if 4 * sum(torch.Size(shape).numel() for shape in model_shapes(config).values()) > nbytes:
            return config
        width += 64


def write_model(folder: Path, config: ModelConfig, shard_bytes: int) -> int:
    """Write a random model; return the bytes of its largest tensor."""
    folder.mkdir()
    shapes = {huggingface_name(name): shape for name, shape in model_shapes(config).items()}
    sizes = {name: 4 * torch.Size(shape).numel() for name, shape in shapes.items()}
    division = divide({name: TensorType(torch.float32, shape) for name, shape in shapes.items()}, shard_bytes)
    for file, (names, _) in division.items():
        types = {name: (torch.float32, shapes[name]) for name in names}
        with write_safetensors(folder / file, types, None) as writer:
            for name in names:
                writer.put(name, Box((0,) * len(shapes[name]), shapes[name]), torch.randn(shapes[name]))
    where = {name: file for file, (names, _) in division.items() for name in names}
    (folder / "model.safetensors.index.json").write_bytes(index_json(where, sum(sizes.values()), 0))
    (folder / "config.json").write_text(json.dumps(huggingface_config(config, torch.float32)))
    return max(sizes.values())


def growth(way: str, *arguments: object) -> int:
    """Growth of the peak of a process that converts, in bytes."""
    command = [sys.executable, "-c", _CHILD, way, *map(str, arguments)]
    # A fixed threshold: glibc raises its own to 32 MiB once a mapped block is freed, and then keeps freed tensors below
    # that size in its heap, more or fewer by chance.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": str(128 << 10)}
    return int(subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout)


def measure(root: Path, gigabytes: float, layers: int = 6) -> dict[str, Any]:
    """All ways; growth of the peak by way, and what it is to be compared with."""
    config = model_of(gigabytes * 2**30, layers)
    largest = write_model(root / "hf", config, shard_bytes=int(gigabytes * 2**30 / 3))
    files = list((root / "hf").glob("*.safetensors"))
    whole = 2 * largest  # more than any tensor with its padding: one rectangle each
    peaks = {
        "to native": growth("to-native", root / "hf", root / "native", 64 << 20),
        "to Hugging Face": growth("to-hf", root / "native", root / "back"),
        "to native, tensors whole": growth("to-native", root / "hf", root / "whole", whole),
        "to Hugging Face, tensors whole": growth("to-hf", root / "whole", root / "back-whole"),
        "to one file, tensors whole": growth("to-file", root / "whole", root / "one.safetensors"),
    }
    return {"model": sum(file.stat().st_size for file in files), "largest": largest, "peaks": peaks}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=0.1)
    parser.add_argument("--folder", default=None, help="where to write; three times the model's size is needed")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found = measure(Path(folder), options.gigabytes)
    print(f"model {found['model'] / 2**20:.0f} MiB, largest tensor {found['largest'] / 2**20:.0f} MiB")
    for way, peak in found["peaks"].items():
        print(f"{way:32s} {peak / 2**20:7.0f} MiB, {peak / found['largest']:.2f} x the largest tensor")


if __name__ == "__main__":
    main()
