"""Every layout of ranks makes the run that one process makes with transformers' model and torch's optimizer, from the
same weights, whatever the model and the optimizer are told.

Six layouts are tried each time, with each value of each setting; all pairs of values at night.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from energon_lite.trainer.models.config import ModelConfig, RopeScaling
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.config import learning_rate
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.parallel.parameters import layout_of
from energon_lite.trainer.training.config import OptimizerConfig
from energon_lite.trainer.training.step import train_step
from tests.trainer.models.by_documents import BY_DOCUMENTS
from tests.trainer.parallel import their_model
from tests.trainer.parallel.plain_loop import PlainRun
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.their_model import Rows, Weights

pytestmark = pytest.mark.usefixtures("models")
BASE = ModelConfig(
    hidden_size=32,
    num_layers=4,
    num_heads=8,
    num_kv_heads=4,
    ffn_size=24,
    vocab_size=29,
    vocab_multiple=32,
    image_size=4,
    patch_size=2,
    init_std=0.2,
    dtype="float64",
)
# Adam divides by the size of the gradient: where that is rounding noise, eps keeps noise from becoming a step.
OPTIMIZER = OptimizerConfig(lr=5e-3, min_lr=1e-3, warmup=2, weight_decay=0.1, eps=1e-5, clip=0.5)
#: Ways to make the same step. Small buckets, so that many are under way, and slices begin and end inside of rows.
LAST = dataclasses.replace(OPTIMIZER, bucket_size=1500)
EVERY = dataclasses.replace(OPTIMIZER, bucket_size=1500, reduce="every")
STEPS, MICRO_BATCHES = 5, 4


@dataclass(frozen=True)
class Layout:
    """Sizes of the axes, and how they are used."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    sp: bool = False
    virtual: int = 1
    share: bool = False

    @property
    def world(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    def mesh(self) -> ParallelMesh:
        sizes = self.pp, self.dp, self.cp, self.tp
        return build_mesh(*sizes, sequence_parallel=self.sp, virtual=self.virtual, share_images=self.share)

    def __str__(self) -> str:
        sizes = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "cp", "dp") if getattr(self, name) > 1]
        more = ["sp"] * self.sp + [f"virtual{self.virtual}"] * (self.virtual > 1) + ["shared"] * self.share
        return " ".join([*sizes, *more]) or "one process"


def make_rows(generator: torch.Generator, kind: str) -> Rows:
    """Random tokens: 'empty' has no rows, no label of 'nothing' counts, 'packed' rows hold several documents."""
    if kind == "empty":
        none = torch.zeros(0, 0, dtype=torch.int64)
        return Rows(none, none, torch.zeros(0, 0), torch.zeros(0, 3, 4, 4), none.flatten(), none.flatten())
    images = {
        **{"mixed": [0, 2], "text": [], "image": [0, 1, 2], "nothing": [1]},
        **{"packed": [], "packed image": [1], "several": [0, 0, 2]},
    }[kind]
    places = 8 if kind == "several" else 4 if images else 0
    rows, length = 3, places + int(torch.randint(4, 9, (), generator=generator))
    lengths = torch.randint(2, length + 1, (rows,), generator=generator)
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).to(torch.float32)
    tokens, labels = (torch.randint(0, 29, (rows, length), generator=generator) for _ in range(2))
    image = torch.rand(len(images), 3, 4, 4, generator=generator)
    starts = torch.randint(0, length - places + 1, (len(images),), generator=generator)
    if kind == "several":  # the second in a row begins behind the first
        starts = starts.sort().values + torch.tensor([0, 4, 0])
    return Rows(
        tokens=tokens,
        labels=labels,
        loss_mask=mask * 0 if kind == "nothing" else mask,
        image=image,
        image_rows=torch.tensor(images, dtype=torch.int64),
        image_starts=starts,
        documents=torch.randint(0, 2, (rows, length), generator=generator).cumsum(1) if "packed" in kind else None,
    )


def make_steps(
    kinds: tuple[str, ...] = ("mixed", "text", "nothing", "packed image"), seed: int = 1, steps: int = STEPS
) -> list[list[Rows]]:
    """Micro-batches of each step; with four data-parallel ranks, the third has no token that counts in any step."""
    generator = torch.Generator().manual_seed(seed)
    return [[make_rows(generator, kind) for kind in kinds] for _ in range(steps)]


def gathered(model: LlamaModel, mesh: ParallelMesh) -> Weights:
    """All parameters of all stages, whole."""
    weights = {}
    for name, p in model.named_parameters():
        dim, group = layout_of(p).sharded_dim, mesh.group("tp")
        if dim is None or group is None:
            weights[name] = p.detach().clone()
            continue
        parts = [torch.empty_like(p) for _ in range(mesh.tp)]
        dist.all_gather(parts, p.detach().contiguous(), group=group)
        weights[name] = torch.cat(parts, dim=dim)
    if mesh.pp == 1:
        return weights
    stages: list[Weights] = [{} for _ in range(mesh.pp)]
    dist.all_gather_object(stages, weights, group=mesh.group("pp"))
    for stage in stages:
        for name in stage.keys() & weights.keys():
            assert torch.equal(stage[name], weights[name]), f"two stages have different {name}"
    return {name: weight for stage in stages for name, weight in stage.items()}


def own(micro_batches: list[Rows], mesh: ParallelMesh) -> list[Rows | None]:
    """This rank's micro-batches: each replica of the model has others, stages between the first and the last none.

    Where they do not divide evenly, some are empty.
    """
    missing = -len(micro_batches) % mesh.dp
    padded = micro_batches + [make_rows(torch.Generator(), "empty")] * missing
    mine: list[Rows | None] = list(padded[mesh.rank("dp") :: mesh.dp])
    return mine if mesh.is_first_stage or mesh.is_last_stage else [None] * len(mine)


@dataclass
class Run(PlainRun):
    start: Weights
    tokens: list[int]


def train_on(
    config: ModelConfig,
    steps: list[list[Rows]],
    layout: Layout,
    frozen: tuple[str, ...] = (),
    settings: OptimizerConfig = LAST,
) -> Run:
    """The run of one rank."""
    mesh = layout.mesh()
    model = LlamaModel(config, mesh, seed=5)
    start = gathered(model, mesh)
    for name, p in model.named_parameters():
        p.requires_grad_(name not in frozen)
    optimizer = OverlappedDistributedOptimizer(model, mesh, settings)
    results = []
    for number, micro_batches in enumerate(steps):
        mine = own(micro_batches, mesh)
        lr = learning_rate(number, len(steps), settings)
        results.append(train_step(model, optimizer, mine, mesh, lr=lr))
    optimizer.wait_parameters()
    losses, norms = [result.loss for result in results], [result.grad_norm for result in results]
    return Run(losses, norms, gathered(model, mesh), start, [result.tokens for result in results])


def assert_same(runs: list[Run], other: PlainRun, tolerance: float) -> None:
    """Losses and norms, relative to what is above one, and weights, but for rows of padding that the other has not."""
    for run in runs:
        torch.testing.assert_close(run.losses, other.losses, rtol=tolerance, atol=tolerance)
        torch.testing.assert_close(run.norms, other.norms, rtol=tolerance, atol=tolerance)
        assert run.weights.keys() == other.weights.keys()
        for name, weight in run.weights.items():
            expected = other.weights[name]
            torch.testing.assert_close(weight[tuple(map(slice, expected.shape))], expected, rtol=0, atol=tolerance)
    # What ranks hold in common they hold to the last bit: a rounding error that differs would grow.
    for run in runs[1:]:
        assert run.losses == runs[0].losses and run.norms == runs[0].norms
        assert all(torch.equal(run.weights[name], runs[0].weights[name]) for name in run.weights)


#: The settings of a run, with the values that each may have. Kinds of micro-batches; names of parameters that stay.
SETTINGS: dict[str, tuple[Any, ...]] = {
    "layout": (
        *(Layout(tp=2, pp=2, virtual=2, sp=True), Layout(tp=2, cp=2, sp=True), Layout(cp=2, dp=2), Layout(tp=2, dp=2)),
        *(Layout(pp=2, dp=2, virtual=2), Layout(pp=2, cp=2), Layout(), Layout(dp=4), Layout(tp=4), Layout(cp=4)),
        *(Layout(pp=4), Layout(pp=3), Layout(tp=2, cp=2), Layout(tp=2, pp=2), Layout(tp=2, pp=2, dp=2)),
        *(Layout(tp=2, pp=2, cp=2), Layout(pp=2, cp=2, dp=2, virtual=2), Layout(tp=2, dp=2, sp=True)),
    ),
    "kinds": (
        ("mixed", "text", "nothing", "packed image"),
        ("image", "text", "empty", "packed"),
        ("several", "empty", "mixed", "text", "empty", "packed"),
        ("text", "text", "nothing", "packed"),
    ),
    "frozen": (
        (),
        ("embed_tokens.weight", "layers.1.mlp.up_proj.weight"),
        ("layers.0.self_attn.k_proj.weight", "norm.weight", "lm_head.weight"),
    ),
    "steps": (2, 5),
    "reduce": ("last", "every"),
    "bucket_size": (1, 400, 1500, None),
    "algorithm": ("adamw", "sgd"),
    "tie_embeddings": (False, True),
    "num_kv_heads": (4, 8),
    "head_dim": (None, 6),
    "traits": ({"qk_norm": True}, {}, {"qkv_bias": True}),
    "sliding_window": (None, 3, 30),
    "rope_scaling": (None, RopeScaling(4.0, 0.1, 1.5, 6)),
    "recompute": ("none", "selective", "full"),
    "attention": ("sdpa", BY_DOCUMENTS),
    "loss_chunk": (0, 1, 5, 1000),
    # With 64 columns, some ranks have columns of padding only.
    "vocab_multiple": (64, 32),
}
Case = dict[str, Any]


def daily() -> list[Case]:
    """A case for each of the first six layouts, in which each value of each other setting comes at least once."""
    draw = random.Random(0)
    columns = [draw.sample((values * 6)[:6], 6) for values in SETTINGS.values()]
    columns[0] = list(SETTINGS["layout"][:6])
    return [dict(zip(SETTINGS, case, strict=True)) for case in zip(*columns, strict=True)]


@functools.cache
def pairwise() -> list[Case]:
    """Cases that have each pair of values of two settings: of some drawn ones, that with the most new pairs is next."""
    draw, names = random.Random(0), list(SETTINGS)

    def pairs(case: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, case[i], j, case[j]) for i in range(len(case)) for j in range(i)}

    sizes = [len(values) for values in SETTINGS.values()]
    left = {(i, a, j, b) for i in range(len(sizes)) for j in range(i) for a in range(sizes[i]) for b in range(sizes[j])}
    cases = []
    while left:
        i, a, j, b = min(left)  # each new case has this pair
        drawn = [[draw.randrange(size) for size in sizes] for _ in range(40)]
        tried = [tuple(a if n == i else b if n == j else value for n, value in enumerate(case)) for case in drawn]
        best = max(tried, key=lambda case: len(pairs(case) & left))
        left -= pairs(best)
        cases.append({name: SETTINGS[name][value] for name, value in zip(names, best, strict=True)})
    return cases


@pytest.mark.parametrize("case", daily(), ids=lambda case: str(case["layout"]))
def test_six_layouts_make_their_run(run_ranks: RunRanks, case: Case) -> None:
    check(run_ranks, case)


@pytest.mark.nightly
@pytest.mark.parametrize("share", range(18))
def test_all_pairs_of_settings_make_their_run(run_ranks: RunRanks, share: int) -> None:
    for case in pairwise()[share::18]:
        check(run_ranks, case)


def check(run_ranks: RunRanks, case: Case) -> None:
    told, layout, frozen = case | case["traits"], case["layout"], case["frozen"]
    steps = make_steps(case["kinds"], steps=case["steps"])
    settings = dataclasses.replace(OPTIMIZER, **{name: told[name] for name in ("reduce", "bucket_size", "algorithm")})
    config = dataclasses.replace(BASE, **{name: told[name] for name in told if hasattr(BASE, name)})
    start = {name: p.detach() for name, p in LlamaModel(config, ParallelMesh(), seed=5).named_parameters()}
    runs = run_ranks(layout.world, lambda rank: train_on(config, steps, layout, frozen, settings))
    assert all(torch.equal(weight, start[name]) for name, weight in runs[0].start.items()), "another start than alone"
    assert_same(runs, their_run_in_child(run_ranks, config, start, steps, frozen, settings), 1e-12)
    assert runs[0].tokens == [sum(int(rows.loss_mask.sum()) for rows in step) for step in steps]
    assert max(runs[0].norms) > OPTIMIZER.clip > 0, "clipping was not tested"


def their_run_in_child(
    run_ranks: RunRanks,
    config: ModelConfig,
    start: Weights,
    steps: list[list[Rows]],
    frozen: tuple[str, ...] = (),
    settings: OptimizerConfig = OPTIMIZER,
) -> PlainRun:
    """Away from the test process: where there is a GPU, a process that has run autograd must not fork any more."""
    run: PlainRun = run_ranks(1, lambda rank: their_model.train(start, config, steps, settings, frozen))[0]
    return run


def test_a_step_without_any_token_changes_no_weight_but_by_decay(run_ranks: RunRanks) -> None:
    steps = [[make_rows(torch.Generator().manual_seed(2), "nothing") for _ in range(MICRO_BATCHES)]]
    for run in run_ranks(2, lambda rank: train_on(BASE, steps, Layout(dp=2))):
        assert (run.losses, run.tokens, run.norms) == ([0.0], [0], [0.0])
        decayed = 1 - learning_rate(0, 1, OPTIMIZER) * OPTIMIZER.weight_decay
        for name, weight in run.weights.items():
            factor = decayed if weight.dim() > 1 else 1.0
            torch.testing.assert_close(weight, run.start[name] * factor, rtol=1e-12, atol=1e-12)


@pytest.mark.nightly
def test_all_axes_at_once(run_ranks: RunRanks) -> None:
    """Sixteen ranks; each replica of the model has its empty micro-batches at other places."""
    config = dataclasses.replace(BASE, tie_embeddings=True)
    layout = Layout(tp=2, cp=2, dp=2, pp=2, sp=True)
    steps = make_steps(("mixed", "text", "empty", "packed image", "text", "empty"))[:2]
    runs = run_ranks(layout.world, lambda rank: train_on(config, steps, layout, settings=EVERY))
    assert_same(runs, their_run_in_child(run_ranks, config, runs[0].start, steps), 1e-12)
