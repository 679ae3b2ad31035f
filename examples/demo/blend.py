"""From samples to a blend: tar shards, ``energon-lite prepare``, and a metadataset.

<folder>/digits/train-000.tar ... val-000.tar    images and captions
<folder>/stdlib/train-000.tar ... val-000.tar    text
<folder>/blend.yaml                              the shares
"""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from examples.demo import digits, source_text
from examples.demo.errors import DemoError

SPLITS = ("train", "val")
BLEND = """\
# Three of four training samples are digits. Held-out loss is measured on digits alone.
__module__: megatron.energon
__class__: MetadatasetV2
splits:
  train:
    blend:
      - {path: ./digits, weight: 3}
      - {path: ./stdlib, weight: 1}
  val:
    path: ./digits
"""

#: A sample in webdataset's form: ``__key__``, and the bytes of each part by its extension.
RawSample = Mapping[str, "str | bytes"]


@dataclass(frozen=True)
class DatasetRecipe:
    """One data set of tar shards.

    Args:
        name: of its folder.
        sample_type: the class that a sample becomes.
        field_map: which part fills which field of that class.
        splits: samples of each split.
        shard_size: samples of a shard.
    """

    name: str
    sample_type: str
    field_map: Mapping[str, str]
    splits: Mapping[str, Iterable[RawSample]]
    shard_size: int


def recipes() -> list[DatasetRecipe]:
    """The two data sets of the demo."""
    read = digits.hold_out(digits.load_digits())
    modules = source_text.hold_out(source_text.library_modules())
    return [
        DatasetRecipe(
            "digits",
            "CaptioningSample",
            {"image": "png", "caption": "txt"},
            {
                split: [{"__key__": digit.key, "png": digit.png, "txt": digit.caption.encode()} for digit in part]
                for split, part in zip(SPLITS, read, strict=True)
            },
            shard_size=250,
        ),
        DatasetRecipe(
            "stdlib",
            "TextSample",
            {"text": "txt"},
            {
                split: [{"__key__": piece.key, "txt": piece.text.encode()} for piece in source_text.cut(part)]
                for split, part in zip(SPLITS, modules, strict=True)
            },
            shard_size=500,
        ),
    ]


def write_shards(recipe: DatasetRecipe, folder: Path) -> dict[str, int]:
    """Write a data set's shards, with the same bytes at each call.

    Args:
        recipe: the data set.
        folder: folder in which the data set's folder is made, or replaced.

    Returns:
        The number of samples of each split.
    """
    from webdataset import ShardWriter

    target = folder / recipe.name
    shutil.rmtree(target, ignore_errors=True)
    target.mkdir(parents=True)
    counts = {}
    for split, samples in recipe.splits.items():
        pattern = str(target / f"{split}-%03d.tar")
        # A fixed time of modification, because tar files keep it.
        with ShardWriter(pattern, maxcount=recipe.shard_size, mtime=0.0, verbose=0) as writer:
            for sample in samples:
                writer.write(dict(sample))
        counts[split] = writer.total
    return counts


def prepare_command(recipe: DatasetRecipe, folder: Path) -> list[str]:
    """The command that prepares a data set."""
    command = ["energon-lite", "prepare", str(folder / recipe.name), "--non-interactive"]
    for split in recipe.splits:
        command += ["--split-parts", f"{split}:{split}-.*"]
    return [*command, "--sample-type", recipe.sample_type, "--field-map", json.dumps(dict(recipe.field_map))]


def prepare(recipe: DatasetRecipe, folder: Path) -> str:
    """Run :func:`prepare_command`, with the program of this Python's environment.

    Returns:
        Its output.

    Raises:
        DemoError: it failed.
    """
    command = prepare_command(recipe, folder)
    program = Path(sys.executable).with_name(command[0])
    done = subprocess.run([str(program), *command[1:]], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise DemoError(f"This command failed:\n  {shlex.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def write_blend(folder: Path, text: str = BLEND) -> Path:
    """Write ``blend.yaml`` next to the data sets."""
    path = folder / "blend.yaml"
    path.write_text(text, encoding="utf-8")
    return path
