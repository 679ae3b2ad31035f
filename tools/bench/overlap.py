"""Does communication hide behind computation? Step times of sharded optimizers over a link of limited bandwidth.

Two ranks run in two network namespaces, joined by a cable that a token bucket limits. Each trains a row of linear
layers in float32, each of which also takes a given time in the forward pass and twice that in the backward pass, in
which the processor is free: as if a GPU did it. So what is measured is when things are launched and waited for, and two
cores are enough. By default a micro-batch computes for one and a half times as long as a step communicates.

How to read it: "bound" is the longer of computation alone (one rank, no network) and communication alone (the reduce-
scatters and all-gathers of a step, one after the other, nothing else), each measured here. "hidden" is what a way to do
it saves of what the bound would save, both against "no overlap": the same collectives, all of them while nobody
computes. 100 % cannot be reached: gradients of the first layer come when nothing is left to compute. Who reduces behind
every micro-batch has more to hide: "of its own" is the same against a step that reduces as often while nobody computes.

    sudo python tools/bench/overlap.py [--rate 400mbit] [--rounds 3] [--accumulation 1 4 16]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from common import machine, spread, table
from torch import nn
from two_hosts import TwoHosts, why_not

from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.collectives import all_gather, reduce_scatter
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.parallel.parameters import ParameterLayout

WIDTH, LAYERS = 512, 20
Step = Callable[[int], None]
METHODS = {
    "no overlap": "none",
    "no overlap, every": "each",
    "overlapped, last": "last",
    "overlapped, every": "every",
    "DDP + ZeroRedundancyOptimizer": "zero",
    "FSDP2": "fsdp",
}


#: What a way to do it is to be compared with, if that is not "no overlap".
OWN_BASELINE = {"no overlap, every": "no overlap, every", "overlapped, every": "no overlap, every"}


class Busy(torch.autograd.Function):
    """Takes some time, and twice that backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0], None


class Layer(nn.Module):
    def __init__(self, seconds: float):
        super().__init__()
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH, bias=False), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        # Waits as a kernel would: the gradient of the weight comes when the layer's backward pass is over.
        return Busy.apply(self.linear(x), self.seconds)


def make_net(seconds: float) -> nn.Sequential:
    """Layers that together compute for so long."""
    torch.manual_seed(0)
    net = nn.Sequential(*(Layer(seconds / LAYERS / 3) for _ in range(LAYERS)))
    for p in net.parameters():
        p.parallel_layout = ParameterLayout(tuple(p.shape))  # type: ignore[attr-defined]
    return net


def backward(net: nn.Module) -> None:
    net(torch.ones(1, WIDTH)).sum().backward()


def ours(seconds: float, mesh: ParallelMesh, reduce: str, *, overlap: bool = True) -> Step:
    net = make_net(seconds)
    optimizer = OverlappedDistributedOptimizer(net, mesh, OptimizerConfig(reduce=reduce, bucket_size=WIDTH * WIDTH))

    def step(micro_batches: int) -> None:
        if overlap:
            optimizer.begin_step(micro_batches)
        for _ in range(micro_batches):
            backward(net)
            if overlap:
                optimizer.end_micro_batch()
        optimizer.step(lr=1e-4)
        if not overlap:
            optimizer.wait_parameters()

    return step


def each(seconds: float) -> Step:
    """Reduces behind each micro-batch, while nobody computes: what ``reduce="every"`` has to hide."""
    net, (reduce, gather) = make_net(seconds), collectives()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def step(micro_batches: int) -> None:
        for _ in range(micro_batches):
            backward(net)
            reduce()
        optimizer.step()
        optimizer.zero_grad()
        gather()

    return step


def zero(seconds: float) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    net = DistributedDataParallel(make_net(seconds), bucket_cap_mb=WIDTH * WIDTH * 4 / 2**20)
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.AdamW, lr=1e-4, fused=True)

    def step(micro_batches: int) -> None:
        for number in range(micro_batches):
            with contextlib.nullcontext() if number == micro_batches - 1 else net.no_sync():
                backward(net)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fsdp(seconds: float) -> Step:
    """As ZeRO-2 that reduces behind the last backward pass: no less communication is to be had from it."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    net: Any = make_net(seconds)
    mesh = init_device_mesh("cpu", (2,))
    for layer in net:
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(net, mesh=mesh, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4, fused=True)

    def step(micro_batches: int) -> None:
        for number in range(micro_batches):
            last = number == micro_batches - 1
            net.set_requires_gradient_sync(last)
            net.set_reshard_after_backward(last)
            backward(net)
        optimizer.step()
        optimizer.zero_grad()

    return step


def make_step(method: str, seconds: float, mesh: ParallelMesh) -> Step:
    if method == "zero":
        return zero(seconds)
    if method == "fsdp":
        return fsdp(seconds)
    if method == "each":
        return each(seconds)
    return ours(seconds, mesh, "last" if method == "none" else method, overlap=method != "none")


def timed(step: Step, micro_batches: int, steps: int) -> list[float]:
    """Seconds of each step, after one that is not counted; one goes into the next, as in training."""
    step(micro_batches)
    times = [time.perf_counter()]
    for _ in range(steps):
        step(micro_batches)
        times.append(time.perf_counter())
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def collectives() -> tuple[Callable[[], None], Callable[[], None]]:
    """The reduce-scatters and the all-gathers of all buckets; each call waits for them."""
    grads, values = [[torch.ones(WIDTH * WIDTH) for _ in range(LAYERS)] for _ in range(2)]
    size, rank = WIDTH * WIDTH // 2, dist.get_rank()
    mine = slice(rank * size, (rank + 1) * size)

    def reduce() -> None:
        for work in [reduce_scatter(whole[mine], whole, async_op=True) for whole in grads]:
            work.wait()

    def gather() -> None:
        for work in [all_gather(whole, whole[mine], async_op=True) for whole in values]:
            work.wait()

    return reduce, gather


def communication() -> Step:
    """The collectives of a step alone."""
    reduce, gather = collectives()

    def step(_: int) -> None:
        reduce()
        gather()

    return step


def work(rank: int, address: str, rounds: int, accumulation: list[int], seconds: float) -> None:
    """One rank; the first prints a line of JSON for each thing measured. All take turns, as the load may change."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{address}:29555", rank=rank, world_size=2)
    mesh, alone = build_mesh(), ParallelMesh()
    alone_on_the_wire = communication()
    given = torch.tensor(seconds or 1.5 * statistics.median(timed(alone_on_the_wire, 1, 5)))
    dist.broadcast(given, src=0)
    seconds = float(given)
    steps = {"computation alone": ours(seconds, alone, "last"), "communication alone": alone_on_the_wire}
    steps |= {name: make_step(method, seconds, mesh) for name, method in METHODS.items()}
    for name in METHODS:
        steps[name](1)  # the first step learns the order
    for count in accumulation:
        for _ in range(rounds):
            for name, step in steps.items():
                dist.barrier()
                times = timed(step, count, 2)
                if rank == 0:
                    print(json.dumps([name, count, times]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def report(found: dict[tuple[str, int], list[float]], accumulation: list[int]) -> Iterator[list[object]]:
    for count in accumulation:
        alone = ["computation alone", "communication alone"]
        bound = max(statistics.median(found[name, count]) for name in alone)
        nothing = statistics.median(found["no overlap", count])
        for name in alone:
            yield [count, name, spread(found[name, count], 3), "", "", ""]
        yield [count, "bound", f"{bound:.3f}", "1.00", "", ""]
        for name in METHODS:
            times = found[name, count]
            median = statistics.median(times)
            own = statistics.median(found[OWN_BASELINE.get(name, "no overlap"), count])
            hidden = [f"{100 * (most - median) / (most - bound):.0f} %" for most in (nothing, own)]
            yield [count, name, spread(times, 3), f"{median / bound:.2f}", *hidden]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="400mbit", help="bandwidth of the link in each direction, for tc")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way, of two steps")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--seconds", type=float, default=0.0, help="computation of a micro-batch")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        work(arguments.worker, arguments.address, arguments.rounds, arguments.accumulation, arguments.seconds)
        return
    if (missing := why_not()) is not None:
        raise SystemExit(f"cannot join two hosts: {missing}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the hosts are taken down
    with TwoHosts(arguments.rate) as hosts:
        same = [*sys.argv[1:], "--address", hosts.address(0)]
        command = [sys.executable, "-W", "ignore", __file__, *same, "--worker"]
        environment = {"OMP_NUM_THREADS": "1"}
        other = hosts.start(1, [*command, "1"], environment)
        first = hosts.start(0, [*command, "0"], environment, stdout=-1, text=True)
        try:
            output, _ = first.communicate()
        finally:
            for process in (first, other):
                process.kill()
                process.wait()
    if first.returncode:
        raise SystemExit("a rank failed")
    found: dict[tuple[str, int], list[float]] = defaultdict(list)
    for what, count, times in map(json.loads, output.splitlines()):
        found[what, count] += times
    size = WIDTH * WIDTH * LAYERS
    print(f"{machine()}; link of {arguments.rate}, {size / 1e6:.1f} million parameters in {LAYERS} buckets, float32")
    header = ["micro-batches", "", "step, s", "of the bound", "hidden", "of its own"]
    print(table(header, list(report(found, arguments.accumulation))))


if __name__ == "__main__":
    main()
