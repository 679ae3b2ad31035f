"""Conversion of a checkpoint of any layout to one safetensors file with our names."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

from energon_lite.errors import UsageError
from energon_lite.trainer.checkpointing.reader import CheckpointReader, read_content
from energon_lite.trainer.checkpointing.weights import find_weights
from energon_lite.trainer.conversion.huggingface_folder import divide
from energon_lite.trainer.conversion.weight_files import TargetTensor, model_config_at, write_files


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
