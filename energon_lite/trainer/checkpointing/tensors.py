"""Tensors to and from storage by ``torch.distributed.checkpoint``, by all ranks or one, with any torch since 2.6."""

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

#: Of torch 2.6, only the former functions can be told that one rank among many works alone.
_TELLS = "no_dist" in inspect.signature(dcp.save).parameters
_SAVE, _LOAD = (dcp.save, dcp.load) if _TELLS else (dcp.save_state_dict, dcp.load_state_dict)


def save_tensors(
    tensors: dict[str, Any], writer: StorageWriter, *, alone: bool, group: dist.ProcessGroup | None = None
) -> None:
    """Write tensors.

    Args:
        tensors: by their names; each rank gives what it has.
        writer: where to.
        alone: this process writes all, and does not wait for other ranks.
        group: those ranks; None for all.

    Raises:
        StateError, OSError: on all ranks: one of them could not write.
    """
    try:
        with _silence():
            _SAVE(tensors, storage_writer=writer, process_group=group, no_dist=alone)
    except CheckpointException as error:
        # It says where in torch, at length; the first rank's own error says why.
        why, _ = next(iter(error.failures.values()))
        raise (why if isinstance(why, (OSError, StateError)) else error) from error


def load_tensors(tensors: dict[str, torch.Tensor], reader: StorageReader, *, alone: bool) -> None:
    """Read tensors into memory that is there already; ``alone``: without waiting for other ranks."""
    with _silence():
        _LOAD(tensors, storage_reader=reader, no_dist=alone)


@contextmanager
def _silence() -> Iterator[None]:
    """torch warns where there is no process group, even when it is told that none is wanted, and of the older names."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="`(save|load)_state_dict` is deprecated")
        yield
