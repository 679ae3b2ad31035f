"""Conversion of a Hugging Face model: to a checkpoint that any layout of ranks can read, or into a model of any layout.

Into a model, each rank reads its own part.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from energon_lite.errors import StateMismatchError, UsageError
from energon_lite.trainer.checkpointing.checkpoint import model_tensors
from energon_lite.trainer.checkpointing.files import CheckpointFiles, Place
from energon_lite.trainer.checkpointing.tensors import check_shapes
from energon_lite.trainer.checkpointing.weights import without_new, write_weights
from energon_lite.trainer.conversion.huggingface_folder import (
    CONFIG,
    EMBEDDING,
    HEAD,
    OTHER_MODELS,
    VISION,
    HuggingFaceFolder,
    check_tensors,
    keep_companions,
    model_shapes,
    native_name,
    read_json,
    their_names,
)
from energon_lite.trainer.conversion.image_config import any_model_config, vision_settings
from energon_lite.trainer.models.config import DTYPES, ModelConfig
from energon_lite.trainer.parallel.mesh import ParallelMesh
from energon_lite.trainer.parallel.shards import Box, ChunkedTensor, copy_box

#: Most bytes of a tensor that are read and written at a time.
READ_BYTES = 64 << 20

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


def huggingface_to_native(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    vocab_multiple: int = 64,
    ignore: Collection[str] = (),
    vision: str | os.PathLike[str] | None = None,
    read_bytes: int = READ_BYTES,
) -> Place:
    """Convert a Hugging Face model to a checkpoint, with one box of a tensor in memory at a time.

    Args:
        source: a folder with ``config.json`` and safetensors files.
        target: folder or URL of the new checkpoint, for the trainer's ``train.init_from``. Tokenizer and configuration
            files are kept in its folder ``huggingface``.
        dtype: type of the model and its weights, by name; None for their own.
        vocab_multiple: the vocabulary is padded to a multiple of this, with zeros.
        ignore: keys of ``config.json`` that may have any value.
        vision: a folder of an image encoder (``SiglipVisionModel``, ``CLIPVisionModel``, or a whole SigLIP or CLIP
            model) to add to the model; the projector gets random weights when training starts.
        read_bytes: bytes of a tensor that are read at a time.

    Returns:
        The path or URL of the checkpoint.

    Raises:
        ConfigError: an unknown architecture, or one with parts that ours lacks.
        StateError: a file is missing or damaged.
        StateMismatchError: tensors are missing, unexpected, or of another shape.
        UsageError: the target has checkpoints already, or the source has no safetensors files.

    Example:
        >>> huggingface_to_native("models/llama-3-8b", "checkpoints/llama-3-8b")
    """
    if CheckpointFiles(target).names():
        raise UsageError(
            "there are checkpoints already", where=target, fix="give another folder: this would become the latest one"
        )
    folder = HuggingFaceFolder(source)
    config = huggingface_model_config(source, dtype=dtype, vocab_multiple=vocab_multiple, ignore=ignore)
    reading: dict[str, Any] = {"dtype": DTYPES[dtype] if dtype else None, "read_bytes": read_bytes}
    tensors = native_tensors(folder, config, **reading)
    if vision is not None:
        if config.image_size:
            raise UsageError("the model has an image encoder already", where=source, fix="leave out the other one")
        encoder = HuggingFaceFolder(vision)
        images = vision_settings(encoder.config, where=str(encoder.path / CONFIG), ignore=ignore)
        config = dataclasses.replace(config, **images)
        tensors |= native_tensors(encoder, config, encoder=True, **reading)
        keep_companions(encoder, target, part=VISION)
    keep_companions(folder, target)
    place = write_weights(target, tensors, {"config": {"model": dataclasses.asdict(config)}})
    logger.info("%d tensors of %s are in %s", len(tensors), folder.path, place)
    return place


def native_tensors(
    folder: HuggingFaceFolder,
    config: ModelConfig,
    *,
    encoder: bool = False,
    dtype: torch.dtype | None = None,
    read_bytes: int = READ_BYTES,
) -> dict[str, ChunkedTensor]:
    """Return the tensors of a folder by their names in our checkpoints, not read yet.

    Args:
        folder: the folder of the model, or of its image encoder.
        config: configuration of the model.
        encoder: True for the folder of the image encoder.
        dtype: type of the tensors; None for their own.
        read_bytes: bytes of a tensor in one box, which are read at a time.

    Raises:
        StateMismatchError: tensors are missing, unexpected, or of another shape.
    """
    shapes, wanted, padded = folder.shapes(), model_shapes(config), model_shapes(config, padded=True)
    if encoder:
        shapes = {name: shape for name, shape in shapes.items() if not name.startswith(OTHER_MODELS)}
        wanted = {name: shape for name, shape in wanted.items() if name.startswith("vision.")}
    names = their_names(wanted, shapes, llava=config.vision is not None and not encoder)
    head = next((name for name in shapes if native_name(name) == HEAD), None)
    if config.tie_embeddings and head is not None and names.get(EMBEDDING) in shapes:
        _check_copy(folder, names[EMBEDDING], head)
        del shapes[head]
    check_tensors(shapes, {names[name]: shape for name, shape in wanted.items()}, str(folder.path))
    return {f"model.{name}": _unread(folder, names[name], padded[name], dtype, read_bytes) for name in wanted}


def _unread(
    folder: HuggingFaceFolder, name: str, shape: tuple[int, ...], dtype: torch.dtype | None, read_bytes: int
) -> ChunkedTensor:
    """Make an unread tensor of a folder, in boxes of whole rows, with zeros after its end."""
    file = folder.tensors[name]
    entry = file.entries[name]
    wanted, rows = dtype or entry.dtype, entry.shape[0]
    row_bytes = max(1, math.prod(shape[1:]) * max(wanted.itemsize, entry.dtype.itemsize))
    step = max(1, read_bytes // row_bytes)
    # Padding has its own rectangle, so that the others are rows of the file only.
    starts = [*range(0, rows, step), *range(rows, shape[0], step)]
    stops = [*starts[1:], shape[0]]
    boxes = [
        Box((start,) + (0,) * (len(shape) - 1), (stop - start, *shape[1:]))
        for start, stop in zip(starts, stops, strict=True)
    ]

    def read(box: Box) -> torch.Tensor:
        if box.offsets[0] >= rows:
            return torch.zeros(box.sizes, dtype=wanted)
        return file.read_rows(name, box.offsets[0], box.offsets[0] + box.sizes[0]).to(wanted)

    return ChunkedTensor(shape, wanted, boxes, read)


def _check_copy(folder: HuggingFaceFolder, table: str, head: str) -> None:
    """Check that an output layer stored in addition to tied embeddings equals the embedding table.

    Raises:
        StateMismatchError: it differs.
    """
    shapes = folder.shapes()
    first, second = (_unread(folder, name, shapes[name], None, READ_BYTES) for name in (table, head))
    if first.shape != second.shape or not all(torch.equal(first.read(box), second.read(box)) for box in first.boxes):
        raise StateMismatchError(
            f"embeddings are tied, but {head} is not {table}",
            where=folder.path,
            fix='set "tie_word_embeddings": false in config.json if both are meant',
        )


@torch.no_grad()
def load_huggingface(
    place: str | os.PathLike[str],
    model: nn.Module,
    config: ModelConfig,
    mesh: ParallelMesh,
    *,
    may_lack: Sequence[str] = (),
) -> None:
    """Fill a model without an optimizer with the weights of a folder, with one box of a tensor in memory at a time.

    Args:
        place: a folder with ``config.json`` and safetensors files, visible to all ranks.
        model: filled in place.
        config: result of :func:`huggingface_model_config` for the folder.
        mesh: the ranks.
        may_lack: name patterns of parameters that stay unchanged if the folder has none of them.

    Raises:
        StateError: a file is missing or damaged.
        StateMismatchError: tensors are missing, unexpected, or of another shape.

    Example:
        >>> load_huggingface("models/llama-3-8b", model, huggingface_model_config("models/llama-3-8b"), mesh)
    """
    sources = native_tensors(HuggingFaceFolder(place), config)
    targets = without_new(dict(model_tensors(model, mesh)), sources, may_lack, str(place))
    shapes = {name: tuple(source.shape) for name, source in sources.items()}
    check_shapes(targets, shapes, place, "take the folder's own settings with model.preset=init_from", "folder")
    for name, target in targets.items():
        assert isinstance(target, ChunkedTensor)
        for box in sources[name].boxes:
            copy_box(box, sources[name].read, target)
