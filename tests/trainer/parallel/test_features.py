"""Features of the model that are registered by name, computed again or compiled; and what is refused of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.trainer.models.attention_functions import sdpa
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.models.registry import adopt_norm, register_attention, register_norm
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training.pipeline import run_pipeline
from tests.testing import nightly_but
from tests.trainer.parallel.plain_llama import PlainRun
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.test_parity import (
    BASE,
    Layout,
    assert_same,
    make_steps,
    train_on,
)

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
    with pytest.raises(Exception, match="use one of: sdpa, varlen"):
        LlamaModel(dataclasses.replace(BASE, attention="ring"), mesh)


def test_an_attention_that_cannot_keep_documents_apart_says_so(run_ranks: RunRanks) -> None:
    def check(rank: int) -> None:
        register_attention("simple", sdpa)
        model = LlamaModel(dataclasses.replace(BASE, attention="simple"), build_mesh())
        run_pipeline(model, make_steps(("packed",))[0])

    with pytest.raises(RankFailure, match="cannot keep packed documents apart"):
        run_ranks(1, check)


@pytest.mark.slow
@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("layout", "kinds"),
    nightly_but({0}, [(Layout(), ("packed",)), (Layout(), ("mixed",)), (Layout(tp=2, sp=True), ("mixed", "packed"))]),
    ids=str,
)
def test_compiled_blocks_make_the_same_run(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch, layout: Layout, kinds: tuple[str, ...]
) -> None:
    """Traced as for a GPU; only the last stage of compilation, which needs seconds for each graph, is left out."""
    compiled = torch.nn.Module.compile
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self: compiled(self, backend="aot_eager"))
    config, steps = dataclasses.replace(BASE, num_layers=1), make_steps(kinds)[:2]

    def run(rank: int, compile: bool) -> Any:
        model = dataclasses.replace(config, compile=compile)
        assert (LlamaModel(model, layout.mesh()).layers["0"]._compiled_call_impl is not None) == compile
        return train_on(model, steps, layout)

    eager = run_ranks(layout.world, lambda rank: run(rank, False))[0]
    plain = PlainRun(eager.losses, eager.norms, eager.end)
    assert_same(run_ranks(layout.world, lambda rank: run(rank, True)), plain, 1e-10)
