"""Conversion of batches for torchtitan: inputs of its model, and labels."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F

from energon_lite.batching import PackedBatch, PaddedBatch
from energon_lite.errors import UsageError

__all__ = ["IGNORED", "model_inputs"]

#: The label that torchtitan's losses ignore.
IGNORED = -100

_THEIR_NAMES = {"tokens": "input", "position_ids": "positions"}


def model_inputs(batch: Any, seq_len: int | None = None) -> tuple[dict[str, Any], torch.Tensor]:
    """Return ``input`` and the other inputs of the model, and the labels.

    For results of :func:`~energon_lite.pack_sequences` and :func:`~energon_lite.pad_sequences`, these are the tokens,
    ``positions`` that restart in each document, and all ``media`` by name. For other batches: ``tokens`` (or
    ``input``), ``position_ids`` (or ``positions``), and every further field that is not None and does not begin with
    ``__``. Labels with a ``loss_mask`` of 0 do not count. A batch without samples becomes a row without counted labels,
    so that its rank can take part in the step.

    Args:
        batch: a mapping, or a dataclass such as :class:`~energon_lite.Batch`; rows are ``[rows, length]``.
        seq_len: length to pad rows to; None for no padding.

    Raises:
        UsageError: there are no tokens or labels, rows are longer than ``seq_len``, or a loss mask is not 0 or 1.

    Example:
        >>> inputs, labels = model_inputs(pack_sequences(samples, pad=0), seq_len=2048)
        >>> sorted(inputs), inputs["input"].shape
        (['input', 'positions'], torch.Size([1, 2048]))
    """
    inputs, without_samples = _named(batch)
    labels, mask = inputs.pop("labels"), inputs.pop("loss_mask", None)
    if without_samples or labels.numel() == 0:
        return _blank(inputs, seq_len or max(labels.shape[-1], 1))
    if mask is not None:
        if bool(((mask != 0) & (mask != 1)).any()):
            what = "a loss_mask between 0 and 1, but for torchtitan's losses a label counts, or it does not"
            raise UsageError(what, fix="give a loss_mask of 0 and 1")
        labels = labels.masked_fill(mask == 0, IGNORED)
    return (inputs, labels) if seq_len is None else _filled(inputs, labels, seq_len)


class _Constants(dict[str, Any]):
    """An input other than a tensor, such as the ids of special tokens. The validator calls ``to`` on every input."""

    def to(self, *_: Any, **__: Any) -> _Constants:
        return self


def _named(batch: Any) -> tuple[dict[str, Any], bool]:
    """Return the fields of a batch by torchtitan's names, and whether it has no samples."""
    fields: dict[str, Any] = {}
    if isinstance(batch, Mapping):
        fields = dict(batch)
    elif dataclasses.is_dataclass(batch):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    keys = fields.get("__key__")
    if isinstance(batch, PackedBatch | PaddedBatch):
        rows = {name: fields[name] for name in ("tokens", "labels", "position_ids", "loss_mask")}
        fields = rows | {name: _stacked(items) for name, items in batch.media.items()}
    inputs = {
        _THEIR_NAMES.get(name, name): _Constants(value) if isinstance(value, dict) else value
        for name, value in fields.items()
        if value is not None and not name.startswith("__")
    }
    if not {"input", "labels"} <= inputs.keys():
        present = ", ".join(fields) or "no fields"
        what = f"torchtitan trains on tokens and labels; this batch, a {type(batch).__name__}, has {present}"
        fix = "return what pack_sequences or pad_sequences makes from batch, or a dict of tokens and labels"
        raise UsageError(what, fix=f"{fix} from encode_batch")
    return inputs, isinstance(keys, list | tuple) and not keys


def _stacked(items: torch.Tensor | list[torch.Tensor]) -> Any:
    """Stack items into one tensor, padded if they differ only in their first dimension, as patches of images do."""
    if isinstance(items, torch.Tensor) or len({item.shape[1:] for item in items}) != 1:
        return items
    return torch.nn.utils.rnn.pad_sequence(items, batch_first=True)


def _blank(inputs: Mapping[str, Any], length: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Make a row without counted labels, with the inputs that belong to no sample."""
    row = {"input": torch.zeros(1, length, dtype=torch.int64)}
    if "positions" in inputs:
        row["positions"] = torch.arange(length)[None]
    constants = {name: value for name, value in inputs.items() if isinstance(value, _Constants)}
    return row | constants, torch.full((1, length), IGNORED)


def _filled(inputs: dict[str, Any], labels: torch.Tensor, seq_len: int) -> tuple[dict[str, Any], torch.Tensor]:
    """Pad rows to a length, for kernels and CUDA graphs. Padding is a document of its own."""
    rows, length = labels.shape
    if length > seq_len:
        fix = "set training.seq_len to the capacity of a pack, or cut samples in encode_sample"
        raise UsageError(f"a row of {length} tokens, and training.seq_len is {seq_len}", fix=fix)
    room = seq_len - length
    inputs["input"] = F.pad(inputs["input"], (0, room))
    if "positions" in inputs:
        inputs["positions"] = torch.cat([inputs["positions"], torch.arange(room).expand(rows, room)], dim=1)
    return inputs, F.pad(labels, (0, room), value=IGNORED)
