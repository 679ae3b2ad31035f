"""Token-capacity batching beside DynamiCat's published figures: fill, padding, bias, lateness, balance, speed.

The published data sets are known by their records, tokens and longest sample. Length sets with exactly these are made
from the quantiles of a log-normal distribution that is cut at the longest sample, in three shapes. *Narrow* is the one
whose largest of so many samples is the published one; *wide* has the spread of real texts of that kind; *between* is a
quarter of the way from the one to the other, where the published times are met best. Samples come in random order (seed
0), chunks of 2^17 are planned, 8 ranks take one micro-batch each a step.

Times are simulated: a step takes ``a + b * tokens of its largest micro-batch, padding included``. Both numbers are
fitted to the eight published times, of fixed batches and of DynamiCat's (sorted, samples times longest within the
capacity). They describe 8 RTX 4090 with ZeRO-3 and offload, and no other machine. How wide each set really is nobody
knows, so a last table goes through all combinations of spreads: in how many of them does the model meet the eight times
within 10 %, and what does best_fit gain there?

    python tools/bench/batching.py                # everything, some three minutes
    python tools/bench/batching.py --only gsm8k   # one of the sets; the time model is fitted to all of them anyway
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
from common import machine, table

from energon_lite.batching.best_fit_decreasing import pack_histogram
from energon_lite.batching.capacity import Capacity, Ints
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.steps import even_step
from energon_lite.batching.strategy import CHUNK, plan_in_chunks, strategy_from_dict
from energon_lite.extras.inspect.planning import PlanMetrics, even_balance, mean_balance, measure_plan, rank_loads

RANKS = 8


@dataclass(frozen=True)
class Published:
    """A data set of DynamiCat's document, and what was measured on it.

    Args:
        sigma: spread of the log lengths, in the narrow and in the wide shape.
        batch_size: of the fixed batches.
        capacity: of DynamiCat's, in tokens.
        seconds: with fixed batches, and with DynamiCat's.
    """

    records: int
    tokens: int
    longest: int
    sigma: tuple[float, float]
    batch_size: int
    capacity: int
    seconds: tuple[float, float]


SETS = {
    "gsm8k": Published(8_700, 1_740_000, 551, (0.272, 0.39), 24, 13_500, (363, 164)),
    "alpaca": Published(51_800, 9_280_000, 1473, (0.525, 1.0), 8, 12_000, (4372, 812)),
    "belle": Published(396_000, 107_270_000, 879, (0.257, 0.8), 12, 13_000, (23_757, 8451)),
    "ultrachat": Published(612_900, 476_230_000, 4096, (0.360, 0.9), 2, 11_500, (147_096, 41_106)),
}
#: The shapes, as the way from narrow to wide.
SHAPES = {"narrow": 0.0, "between": 0.25, "wide": 1.0}

#: Ways from narrow to wide that are combined.
WAYS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0)

#: What is compared. Capacities are filled in.
STRATEGIES: dict[str, dict[str, Any]] = {
    "fixed": {"strategy": "fixed"},
    "greedy": {"strategy": "capacity"},
    "sorted": {"strategy": "sorted_window", "batches": None},
    "window 70": {"strategy": "sorted_window", "batches": 70},
    "window 300": {"strategy": "sorted_window", "batches": 300},
    "next fit": {"strategy": "capacity", "unit": "packed_tokens"},
    "best_fit": {"strategy": "best_fit"},
    "bfd": {"strategy": "bfd"},
    "concat_split": {"strategy": "concat_split"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=[*SETS], action="append")
    parser.add_argument("--shape", choices=[*SHAPES], action="append")
    parser.add_argument("--exchange-steps", type=int, default=300, help="steps in which samples are exchanged")
    arguments = parser.parse_args()
    print(machine())
    lengths = {(name, shape): length_set(SETS[name], SHAPES[shape]) for name in SETS for shape in SHAPES}
    models = {shape: fit_model({name: lengths[name, shape] for name in SETS}) for shape in SHAPES}
    for shape, (model, errors) in models.items():
        print(
            f"\ntime model, {shape}: {model[0]:.2f} s a step, {model[1]:.3f} s per 1K tokens; error of the eight times:"
        )
        print("  " + ", ".join(f"{error:+.1%}" for error in errors))
        print(f"  rms {rms(errors):.1%}, largest {max(map(abs, errors)):.1%}")
    for name in arguments.only or SETS:
        for shape in arguments.shape or SHAPES:
            compare(name, shape, lengths[name, shape], models[shape][0], arguments.exchange_steps)
    small_ratios()
    if not arguments.only:
        all_spreads()
    speed(lengths["ultrachat", "wide"])


def length_set(wanted: Published, way: float) -> Ints:
    """Lengths with the published count, sum and maximum, in random order."""
    narrow, wide = wanted.sigma
    sigma, cut = narrow + way * (wide - narrow), float(np.log(wanted.longest))
    grid = (np.arange(wanted.records) + 0.5) / wanted.records
    low, high = 0.0, cut + 2
    for _ in range(40):
        mu = (low + high) / 2
        small = quantiles(grid[:: max(1, len(grid) // 2000)], mu, sigma, cut).mean() < wanted.tokens / wanted.records
        low, high = (mu, high) if small else (low, mu)
    lengths = np.clip(np.rint(quantiles(grid, mu, sigma, cut)), 1, wanted.longest).astype(np.int64)
    lengths[-1] = wanted.longest
    lengths = np.random.default_rng(0).permutation(lengths)
    # What rounding has left over, one token each for samples that are not at the edge.
    missing = wanted.tokens - int(lengths.sum())
    while missing:
        able = np.flatnonzero((lengths > 1) & (lengths < wanted.longest - 1))[: abs(missing)]
        lengths[able] += np.sign(missing)
        missing -= len(able) * int(np.sign(missing))
    return lengths


def quantiles(grid: np.ndarray, mu: float, sigma: float, cut: float) -> np.ndarray:
    """Quantiles of a log-normal distribution below ``exp(cut)``."""
    normal = statistics.NormalDist(mu, sigma)
    share = normal.cdf(cut)
    return np.exp([normal.inv_cdf(place * share) for place in grid])


def document(name: str, wanted: Published) -> dict[str, Any]:
    """A strategy of the table, with the numbers of a data set."""
    found = STRATEGIES[name]
    if name == "fixed":
        return {**found, "batch_size": wanted.batch_size}
    return {**found, "tokens" if name == "concat_split" else "capacity": wanted.capacity}


def step_loads(batches: MicroBatches) -> tuple[int, float]:
    """Steps of an epoch, and thousands of tokens of the largest micro-batch of each, summed."""
    starts = np.arange(0, len(batches), RANKS)
    return len(starts), float(np.maximum.reduceat(batches.space(), starts).sum()) / 1000


def fit_model(lengths: dict[str, Ints]) -> tuple[np.ndarray, list[float]]:
    """Seconds a step and per 1K tokens, by least squares of relative errors; and these errors."""
    rows, seconds = [], []
    for name, wanted in SETS.items():
        global_sort = {**document("sorted", wanted), "order": "none"}
        for strategy, time_taken in zip((document("fixed", wanted), global_sort), wanted.seconds, strict=True):
            rows.append(step_loads(strategy_from_dict(strategy).plan(lengths[name])))
            seconds.append(time_taken)
    matrix = np.array(rows) / np.array(seconds)[:, None]
    model = np.linalg.lstsq(matrix, np.ones(len(seconds)), rcond=None)[0]
    return model, [float(error) for error in matrix @ model - 1]


def all_spreads() -> None:
    """Each set with each of several spreads: what depends on them, and what does not."""
    cases = ("fixed", "sorted", "best_fit")
    loads = {}
    for (name, wanted), way in itertools.product(SETS.items(), WAYS):
        lengths = length_set(wanted, way)
        plans = (
            plan_in_chunks(strategy_from_dict(document(case, wanted)), lengths, chunk=len(lengths)) for case in cases
        )
        loads[name, way] = np.array([step_loads(plan) for plan in plans])
    seconds = np.array([wanted.seconds for wanted in SETS.values()])
    published = seconds[:, 0] / seconds[:, 1]
    found = []
    for ways in itertools.product(WAYS, repeat=len(SETS)):
        rows = np.stack([loads[key] for key in zip(SETS, ways, strict=True)])  # [sets, cases, 2]
        matrix = (rows[:, :2] / seconds[:, :, None]).reshape(-1, 2)
        model = np.linalg.lstsq(matrix, np.ones(len(matrix)), rcond=None)[0]
        errors, times = matrix @ model - 1, rows @ model
        found.append((ways, float(np.abs(errors).max()), rms(errors.tolist()), *(times[:, :1] / times[:, 1:]).T))
    fits = [one for one in found if one[1] < 0.10]
    print(f"\n{len(found)} combinations of spreads; the model meets the eight times within 10 % in {len(fits)} of them")
    print(f"  best_fit beside sorted, same lengths: {min((one[4] / one[3]).min() for one in fits):.3f} x at least")
    over = np.array([one[4] / published for one in fits])
    for number, name in enumerate(SETS):
        low, middle, high = np.quantile(over[:, number], (0, 0.5, 1))
        print(f"  {name}: best_fit at {low:.2f} to {high:.2f} of the published speed-up, median {middle:.2f}")
    as_fast = [one for one in fits if (one[4] >= published).all()]
    print(f"  at least the published one on all four sets: {len(as_fast)} combinations")
    for what, part in (("nearest to the times", fits), ("nearest among those", as_fast)):
        if part:
            best = min(part, key=lambda one: one[2])
            speeds = ", ".join(f"{speed:.2f}x" for speed in best[4])
            print(f"  {what}: ways {best[0]}, rms {best[2]:.1%}, largest {best[1]:.1%}; best_fit {speeds}")


def rms(errors: list[float]) -> float:
    return float(np.sqrt(np.mean(np.square(errors))))


def compare(name: str, shape: str, lengths: Ints, model: np.ndarray, exchange_steps: int) -> None:
    wanted = SETS[name]
    ratio = wanted.capacity / lengths.mean()
    published = wanted.seconds[0] / wanted.seconds[1]
    capacity = f"{ratio:.1f} samples fill the capacity of {wanted.capacity}"
    print(f"\n{name}, {shape}: {capacity}; published speed {published:.2f}x")
    rows, baseline = [], 0.0
    for label in STRATEGIES:
        batches = plan_in_chunks(strategy_from_dict(document(label, wanted)), lengths)
        found = measure_plan(batches, ranks=RANKS)
        seconds = float(np.dot(step_loads(batches), model))
        baseline = baseline or seconds
        rows.append([label, *cells(found, batches, wanted.capacity, exchange_steps), f"{baseline / seconds:.2f}x"])
    header = "strategy|micro-batches|fill|padding eff.|over|ICC|step var.|Kish|late|tokens|attention|evened out|speed"
    print(table(header.split("|"), rows))


def cells(found: PlanMetrics, batches: MicroBatches, capacity: int, exchange_steps: int) -> list[str]:
    fill = int(batches.tokens().sum()) / (len(batches) * capacity)
    after = "-"
    if batches.packed:
        tokens, attention = even_balance(batches, Capacity(capacity), ranks=RANKS, steps=exchange_steps)
        after = f"{tokens:.3f} {attention:.3f}"
    return [
        f"{found.micro_batches:,}",
        f"{fill:.4f}",
        f"{found.padding_efficiency:.4f}",
        f"{found.over:.1%}",
        f"{found.length_correlation:.3f}",
        f"{found.step_variance_ratio:.2f}",
        f"{found.effective_samples:.2f}",
        f"{found.lateness:,}",
        *(f"{mean_balance(loads):.3f}" for loads in rank_loads(batches, ranks=RANKS)),
        after,
    ]


def small_ratios() -> None:
    """Fill where few samples make up a micro-batch."""
    rows = []
    for shape in SHAPES:
        lengths = length_set(Published(65_536, 65_536 * 777, 3_885, (0.360, 0.9), 2, 0, (0, 0)), SHAPES[shape])
        for ratio in (5, 10, 15, 21, 42):
            row: list[object] = [shape, ratio]
            for strategy in ("best_fit", "bfd"):
                plan = plan_in_chunks(strategy_from_dict({"strategy": strategy, "capacity": 777 * ratio}), lengths)
                found = measure_plan(plan, ranks=RANKS)
                row += [
                    f"{found.fill:.4f}",
                    f"{found.length_correlation:.3f}",
                    f"{found.lateness} <= {plan.lateness_bound}",
                ]
            rows.append(row)
    print("\npacking, by samples per capacity (ultrachat's spread, longest sample 5 times the mean)")
    print(table(["shape", "ratio", "best_fit", "ICC", "late", "bfd", "ICC", "late"], rows))


def speed(lengths: Ints) -> None:
    """Planning one chunk of wide ultrachat lengths, in CPU time."""
    chunk, wanted = lengths[:CHUNK], SETS["ultrachat"]
    rows: list[list[object]] = []
    for label in STRATEGIES:
        strategy = strategy_from_dict(document(label, wanted))
        seconds = fastest(lambda strategy=strategy: strategy.plan(chunk, seed=1))
        rows.append([label, f"{seconds * 1000:.0f}", f"{len(chunk) / seconds / 1e6:.1f}"])
    for what, part in (("histogram of a chunk", chunk), ("histogram of all", lengths)):
        counts = np.bincount(part)
        seconds = fastest(lambda counts=counts: pack_histogram(counts, wanted.capacity))
        rows.append([what, f"{seconds * 1000:.0f}", f"{len(part) / seconds / 1e6:.1f}"])
    for step in (RANKS, 8 * RANKS):
        whole = strategy_from_dict(document("best_fit", wanted)).plan(chunk)
        parts = [whole.select(np.arange(first, first + step)) for first in range(0, 800 // step * step, step)]
        seconds = fastest(lambda parts=parts: [even_step(part, Capacity(wanted.capacity)) for part in parts])
        rows.append([f"evening out a step of {step}", f"{1000 * seconds / len(parts):.1f}", ""])
    print(f"\nplanning {CHUNK:,} samples of ultrachat, wide (CPU time, fastest of 3)")
    print(table(["what", "ms", "M samples/s"], rows))


def fastest(work: Any) -> float:
    times = []
    for _ in range(3):
        start = time.process_time()
        work()
        times.append(time.process_time() - start)
    return min(times)


if __name__ == "__main__":
    main()
