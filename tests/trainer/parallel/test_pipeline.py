"""Running a pipeline: evaluation, shapes that change, order, and what is refused; parity has its losses and weights."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import torch.distributed as dist

from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.models.named_layers import register_attention, sdpa
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.training.pipeline import Action, pipeline_order, run_pipeline
from energon_lite.trainer.training.step import evaluate
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.test_parity import BASE, Layout, make_rows, make_steps, own, their_run_in_child
from tests.trainer.parallel.their_model import Rows
from tests.trainer.training.host_reads import host_reads

TEXT = dataclasses.replace(BASE, image_size=0)


@pytest.mark.usefixtures("models")
@pytest.mark.parametrize(
    "layout",
    nightly_but(
        {3, 4},
        [
            Layout(),
            Layout(pp=2, virtual=2),
            Layout(pp=3),
            Layout(pp=2, tp=2, sp=True),
            Layout(pp=2, cp=2),
            Layout(pp=2, dp=2),
        ],
    ),
    ids=str,
)
def test_evaluation_is_the_mean_over_all_tokens(run_ranks: RunRanks, layout: Layout) -> None:
    """More batches than fit into the stages at once, some without rows; no gradient is left behind."""
    batches = [rows for step in make_steps(("mixed", "packed", "empty", "nothing")) for rows in step]

    def check(rank: int) -> tuple[float, int]:
        mesh = layout.mesh()
        model = LlamaModel(BASE, mesh, seed=5)
        found = evaluate(model, own(batches, mesh), mesh)
        assert all(p.grad is None for p in model.parameters())
        return found

    found = run_ranks(layout.world, check)
    assert found == [found[0]] * layout.world
    loss, tokens = found[0]
    start = run_ranks(1, lambda rank: dict(LlamaModel(BASE, build_mesh(), seed=5).state_dict()))[0]
    theirs = their_run_in_child(run_ranks, BASE, start, [batches])
    assert tokens == sum(int(rows.loss_mask.sum()) for rows in batches)
    assert loss == pytest.approx(theirs.losses[0], abs=1e-10)


@pytest.mark.parametrize(("pp", "virtual"), nightly_but({0, 1}, [(4, 1), (2, 2), (3, 1)]))
def test_any_number_of_micro_batches(run_ranks: RunRanks, pp: int, virtual: int) -> None:
    """Fewer than stages, not a multiple of them, none at all: all come back, and nothing hangs."""

    def check(rank: int) -> None:
        mesh = build_mesh(pp=pp, virtual=virtual)
        model = LlamaModel(BASE, mesh, seed=5)
        for count in (0, 1, 2, 5):
            done: list[Action] = []
            back: list[Any] = []
            batches = own([make_rows(torch.Generator().manual_seed(n), "mixed") for n in range(count)], mesh)
            loss = run_pipeline(
                model, batches, after_backward=back.append, record=lambda action, *_, done=done: done.append(action)
            )[0]
            chunks = [model.parameters_of_chunk(chunk) for chunk in range(virtual)] if virtual > 1 else [None]
            assert sorted(map(str, back)) == sorted(map(str, chunks * count)) and len(done) == 2 * count * virtual
            assert (loss.item() > 0) == (count > 0 and mesh.is_last_stage)

    run_ranks(pp, check)


@pytest.mark.parametrize("virtual", nightly_but({1}, [1, 2]))
def test_all_stages_begin_and_end_with_what_is_short(run_ranks: RunRanks, virtual: int) -> None:
    """Stages between the first and the last one have no micro-batches, and take the same order."""
    lengths = [[6], [3, 3], [1] * 6, [4, 2], [5, 1]]

    def check(rank: int) -> tuple[list[int], list[int]]:
        mesh = build_mesh(pp=3, virtual=virtual)
        done: list[Action] = []
        tokens, batches = torch.zeros(3, 6, dtype=torch.int64), []
        for own_lengths in lengths:
            documents = [number for number, length in enumerate(own_lengths) for _ in range(length)]
            fields = {"documents": torch.tensor([documents] * 3), "document_lengths": own_lengths * 3}
            batches.append(Rows(tokens, tokens, torch.ones(3, 6), **fields))
        model = LlamaModel(dataclasses.replace(TEXT, num_layers=6), mesh, seed=5)
        run_pipeline(model, own(batches, mesh), record=lambda action, began, ended: done.append(action))
        order = ([a.micro_batch for a in done if a.chunk == 0 and a.backward == back] for back in (False, True))
        return next(order), next(order)

    cost = [sum(length * (length + 1) for length in own_lengths) for own_lengths in lengths]
    assert run_ranks(3, check) == [(pipeline_order(cost), pipeline_order(cost))] * 3


@pytest.mark.parametrize("virtual", nightly_but({1}, [1, 2]))
def test_what_the_host_reads_does_not_grow_with_micro_batches(run_ranks: RunRanks, virtual: int) -> None:
    """Sizes before the step, and the lengths of documents of all micro-batches; a stage between reads no document."""
    config = dataclasses.replace(TEXT, num_layers=6, attention="all documents")

    def check(rank: int) -> tuple[list[int], list[Any]]:
        mesh, seen = build_mesh(pp=3, virtual=virtual), list[Any]()
        register_attention(
            "all documents",
            lambda q, k, v, run: sdpa(q, k, v, dataclasses.replace(run, mask=None)),
            lambda lengths, *_: seen.append(lengths),
        )
        model = LlamaModel(config, mesh)
        counts = []
        for kind in ("text", "packed"):
            for count in (1, 5):
                batches = [make_rows(torch.Generator().manual_seed(n), kind) for n in range(count)]
                for batch in batches:
                    batch.known_lengths()  # as the loader has counted them
                with host_reads() as found:
                    run_pipeline(model, own(batches, mesh))
                counts.append(len(found))
        return counts, seen[:: len(model.chunks)]

    first, between, last = run_ranks(3, check)
    assert first[0] == between[0] == last[0] == [1, 1, 2, 2]
    assert first[1] == between[1] == last[1] and len(between[1]) == 6


def test_ends_with_rows_of_different_lengths_are_told_apart(run_ranks: RunRanks) -> None:
    def check(rank: int) -> None:
        mesh = build_mesh(pp=2)
        batches = [make_rows(torch.Generator().manual_seed(7), "text") for _ in range(2)]
        if rank == 1:
            batches[1].tokens = batches[1].tokens[:, 1:]
        run_pipeline(LlamaModel(BASE, mesh), batches)

    with pytest.raises(RankFailure, match="micro-batch 1 of the step is not the same on the first and the last stage"):
        run_ranks(2, check, moment=0.1)


def test_a_stage_has_its_own_layers_only(run_ranks: RunRanks) -> None:
    def names(rank: int) -> set[str]:
        model = LlamaModel(dataclasses.replace(BASE, tie_embeddings=True), build_mesh(pp=2, virtual=2))
        return {".".join(name.split(".")[:2]) for name, _ in model.named_parameters()}

    first, last = run_ranks(2, names)
    assert first == {"embed_tokens.weight", "vision.weight", "vision.bias", "vision.position", "layers.0", "layers.2"}
    assert last == {"embed_tokens.weight", "layers.1", "layers.3", "norm.weight"}
    alone = ParallelMesh()
    assert not dist.is_initialized() and LlamaModel(BASE, alone).chunks == [[0, 1, 2, 3]]
