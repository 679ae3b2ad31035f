"""Batches shared between the ranks of a model replica: one rank loads them, its peers receive them.

A batch is sent as one flat buffer: its structure (pickled, because the ranks of a run are one program) and the memory
of its tensors, one after the other. It goes from the first rank of the replica to the pipeline stages that need it,
from there along the context-parallel axis, and from each of these ranks along the tensor-parallel axis: one collective
per axis, after another one for the size.
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from energon_lite.batching.digests import NO_SAMPLES
from energon_lite.errors import TopologyError, WorkerError, field_of
from energon_lite.loading.batch_path import BatchPath, PathRequest
from energon_lite.loading.executors.transport import pack, unpack
from energon_lite.loading.iterators.collectives import broadcast_bytes, device_of
from energon_lite.loading.makers.outcomes import Result
from energon_lite.tensors import map_tensors
from energon_lite.topology import Replica


@dataclasses.dataclass(frozen=True)
class _Failed:
    """Placeholder for a batch that could not be made, so that no peer waits for it."""

    reason: str


@dataclasses.dataclass(frozen=True)
class _Shared:
    """A batch for the peers, the digest of its samples, and the step that its rank has taken: pass and position."""

    batch: Any
    digest: int
    step: tuple[int, int]


class ReplicaPath(BatchPath):
    """Path of results among the ranks of a replica: loaded by one of them, or by each; compared on request.

    Args:
        request: the path of this rank's own results, and its replica.
    """

    def __init__(self, request: PathRequest):
        replica = request.worker_config.replica
        assert replica is not None
        self._before = request.before
        self._iterator = request.iterator
        self._replica = replica
        self._check_peers = request.check_peers
        self._digest = NO_SAMPLES

    def take(self) -> Result | None:
        replica = self._replica
        if replica.share == "broadcast":
            result = self._shared()
        else:
            result = self._before.take()
            if result is not None and replica.is_last_stage:
                result = dataclasses.replace(result, batch=select_fields(result.batch, replica.last_stage_fields))
        if result is not None and self._check_peers:
            check_peers(result.batch, replica)
        return result

    def forget(self) -> None:
        self._before.forget()

    def digest(self, result: Result) -> int:
        return self._digest if self._replica.share == "broadcast" else result.digest

    def _shared(self) -> Result | None:
        """Return the next result of the rank that loads for this one; None: the loop is over, which that rank reports
        if the others cannot know it."""
        iterator = self._iterator
        own = Result(None)

        def take() -> _Shared | None:
            nonlocal own
            result = self._before.take()
            own = result or own
            return None if result is None else _Shared(result.batch, result.digest, iterator.step)

        if iterator.knows_end and iterator.is_over():
            return None
        shared = _share_batch(take, self._replica)
        if not iterator.knows_end:
            iterator.follow(None if shared is None else shared.step)
        if shared is None:
            return own if iterator.knows_end else None
        self._digest = shared.digest
        return dataclasses.replace(own, batch=shared.batch)


def _share_batch(take: Callable[[], Any], replica: Replica) -> Any:
    """Return the next batch, made by one rank of the replica. All its ranks that need batches must call it, in step.

    Args:
        take: makes the batch; called on the first rank only.
        replica: the ranks of the replica.

    Raises:
        WorkerError: on the peers, if ``take`` raised on the first rank (which raises its own error).
    """
    error: Exception | None = None
    batch: Any = None
    if replica.is_first:
        try:
            batch = take()
        except Exception as failure:
            error = failure
            batch = _Failed(f"{type(failure).__name__}: {failure}")
    batch = _to_stages(batch, replica)
    # Only ranks that are first on all later axes broadcast along an axis: they reach the others along those axes.
    for axis, later in (("cp", ("tp",)), ("tp", ())):
        group = replica.groups.get(axis)
        if group is not None and not any(replica.coordinates.get(other, 0) for other in later):
            batch = _broadcast(batch, group)
    if error is not None:
        raise error
    if isinstance(batch, _Failed):
        raise WorkerError(
            f"the rank that loads for this one failed: {batch.reason}", fix="see the error of that rank for its cause"
        )
    return batch


def select_fields(batch: Any, fields: tuple[str, ...] | None) -> Any:
    """Return the needed part of a batch: these entries of a dict; of a dataclass, the other fields become None.

    Names that begin with ``__`` (keys, sources) are always kept.

    Raises:
        TopologyError: the batch has no such field.
    """
    if fields is None:
        return batch
    is_record = dataclasses.is_dataclass(batch) and not isinstance(batch, type)
    names = [*batch] if isinstance(batch, Mapping) else []
    if is_record:
        names = [field.name for field in dataclasses.fields(batch)]
    if missing := [name for name in fields if name not in names]:
        raise TopologyError(
            f"last_stage_fields names {missing[0]!r}, which a {type(batch).__name__} does not have",
            fix="the fields of the batch are: " + ", ".join(map(str, names)) if names else "make batches dicts",
        )
    unwanted = [name for name in names if name not in fields and not str(name).startswith("__")]
    if isinstance(batch, Mapping):
        return {name: value for name, value in batch.items() if name not in unwanted}
    selected = copy.copy(batch)
    for name in unwanted:
        object.__setattr__(selected, name, None)
    return selected


def batch_checksum(batch: Any) -> int:
    """Return a 63-bit hash over all tensors and arrays of a batch, their types and shapes, and its restore key."""
    digest = hashlib.blake2b(digest_size=8)

    def add(tensor: torch.Tensor) -> torch.Tensor:
        digest.update(f"{tensor.dtype}{tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return tensor

    map_tensors(add, batch)
    digest.update(repr(field_of(batch, "__restore_key__")).encode())
    return int.from_bytes(digest.digest(), "little") >> 1


def check_peers(batch: Any, replica: Replica) -> None:
    """Compare a batch with those of the tensor- and context-parallel peers. All of them must call it, in step.

    Raises:
        TopologyError: the batches differ; the message has the checksum of each peer.
    """
    own = batch_checksum(batch)
    for axis in ("cp", "tp"):
        if (group := replica.groups.get(axis)) is None:
            continue
        device = device_of(group)
        sums = list(torch.zeros(dist.get_world_size(group), dtype=torch.int64, device=device))
        dist.all_gather(sums, torch.tensor(own, dtype=torch.int64, device=device), group=group)
        checksums = [int(value) for value in sums]
        if len(set(checksums)) > 1:
            listed = ", ".join(f"{axis} rank {rank}: {value:016x}" for rank, value in enumerate(checksums))
            raise TopologyError(
                f"peers along {axis} have different batches ({listed})",
                fix="a hook depends on something other than its arguments and self.rng: the rank, the time, a global "
                "generator in a hook marked restore_seeds=False, or files that differ between machines",
            )


def _to_stages(batch: Any, replica: Replica) -> Any:
    """Send the batch from the first stage to the others that need it; one rank of each stage takes part."""
    others = replica.fed_stages[1:]
    group = replica.groups.get("pp")
    if group is None or not others or any(replica.coordinates.get(axis, 0) for axis in ("cp", "tp")):
        return batch
    if replica.is_first:
        for stage in others:
            _send(_for_stage(batch, stage, replica), stage, group)
        return batch
    return _receive(0, group) if replica.needs_data else batch


def _for_stage(batch: Any, stage: int, replica: Replica) -> Any:
    if not isinstance(batch, _Shared) or stage != replica.stages - 1:
        return batch
    try:
        return dataclasses.replace(batch, batch=select_fields(batch.batch, replica.last_stage_fields))
    except TopologyError as error:
        return _Failed(str(error))


def _flat(value: Any) -> torch.Tensor:
    """Return a value as one buffer of bytes."""
    return torch.from_numpy(np.concatenate([np.frombuffer(part, dtype=np.uint8) for part in pack(value)]))


def _unflat(buffer: torch.Tensor) -> Any:
    return unpack(memoryview(buffer.cpu().numpy()))  # type: ignore[arg-type]


def _broadcast(value: Any, group: dist.ProcessGroup) -> Any:
    """Return the ``value`` of the group's first rank, on all of its ranks."""
    source = dist.get_global_rank(group, 0)
    if dist.get_rank() == source:
        broadcast_bytes(_flat(value), source, group)
        return value
    return _unflat(broadcast_bytes(None, source, group))


def _send(value: Any, rank: int, group: dist.ProcessGroup) -> None:
    device = device_of(group)
    target = dist.get_global_rank(group, rank)
    buffer = _flat(value).to(device)
    dist.send(torch.tensor([buffer.numel()], dtype=torch.int64, device=device), target, group=group)
    dist.send(buffer, target, group=group)


def _receive(rank: int, group: dist.ProcessGroup) -> Any:
    device = device_of(group)
    source = dist.get_global_rank(group, rank)
    size = torch.zeros(1, dtype=torch.int64, device=device)
    dist.recv(size, source, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
    dist.recv(buffer, source, group=group)
    return _unflat(buffer)
