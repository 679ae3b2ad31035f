"""From a Hugging Face folder straight into a model, whatever layout of ranks that has: each rank reads its own part."""

from __future__ import annotations

import fnmatch
import logging
import os
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import nn

from energon_lite.errors import StateMismatchError
from energon_lite.trainer.checkpointing.checkpoint import model_tensors
from energon_lite.trainer.conversion.huggingface_folder import CONFIG, HuggingFaceFolder, read_json
from energon_lite.trainer.conversion.llava import any_model_config
from energon_lite.trainer.conversion.to_native import native_tensors
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.optimizer.plain_optimizer import Optimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.shards import Box, ChunkedTensor

logger = logging.getLogger(__name__)


def is_huggingface(place: str | os.PathLike[str]) -> bool:
    """True for a model's folder of Hugging Face, which our checkpoints are not."""
    return (Path(place) / CONFIG).is_file()


def huggingface_model_config(
    place: str | os.PathLike[str], *, dtype: str | None = None, vocab_multiple: int = 64, ignore: Collection[str] = ()
) -> ModelConfig:
    """Our configuration of the model of a folder; arguments and errors as for :func:`huggingface_to_native`."""
    values, where = read_json(Path(place) / CONFIG), str(Path(place) / CONFIG)
    return any_model_config(values, where=where, dtype=dtype, vocab_multiple=vocab_multiple, ignore=ignore)


@torch.no_grad()
def load_huggingface(
    place: str | os.PathLike[str],
    model: nn.Module,
    config: ModelConfig,
    mesh: ParallelMesh,
    optimizer: Optimizer | None = None,
    *,
    may_lack: Sequence[str] = (),
) -> None:
    """Fill a model with the weights of a folder. In memory is a box of a tensor at a time, of those that are needed.

    Args:
        place: a folder with ``config.json`` and safetensors files, which all ranks see.
        model: filled in place.
        config: what :func:`huggingface_model_config` made of the folder.
        mesh: the ranks.
        optimizer: one that was made for the model; its master values follow.
        may_lack: patterns of names of parameters that stay as they are if the folder has none of them.

    Raises:
        StateError: a file is missing or damaged.
        StateMismatchError: tensors are missing, unexpected, or of another shape.

    Example:
        >>> load_huggingface("models/llama-3-8b", model, huggingface_model_config("models/llama-3-8b"), mesh)
    """
    found = native_tensors(HuggingFaceFolder(place), config)
    if optimizer is not None:
        optimizer.wait_parameters()
    for name, target in model_tensors(model, mesh):
        assert isinstance(target, ChunkedTensor)
        if name not in found and any(fnmatch.fnmatchcase(name.removeprefix("model."), one) for one in may_lack):
            logger.info("%s has no %s: it begins as new", place, name)
            continue
        if name not in found or found[name].shape != target.shape:
            has = f"shape {list(found[name].shape)}" if name in found else "nothing"
            raise StateMismatchError(
                f"the folder has {has} for {name}, the model has shape {list(target.shape)}",
                where=place,
                fix="take the folder's own settings with model.preset=init_from",
            )
        _copy(found[name], target)
    for shard in optimizer.shards() if optimizer is not None else ():
        shard.take_values()


def _copy(source: ChunkedTensor, target: ChunkedTensor) -> None:
    """Fill the boxes of a tensor from another division of the same one into boxes; what is not needed is not read."""
    for box in source.boxes:
        common = [(mine, both) for mine in target.boxes if (both := _overlap(box, mine)) is not None]
        values = source.read(box) if common else None
        for mine, both in common:
            assert values is not None
            target.read(mine)[_within(mine, both)].copy_(values[_within(box, both)])


def _overlap(one: Box, other: Box) -> Box | None:
    starts = tuple(map(max, one.offsets, other.offsets))
    stops = [min(a + m, b + n) for a, m, b, n in zip(*one, *other, strict=True)]
    sizes = tuple(stop - start for start, stop in zip(starts, stops, strict=True))
    return Box(starts, sizes) if all(size > 0 for size in sizes) else None


def _within(whole: Box, part: Box) -> tuple[slice, ...]:
    """Where a part of a box is in its values."""
    return tuple(slice(a - b, a - b + size) for a, b, size in zip(part.offsets, whole.offsets, part.sizes, strict=True))
