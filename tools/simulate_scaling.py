"""A model, not a measurement: step time of data-parallel training for any number of GPUs, from a few constants.

One stream computes, another communicates, each in order. A step is forward and backward passes of all micro-batches;
the parameters are a row of buckets, and each collective costs the ring's latency and bandwidth (alpha-beta):

    (ranks - 1) * (latency + bytes / ranks / bandwidth)

The bandwidth of a ring is that of a node's network cards, shared by the tensor-parallel groups of the node, times an
efficiency. Tensor-parallel communication is in the speed of the kernels. Four ways to run the optimizer:

    stock        reduces and gathers when nothing computes
    overlapped   Megatron-LLaMA's: reduces behind each micro-batch, in buckets of 200 million elements
    every        ours with reduce="every": the same in smaller buckets
    last         ours with reduce="last": reduces behind the last micro-batch only

Two constants are not known: the speed of the kernels and the efficiency of the links. They are solved for from the
*stock* rows of Megatron-LLaMA's table of LLaMA-13B (its README: tokens per second and GPU on 256 and 512 A100); its
overlapped rows are then compared. What the table does not say is assumed: tp=2 as in its scripts, 4 million tokens in a
step as in LLaMA's paper, and micro-batches of 4. That last number was chosen with the table in view: with 2, as in the
scripts, the overlapped rows come out 4 % and 5 % too slow, because gathering then takes longer than a forward pass.

That a step is put together in this way is also held against runs of our own, on two ranks: from the times of
computation and of communication alone, the steps of each way follow without any constant left to choose.

    python tools/simulate_scaling.py --plot scaling.png
    python tools/simulate_scaling.py --gpus 64 1024 --global-tokens 8e6 --hidden 8192 --layers 80 --ffn 28672 --tp 8
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

WAYS = ("stock", "overlapped", "every", "last")
#: Tokens per second and GPU that Megatron-LLaMA's README gives, by way and number of GPUs.
TABLE = {("stock", 256): 1630.0, ("stock", 512): 1430.0, ("overlapped", 256): 1890.0, ("overlapped", 512): 1845.0}
#: Seconds of a step that ``tools/bench/overlap.py`` measured, by way and micro-batches (docs/benchmarks.md).
MEASURED = {
    ("stock", 1): 1.672,
    ("stock", 4): 4.734,
    ("stock", 16): 16.88,
    ("last", 1): 1.051,
    ("last", 4): 4.108,
    ("last", 16): 16.29,
    ("every", 1): 1.053,
    ("every", 4): 4.124,
    ("every", 16): 16.48,
}
#: How far the model may be from each row of either table.
STATED_ERROR = 0.02


@dataclass(frozen=True)
class Job:
    """What is trained, and how.

    Args:
        parameters: of the whole model.
        tp: ranks that share each layer.
        sequence: tokens of a sequence.
        micro_batch: sequences of a micro-batch.
        global_tokens: tokens of a step.
    """

    parameters: float = 13.0e9
    tp: int = 2
    sequence: int = 2048
    micro_batch: int = 4
    global_tokens: float = 2048 * 2048

    def accumulation(self, gpus: int) -> int:
        """Micro-batches of a step for each replica: at least one, so few tokens on many GPUs mean larger steps."""
        replicas = gpus / self.tp
        return max(1, round(self.global_tokens / (replicas * self.micro_batch * self.sequence)))


@dataclass(frozen=True)
class Machine:
    """What it is trained on. The defaults are nodes of eight A100 with four network cards of 200 Gbit/s.

    Args:
        kernels: tokens per second of one GPU, if nothing but computation took time.
        efficiency: share of the network's bandwidth that collectives reach.
        network: bytes per second in and out of a node, each.
        gpus_per_node: GPUs that share it.
        latency: seconds of a hop.
        memory: bytes per second of a GPU's memory, for the update.
    """

    kernels: float = 1900.0
    efficiency: float = 0.5
    network: float = 4 * 200e9 / 8
    gpus_per_node: int = 8
    latency: float = 2e-6
    memory: float = 1.5e12

    def collective(self, size: float, ranks: int, tp: int) -> float:
        """Seconds to reduce and scatter, or to gather, so many bytes over the data-parallel ranks."""
        rings = max(1, min(tp, self.gpus_per_node))
        bandwidth = self.network * self.efficiency / rings
        return (ranks - 1) * (self.latency + size / ranks / bandwidth)


@dataclass(frozen=True)
class Costs:
    """What a step is put together from, in seconds.

    Args:
        forward: a forward pass of a micro-batch; its backward pass takes twice as long.
        buckets: how many.
        reduce, gather: one bucket.
        update: all that the rank updates.
    """

    forward: float
    buckets: int
    reduce: float
    gather: float
    update: float = 0.0


#: Of the runs of MEASURED: computation alone (16.27 s for 16 micro-batches), and communication alone (0.660 s for the
#: reduce-scatters and all-gathers of 20 buckets in float32, which send equally much).
MEASURED_COSTS = Costs(forward=16.27 / 16 / 3, buckets=20, reduce=0.660 / 40, gather=0.660 / 40)


def bucket_elements(way: str, ranks: int) -> float:
    """The bucket sizes: Megatron-LLaMA's scripts', and our default."""
    return 2e8 if way in ("stock", "overlapped") else max(40e6, 1e6 * ranks)


def step_time(way: str, gpus: int, job: Job, machine: Machine, micro_batches: int | None = None) -> float:
    """Seconds of a step.

    Args:
        way: one of :data:`WAYS`.
        gpus: how many, of all replicas together.
        job, machine: what is trained, on what.
        micro_batches: of each replica; None for what the tokens of a step need.
    """
    ranks, own = max(1, gpus // job.tp), job.parameters / job.tp
    buckets = max(1, math.ceil(own / bucket_elements(way, ranks)))
    elements = own / buckets
    costs = Costs(
        forward=job.micro_batch * job.sequence / job.tp / machine.kernels / 3,
        buckets=buckets,
        reduce=machine.collective(4 * elements, ranks, job.tp),
        gather=machine.collective(2 * elements, ranks, job.tp),
        update=30 * own / ranks / machine.memory,  # reads gradient, master and moments, writes all but the gradient
    )
    return scheduled(way, micro_batches or job.accumulation(gpus), costs)


def scheduled(way: str, micro_batches: int, costs: Costs) -> float:
    """Seconds of a step of so many micro-batches, from the end of an update to the end of the next one."""
    forward, buckets = costs.forward, costs.buckets
    if way == "stock":
        return 3 * forward * micro_batches + buckets * (costs.reduce + costs.gather) + costs.update
    now = 0.0
    for number in range(buckets):  # values arrive in the order of the forward pass
        now = max(now, (number + 1) * costs.gather) + forward / buckets
    network_free = buckets * costs.gather
    for micro_batch in range(micro_batches):
        now += forward if micro_batch else 0.0
        for _ in range(buckets):
            now += 2 * forward / buckets
            if way != "last" or micro_batch == micro_batches - 1:
                network_free = max(network_free, now) + costs.reduce
    return max(now, network_free) + costs.update


def tokens_per_second(way: str, gpus: int, job: Job, machine: Machine, micro_batches: int | None = None) -> float:
    """Of one GPU."""
    count = micro_batches or job.accumulation(gpus)
    tokens = count * job.micro_batch * job.sequence / job.tp
    return tokens / step_time(way, gpus, job, machine, micro_batches)


def calibrated(job: Job, machine: Machine) -> Machine:
    """The machine with the kernels and the efficiency that make the stock rows of the table come out."""
    for _ in range(50):
        # Given the efficiency, kernels from the smaller number of GPUs; given kernels, efficiency from the larger.
        machine = replace(machine, kernels=_solve("kernels", 256, job, machine))
        machine = replace(machine, efficiency=_solve("efficiency", 512, job, machine))
    return machine


def _solve(name: str, gpus: int, job: Job, machine: Machine) -> float:
    """The value of one constant for which a stock row comes out; speed grows with it."""
    low, high = (500.0, 10_000.0) if name == "kernels" else (0.01, 1.0)
    for _ in range(60):
        middle = (low + high) / 2
        fast = tokens_per_second("stock", gpus, job, replace(machine, **{name: middle})) > TABLE["stock", gpus]  # type: ignore[arg-type]
        low, high = (low, middle) if fast else (middle, high)
    return (low + high) / 2


def parameters_of(hidden: int, layers: int, ffn: int, vocabulary: int, kv_share: float = 1.0) -> float:
    """Parameters of a Llama: attention with grouped keys and values, three matrices of the MLP, two embeddings."""
    return layers * (hidden * hidden * (2 + 2 * kv_share) + 3 * hidden * ffn) + 2 * vocabulary * hidden


def plot(path: Path, gpus: Sequence[int], job: Job, machine: Machine) -> None:
    """Speed over the number of GPUs, and over the number of micro-batches."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (scale, accumulation) = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True)
    counts, most = [1, 2, 4, 8, 16, 32], max(gpus)
    for way, style in zip(WAYS, ("C3-", "C1-", "C0--", "C2-"), strict=True):
        label = way if way in ("stock", "overlapped") else f'ours, reduce="{way}"'
        scale.plot(gpus, [tokens_per_second(way, n, job, machine) for n in gpus], style, label=label)
        speeds = [tokens_per_second(way, most, job, machine, count) for count in counts]
        accumulation.plot(counts, speeds, style, label=label)
    if job == Job():
        for way, color in (("stock", "C3"), ("overlapped", "C1")):
            known = {n: speed for (name, n), speed in TABLE.items() if name == way}
            scale.plot(list(known), list(known.values()), color + "o", label=f"{way}, published")
    scale.set(
        xscale="log", xlabel="GPUs", ylabel="tokens per second and GPU", title="a fixed number of tokens in a step"
    )
    accumulation.set(xscale="log", xlabel="micro-batches of a step", title=f"{most} GPUs")
    for axes, ticks in ((scale, gpus), (accumulation, counts)):
        axes.set_xticks(list(ticks), [str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.legend(fontsize=8)
    figure.suptitle("A model of scaling, not a measurement", fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024])
    parser.add_argument("--global-tokens", type=float, default=Job.global_tokens)
    parser.add_argument("--hidden", type=int, help="with --layers and --ffn: another model than LLaMA-13B")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--ffn", type=int)
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--tp", type=int, default=Job.tp)
    parser.add_argument("--micro-batch", type=int, default=Job.micro_batch)
    parser.add_argument("--sequence", type=int, default=Job.sequence)
    parser.add_argument("--kernels", type=float, help="tokens per second of a GPU alone; calibrated if left out")
    parser.add_argument("--efficiency", type=float, help="share of the bandwidth that is reached; likewise")
    parser.add_argument("--network", type=float, default=Machine.network, help="bytes per second of a node")
    parser.add_argument("--gpus-per-node", type=int, default=Machine.gpus_per_node)
    parser.add_argument("--latency", type=float, default=Machine.latency, help="seconds of a hop")
    parser.add_argument("--accumulation", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG")
    given = parser.parse_args()

    known = calibrated(Job(), Machine())
    print("A model, not a measurement. Two constants are calibrated on the published stock rows; the others follow:")
    print(f"  kernels {known.kernels:.0f} tokens/s per GPU, {100 * known.efficiency:.0f} % of the links' bandwidth")
    for (way, gpus), published in TABLE.items():
        found = tokens_per_second(way, gpus, Job(), known)
        print(f"  {way:10} {gpus} GPUs: published {published:.0f}, model {found:.0f} ({found / published - 1:+.1%})")
    print("Two ranks on a slow link, measured here; computation and communication alone are given, the steps follow:")
    for (way, count), measured in MEASURED.items():
        seconds = scheduled(way, count, MEASURED_COSTS)
        error = seconds / measured - 1
        print(f"  {way:10} {count:2} micro-batches: measured {measured:.3f} s, model {seconds:.3f} ({error:+.1%})")
    parameters = Job.parameters
    if given.hidden:
        if not (given.layers and given.ffn):
            parser.error("--hidden needs --layers and --ffn")
        parameters = parameters_of(given.hidden, given.layers, given.ffn, given.vocabulary)
    job = Job(parameters, given.tp, given.sequence, given.micro_batch, given.global_tokens)
    machine = Machine(
        kernels=given.kernels or known.kernels * Job.parameters / parameters,  # as many operations per second
        efficiency=given.efficiency or known.efficiency,
        network=given.network,
        gpus_per_node=given.gpus_per_node,
        latency=given.latency,
    )
    print(f"\n{parameters / 1e9:.1f} billion parameters, tp={job.tp}; tokens per second and GPU (seconds of a step):")
    print("GPUs   micro-batches  " + "".join(f"{way:>20}" for way in WAYS))
    rows = [(gpus, None) for gpus in given.gpus] + [(max(given.gpus), count) for count in given.accumulation]
    for gpus, count in rows:
        cells = [
            f"{tokens_per_second(way, gpus, job, machine, count):.0f} ({step_time(way, gpus, job, machine, count):.2f})"
            for way in WAYS
        ]
        print(f"{gpus:<6} {count or job.accumulation(gpus):<14} " + "".join(f"{cell:>20}" for cell in cells))
    if given.plot:
        plot(given.plot, given.gpus, job, machine)
        print(f"curves: {given.plot}")


if __name__ == "__main__":
    main()
