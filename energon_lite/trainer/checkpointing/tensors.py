"""Saving and loading of tensors by ``torch.distributed.checkpoint``, on all ranks or one, for torch 2.6 and later."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter

from energon_lite.errors import StateError

#: In torch 2.6, only the deprecated functions support one rank among many working alone.
_TELLS = "no_dist" in inspect.signature(dcp.save).parameters
_SAVE = dcp.save if _TELLS else dcp.save_state_dict
_LOAD = dcp.load if _TELLS else dcp.load_state_dict


def save_tensors(
    tensors: dict[str, Any], writer: StorageWriter, *, alone: bool, group: dist.ProcessGroup | None = None
) -> None:
    """Write tensors to storage, together with other ranks or alone.

    Args:
        tensors: this rank's part of each tensor, by name.
        writer: the storage.
        alone: True if this process writes all tensors, without waiting for other ranks.
        group: the ranks that write; None for all.

    Raises:
        StateError, OSError: on all ranks: one of them could not write.
    """
    try:
        with _silence():
            _SAVE(tensors, storage_writer=writer, process_group=group, no_dist=alone)
    except CheckpointException as error:
        # The exception holds long tracebacks; the first rank's own error has the reason.
        why, _ = next(iter(error.failures.values()))
        raise (why if isinstance(why, (OSError, StateError)) else error) from error


def load_tensors(tensors: dict[str, torch.Tensor], reader: StorageReader, *, alone: bool) -> None:
    """Read values into existing tensors; with ``alone``, without waiting for other ranks."""
    with _silence():
        _LOAD(tensors, storage_reader=reader, no_dist=alone)


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress torch's warnings about a missing process group and deprecated function names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="`(save|load)_state_dict` is deprecated")
        yield
