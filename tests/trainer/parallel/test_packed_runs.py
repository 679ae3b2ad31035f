"""Batches by tokens through the trainer: packed rows are what padded rows are, on every layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import CaptioningSample, TextSample
from energon_lite.errors import ConfigError
from energon_lite.hooks import HookContext, hook_context
from energon_lite.trainer import MultimodalBatch, MultimodalTaskEncoder, TrainerConfig
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.config import learning_rate
from energon_lite.trainer.parallel.parameters import layout_of
from energon_lite.trainer.training.pipeline import run_pipeline
from tests.testing import errors_of, nightly_but
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.small_runs import BATCHING, make_config, metrics, train
from tests.trainer.parallel.test_parity import BASE, Layout, gathered

CONFIG = dataclasses.replace(BASE, vocab_size=259, vocab_multiple=64)
Loss = tuple[float, dict[str, torch.Tensor]]


def samples(seed: int) -> list[CaptioningSample | TextSample]:
    """Texts of one to twelve letters, every third behind an image."""
    generator = np.random.default_rng(seed)
    made: list[CaptioningSample | TextSample] = []
    for number in range(7):
        text = "".join(chr(97 + letter) for letter in generator.integers(0, 26, generator.integers(1, 13)))
        base: dict[str, Any] = {"__key__": str(number), "__restore_key__": ("sample", 0, number, 0, 0)}
        if number % 3 == seed % 3:
            image = torch.from_numpy(generator.random((3, 4, 4), dtype=np.float32))
            made.append(CaptioningSample(**base, image=image, caption=text))
        else:
            made.append(TextSample(**base, text=text))
    return made


def collated(kind: str, chosen: list[CaptioningSample | TextSample]) -> MultimodalBatch:
    """The samples as rows with places for images, each alone in a batch's row or all in one."""
    packed = kind == "packed"
    encoder = MultimodalTaskEncoder(max_length=16, image_size=4, patch_size=2, training=False, packed=packed)
    with hook_context(HookContext(0)):
        return encoder.batch([encoder.encode_sample(sample) for sample in chosen])  # type: ignore[arg-type]


def loss_and_gradients(layout: Layout, kind: str) -> Loss:
    """Of two micro-batches of different sizes: the sum of the losses, and all gradients, whole."""
    mesh = layout.mesh()
    model = LlamaModel(CONFIG, mesh, seed=5)
    micro_batches = [collated(kind, samples(1)), collated(kind, samples(2)[:3])]
    loss = mesh.sum_over_data(run_pipeline(model, micro_batches)[0])
    if (group := mesh.group("pp")) is not None:
        torch.distributed.all_reduce(loss, group=group)
    with torch.no_grad():
        for p in model.parameters():
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            for axis in layout_of(p).sum_over:
                torch.distributed.all_reduce(grad, group=mesh.group(axis))
            p.copy_(mesh.sum_over_data(grad))
    return loss.item(), gathered(model, mesh)


PACKED_LAYOUTS = [
    Layout(),
    Layout(tp=2, sp=True),
    Layout(cp=2),
    Layout(pp=2, virtual=2),
    Layout(tp=2, cp=2, pp=2),
]


@pytest.mark.parametrize("layout", nightly_but({2, 4}, PACKED_LAYOUTS), ids=str)
def test_packed_and_padded_have_one_loss_and_one_gradient(run_ranks: RunRanks, layout: Layout) -> None:
    """The same samples, images among them, in both forms; on one process in the form that has no mask at all."""
    expected, whole = run_ranks(1, lambda rank: loss_and_gradients(Layout(), "padded"))[0]
    for kind in ("padded", "packed"):
        for loss, gradients in run_ranks(layout.world, lambda rank, form=kind: loss_and_gradients(layout, form)):
            assert loss == pytest.approx(expected, rel=1e-12)
            assert gradients.keys() == whole.keys()
            for name, gradient in gradients.items():
                torch.testing.assert_close(gradient, whole[name], rtol=1e-9, atol=1e-10, msg=name)


# -- runs --------------------------------------------------------------------------------------------------------------


def token_config(path: Path, output: Path, batching: dict[str, Any], **more: Any) -> TrainerConfig:
    config = make_config(path, output, **more)
    model = dataclasses.replace(config.model, patch_size=2, num_layers=4)
    optimizer = dataclasses.replace(config.optimizer, scale_rule="sqrt", reference_tokens=100)
    return dataclasses.replace(
        config, data=dataclasses.replace(config.data, batching=batching), model=model, optimizer=optimizer
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "world", "mesh", "share"),
    nightly_but(
        {0, 5},
        [
            ("capacity", 4, {"tp": 2, "sequence_parallel": True}, "load"),
            ("capacity", 4, {"pp": 2, "virtual": 2}, "load"),
            ("best_fit", 2, {}, "load"),
            ("best_fit", 2, {"cp": 2}, "broadcast"),
            ("best_fit", 8, {"tp": 2, "pp": 2}, "load"),
            ("cost", 8, {"pp": 2, "cp": 2}, "broadcast"),
        ],
    ),
    ids=str,
)
def test_each_layout_makes_the_run_of_one_process(
    run_ranks: RunRanks, measured: Path, tmp_path: Path, strategy: str, world: int, mesh: dict[str, Any], share: str
) -> None:
    runs = []
    for name, sizes, ranks in (("alone", {}, 1), ("together", mesh, world)):
        config = token_config(
            measured, tmp_path / name, BATCHING[strategy], mesh=sizes, share=share, steps=4, save_every=0, eval_every=2
        )
        assert run_ranks(ranks, lambda rank, c=config: train(c)) == [4] * ranks
        runs.append(metrics(tmp_path / name))
    assert len({entry["tokens"] for entry in runs[0]}) > 1, "sizes that do not vary prove nothing"
    for entry in runs[0]:
        planned = learning_rate(entry["step"] - 1, 4, config.optimizer)
        assert entry["lr"] == pytest.approx(planned * (entry["tokens"] / 100) ** 0.5)
    for mine, its in zip(*runs, strict=True):
        assert (
            mine.keys() == its.keys()
            and mine["tokens"] == its["tokens"]
            and mine["digest"] == its["digest"]
            and mine["lr"] == its["lr"]
        )
        for key in mine.keys() - {"digest"}:
            assert mine[key] == pytest.approx(its[key], rel=1e-4 if key == "grad_norm" else 1e-5)


def test_a_strategy_that_cannot_be_is_refused(run_ranks: RunRanks, measured: Path, tmp_path: Path) -> None:
    config = token_config(measured, tmp_path / "run", {"strategy": "best_fit", "capcity": 40})
    (text,) = errors_of(run_ranks, 1, ConfigError, lambda rank: train(config))
    assert "data.batching.capcity" in text


def test_lengths_that_nobody_measured_are_asked_for(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    with pytest.raises(RankFailure, match="energon-lite measure"):
        run_ranks(1, lambda rank: train(token_config(blend, tmp_path / "run", BATCHING["best_fit"])))
