"""Exchange of plain data between ranks, as JSON bytes in tensors, never as pickles."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from energon_lite.errors import TopologyError, UsageError, listed
from energon_lite.topology import launched_place
from energon_lite.worker_config import WorkerConfig

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def is_running() -> bool:
    """Return whether a process group is initialised."""
    return dist.is_available() and dist.is_initialized()


def device_of(group: ProcessGroup | None) -> torch.device:
    """Return the device of tensors for the group's collectives: the CPU if possible, which needs no GPU sync."""
    backends = dist.get_backend_config(group)  # such as "cpu:gloo,cuda:nccl"
    return torch.device("cpu") if "cpu:" in backends else torch.device("cuda", torch.cuda.current_device())


def broadcast_plain(value: Any, *, src_rank: int, group: ProcessGroup | None) -> Any:
    """Return the ``value`` of one rank on every rank of the group; ``src_rank`` is the rank *within the group*.

    Raises:
        TopologyError: the group has no such rank.
    """
    size = dist.get_world_size(group)
    if not 0 <= src_rank < size:
        raise TopologyError(
            f"src_rank {src_rank} in a group of {size} ranks", fix="give the rank inside the data-parallel group"
        )
    source = src_rank if group is None else dist.get_global_rank(group, src_rank)
    own = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    payload = broadcast_bytes(own if dist.get_rank() == source else None, source, group)
    return json.loads(bytes(payload.cpu().numpy()))


def broadcast_bytes(own: torch.Tensor | None, source: int, group: ProcessGroup | None) -> torch.Tensor:
    """Broadcast the bytes of one rank, as uint8, to all ranks of a group. A first broadcast sends their number.

    Args:
        own: the bytes, on the rank that sends them; None on the others.
        source: the rank that sends them, in the default group.
    """
    device = device_of(group)
    size = torch.tensor([0 if own is None else own.numel()], dtype=torch.int64, device=device)
    dist.broadcast(size, source, group=group)
    buffer = torch.empty(int(size), dtype=torch.uint8, device=device) if own is None else own.to(device)
    dist.broadcast(buffer, source, group=group)
    return buffer


def gather_plain(value: Any, *, group: ProcessGroup | None) -> list[Any]:
    """Return the values of all ranks of the group, on every rank."""
    size = dist.get_world_size(group)
    device = device_of(group)
    data = json.dumps(value).encode()
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(data)], dtype=torch.int64, device=device), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8).to(device)
    payloads = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in range(size)]
    dist.all_gather(payloads, padded, group=group)
    return [json.loads(bytes(payload.cpu().numpy())) for payload in payloads]


def gather_states(state: Any, config: WorkerConfig) -> list[Any]:
    """Return the states of all ranks of the data-parallel group, on every rank of it.

    Raises:
        TopologyError: no process has one of the data-parallel ranks, so its batches are missing.
    """
    gathered = gather_plain([config.rank, state], group=config.data_parallel_group)
    ranks = [rank for rank, _ in gathered]
    if missing := sorted(set(range(config.world_size)) - set(ranks)):
        raise TopologyError(
            f"no process is data-parallel rank {listed(missing)} of {config.world_size}; the processes are ranks "
            f"{listed(ranks)}: some have the same batches, and other batches are never delivered",
            fix="give each its own rank: WorkerConfig.default_worker_config(), or from_mesh for a model in parts",
        )
    return [state for _, state in gathered]


def check_place(config: WorkerConfig) -> None:
    """Refuse a rank that differs from the rank given by the process group or the launcher. Needs no collective.

    Ranks that share their batches (fewer data-parallel ranks than processes) can only be checked if they have a
    ``data_parallel_group``; the group of a mesh is always right.

    Raises:
        TopologyError: this process has another rank.
    """
    if config.replica is not None or not config.loads_data:
        return
    group = config.data_parallel_group
    own = (config.rank, config.world_size)
    if is_running():
        place = (dist.get_rank(group), dist.get_world_size(group))
        by = "the process group"
        fix = "give WorkerConfig.default_worker_config(data_parallel_group=...), made after init_process_group"
    else:
        launched = launched_place()
        if launched is None:
            return
        place = launched[:2]
        by = " and ".join(launched.names)
        fix = (
            f"give WorkerConfig(rank={place[0]}, world_size={place[1]}); or unset {by}, if they are not this process's"
        )
    is_shared = group is None and own[1] != place[1] and not config._before_group
    if own != place and not is_shared:
        raise TopologyError(
            f"the loader is made for data-parallel rank {own[0]} of {own[1]}, and this process is rank {place[0]} of "
            f"{place[1]}, says {by}",
            fix=fix,
        )


def check_group(*, world_size: int, group: ProcessGroup | None) -> None:
    """Check that there is a process group with the right number of ranks.

    Raises:
        UsageError: there is no process group for the collectives.
        TopologyError: the group has another number of ranks.
    """
    if not is_running():
        raise UsageError(
            f"a pass that ends, over data whose content decides how many batches there are, on {world_size} ranks: the "
            "ranks have to agree at each step on whether any of them still has a batch, and there is no process group",
            fix="call torch.distributed.init_process_group before the loop; or build the data set on each rank with "
            "WorkerConfig(rank=0, world_size=1), so that each of them goes through all of it",
        )
    if dist.get_world_size(group) != world_size:
        raise TopologyError(
            f"world_size is {world_size}, but the data-parallel group has {dist.get_world_size(group)} ranks",
            fix="give WorkerConfig the data_parallel_group of these ranks",
        )


def agree_on_step(step: int, *, group: ProcessGroup | None) -> tuple[int, int]:
    """Return the smallest and the largest step number of the ranks. One all-reduce of 16 bytes."""
    numbers = torch.tensor([step, -step], dtype=torch.int64, device=device_of(group))
    dist.all_reduce(numbers, op=dist.ReduceOp.MIN, group=group)
    least, most = numbers.tolist()
    return least, -most


#: Counts that are added up.
_SUMS = ("batches", "samples", "tokens", "skipped", "failed", "dropped", "bytes_read", "worker_deaths")


def gathered_stats(own: Mapping[str, Any], config: WorkerConfig) -> dict[str, Any]:
    """Return the statistics of all ranks, on each rank. A collective.

    Args:
        own: statistics of this rank.
        config: rank and world size of this process.

    Raises:
        UsageError: there is no process group.
        TopologyError: the group has another number of ranks.
    """
    if config.world_size == 1:
        ranks = [dict(own)]
    else:
        if not is_running():
            raise UsageError(
                f"gather_stats on {config.world_size} ranks without a process group to ask the others over",
                fix="call torch.distributed.init_process_group before, or stats(), which is about this rank",
            )
        check_group(world_size=config.world_size, group=config.data_parallel_group)
        ranks = gather_plain(own, group=config.data_parallel_group)
    waits = [stats["wait_seconds"] for stats in ranks]
    slowest = max(range(len(waits)), key=waits.__getitem__)
    return {
        **{name: sum(stats[name] for stats in ranks) for name in _SUMS},
        "fallbacks": dict(sum((Counter(stats["fallbacks"]) for stats in ranks), Counter[str]())),
        "wait_seconds": waits[slowest],
        "wait_seconds_mean": sum(waits) / len(waits),
        "wait_rank": slowest,
        "bottleneck": ranks[slowest]["bottleneck"],
        "ranks": ranks,
    }
