"""An image encoder on every layout of ranks, and images that other ranks encode: the run of one rank, whose model is
compared with that of transformers; and the work is even."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

from energon_lite.errors import TopologyError
from energon_lite.trainer.models.config import ModelConfig, VisionConfig
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.models.vision import VisionFeedForward, VisionTransformer
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.parallel.parameters import freeze
from energon_lite.trainer.training.pipeline import run_pipeline
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import (
    BASE,
    EVERY,
    LAST,
    OPTIMIZER,
    Layout,
    Run,
    assert_same,
    make_rows,
    train_on,
)
from tests.trainer.parallel.their_model import Rows

SIGLIP = VisionConfig(hidden_size=16, num_layers=3, num_heads=4, ffn_size=20, feature_layer=-2, head=True)
CLIP = VisionConfig(
    "clip", hidden_size=16, num_layers=2, num_heads=4, ffn_size=20, activation="quick_gelu", projector="linear"
)
POOLED = dataclasses.replace(SIGLIP, feature_layer=None, pooling="attention", num_layers=2)
#: Heights and widths; patches of two pixels.
SIZES = [(4, 4), (2, 6), (4, 4), (6, 4), (2, 2)]


def with_images(generator: torch.Generator, config: ModelConfig, *, packed: bool) -> Rows:
    """Two rows with five images of four sizes between their tokens."""
    assert config.vision is not None
    tokens = [1 if config.vision.pooling != "none" else height * width // 4 for height, width in SIZES]
    length = 4 + max(sum(tokens[:3]), sum(tokens[3:])) + int(torch.randint(1, 5, (), generator=generator))
    starts = [1, 1 + tokens[0], 3 + tokens[0] + tokens[1], 0, tokens[3] + 2]
    rows = Rows(
        *torch.randint(0, 29, (2, 2, length), generator=generator),
        (torch.rand(2, length, generator=generator) < 0.8).to(torch.float32),
        torch.rand(5, 3, 6, 6, generator=generator),
        torch.tensor([0, 0, 0, 1, 1]),
        torch.tensor(starts),
        image_sizes=SIZES,
    )
    if packed:
        rows.documents = torch.randint(0, 2, (2, length), generator=generator).cumsum(1)
    return rows


def make_steps(config: ModelConfig, steps: int = 2) -> list[list[Rows]]:
    """Images of one size and of several, packed and not; a text without images; nothing at all."""
    generator = torch.Generator().manual_seed(3)
    kinds = ("text", "empty") if config.prefix_length == 1 else ("text", "packed image")
    return [
        [with_images(generator, config, packed=packed) for packed in (False, True)]
        + [make_rows(generator, kind) for kind in kinds]
        for _ in range(steps)
    ]


def train(config: ModelConfig, layout: Layout, settings: OptimizerConfig, frozen: tuple[str, ...], rank: int) -> Run:
    return train_on(config, make_steps(config), layout, frozen, settings)


@pytest.fixture(scope="module")
def alone() -> dict[str, Run]:
    """One rank's run of each encoder is enough for all layouts."""
    return {}


#: Encoder, settings of it, layout, optimizer. Encoders whose tp is 1 are whole on ranks that cut the language model.
ENCODERS = {"siglip": SIGLIP, "clip": CLIP, "pooled": POOLED}
CASES: list[tuple[str, dict[str, Any], Layout, OptimizerConfig]] = [
    ("siglip", {}, Layout(tp=2, pp=2, sp=True), LAST),
    ("siglip", {"recompute": "full"}, Layout(tp=2, cp=2), EVERY),
    ("siglip", {"tp": 1}, Layout(tp=2, dp=2), EVERY),
    ("siglip", {"tp": 1, "recompute": "full"}, Layout(tp=2, pp=2, virtual=2, sp=True), LAST),
    ("clip", {"recompute": "selective"}, Layout(tp=4), LAST),
    ("clip", {"tp": 1}, Layout(tp=2, cp=2, sp=True), OPTIMIZER),
    ("pooled", {}, Layout(tp=2, cp=2), LAST),
    ("pooled", {"tp": 1}, Layout(pp=2, cp=2), EVERY),
    # Of the micro-batches some have no images, and one has no rows: their ranks encode those of others.
    ("siglip", {}, Layout(dp=2, share=True), LAST),
    ("siglip", {}, Layout(dp=4, share=True), OPTIMIZER),
    ("siglip", {}, Layout(dp=2, pp=2, share=True), EVERY),
    ("clip", {}, Layout(dp=2, tp=2, sp=True, share=True), LAST),
    ("pooled", {}, Layout(dp=2, cp=2, share=True), LAST),
    # Ranks with rows wait for sums of many buckets, before they send the gradients of images to the rank without.
    ("pooled", {}, Layout(dp=4, share=True), dataclasses.replace(EVERY, bucket_size=100)),
]


@pytest.mark.parametrize(
    ("name", "told", "layout", "optimizer"),
    nightly_but({3, 7, 10, 11, 13}, CASES),
    ids=[f"{name} {more} {layout}" for name, more, layout, _ in CASES],
)
def test_an_encoder_on_any_layout_makes_the_run_of_one_rank(
    run_ranks: RunRanks,
    alone: dict[str, Run],
    name: str,
    told: dict[str, Any],
    layout: Layout,
    optimizer: OptimizerConfig,
) -> None:
    vision = ENCODERS[name]
    config = dataclasses.replace(BASE, vision=vision, tie_embeddings=True)
    if name not in alone:
        alone[name] = run_ranks(1, functools.partial(train, config, Layout(), OPTIMIZER, ()))[0]
    one = alone[name]
    config = dataclasses.replace(config, vision=dataclasses.replace(vision, **told))
    runs = run_ranks(layout.world, functools.partial(train, config, layout, optimizer, ()))
    assert all(torch.equal(weight, one.start[name]) for name, weight in runs[0].start.items()), "another start"
    assert_same(runs, one, 1e-10)
    moved = [name for name in one.weights if name.startswith(("vision.", "projector.")) and name.endswith(".weight")]
    assert len(moved) > 20


@pytest.mark.parametrize(
    ("layout", "still"), [(Layout(tp=2, pp=2), ("vision",)), (Layout(dp=2, share=True), ("vision", "projector"))]
)
def test_what_of_an_encoder_is_frozen_stays(run_ranks: RunRanks, layout: Layout, still: tuple[str, ...]) -> None:
    config = dataclasses.replace(BASE, vision=SIGLIP)
    frozen = tuple(name for name, _ in LlamaModel(config, build_mesh()).named_parameters() if name.startswith(still))
    one = run_ranks(1, functools.partial(train, config, Layout(), OPTIMIZER, frozen))[0]
    runs = run_ranks(layout.world, functools.partial(train, config, layout, LAST, frozen))
    assert_same(runs, one, 1e-10)
    assert all(torch.equal(one.weights[name], one.start[name]) for name in frozen)
    moved = not torch.equal(one.weights["projector.linear_1.weight"], one.start["projector.linear_1.weight"])
    assert moved == ("projector" not in still)


def test_a_pattern_freezes_the_encoder_and_what_is_behind_the_features_does_not_learn() -> None:
    model = LlamaModel(dataclasses.replace(BASE, vision=SIGLIP), build_mesh())
    still = {name for name, p in model.named_parameters() if not p.requires_grad}
    assert still and all(
        name.startswith(("vision.encoder.layers.2.", "vision.post_", "vision.head.")) for name in still
    )
    freeze(model, ["vision.*"], model.mesh)
    learning = {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad}
    assert learning == {"embed_tokens", "projector", "layers", "norm", "lm_head"}


@pytest.mark.parametrize(("recompute", "times"), [("none", 1), ("selective", 2), ("full", 2)])
def test_the_encoder_has_its_own_recomputation(run_ranks: RunRanks, recompute: str, times: int) -> None:
    config = dataclasses.replace(BASE, vision=dataclasses.replace(SIGLIP, recompute=recompute))

    def count(rank: int) -> list[int]:
        calls, feed = [], VisionFeedForward.forward

        def counted(self: VisionFeedForward, x: torch.Tensor) -> torch.Tensor:
            calls.append(len(x))
            return feed(self, x)

        VisionFeedForward.forward = counted  # type: ignore[method-assign]
        run_pipeline(LlamaModel(config, build_mesh()), [make_steps(config, 1)[0][0]])
        return calls

    # Images of one size go together, through two of the three blocks.
    assert sorted(run_ranks(1, count)[0]) == sorted([2, 1, 1, 1] * 2 * times)


def test_an_encoder_that_cannot_be_cut_says_so(run_ranks: RunRanks) -> None:
    def check(rank: int) -> None:
        vision = dataclasses.replace(SIGLIP, num_heads=1)
        with pytest.raises(TopologyError, match="an image encoder of 1 heads"):
            LlamaModel(dataclasses.replace(BASE, vision=vision), Layout(tp=2).mesh())
        LlamaModel(dataclasses.replace(BASE, vision=dataclasses.replace(vision, tp=1)), Layout(tp=2).mesh())

    run_ranks(2, check)


def micro_batch(images: int) -> Rows:
    """A row with so many images of two patches by two."""
    length = 5 * images + 3
    rows, starts = torch.zeros(images, dtype=torch.int64), torch.arange(images) * 5
    tokens = torch.arange(length)[None] % 29
    return Rows(tokens, tokens, torch.ones(1, length), torch.full((images, 3, 4, 4), 0.5), rows, starts)


@pytest.mark.parametrize(("shared", "encoded"), [(True, [[4, 2]] * 3), (False, [[12, 0], [0, 5], [0, 1]])])
def test_each_rank_encodes_as_many(run_ranks: RunRanks, shared: bool, encoded: list[list[int]]) -> None:
    """Of twelve images of one rank and none of others in a turn, and of five and one in the next."""
    config = dataclasses.replace(BASE, vision=SIGLIP)

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
