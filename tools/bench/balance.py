"""How even is a step on many ranks, and how long would it take? Four mixes of text and images, simulated ranks.

A step is planned as the loader does it, for a language model of 8 billion parameters and an image encoder of 6 billion
(InternVL's), whose costs follow from their shapes (:class:`CostModel`). Times are those of the slowest rank, with the
stages of a pipeline simulated (1F1B; layers are divided so that stages have equal work on average, encoder first):

    by number     no balance: every micro-batch has as many samples, whatever they are (it need not even fit)
    as packed     best_fit by tokens, micro-batches as they come
    lengths       steps evened out in tokens and attention (micro_batches_per_step alone)
    run time      what others do while they train: samples gathered from all ranks, dealt by the language model's cost,
                  longest first, then exchanged until the largest is 5 % above the mean; images dealt in the same way
                  for the encoder; both left as they are where they are even to 20 %. Time for gathering is not counted.
    planned       all costs (costs=...), each image where its sample is
    encoder apart the same, images dealt by the encoder plan, turn by turn
    even          every micro-batch costs the mean: the lower bound

How to read it: "mean/max" is over ranks, for the planned step: tokens, attention, encoder, loss tokens; where a sample
is more than a rank's share, or needs so many micro-batches beside it that it becomes so, the least possible maximum
stands in place of the mean ("*"): a linear program's, in which that rank has no more of any other cost than 1 / 0.97 of
the mean, samples may be cut, and all other ranks are full to the last token. "ms" is planning for each micro-batch of a
step, on one core; a rank plans the whole step, in the background.

    python tools/bench/balance.py [--ranks 8 64 512] [--pp 1 4] [--mixes captions ...]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from balance_mixes import MIXES, Mix, Samples
from common import machine, table
from numpy.typing import NDArray
from scipy.optimize import linprog

from energon_lite import BestFit, Capacity
from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.steps import even_step, rank_slot
from energon_lite.batching.transformer_shape import TransformerShape
from energon_lite.extras.balance.cost_model import CostModel
from energon_lite.extras.balance.even_costs import even_costs
from energon_lite.extras.balance.shared_images import EncoderPlan
from energon_lite.trainer.training.pipeline import pipeline_order, pipeline_schedule

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LANGUAGE = TransformerShape(4096, 32, 32, 14336, kv_heads=8, vocab_size=128_256)
ENCODER = TransformerShape(3200, 45, 25, 12_800, gated=False, causal=False)
MODEL = CostModel.of_shape(LANGUAGE, ENCODER, logits_of_loss_only=True)
#: Micro-batches of a rank in a step, by stages of the pipeline.
TURNS = {1: 4, 4: 16}
SEQUENCE, LEFT = 1.05, 1.2


@dataclass(frozen=True)
class Step:
    """The samples of a step.

    Args:
        tokens, images, loss: of each.
        costs: language model, encoder, output layer, ``[3, samples]``, nanoseconds.
        owner, patches: of its images: the sample, and the size.
    """

    tokens: Ints
    images: Ints
    loss: Ints
    costs: Ints
    owner: Ints
    patches: Ints

    @classmethod
    def of(cls, samples: Samples, chosen: Ints) -> Step:
        here = np.flatnonzero(np.isin(samples.owner, chosen))
        new = np.full(len(samples.tokens), -1, dtype=np.int64)
        new[chosen] = np.arange(len(chosen))
        patches = samples.patches
        costs = MODEL.costs(
            {
                "tokens": samples.tokens[chosen],
                "loss_tokens": samples.loss[chosen],
                "images": samples.images()[chosen],
                "patches": samples.summed(patches)[chosen],
                "squared_patches": samples.summed(patches * patches)[chosen],
            }
        )
        order = here[np.argsort(new[samples.owner[here]], kind="stable")]
        return cls(
            samples.tokens[chosen],
            samples.images()[chosen],
            samples.loss[chosen],
            costs,
            new[samples.owner[order]],
            patches[order],
        )

    def rows(self) -> Ints:
        """What has to be even: tokens, attention, encoder, loss tokens."""
        return np.stack([self.tokens, self.tokens**2, self.costs[1], self.loss])

    def batch_costs(self, place: Ints, count: int) -> Floats:
        """Costs of micro-batches, ``[3, count]``, in milliseconds."""
        return np.stack([np.bincount(place, weights=row, minlength=count) for row in self.costs]) / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--pp", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--mixes", nargs="+", default=list(MIXES))
    parser.add_argument("--steps", type=int, default=4, help="steps of each case; of 512 ranks there is one")
    arguments = parser.parse_args()
    print(machine())
    times, evenness = [], []
    for name in arguments.mixes:
        for ranks in arguments.ranks:
            for stages in arguments.pp:
                steps = arguments.steps if ranks < 512 else 1
                found = [one_step(MIXES[name], ranks, stages, seed) for seed in range(steps)]
                label = (name, ranks, stages, TURNS[stages])
                step = np.mean([one for one, _, _, _ in found], axis=0)
                times.append(
                    (
                        *label,
                        *(f"{value:,.0f}" for value in step),
                        f"{step[0] / step[5]:.2f}",
                        f"{step[1] / step[5]:.2f}",
                        f"{step[5] / step[6]:.3f}",
                    )
                )
                balance = np.mean([one for _, one, _, _ in found], axis=0)
                bounded = np.any([one for _, _, one, _ in found], axis=0)
                shown = (f"{value:.3f}{'*' if star else ''}" for value, star in zip(balance, bounded, strict=True))
                evenness.append((*label, *shown, f"{np.mean([one for *_, one in found]):.2f}"))
                print(*times[-1], *evenness[-1][4:], flush=True)
    label = ("mix", "ranks", "pp", "turns")
    factors = ("by number / apart", "as packed / apart", "apart / even")
    print("\npredicted step, ms")
    print(
        table(
            (*label, "by number", "as packed", "lengths", "run time", "planned", "encoder apart", "even", *factors),
            times,
        )
    )
    print("\nplanned: mean / max over ranks, and planning")
    print(table((*label, "tokens", "attention", "encoder", "loss tokens", "ms"), evenness))


def one_step(mix: Mix, ranks: int, stages: int, seed: int) -> tuple[list[float], Floats, list[bool], float]:
    """Predicted times of the ways to put a step together; how even the planned one is; milliseconds of planning."""
    turns = TURNS[stages]
    count = ranks * turns
    plan, samples = packed(mix, count, seed)
    chosen, home = plan.sample, np.repeat(np.arange(count), plan.rows())
    step = Step.of(samples, chosen)

    lengths = even_step(plan, Capacity(mix.tokens))
    slots = [turn * ranks + rank_slot(rank, ranks, turn) for turn in range(turns) for rank in range(ranks)]
    of_slot = np.empty(count, dtype=np.int64)
    of_slot[slots] = np.arange(count)
    by_lengths = np.empty(len(samples.tokens), dtype=np.int64)
    by_lengths[lengths.sample] = of_slot[np.repeat(np.arange(count), lengths.rows())]

    began = time.process_time()
    sizes, limits = np.stack([step.tokens, step.images]), [mix.tokens, mix.images]
    place = even_costs(np.concatenate([step.tokens[None] ** 2, step.costs]), sizes, limits, home, count)
    planning = (time.process_time() - began) * 1000 / count

    found = [
        predicted(step.batch_costs(np.random.default_rng(seed).permutation(len(home)) % count, count), ranks, stages),
        predicted(step.batch_costs(home, count), ranks, stages),
        predicted(step.batch_costs(by_lengths[chosen], count), ranks, stages),
        at_run_time(step, home, ranks, stages, turns),
        predicted(step.batch_costs(place, count), ranks, stages),
        apart(step, place, ranks, stages, turns),
        predicted(np.repeat(step.batch_costs(place, count).mean(axis=1, keepdims=True), count, axis=1), ranks, stages),
    ]
    balance, bounded = evenness_of(step, place, ranks, turns, mix.tokens)
    return found, balance, bounded, planning


def packed(mix: Mix, count: int, seed: int) -> tuple[MicroBatches, Samples]:
    """So many micro-batches as the strategy makes them, and what they are made of."""
    rng = np.random.default_rng(seed)
    mean = mix.draw(rng, 2000).tokens.mean()
    samples = mix.draw(rng, int(1.2 * count * mix.tokens / mean) + 2000)
    plan = BestFit(Capacity(mix.tokens)).plan(samples.tokens)
    return plan.select(np.arange(count)), samples


def evenness_of(step: Step, place: Ints, ranks: int, turns: int, capacity: int) -> tuple[Floats, list[bool]]:
    """Mean (or the least possible maximum, if that is more) over maximum of the ranks, by row; and whether it is."""
    balance, bounded = [], []
    for number, row in enumerate(step.rows()):
        loads = np.bincount(place % ranks, weights=row, minlength=ranks)
        least = max(float(loads.mean()), least_beside_largest(step, number, ranks, turns, capacity))
        balance.append(least / loads.max())
        bounded.append(least > loads.mean() * 1.001)
    return np.array(balance), bounded


def least_beside_largest(step: Step, number: int, ranks: int, turns: int, capacity: int) -> float:
    """The least that the rank with the largest sample of this row can have; 0 if that is surely below the mean."""
    rows = step.rows().astype(np.float64)
    row, shares = rows[number], rows.sum(axis=1) / ranks
    largest = int(row.argmax())
    if row[largest] < 0.8 * shares[number]:
        return 0
    others = [other for other in range(1, len(rows)) if other != number and rows[other, largest] < shares[other]]
    needed = rows[0].sum() - (ranks - 1) * turns * capacity
    chosen = np.zeros((len(row), 2))
    chosen[:, 1], chosen[largest, 0] = 1, 1
    found = linprog(row, np.stack([-rows[0], *rows[others]]), [-needed, *(shares[others] / 0.97)], bounds=chosen)
    return float(found.fun) if found.success else 0


def predicted(costs: Floats, ranks: int, stages: int, turns_wait: bool = False) -> float:
    """Milliseconds of the slowest rank.

    Args:
        costs: of micro-batches in the order of the step: language model, encoder, output layer, ``[3, count]``.
        stages: of the pipeline.
        turns_wait: ranks wait for each other in each turn.
    """
    by_turn = costs.reshape(3, -1, ranks)
    if stages == 1:
        total = by_turn.sum(axis=0)
        return float(total.max(axis=1).sum() if turns_wait else total.sum(axis=0).max())
    order = np.stack([pipeline_order(rank.sum(axis=0).tolist()) for rank in by_turn.transpose(2, 0, 1)])
    ordered = np.take_along_axis(by_turn.transpose(2, 0, 1), order[:, None], axis=2)  # [ranks, 3, turns]
    return float(pipelined(ordered, stages).max())


def pipelined(costs: Floats, stages: int) -> Floats:
    """Milliseconds of each rank's pipeline: 1F1B, a third of the work forward, ``[ranks]``."""
    turns = costs.shape[2]
    # Encoder, language model and output layer, one behind the other, cut where each stage has as much on average.
    ends = np.cumsum(costs.mean(axis=(0, 2))[[1, 0, 2]])
    cuts = np.linspace(0, ends[-1], stages + 1)
    firsts = np.concatenate([[0], ends[:-1]])
    work = np.zeros((stages, len(costs), turns))
    for kind, first, end in zip((1, 0, 2), firsts, ends, strict=True):
        for stage in range(stages):
            part = max(0.0, min(end, cuts[stage + 1]) - max(first, cuts[stage])) / (end - first)
            work[stage] += part * costs[:, kind]
    schedule = [pipeline_schedule(stage, stages, turns) for stage in range(stages)]
    done: dict[tuple[int, int, bool], Floats] = {}
    free = [np.zeros(len(costs)) for _ in range(stages)]
    places = [0] * stages
    while any(place < len(actions) for place, actions in zip(places, schedule, strict=True)):
        for stage in range(stages):
            while places[stage] < len(schedule[stage]):
                action = schedule[stage][places[stage]]
                number, back = action.micro_batch, action.backward
                before = (stage + 1, number, True) if back else (stage - 1, number, False)
                if back and stage == stages - 1:
                    before = (stage, number, False)
                if before not in done and not (stage == 0 and not back):
                    break
                start = np.maximum(free[stage], done[before]) if before in done else free[stage]
                free[stage] = done[stage, number, back] = start + work[stage, :, number] * (2 / 3 if back else 1 / 3)
                places[stage] += 1
    return free[0]


def longest_first(costs: Sequence[float], ranks: int) -> tuple[Ints, Floats]:
    """A rank for each, the longest first, then single exchanges of the fullest with the emptiest down to 5 %."""
    loads, place = np.zeros(ranks), np.zeros(len(costs), dtype=np.int64)
    values = np.asarray(costs, dtype=np.float64)
    for number in np.argsort(-values, kind="stable").tolist():
        place[number] = loads.argmin()
        loads[place[number]] += values[number]
    for _ in range(4 * ranks):
        high, low = int(loads.argmax()), int(loads.argmin())
        if loads[high] <= SEQUENCE * loads.mean():
            break
        mine, yours = np.flatnonzero(place == high), np.flatnonzero(place == low)
        moved = values[mine][:, None] - np.append(values[yours], 0)[None]
        after = np.maximum(loads[high] - moved, loads[low] + moved)
        i, j = np.unravel_index(int(after.argmin()), after.shape)
        if after[i, j] >= loads[high]:
            break
        place[mine[i]] = low
        if j < len(yours):
            place[yours[j]] = high
        loads[high] -= moved[i, j]
        loads[low] += moved[i, j]
    return place, loads


def at_run_time(step: Step, home: Ints, ranks: int, stages: int, turns: int) -> float:
    """The published recipe: see above. A rank's samples are divided among its micro-batches in the same way."""
    own = np.bincount(home % ranks, weights=step.costs[0], minlength=ranks)
    where, batch = home % ranks, home // ranks
    if own.max() > LEFT * own.mean():
        where, _ = longest_first(step.costs[0], ranks)
        batch = np.zeros(len(where), dtype=np.int64)
        for rank in range(ranks):
            mine = np.flatnonzero(where == rank)
            batch[mine], _ = longest_first(step.costs[0, mine], turns)
    images = MODEL.image_costs(step.patches)
    owners = where[step.owner]
    loads = np.bincount(owners, weights=images, minlength=ranks)
    if loads.max() > LEFT * loads.mean():
        owners, loads = longest_first(images, ranks)
    costs = step.batch_costs(batch * ranks + where, turns * ranks)
    if stages == 1:
        return float((costs[[0, 2]].sum(axis=0).reshape(turns, ranks).sum(axis=0)).max() + loads.max() / 1e6)
    costs[1] = np.tile(loads / turns / 1e6, turns)
    return predicted(costs, ranks, stages)


def apart(step: Step, place: Ints, ranks: int, stages: int, turns: int) -> float:
    """The planned step with images dealt to other ranks of their turn."""
    images, of_image = MODEL.image_costs(step.patches), place[step.owner]
    costs = step.batch_costs(place, ranks * turns)
    for turn in range(turns):
        here = np.flatnonzero(of_image // ranks == turn)
        here = here[np.argsort(of_image[here], kind="stable")]
        plan = EncoderPlan.of(of_image[here] % ranks, images[here], ranks)
        costs[1, turn * ranks : (turn + 1) * ranks] = plan.loads(images[here]) / 1e6
    return predicted(costs, ranks, stages, turns_wait=True)


if __name__ == "__main__":
    main()
