"""One feature at a time on layouts that it might not get on with; long rows; steps that all ranks leave out."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.trainer.models.attention_functions import document_segments, sdpa
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.models.registry import adopt_norm, register_attention, register_norm
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training.config import OptimizerConfig
from energon_lite.trainer.training.pipeline import run_pipeline
from energon_lite.trainer.training.step import train_step
from tests.trainer.parallel.plain_llama import PlainRun, Rows
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.test_parity import (
    BASE,
    EVERY,
    LAST,
    OPTIMIZER,
    Layout,
    assert_same,
    gathered,
    make_steps,
    own,
    plain_run_in_child,
    train_on,
)

PACKED = ("packed", "packed image", "packed", "text")
TEXT = ("text", "text", "nothing", "packed")
#: Micro-batches, frozen parameters, settings of the model.
FEATURES: dict[str, tuple[tuple[str, ...], tuple[str, ...], dict[str, Any]]] = {
    "packed documents": (PACKED, (), {}),
    "unused parameters": (TEXT, (), {}),
    "frozen first layers": (
        TEXT,
        ("embed_tokens.weight", "layers.0.self_attn.q_proj.weight"),
        {"tie_embeddings": False},
    ),
    "frozen tied embedding": (PACKED, ("embed_tokens.weight",), {"tie_embeddings": True}),
    "one head each": (PACKED, (), {"num_kv_heads": None}),
    "selective recomputation": (PACKED, (), {"recompute": "selective"}),
    "full recomputation": (PACKED, (), {"recompute": "full"}),
    "fused projections": (PACKED, ("layers.1.self_attn.k_proj.weight",), {"fuse_projections": True}),
    "loss in chunks": (TEXT, (), {"loss_chunk": 4, "tie_embeddings": True}),
    "loss in chunks, frozen": (PACKED, ("lm_head.weight",), {"loss_chunk": 7, "fuse_projections": True}),
    "rows of other lengths": (("image", "text", "empty", "packed"), (), {"tie_embeddings": True}),
}


FEATURE_LAYOUTS = [Layout(tp=2, pp=2, sp=True), Layout(cp=2, dp=2), Layout(pp=2, virtual=2)]
#: Where a feature has most to get wrong; on the others at night.
MOST = {
    "packed documents": Layout(cp=2, dp=2),
    "unused parameters": Layout(cp=2, dp=2),
    "frozen first layers": Layout(pp=2, virtual=2),
    "frozen tied embedding": Layout(tp=2, pp=2, sp=True),
    "one head each": Layout(cp=2, dp=2),
    "selective recomputation": Layout(tp=2, pp=2, sp=True),
    "full recomputation": Layout(pp=2, virtual=2),
    "fused projections": Layout(tp=2, pp=2, sp=True),
    "loss in chunks": Layout(tp=2, pp=2, sp=True),
    "loss in chunks, frozen": Layout(pp=2, virtual=2),
    "rows of other lengths": Layout(pp=2, virtual=2),
}


@pytest.mark.parametrize(
    ("feature", "layout"),
    [
        pytest.param(feature, layout, marks=[pytest.mark.nightly] * (layout != MOST[feature]))
        for feature in FEATURES
        for layout in FEATURE_LAYOUTS
    ],
    ids=str,
)
def test_a_feature_changes_no_number(run_ranks: RunRanks, feature: str, layout: Layout) -> None:
    kinds, frozen, shape = FEATURES[feature]
    config, steps = dataclasses.replace(BASE, **shape), make_steps(kinds)[:3]
    runs = run_ranks(layout.world, functools.partial(_run, config, steps, layout, frozen))
    assert_same(runs, plain_run_in_child(run_ranks, config, runs[0].start, steps, frozen), 1e-10)


def _run(config: ModelConfig, steps: list[list[Rows]], layout: Layout, frozen: tuple[str, ...], rank: int) -> Any:
    return train_on(config, steps, layout, frozen, EVERY)


@pytest.mark.parametrize("packed", [False, True])
def test_long_rows_are_those_of_one_rank(run_ranks: RunRanks, packed: bool) -> None:
    """1,500 tokens, which divide by no number of chunks, over four ranks: the loss and every gradient."""
    config = dataclasses.replace(BASE, num_layers=1, image_size=0)
    generator = torch.Generator().manual_seed(4)
    tokens, labels = torch.randint(0, 29, (2, 1, 1500), generator=generator)
    documents = (torch.rand(1, 1500, generator=generator) < 0.005).long().cumsum(1) if packed else None
    none = torch.zeros(0, dtype=torch.int64)
    rows = Rows(tokens, labels, torch.ones(1, 1500), torch.zeros(0, 3, 4, 4), none, none, documents)

    def gradients(rank: int, layout: Layout) -> tuple[float, dict[str, torch.Tensor]]:
        mesh = layout.mesh()
        model = LlamaModel(config, mesh, seed=5)
        loss = mesh.sum_over_data(run_pipeline(model, [rows]))
        with torch.no_grad():
            for p in model.parameters():
                assert p.grad is not None
                p.copy_(mesh.sum_over_data(p.grad))
        return loss.item(), gathered(model, mesh)

    loss, whole = run_ranks(1, lambda rank: gradients(rank, Layout()))[0]
    for found, parts in run_ranks(4, lambda rank: gradients(rank, Layout(cp=4))):
        assert found == pytest.approx(loss, rel=1e-12)
        for name, gradient in parts.items():
            torch.testing.assert_close(gradient, whole[name], rtol=1e-9, atol=1e-9)


NOT_FINITE = dict(
    zip([Layout(tp=2, pp=2), Layout(cp=2, dp=2), Layout(pp=2, virtual=2)], [EVERY, LAST, OPTIMIZER], strict=True)
)


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        pytest.param(layout, settings, marks=[pytest.mark.nightly] * (settings != always), id=f"{layout}-{name}")
        for layout, always in NOT_FINITE.items()
        for name, settings in (("one bucket", OPTIMIZER), ("last", LAST), ("every", EVERY))
    ],
)
def test_a_step_that_is_not_finite_is_left_out_by_all_ranks(
    run_ranks: RunRanks, layout: Layout, settings: OptimizerConfig
) -> None:
    """One rank has a gradient that is not a number; nobody's weights, moments or count of updates change."""
    steps = make_steps()[:2]

    def check(rank: int) -> None:
        mesh = layout.mesh()
        model = LlamaModel(BASE, mesh, seed=5)
        optimizer = OverlappedDistributedOptimizer(model, mesh, settings)
        before = gathered(model, mesh)
        spoiled = next(p for name, p in model.named_parameters() if "up_proj" in name)
        hook = spoiled.register_hook(lambda grad: grad * math.nan if rank == 1 else grad)
        result = train_step(model, optimizer, own(steps[0], mesh), mesh, lr=1e-2)
        hook.remove()
        optimizer.wait_parameters()
        assert math.isnan(result.grad_norm) and math.isfinite(result.loss)
        after = gathered(model, mesh)
        assert all(torch.equal(after[name], before[name]) for name in before) and optimizer.updates == 0
        result = train_step(model, optimizer, own(steps[1], mesh), mesh, lr=1e-2)
        assert math.isfinite(result.grad_norm) and optimizer.updates == 1

    run_ranks(layout.world, check)


# -- registries, recomputation, compilation ----------------------------------------------------------------------------


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 2), ("full", 2)])
def test_what_is_recomputed_runs_twice(run_ranks: RunRanks, recompute: str, times: int) -> None:
    def count(rank: int) -> tuple[int, int]:
        calls = {"norm": 0, "attention": 0}

        def attention(q: Any, k: Any, v: Any, run: Any) -> torch.Tensor:
            calls["attention"] += 1
            return sdpa(q, k, v, run)

        class Norm(torch.nn.RMSNorm):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                calls["norm"] += 1
                return super().forward(x)

        register_attention("counted", attention)
        register_norm(
            "counted", lambda config, mesh: adopt_norm(Norm(config.hidden_size, config.norm_eps), config, mesh)
        )
        config = dataclasses.replace(BASE, norm="counted", attention="counted", recompute=recompute)
        run_pipeline(LlamaModel(config, build_mesh()), make_steps(("mixed",))[0])
        return calls["attention"], calls["norm"]

    attention, norm = run_ranks(1, count)[0]
    assert attention == 4 * times and norm == 2 * 4 * times + 1


def test_another_librarys_norm_in_its_place(run_ranks: RunRanks) -> None:
    """torch's own RMSNorm, registered by name, makes the run that ours makes, on every layout."""
    steps = make_steps()[:2]

    def run(rank: int, layout: Layout, norm: str) -> Any:
        register_norm(
            "torch",
            lambda config, mesh: adopt_norm(torch.nn.RMSNorm(config.hidden_size, config.norm_eps), config, mesh),
        )
        return train_on(dataclasses.replace(BASE, norm=norm), steps, layout)

    ours = run_ranks(1, lambda rank: run(rank, Layout(), "rms_norm"))[0]
    plain = PlainRun(ours.losses, ours.norms, ours.end)
    layout = Layout(tp=2, pp=2, sp=True)
    assert_same(run_ranks(4, lambda rank: run(rank, layout, "torch")), plain, 1e-10)


def test_a_module_whose_start_is_not_known_is_refused(run_ranks: RunRanks) -> None:
    def check(rank: int) -> None:
        mesh = build_mesh()
        with pytest.raises(UsageError, match="'weight' has no single initial value"):
            adopt_norm(torch.nn.Linear(2, 2), BASE, mesh)

    run_ranks(1, check)


def test_names_that_nobody_registered() -> None:
    mesh = build_mesh()
    with pytest.raises(Exception, match="did you mean 'rms_norm'"):
        LlamaModel(dataclasses.replace(BASE, norm="rmsnorm"), mesh)
    with pytest.raises(Exception, match="use one of: sdpa, varlen, varlen_kernel"):
        LlamaModel(dataclasses.replace(BASE, attention="ring"), mesh)


def test_an_attention_that_cannot_keep_documents_apart_says_so(run_ranks: RunRanks) -> None:
    def check(rank: int) -> None:
        register_attention("simple", sdpa)
        model = LlamaModel(dataclasses.replace(BASE, attention="simple"), build_mesh())
        run_pipeline(model, make_steps(("packed",))[0])

    with pytest.raises(RankFailure, match="cannot keep packed documents apart"):
        run_ranks(1, check)


@pytest.mark.parametrize("layout", [Layout(), Layout(cp=2), Layout(tp=2, pp=2, sp=True)], ids=str)
def test_attention_by_documents_makes_the_same_run(run_ranks: RunRanks, layout: Layout) -> None:
    steps = make_steps(("packed", "packed image", "mixed"))[:2]
    alone = run_ranks(1, lambda rank: train_on(BASE, steps, Layout()))[0]
    plain = PlainRun(alone.losses, alone.norms, alone.end)
    config = dataclasses.replace(BASE, attention="varlen")
    assert_same(run_ranks(layout.world, lambda rank: train_on(config, steps, layout)), plain, 1e-10)


def test_the_segments_of_documents_cover_the_queries_once() -> None:
    documents = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, -1, -1]])
    assert document_segments(documents, 0, 6) == [[(0, 0, 2), (2, 2, 5), (5, 5, 6)], [(0, 0, 4), (4, 4, 6)]]
    assert document_segments(documents, 3, 2) == [[(2, 3, 5)], [(0, 3, 4), (4, 4, 5)]]


@pytest.mark.slow
@pytest.mark.parametrize("layout", [pytest.param(Layout(), marks=pytest.mark.nightly), Layout(tp=2, sp=True)], ids=str)
def test_compiled_blocks_make_the_same_run(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, layout: Layout
) -> None:
    """Traced as for a GPU; only the last stage of compilation, which needs seconds for each graph, is left out."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled(self, backend="aot_eager"))
    config, steps = dataclasses.replace(BASE, num_layers=2), make_steps(("mixed", "packed"))[:2]

    def run(rank: int, compile: bool) -> Any:
        model = dataclasses.replace(config, compile=compile)
        assert (LlamaModel(model, layout.mesh()).layers["0"]._compiled_call_impl is not None) == compile
        return train_on(model, steps, layout)

    eager = run_ranks(layout.world, lambda rank: run(rank, False))[0]
    plain = PlainRun(eager.losses, eager.norms, eager.end)
    assert_same(run_ranks(layout.world, lambda rank: run(rank, True), 200.0), plain, 1e-10)
