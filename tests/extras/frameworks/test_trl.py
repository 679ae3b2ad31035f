"""TRL's supervised fine-tuning, as it is: a class of its own between Trainer and the user, that prepares its data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from energon_lite import TaskEncoder, get_savable_loader, get_train_dataset, get_val_dataset, stateless
from energon_lite.extras.frameworks.transformers import use_loaders
from tests.testing import ALONE

pytestmark = pytest.mark.slow

WORDS = ["<pad>", "<end>", *(f"w{number}" for number in range(30))]


class Tokens(TaskEncoder):
    """A sample is four tokens: its number and the next ones."""

    @stateless
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        number = int(sample.__key__.rpartition("-")[2])
        tokens = torch.tensor([2 + (number + place) % 30 for place in range(4)])
        return {"key": sample.__key__, "input_ids": tokens, "labels": tokens, "attention_mask": torch.ones_like(tokens)}


def sft_trainer(leaf: Path, folder: Path, steps: int) -> Any:
    trl = pytest.importorskip("trl", reason="needs trl and datasets, which are not among the packages of the tests")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, pad_token_id=0
    )
    arguments = trl.SFTConfig(
        str(folder / "out"),
        max_steps=steps,
        save_steps=3,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        eval_strategy="steps",
        eval_steps=3,
        gradient_accumulation_steps=2,
        use_cpu=True,
        bf16=False,
        lr_scheduler_type="constant",
        report_to="none",
        disable_tqdm=True,
    )
    rows = Dataset.from_list([{"text": "w1 w2 w3"}] * 4)
    torch.manual_seed(0)
    trainer = trl.SFTTrainer(
        LlamaForCausalLM(config), args=arguments, train_dataset=rows, eval_dataset=rows, processing_class=tokenizer
    )
    options: dict[str, Any] = {"worker_config": ALONE, "task_encoder": Tokens()}
    train = get_savable_loader(get_train_dataset(leaf, batch_size=2, **options))
    use_loaders(trainer, train=train, evaluation=get_val_dataset(leaf, batch_size=2, **options))
    trainer.seen = []
    step = trainer.training_step

    def training_step(model: Any, inputs: dict[str, Any], *args: Any) -> Any:
        trainer.seen.append((inputs["input_ids"][:, 0] - 2).tolist())
        return step(model, inputs, *args)

    trainer.training_step = training_step
    return trainer


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_supervised_fine_tuning_goes_on_where_it_was(tmp_path: Path, leaf_of: Callable[..., Path]) -> None:
    leaf = leaf_of(14, "trl")
    whole = sft_trainer(leaf, tmp_path / "whole", 8)
    whole.train()
    first = sft_trainer(leaf, tmp_path / "again", 3)
    first.train()
    again = sft_trainer(leaf, tmp_path / "again", 8)
    again.train(resume_from_checkpoint=True)
    assert len(whole.seen) > 12 and first.seen + again.seen == whole.seen
    losses, after = (
        [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
        for trainer in (whole, again)
    )
    assert len(losses) == 3 and after == losses
