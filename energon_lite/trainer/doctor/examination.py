"""The whole examination, of one process or of all ranks of a launch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain

from energon_lite.trainer.doctor.finding import Finding
from energon_lite.trainer.doctor.machine import accelerators, disk, launch, limits, processors, shared_memory, software


@dataclass(frozen=True)
class Report:
    """What was found.

    Args:
        by_rank: the findings of each rank that told this one.
        speaks: this process is the one to show them.
    """

    by_rank: tuple[tuple[Finding, ...], ...]
    speaks: bool = True

    @property
    def wrong(self) -> int:
        """How many things are wrong."""
        return len({one for findings in self.by_rank for one in findings if one.level == "wrong"})


def examine(
    path: str = ".",
    *,
    megabytes: int = 64,
    timeout: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Examine this machine, and under torchrun all ranks together. Every rank must call it.

    Args:
        path: where checkpoints will be written.
        megabytes: size of the sum by which links are measured.
        timeout: seconds to wait for other ranks.
        environment: instead of the process' own.

    Returns:
        Rank 0 has the findings of all ranks, the others have their own.

    Example:
        >>> examine("output").wrong
        0
    """
    told = os.environ if environment is None else environment
    checks = (software(), accelerators(told), processors(told), shared_memory(told), limits(), disk(path))
    mine = [*launch(told), *chain.from_iterable(checks)]
    # After some mistakes, ranks could not meet, or not talk.
    faults = {finding.topic for finding in mine if finding.level == "wrong"}
    if faults & {"ranks", "GPU"} or int(told.get("WORLD_SIZE") or "1") == 1:
        return Report((tuple(mine),))
    return _together(mine, megabytes, timeout)


def _together(mine: list[Finding], megabytes: int, timeout: float) -> Report:
    """The rest of it, for which ranks must talk."""
    import torch.distributed as dist

    from energon_lite.trainer.doctor.links import alike, clocks, link_speed, own_facts
    from energon_lite.trainer.parallel.mesh import start_process_group
    from energon_lite.trainer.parallel.process_group import end_process_group

    made, limit = False, timedelta(seconds=timeout)
    try:
        device, made = start_process_group(timeout=limit)
        quiet = dist.new_group(backend="gloo", timeout=limit)  # of all ranks on the CPU, beside the default one
        world, rank = dist.get_world_size(), dist.get_rank()
        facts = [own_facts()] * world
        dist.all_gather_object(facts, facts[0], group=quiet)
        shared = [*alike(facts), *clocks(facts, quiet), *link_speed(device, megabytes)]
        found = [tuple(mine)] * world
        dist.all_gather_object(found, tuple(mine), group=quiet)
        # What all know together is said once.
        by_rank = tuple((*findings, *shared) for findings in found)
        return Report(by_rank, speaks=rank == 0)
    except (RuntimeError, ValueError, OSError) as error:
        first = str(error).strip().split("\n")[0]
        fix = (
            "are all ranks started, with the same port, and is it open? with several interfaces, name one by "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME"
        )
        talk = Finding("links", f"ranks cannot talk within {timeout:g} s: {first}", "wrong", fix)
        return Report(((*mine, talk),))
    finally:
        if made:
            end_process_group()
