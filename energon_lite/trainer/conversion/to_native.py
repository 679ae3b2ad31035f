"""Conversion of a Hugging Face model to a checkpoint that any layout of ranks can read."""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Collection
from typing import Any

import torch

from energon_lite.errors import StateMismatchError, UsageError
from energon_lite.trainer.checkpointing.checkpoint import Place
from energon_lite.trainer.checkpointing.files import CheckpointFiles
from energon_lite.trainer.checkpointing.weights import write_weights
from energon_lite.trainer.conversion.huggingface_folder import CONFIG, VISION, HuggingFaceFolder, keep_companions
from energon_lite.trainer.conversion.llava import any_model_config
from energon_lite.trainer.conversion.tensor_names import (
    EMBEDDING,
    belongs_to_encoder,
    check_tensors,
    is_head,
    model_shapes,
    their_names,
    vision_shapes,
)
from energon_lite.trainer.conversion.vision_config import vision_settings
from energon_lite.trainer.models.config import DTYPES, ModelConfig
from energon_lite.trainer.parallel.shards import Box, ChunkedTensor

#: Bytes of a tensor that are read and written at a time.
READ_BYTES = 64 << 20

logger = logging.getLogger(__name__)


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
    where = str(folder.path / CONFIG)
    config = any_model_config(folder.config, where=where, dtype=dtype, vocab_multiple=vocab_multiple, ignore=ignore)
    reading: dict[str, Any] = {"dtype": DTYPES[dtype] if dtype else None, "read_bytes": read_bytes}
    tensors = native_tensors(folder, config, **reading)
    if vision is not None:
        if config.image_size:
            raise UsageError("the model has an image encoder already", where=source, fix="leave out the other one")
        encoder = HuggingFaceFolder(vision)
        images = vision_settings(encoder.config, where=str(encoder.path / CONFIG), ignore=ignore)
        config = dataclasses.replace(config, **images)
        tensors |= encoder_tensors(encoder, config, **reading)
        keep_companions(encoder, target, part=VISION)
    keep_companions(folder, target)
    place = write_weights(target, tensors, {"config": {"model": dataclasses.asdict(config)}})
    logger.info("%d tensors of %s are in %s", len(tensors), folder.path, place)
    return place


def native_tensors(
    folder: HuggingFaceFolder,
    config: ModelConfig,
    *,
    dtype: torch.dtype | None = None,
    read_bytes: int = READ_BYTES,
) -> dict[str, ChunkedTensor]:
    """Return the tensors of a folder by their names in our checkpoints, not read yet.

    Args:
        folder: the model's folder.
        config: configuration from its ``config.json``.
        dtype: type of the tensors; None for their own.
        read_bytes: bytes of a tensor in one box, which are read at a time.

    Raises:
        StateMismatchError: tensors are missing, unexpected, or of another shape.
    """
    shapes, wanted = folder.shapes(), model_shapes(config)
    names = their_names(wanted, shapes, llava=config.vision is not None)
    head = next(filter(is_head, shapes), None)
    if config.tie_embeddings and head is not None and names[EMBEDDING] in shapes:
        _check_copy(folder, names[EMBEDDING], head)
        del shapes[head]
    check_tensors(shapes, {names[name]: shape for name, shape in wanted.items()}, str(folder.path))
    return {
        f"model.{name}": _unread(folder, names[name], shape, dtype, read_bytes)
        for name, shape in model_shapes(config, padded=True).items()
    }


def encoder_tensors(
    folder: HuggingFaceFolder, config: ModelConfig, *, dtype: torch.dtype | None = None, read_bytes: int = READ_BYTES
) -> dict[str, ChunkedTensor]:
    """Return the tensors of an image encoder's folder, by their names in a checkpoint with that encoder."""
    shapes = {name: shape for name, shape in folder.shapes().items() if belongs_to_encoder(name)}
    wanted = {name: shape for name, shape in vision_shapes(config).items() if name.startswith("vision.")}
    names = their_names(wanted, shapes, llava=False)
    check_tensors(shapes, {names[name]: shape for name, shape in wanted.items()}, str(folder.path))
    return {f"model.{name}": _unread(folder, names[name], shape, dtype, read_bytes) for name, shape in wanted.items()}


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
