"""Weights of a checkpoint without its training state, to start another run from."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from energon_lite.errors import StateError
from energon_lite.trainer.checkpointing.checkpoint import model_tensors
from energon_lite.trainer.checkpointing.files import CheckpointFiles, Place, of_main
from energon_lite.trainer.checkpointing.tensors import (
    JSON_NAME,
    CheckpointReader,
    CheckpointWriter,
    json_tensor,
    read_content,
    read_tensors,
    save_tensors,
)
from energon_lite.trainer.parallel.mesh import ParallelMesh

logger = logging.getLogger(__name__)


def find_weights(place: str | os.PathLike[str], mesh: ParallelMesh | None = None, *, whole: bool = True) -> Place:
    """Find a checkpoint for its weights. Every rank must call it, and reads a share of the files.

    Args:
        place: a checkpoint, or a folder of checkpoints, of which the newest is used.
        mesh: the ranks; None for this process alone.
        whole: verify checksums of all files; otherwise only sizes. Its configuration can then be checked before the
            hours that a full read may take.

    Raises:
        StateError: there is none, or it is damaged. An older one is not used instead: that would silently be another
            model.
    """
    named = os.fspath(place).rstrip("/")
    root, _, last = named.rpartition("/")
    files = CheckpointFiles(named)
    if last.startswith("step-") or files.is_one():
        files, chosen = CheckpointFiles(root or "."), [last]
    else:
        chosen = files.newest_first()
    mesh = mesh or ParallelMesh()
    chosen = of_main(chosen, mesh)
    if not chosen:
        raise StateError("there is no finished checkpoint", where=named, fix="give a checkpoint, or its parent folder")
    name = chosen[0]
    damage = files.damage(name, sums=whole, share=slice(mesh.global_rank, None, mesh.world_size))
    if mesh.any_rank(damage is not None):
        fix = "write or copy it again, or name another one"
        raise StateError(damage or f"another rank found {name} damaged", where=place, fix=fix)
    return files.place(name)


def load_weights(
    place: str | os.PathLike[str],
    model: nn.Module,
    mesh: ParallelMesh,
    *,
    may_lack: Sequence[str] = (),
) -> Place:
    """Fill a model with the weights of a checkpoint of any layout, before its optimizer is made.

    Every rank must call it.

    Args:
        place: see :func:`find_weights`.
        model: filled in place.
        mesh: the ranks.
        may_lack: name patterns of parameters that stay unchanged if the checkpoint has none of them.

    Returns:
        The checkpoint that was read.

    Raises:
        StateError: there is no complete checkpoint.
        StateMismatchError: a tensor is missing or has another shape: it is of another model.

    Example:
        >>> load_weights("checkpoints/llama-3-8b", model, mesh, may_lack=["vision.*"])
    """
    checkpoint = find_weights(place, mesh)
    reader = CheckpointReader(checkpoint)
    read_content(reader, checkpoint)  # checks that it is a checkpoint of this trainer
    read_tensors(reader, without_new(dict(model_tensors(model, mesh)), reader.shapes, may_lack, checkpoint), checkpoint)
    return checkpoint


def without_new(
    tensors: dict[str, torch.Tensor], saved: Collection[str], may_lack: Sequence[str], place: Place
) -> dict[str, torch.Tensor]:
    """Return a model's tensors without those of name patterns of which nothing was saved: they begin as new."""
    for pattern in may_lack:
        fitting = {name for name in tensors if fnmatch.fnmatchcase(name.removeprefix("model."), pattern)}
        if fitting and fitting.isdisjoint(saved):
            logger.info("%s has no %s: they begin as new", place, pattern)
            tensors = {name: tensor for name, tensor in tensors.items() if name not in fitting}
    return tensors


def write_weights(root: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], state: Mapping[str, Any]) -> Place:
    """Write a checkpoint of step 0 with weights only, from one process.

    A :class:`ChunkedTensor` may compute the values of a box on demand, and the writer keeps none of them; so a model of
    any size needs only the memory of its largest box.

    Args:
        root: folder or URL of the checkpoints.
        tensors: tensors by their global names, such as ``model.norm.weight``.
        state: further values to keep, as JSON can hold them.

    Returns:
        The path or URL of the checkpoint.
    """
    files = CheckpointFiles(root)
    writer = CheckpointWriter(files.begin(0))
    content = json_tensor(step=0, updates=0, world_size=0, state=dict(state))
    try:
        save_tensors({JSON_NAME: content, **tensors}, writer, alone=True)
        return files.publish(0, writer.sums)
    except BaseException:
        files.abandon(0)
        raise
