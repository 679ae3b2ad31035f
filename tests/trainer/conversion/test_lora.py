"""LoRA by peft, as in the example: trained on any ranks, killed, resumed, and loaded by peft and by transformers."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

peft = pytest.importorskip("peft")
from energon_lite.errors import TopologyError  # noqa: E402
from energon_lite.trainer import Trainer, TrainerConfig, config_from_dict  # noqa: E402
from examples.own_models.lora import adapted, save_adapter  # noqa: E402
from tests.trainer.conversion.small_models import SaveModel, make_model  # noqa: E402
from tests.trainer.parallel.rank_processes import RunRanks  # noqa: E402
from tests.trainer.parallel.small_runs import run_part  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:Unsupported layer type", "ignore:`is_gradient_checkpointing`")


def settings() -> Any:
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "k_proj", "o_proj", "up_proj", "down_proj"])


def config_of(folder: Path, output: Path, **train: Any) -> TrainerConfig:
    texts = folder.parent / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"line {n}"}) + "\n" for n in range(40)))
    return config_from_dict(
        {
            "output": str(output),
            "data": {"path": str(texts), "micro_batch_size": 3, "workers": 0, "tokenizer": None},
            "model": {"preset": "init_from"},
            "optimizer": {"lr": 1e-2, "warmup": 1, "eps": 1e-4},
            "train": {"init_from": str(folder), "steps": 4, "save_every": 2} | train,
        }
    )


def trained(config: TrainerConfig, until: int, tokens: torch.Tensor, adapter: Path) -> tuple[torch.Tensor, list[str]]:
    """Logits after so many steps, and the parameters that have moments; the adapter is written."""
    lora = settings()
    with Trainer(config, make_model=adapted(lora)) as trainer:
        run_part(trainer, until)
        if trainer.mesh.is_main:
            save_adapter(trainer.model, lora, adapter, config.train.init_from)
        return trainer.model.all_logits(tokens).detach(), list(trainer.optimizer.parameters)


def test_an_adapter_is_that_of_any_ranks_and_transformers_loads_it(
    run_ranks: RunRanks, save_model: SaveModel, tmp_path: Path
) -> None:
    folder, tokens = save_model(vocab_size=259, num_key_value_heads=2), torch.arange(30)[None]
    (alone,) = run_ranks(1, lambda rank: trained(config_of(folder, tmp_path / "one"), 4, tokens, tmp_path / "one-a"))
    config = config_of(folder, tmp_path / "two")
    run_ranks(2, lambda rank: trained(config, 2, tokens, tmp_path / "early"))
    ours, moments = run_ranks(2, lambda rank: trained(config, 4, tokens, tmp_path / "adapter"))[0]
    assert moments and all(".lora_" in name for name in moments)
    assert (alone[0] - ours).abs().max() < 1e-5, "resumed on two ranks, it is the run of one"

    base = make_model(vocab_size=259, num_key_value_heads=2)
    before = base(tokens).logits.detach()
    assert (before - ours).abs().max() > 0.1
    with_adapter = peft.PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert (with_adapter(tokens).logits - ours).abs().max() < 1e-5
    again = make_model(vocab_size=259, num_key_value_heads=2)
    again.load_adapter(str(tmp_path / "adapter"))
    assert (again(tokens).logits - ours).abs().max() < 1e-5
    assert json.loads((tmp_path / "adapter/adapter_config.json").read_text())["base_model_name_or_path"] == str(folder)


def test_cut_layers_are_refused(run_ranks: RunRanks, save_model: SaveModel, tmp_path: Path) -> None:
    config = config_of(save_model(vocab_size=259), tmp_path / "run")
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, tp=2))

    def start(rank: int) -> None:
        with pytest.raises(TopologyError, match="LoRA needs whole layers"):
            Trainer(config, make_model=adapted(settings()))

    run_ranks(2, start)
