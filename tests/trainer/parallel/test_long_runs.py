"""Twenty steps on every layout are those of one process: both reductions, both algorithms, buckets of all sizes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import pytest

from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.training.config import OptimizerConfig
from tests.testing import nightly_but
from tests.trainer.parallel.plain_llama import PlainRun
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import (
    BASE,
    LAYOUTS,
    OPTIMIZER,
    Layout,
    assert_same,
    make_steps,
    plain_run_in_child,
    train_on,
)
from tests.trainer.parallel.test_parity import Run as LlamaRun

STEPS = 20
#: What makes the micro-batches of a replica, in turn.
KINDS = ("mixed", "nothing", "packed", "text", "packed image", "empty")


class Case(NamedTuple):
    """How a run is made: type, reduction, elements of a bucket, algorithm, micro-batches of all replicas together."""

    dtype: str
    reduce: str
    bucket_size: int | None
    algorithm: str
    micro_batches: int

    @property
    def settings(self) -> OptimizerConfig:
        constants = dataclasses.replace(OPTIMIZER, lr=1e-3, min_lr=2e-4, eps=OptimizerConfig().eps)
        return dataclasses.replace(
            constants, reduce=self.reduce, bucket_size=self.bucket_size, algorithm=self.algorithm
        )


#: Two for each layout, in turn; and each once, on one layout.
CASES = [
    (Case("float64", "last", 1, "adamw", 4), Case("float32", "every", 400, "adamw", 4)),
    (Case("float64", "every", None, "sgd", 4), Case("float32", "last", 400, "adamw", 4)),
    (Case("float64", "every", 400, "adamw", 4), Case("float32", "last", None, "sgd", 4)),
    (Case("float64", "last", 400, "sgd", 4), Case("float32", "every", 1, "adamw", 4)),
]
#: Eight for one replica. On some layouts only: each costs as much as four others.
EIGHT = {
    Layout(): Case("float64", "last", 400, "adamw", 8),
    Layout(pp=2, virtual=2): Case("float64", "every", None, "adamw", 8),
    Layout(tp=2, dp=2): Case("float64", "every", 400, "adamw", 8),
}
ONCE = {
    Layout(): EIGHT[Layout()],
    Layout(tp=2, pp=2): CASES[0][0],
    Layout(pp=2, virtual=2, tp=2, sp=True): CASES[0][1],
    Layout(cp=2, dp=2): CASES[1][0],
    Layout(dp=4): CASES[1][1],
    Layout(pp=2, dp=2): CASES[2][0],
    Layout(tp=2, cp=2): CASES[2][1],
    Layout(tp=2, dp=2, sp=True): CASES[3][0],
    Layout(tp=2, pp=2, dp=2): CASES[3][1],
}
EVERY_CASE = [
    Case(*settings)
    for settings in itertools.product(
        ["float64", "float32"], ["last", "every"], [1, 400, None], ["adamw", "sgd"], [1, 2, 8]
    )
]
Known = tuple[ModelConfig, str, int]


def run_cases(run_ranks: RunRanks, layout: Layout, cases: list[Case], known: dict[Known, PlainRun]) -> None:
    # As few layers as there are chunks of them: what is long here is the run, not the model. Weights as large as they
    # usually are: with those of BASE, two plain runs in float32 that add in another order differ by more than 1e-6.
    shape = dataclasses.replace(BASE, num_layers=max(2, layout.pp * layout.virtual), init_std=ModelConfig().init_std)
    configs = [dataclasses.replace(shape, dtype=case.dtype) for case in cases]
    steps = [make_steps(tuple(itertools.islice(itertools.cycle(KINDS), case[-1])), steps=STEPS) for case in cases]

    def job(rank: int) -> list[LlamaRun]:
        return [
            train_on(config, batches, layout, settings=case.settings)
            for config, batches, case in zip(configs, steps, cases, strict=True)
        ]

    by_rank = run_ranks(layout.world, job, timeout=900.0)
    for number, (config, batches, case) in enumerate(zip(configs, steps, cases, strict=True)):
        runs, key = [made[number] for made in by_rank], (config, case.algorithm, case.micro_batches)
        if key not in known:
            known[key] = plain_run_in_child(run_ranks, config, runs[0].start, batches, (), case.settings)
        tolerance, of_weights = (1e-12, 1e-12) if case.dtype == "float64" else (1e-6, 1e-5)
        assert_same(runs, known[key], tolerance, of_weights)
        assert max(runs[0].norms) > OPTIMIZER.clip, "clipping was not tested"


@pytest.fixture(scope="module")
def known() -> dict[Known, PlainRun]:
    """Runs of one process. One is enough for all layouts: they start from equal weights."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("layout", nightly_but({0, 2, 3, 4, 8}, ONCE), ids=str)
def test_twenty_steps_are_those_of_one_process(
    run_ranks: RunRanks, layout: Layout, known: dict[Known, PlainRun]
) -> None:
    case = ONCE[layout]
    # Accumulation of one to two, because micro-batches take time.
    few = layout.dp if case.dtype == "float32" else 4 if layout.dp > 1 else 2
    run_cases(run_ranks, layout, [case if case.micro_batches == 8 else case._replace(micro_batches=few)], known)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_twenty_steps_on_each_layout(run_ranks: RunRanks, layout: Layout, known: dict[Known, PlainRun]) -> None:
    first, second = CASES[LAYOUTS.index(layout) % len(CASES)]
    first = EIGHT.get(layout, first._replace(micro_batches=4 if layout.dp > 1 else 2))
    second = second._replace(micro_batches=layout.dp)
    run_cases(run_ranks, layout, [first, second], known)


@pytest.mark.nightly
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_twenty_steps_are_those_of_one_process(
    run_ranks: RunRanks, layout: Layout, known: dict[Known, PlainRun]
) -> None:
    run_cases(run_ranks, layout, EVERY_CASE, known)
