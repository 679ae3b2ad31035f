"""Writing of a checkpoint's tensors, saved in rectangles, to safetensors files; of all of them, to one file."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from energon_lite.errors import StateError, UsageError
from energon_lite.trainer.checkpointing.checkpoint import read_state
from energon_lite.trainer.checkpointing.reader import CheckpointReader, read_content
from energon_lite.trainer.checkpointing.weights import find_weights
from energon_lite.trainer.conversion.huggingface_folder import Division, divide
from energon_lite.trainer.conversion.safetensors_file import SafetensorsWriter, TensorType
from energon_lite.trainer.models.config import ModelConfig, model_config_of
from energon_lite.trainer.parallel.shards import Box


@dataclass(frozen=True)
class TargetTensor(TensorType):
    """A tensor of an output file, and the source of its values.

    Args:
        dtype, shape: those in the file; further rows of the source are padding, and left out.
        source: name of the tensor in the checkpoint.
    """

    source: str


def write_files(saved: CheckpointReader, folder: Path, division: Division, targets: Mapping[str, TargetTensor]) -> None:
    """Write each file of a division, with one rectangle in memory at a time."""
    for file, (names, metadata) in division.items():
        tensors = {name: (targets[name].dtype, targets[name].shape) for name in names}
        with closing(SafetensorsWriter(folder / file, tensors, metadata)) as writer:
            for name in names:
                target = targets[name]
                for box in saved.boxes(target.source):
                    if (kept := _without_padding(box, target.shape)) is not None:
                        values = saved.read(target.source, box)
                        writer.put(name, kept, values[: kept.sizes[0]] if kept.sizes else values)
                        del values  # free it before the next one is read
            writer.finish()


def model_config_at(place: str | os.PathLike[str]) -> ModelConfig:
    """Return the configuration of a checkpoint's model.

    Raises:
        StateError: the checkpoint has none.
    """
    state = read_state(place)
    if "config" not in state:
        raise StateError("the checkpoint does not say what model it is of", where=place, fix="use one of the Trainer's")
    return model_config_of(state["config"])


def _without_padding(box: Box, shape: tuple[int, ...]) -> Box | None:
    """Return the part of a rectangle inside a shape with fewer rows; None if it is empty."""
    if not shape:
        return box
    rows = min(box.sizes[0], shape[0] - box.offsets[0])
    return Box(box.offsets, (rows, *box.sizes[1:])) if rows > 0 else None


def native_to_file(source: str | os.PathLike[str], target: str | os.PathLike[str], *, optimizer: bool = False) -> Path:
    """Write the weights of a checkpoint of any layout to one safetensors file, by the names of the parameters.

    Args:
        source: a checkpoint, or a folder of checkpoints, of which the newest is used.
        target: path of the file, on a local disk; it must not exist.
        optimizer: also write the optimizer's state, as ``optimizer.<parameter>.exp_avg``.

    Returns:
        The file. The text ``energon_lite`` of its header is JSON with ``step`` and the ``model``'s configuration.

    Raises:
        StateError: there is no complete checkpoint.
        UsageError: the file exists already.

    Example:
        >>> native_to_file("output/run/checkpoints", "weights.safetensors")
    """
    place, path = find_weights(source), Path(target)
    if path.exists():
        raise UsageError("there is a file already", where=path, fix="remove it, or give another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    with CheckpointReader(place) as saved:
        about = {"step": read_content(saved, place)["step"], "model": dataclasses.asdict(model_config_at(place))}
        kinds = ("model.", "optimizer.") if optimizer else ("model.",)
        names = [name for name in saved.shapes if name.startswith(kinds)]
        targets = {n.removeprefix("model."): TargetTensor(saved.dtype(n), saved.shapes[n], n) for n in names}
        (file,) = divide(targets, sum(target.nbytes for target in targets.values())).values()
        metadata = {"format": "pt", "energon_lite": json.dumps(about)}
        write_files(saved, path.parent, {path.name: file._replace(metadata=metadata)}, targets)
    return path
