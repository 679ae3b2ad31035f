"""Runs of models with images that begin with weights of Hugging Face, and what they leave."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from energon_lite.trainer import Trainer, config_from_dict
from energon_lite.trainer.conversion.export import native_to_huggingface
from energon_lite.trainer.conversion.from_huggingface import huggingface_to_native
from tests.trainer.conversion.small_models import SaveModel
from tests.trainer.conversion.small_vision_models import IMAGE, make_encoder, make_llava
from tests.trainer.parallel.rank_processes import RunRanks

CAPTIONED = (
    "sample_type: {__module__: megatron.energon, __class__: CaptioningSample}\nfield_map: {image: png, caption: txt}\n"
)


def picture(number: int) -> dict[str, bytes]:
    """An image of one shade, of a size that is not the model's, and its name."""
    data = io.BytesIO()
    Image.fromarray(np.full((9 + number, 20, 3), (number % 3) * 127, dtype=np.uint8)).save(data, "png")
    return {"png": data.getvalue(), "txt": b"abc"[number % 3 :][:1]}


@pytest.fixture
def run(tmp_path: Path, write_dataset: Callable[..., Path]) -> Callable[..., tuple[list[float], dict[str, Any]]]:
    """``run(mesh, init_from, **train)``: the losses of a run of one rank, and its weights at the end."""
    samples = [(f"{n:02d}", picture(n)) for n in range(16)]
    write_dataset(tmp_path / "data", {"a.tar": samples}, dataset_yaml=CAPTIONED)

    def go(mesh: dict[str, int], place: Path, output: str, model: dict[str, Any], train: dict[str, Any]) -> Any:
        data = {"path": str(tmp_path / "data"), "micro_batch_size": 2, "micro_batches_per_step": 2, "workers": 0}
        values = {
            "output": str(tmp_path / output),
            "data": data | {"max_length": 10, "tokenizer": None},
            "mesh": mesh,
            "model": {**model, "preset": "init_from"},
            "optimizer": {"lr": 1e-2, "eps": 1e-6},
            "train": {"steps": 3, "save_every": 3, "async_save": False, "init_from": str(place)} | train,
        }
        with Trainer(config_from_dict(values)) as trainer:
            trainer.run()
            trainer.optimizer.wait_parameters()
            weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
        lines = (tmp_path / output / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines], weights

    return go


@pytest.mark.slow
def test_a_run_begins_with_a_llava_and_leaves_one(run: Callable[..., Any], run_ranks: RunRanks, tmp_path: Path) -> None:
    """Its encoder frozen; the same on any layout; with a tokenizer of bytes, in which one byte is the image's token."""
    from transformers import LlavaForConditionalGeneration

    theirs = make_llava("siglip", vocab_size=259)
    theirs.save_pretrained(tmp_path / "hf")
    train = {"freeze": ["vision.*"]}
    first, weights = run_ranks(1, lambda rank: run({}, tmp_path / "hf", "one", {}, train))[0]
    assert len(first) == 3 and first[-1] < first[0]
    mesh = {"tp": 2, "sequence_parallel": True}
    for name, vision in (("cut", {}), ("whole", {"tp": 1, "recompute": "full"})):
        model = {"vision": vision}  # of which the rest is that of the folder
        losses = run_ranks(2, lambda rank, out=name, m=model: run(mesh, tmp_path / "hf", out, m, train)[0])[0]
        torch.testing.assert_close(losses, first, rtol=1e-4, atol=1e-4)
    native_to_huggingface(tmp_path / "one/checkpoints", tmp_path / "out", like=tmp_path / "hf")
    made = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    before, after = theirs.state_dict(), made.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if ".vision_tower." in name} == same
    assert torch.equal(after["model.multi_modal_projector.linear_1.weight"], weights["projector.linear_1.weight"])
    assert made.config.image_token_index == IMAGE


def test_a_run_begins_with_a_language_model_and_an_encoder(
    run: Callable[..., Any], run_ranks: RunRanks, save_model: SaveModel, tmp_path: Path
) -> None:
    """The projector begins as new, and learns alone, as LLaVA's first stage has it."""
    make_encoder("clip").save_pretrained(tmp_path / "clip")
    huggingface_to_native(save_model(vocab_size=259), tmp_path / "native", vision=tmp_path / "clip")
    train = {"freeze": ["vision.*", "layers.*", "embed_tokens.*", "norm.*", "lm_head.*"], "steps": 4}
    losses, weights = run_ranks(1, lambda rank: run({}, tmp_path / "native", "run", {}, train))[0]
    assert len(losses) == 4 and losses[-1] < losses[0]
    pp = run_ranks(2, lambda rank: run({"pp": 2}, tmp_path / "native", "pp", {}, train)[0])[0]
    torch.testing.assert_close(pp, losses, rtol=1e-4, atol=1e-4)
    theirs = make_encoder("clip").state_dict()
    assert all(torch.equal(weights[f"vision.{name}"], tensor) for name, tensor in theirs.items())
