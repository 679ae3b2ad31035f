"""Loading of a Hugging Face folder into a model of any layout of ranks: each rank reads its own part."""

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
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.shards import Box, ChunkedTensor

logger = logging.getLogger(__name__)


def is_huggingface(place: str | os.PathLike[str]) -> bool:
    """Return whether a place is a model folder of Hugging Face, as opposed to a checkpoint."""
    return (Path(place) / CONFIG).is_file()


def huggingface_model_config(
    place: str | os.PathLike[str], *, dtype: str | None = None, vocab_multiple: int = 64, ignore: Collection[str] = ()
) -> ModelConfig:
    """Return our configuration of a folder's model; arguments and errors as for :func:`huggingface_to_native`."""
    values, where = read_json(Path(place) / CONFIG), str(Path(place) / CONFIG)
    return any_model_config(values, where=where, dtype=dtype, vocab_multiple=vocab_multiple, ignore=ignore)


@torch.no_grad()
def load_huggingface(
    place: str | os.PathLike[str],
    model: nn.Module,
    config: ModelConfig,
    mesh: ParallelMesh,
    optimizer: OverlappedDistributedOptimizer | None = None,
    *,
    may_lack: Sequence[str] = (),
) -> None:
    """Fill a model with the weights of a folder, with one needed box of a tensor in memory at a time.

    Args:
        place: a folder with ``config.json`` and safetensors files, visible to all ranks.
        model: filled in place.
        config: result of :func:`huggingface_model_config` for the folder.
        mesh: the ranks.
        optimizer: optimizer of the model; its master values are set too.
        may_lack: name patterns of parameters that stay unchanged if the folder has none of them.

    Raises:
        StateError: a file is missing or damaged.
        StateMismatchError: tensors are missing, unexpected, or of another shape.

    Example:
        >>> load_huggingface("models/llama-3-8b", model, huggingface_model_config("models/llama-3-8b"), mesh)
    """
    sources = native_tensors(HuggingFaceFolder(place), config)
    if optimizer is not None:
        optimizer.wait_parameters()
    for name, target in model_tensors(model, mesh):
        assert isinstance(target, ChunkedTensor)
        ours = name.removeprefix("model.")
        if name not in sources and any(fnmatch.fnmatchcase(ours, pattern) for pattern in may_lack):
            logger.info("%s has no %s: it begins as new", place, name)
            continue
        if name not in sources or sources[name].shape != target.shape:
            has = f"shape {list(sources[name].shape)}" if name in sources else "nothing"
            raise StateMismatchError(
                f"the folder has {has} for {name}, the model has shape {list(target.shape)}",
                where=place,
                fix="take the folder's own settings with model.preset=init_from",
            )
        _copy(sources[name], target)
    for shard in optimizer.shards() if optimizer is not None else ():
        shard.take_values()


def _copy(source: ChunkedTensor, target: ChunkedTensor) -> None:
    """Fill the boxes of a tensor from another division of it into boxes; unneeded boxes are not read."""
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
    """Return the slices of a part within the values of a box."""
    return tuple(slice(a - b, a - b + size) for a, b, size in zip(part.offsets, whole.offsets, part.sizes, strict=True))
