"""Features of the model that are registered by name, computed again or compiled; how many graphs the compiler makes of
a run; and what is refused."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.trainer.models import named_layers
from energon_lite.trainer.models.config import VisionConfig
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.models.named_layers import adopt_norm, register_attention, register_norm, sdpa
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.training.pipeline import run_pipeline
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.test_parity import BASE, Layout, assert_same, make_steps, train_on
from tests.trainer.parallel.their_model import Rows

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
    assert_same(run_ranks(layout.world, lambda rank: run(rank, True)), eager, 1e-10)


# -- graphs: none of the blocks falls back to eager --------------------------------------------------------------------

CONFIG = dataclasses.replace(BASE, num_layers=3, image_size=0, compile=True)


def rows(number: int, length: int, *, packed: bool, salt: int = 0) -> Rows:
    generator = torch.Generator().manual_seed(number * length + salt)
    tokens, labels = torch.randint(0, 29, (2, number, length), generator=generator)
    documents = (torch.rand(number, length, generator=generator) < 0.3).long().cumsum(1) if packed else None
    return Rows(tokens, labels, torch.ones(number, length), documents=documents)


class Counted:
    """A model whose blocks are traced, and not compiled any further."""

    def __init__(self, mesh: ParallelMesh, **shape: Any):
        self.graphs = 0
        torch._dynamo.reset()  # of the process that this one was forked from
        torch._dynamo.utils.counters.clear()
        compiled = torch.nn.Module.compile

        def keep(graph: torch.fx.GraphModule, inputs: object) -> Any:
            self.graphs += 1
            return graph.forward

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.nn.Module, "compile", lambda module: compiled(module, backend=keep))
            self.model = LlamaModel(dataclasses.replace(CONFIG, **shape), mesh)
        assert self.model.lm_head is not None
        self.model.lm_head.compiled = False  # it is counted elsewhere

    def encode(self, number: int, side: int) -> int:
        """How many more graphs these images make in the encoder, which gives what it gave before it was compiled."""
        before, encoder = self.graphs, self.model.vision
        images = torch.rand(number, 3, side, side, generator=torch.Generator().manual_seed(side))
        assert encoder is not None
        made = encoder(images)
        with torch.compiler.set_stance("force_eager"):
            torch.testing.assert_close(made, encoder(images))
        made.sum().backward()
        return self.graphs - before

    def run(self, number: int, length: int, *, packed: bool = False, learning: bool = True, salt: int = 0) -> int:
        """How many more graphs this batch makes."""
        before = self.graphs
        with torch.set_grad_enabled(learning):
            run_pipeline(self.model, [rows(number, length, packed=packed, salt=salt)], backward=learning)
        return self.graphs - before


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("recompute", ["none", pytest.param("selective", marks=pytest.mark.nightly)])
def test_rows_of_all_kinds_make_few_graphs(run_ranks: RunRanks, recompute: str) -> None:
    """One for the first shape, and one for each kind of all other shapes."""

    def check(rank: int) -> None:
        counted = Counted(build_mesh(), recompute=recompute)
        assert [counted.run(2, 16) for _ in range(2)] == [1, 0]
        kinds = {"packed": True, "learning": True}, {"learning": False}, {"packed": True, "learning": False}
        assert [counted.run(3, 20)] + [counted.run(2 + i, 13 + i, **kind) for i, kind in enumerate(kinds)] == [1] * 4
        for kind in ({}, *kinds):
            assert [counted.run(*shape, **kind) for shape in ((5, 24), (2, 8), (4, 4), (32, 40), (8, 13))] == [0] * 5
        assert sum(counted.run(1, 19, **kind) for kind in ({}, *kinds)) == 4  # a single row is another matter
        assert sum(counted.run(1, 14 + i, **kind) for i, kind in enumerate(({}, *kinds))) == 0
        assert not torch._dynamo.utils.counters["graph_break"]

    run_ranks(1, check)


@torch.library.custom_op("energon_lite_tests::varlen", mutates_args=())
def varlen_op(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, most_q: int, most_k: int) -> torch.Tensor:
    return q * (v.sum() + k.sum() + most_q + most_k)


@varlen_op.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, most_q: int, most_k: int) -> torch.Tensor:
    return torch.empty_like(q)


@pytest.mark.usefixtures("compiler")
def test_the_longest_document_is_no_reason_to_compile_again(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of one shape, with other documents each time: at most one graph more."""

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *bounds: Any, **_: Any) -> Any:
        return varlen_op(q, k, v, *bounds[2:])

    monkeypatch.setattr(named_layers, "_varlen_attn", lambda: kernel)
    monkeypatch.setattr(named_layers, "has_varlen_kernel", lambda device, dtype: True)

    def check(rank: int) -> list[int]:
        counted = Counted(build_mesh())
        return [counted.run(2, 24, packed=True, learning=False, salt=salt) for salt in range(6)]

    for found in run_ranks(1, check):
        assert found[0] == 1 and sum(found[1:]) <= 1


@pytest.mark.nightly
@pytest.mark.usefixtures("compiler")
def test_rows_that_are_cut_over_ranks_make_one_graph(run_ranks: RunRanks) -> None:
    """The keys that a rank's queries see end in the middle of the row."""

    def check(rank: int) -> list[int]:
        counted = Counted(Layout(cp=2).mesh())
        return [counted.run(2, 16), counted.run(2, 16), counted.run(3, 24), counted.run(2, 32), counted.run(4, 40)]

    for found in run_ranks(2, check):
        assert found[:3] == [1, 0, 1] and sum(found) <= 3


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.nightly), "selective"])
def test_images_of_all_sizes_make_few_graphs(run_ranks: RunRanks, recompute: str) -> None:
    """One for the first shape, one for all others; a single image is another matter."""
    vision = VisionConfig(hidden_size=8, num_layers=2, num_heads=2, ffn_size=12, recompute=recompute)

    def check(rank: int) -> None:
        counted = Counted(build_mesh(), image_size=4, vision=vision)
        assert [counted.encode(*shape) for shape in ((2, 4), (2, 4), (3, 4), (3, 6), (5, 10))] == [1, 0, 1, 0, 0]
        assert [counted.encode(1, side) for side in (4, 6, 8)] == [1, 0, 0]
        assert not torch._dynamo.utils.counters["graph_break"]

    run_ranks(1, check)
