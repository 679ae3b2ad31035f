"""Images that other ranks encode: the run of one rank, whoever has encoded what; and the work is even."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

import pytest
import torch

from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.interface import MultimodalBatch
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.models.vision import VisionTransformer
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.training.pipeline import run_pipeline
from tests.testing import nightly_but
from tests.trainer.parallel.plain_llama import PlainRun
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import BASE, EVERY, LAST, OPTIMIZER, Layout, Run, assert_same
from tests.trainer.parallel.test_vision_layouts import CLIP, POOLED, SIGLIP, train


@dataclass(frozen=True)
class Sharing(Layout):
    """A layout whose data-parallel ranks encode each other's images."""

    def mesh(self) -> ParallelMesh:
        return build_mesh(
            *(self.pp, self.dp, self.cp, self.tp), sequence_parallel=self.sp, virtual=self.virtual, share_images=True
        )


CASES: list[tuple[str, Layout, OptimizerConfig]] = [
    ("siglip", Sharing(dp=2), LAST),
    ("siglip", Sharing(dp=4), OPTIMIZER),
    ("siglip", Sharing(dp=2, pp=2), EVERY),
    ("clip", Sharing(dp=2, tp=2, sp=True), LAST),
    ("pooled", Sharing(dp=2, cp=2), LAST),
]
MODELS = {
    "siglip": dataclasses.replace(BASE, vision=SIGLIP, tie_embeddings=True),
    "clip": dataclasses.replace(BASE, vision=CLIP),
    "pooled": dataclasses.replace(BASE, vision=POOLED),
}


@pytest.fixture(scope="module")
def alone() -> dict[str, Run]:
    return {}


@pytest.mark.parametrize(
    ("name", "layout", "optimizer"), nightly_but({2, 3}, CASES), ids=[f"{name} {layout}" for name, layout, _ in CASES]
)
def test_whoever_encodes_the_images_the_run_is_that_of_one_rank(
    run_ranks: RunRanks, alone: dict[str, Run], name: str, layout: Layout, optimizer: OptimizerConfig
) -> None:
    """Of the micro-batches some have no images, and one has no rows: their ranks encode those of others."""
    config = MODELS[name]
    if name not in alone:
        alone[name] = run_ranks(1, functools.partial(train, config, Layout(), OPTIMIZER, ()))[0]
    one = alone[name]
    runs = run_ranks(layout.world, functools.partial(train, config, layout, optimizer, ()))
    assert_same(runs, PlainRun(one.losses, one.norms, one.end), 1e-10)


def test_a_frozen_encoder_is_shared_too(run_ranks: RunRanks) -> None:
    config = MODELS["siglip"]
    frozen = tuple(
        name for name, _ in LlamaModel(config, build_mesh()).named_parameters() if name.startswith(("vision", "proj"))
    )
    one = run_ranks(1, functools.partial(train, config, Layout(), OPTIMIZER, frozen))[0]
    runs = run_ranks(2, functools.partial(train, config, Sharing(dp=2), LAST, frozen))
    assert_same(runs, PlainRun(one.losses, one.norms, one.end), 1e-10)


def micro_batch(images: int) -> MultimodalBatch:
    """A row with so many images of two patches by two."""
    length = 5 * images + 3
    return MultimodalBatch(
        __key__=(),
        __restore_key__=(),
        tokens=torch.arange(length)[None] % 29,
        labels=torch.arange(length)[None] % 29,
        loss_mask=torch.ones(1, length),
        image=torch.full((images, 3, 4, 4), 0.5),
        image_rows=torch.zeros(images, dtype=torch.int64),
        image_starts=torch.arange(images) * 5,
    )


@pytest.mark.parametrize(("shared", "encoded"), [(True, [[4, 2]] * 3), (False, [[12, 0], [0, 5], [0, 1]])])
def test_each_rank_encodes_as_many(run_ranks: RunRanks, shared: bool, encoded: list[list[int]]) -> None:
    """Of twelve images of one rank and none of others in a turn, and of five and one in the next."""
    config: ModelConfig = dataclasses.replace(BASE, vision=SIGLIP)

    def count(rank: int) -> list[int]:
        mesh = build_mesh(share_images=shared)
        model = LlamaModel(config, mesh)
        seen: list[int] = []
        encoder = model.vision
        assert isinstance(encoder, VisionTransformer)
        encoder.register_forward_pre_hook(lambda _, inputs: seen.append(len(inputs[0])))
        turns = [(12, 0, 0), (0, 5, 1)]
        run_pipeline(model, [micro_batch(images[rank]) for images in turns])
        return [*seen, 0][:2] if rank == 0 else [*[0] * (2 - len(seen)), *seen]

    assert run_ranks(3, count) == encoded
