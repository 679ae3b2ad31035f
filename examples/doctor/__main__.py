"""The doctor: examine this machine, and under torchrun all ranks and their links, before a training.

    python -m examples.doctor --path output
    torchrun --standalone --nproc-per-node 8 -m examples.doctor --path output

It names problems, each with a remedy; the exit code is 1 if there is one.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain, pairwise

import torch.distributed as dist

from energon_lite.trainer import end_process_group, start_process_group
from examples.doctor.machine import Finding, accelerators, disk, launch, limits, shared_memory
from examples.doctor.ranks import alike, clocks, link_speed, own_facts


@dataclass(frozen=True)
class Report:
    """Findings of an examination.

    Args:
        by_rank: the findings of each rank known to this one.
        speaks: True on the process that shows them.
    """

    by_rank: tuple[tuple[Finding, ...], ...]
    speaks: bool = True

    @property
    def wrong(self) -> int:
        """Number of distinct findings of level ``wrong``."""
        return len({finding for findings in self.by_rank for finding in findings if finding.level == "wrong"})


def examine(
    path: str = ".",
    *,
    megabytes: int = 64,
    timeout: float = 60.0,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Examine this machine, and under torchrun all ranks together. Every rank must call it.

    Args:
        path: folder of future checkpoints.
        megabytes: size of the all-reduce that measures links, in MB.
        timeout: seconds to wait for other ranks.
        environment: environment variables; None for those of the process.

    Returns:
        The findings of all ranks on rank 0, of the own rank on others.

    Example:
        >>> examine("output").wrong
        0
    """
    variables = os.environ if environment is None else environment
    checks = (
        accelerators(variables),
        shared_memory(variables),
        limits(),
        disk(path),
    )
    mine = [*launch(variables), *chain.from_iterable(checks)]
    # With some faults, ranks could not connect or communicate.
    faults = {finding.topic for finding in mine if finding.level == "wrong"}
    if faults & {"ranks", "GPU"} or int(variables.get("WORLD_SIZE") or "1") == 1:
        return Report((tuple(mine),))
    return _together(mine, megabytes, timeout)


def _together(mine: list[Finding], megabytes: int, timeout: float) -> Report:
    """Run the checks for which ranks must communicate."""
    made, limit = False, timedelta(seconds=timeout)
    try:
        device, made = start_process_group(timeout=limit)
        quiet = dist.new_group(backend="gloo", timeout=limit)  # of all ranks on the CPU, in addition to the default one
        world, rank = dist.get_world_size(), dist.get_rank()
        facts = [own_facts()] * world
        dist.all_gather_object(facts, facts[0], group=quiet)
        shared = [*alike(facts), *clocks(facts, quiet), *link_speed(device, megabytes)]
        gathered = [tuple(mine)] * world
        dist.all_gather_object(gathered, tuple(mine), group=quiet)
        # Findings common to all ranks are added to each, and shown once.
        by_rank = tuple((*findings, *shared) for findings in gathered)
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


def report_lines(by_rank: Sequence[Sequence[Finding]]) -> Iterator[str]:
    """Yield the findings of all ranks as lines: each once, with the ranks that have it unless all do.

    Findings of level ``ok`` are shown for the first rank only, because each rank has, for example, another number of
    free bytes.
    """
    owners: dict[Finding, list[int]] = {}
    for rank, findings in enumerate(by_rank):
        for finding in findings:
            if finding.level != "ok" or finding in by_rank[0]:
                owners.setdefault(finding, []).append(rank)
    width = max((len(finding.topic) for finding in owners), default=0)
    for finding, ranks in owners.items():
        who = "" if finding.level == "ok" or len(ranks) == len(by_rank) else f"  [{_ranks(ranks)}]"
        yield f"{finding.level:8s} {finding.topic.ljust(width)}  {finding.text}{who}"
        if finding.fix:
            yield f"{'':8s} {'':{width}}  -> {finding.fix}"


def _ranks(ranks: Sequence[int]) -> str:
    """Abbreviate a list of ranks, such as ``ranks 0-3, 7``."""
    starts = [ranks[0], *(b for a, b in pairwise(ranks) if b != a + 1)]
    ends = [*(a for a, b in pairwise(ranks) if b != a + 1), ranks[-1]]
    parts = [str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True)]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Examine this machine, and under torchrun all ranks and their links.")
    parser.add_argument("--path", default=".", help="folder for checkpoints, which is checked")
    parser.add_argument("--megabytes", type=int, default=64, help="size of the all-reduce by which links are timed")
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds to wait for other ranks")
    told = parser.parse_args()
    report = examine(told.path, megabytes=told.megabytes, timeout=told.timeout)
    if not report.speaks:
        return
    for line in report_lines(report.by_rank):
        print(line)
    if report.wrong:
        print(f"{report.wrong} thing{'s are' if report.wrong > 1 else ' is'} wrong")
        sys.exit(1)
    print("nothing is wrong")


if __name__ == "__main__":
    main()
