"""Hugging Face's own Trainer with the mixin, and TRL's: what is seen after a kill, elsewhere, and in evaluation."""

from __future__ import annotations

import os
import random
import runpy
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")
pytest.importorskip("transformers")

from transformers import Trainer, TrainerCallback, TrainingArguments

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset, get_val_dataset, stateless
from energon_lite.errors import StateError, UsageError
from energon_lite.extras.frameworks import transformers as adapter
from energon_lite.extras.frameworks.transformers import EnergonTrainerMixin, newest_checkpoint, use_loaders
from tests.extras.frameworks.framework_runs import (
    SAMPLES,
    Model,
    expected,
    log_line,
    logged,
    micro_batches,
    numbers_of,
    reached,
    run_processes,
    train_data,
    val_data,
)
from tests.testing import ALONE

Leaf = Callable[[int, str], Path]

#: As Trainer's own callback calls it.
MARK = "checkpoint-is-incomplete.txt"


class Seen(EnergonTrainerMixin, Trainer):
    """Writes down which samples each step saw."""

    seen_file: Path

    def training_step(self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> torch.Tensor:
        assert set(inputs) == {"number", "labels"}
        log_line(self.seen_file, step=self.state.global_step, rank=self.args.process_index, numbers=numbers_of(inputs))
        return super().training_step(model, inputs, *args, **kwargs)


def metrics(prediction: Any) -> dict[str, Any]:
    assert prediction.predictions[:, 0].tolist() == prediction.label_ids.tolist()
    return {"seen": prediction.label_ids.tolist()}


def arguments_in(folder: Path, **given: Any) -> TrainingArguments:
    given = {"max_steps": 12, "save_steps": 2, "per_device_train_batch_size": 2, "logging_steps": 1000} | given
    given |= {"per_device_eval_batch_size": 4, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
    return TrainingArguments(str(folder / "out"), ddp_find_unused_parameters=False, **given)


def train(
    leaf: Path, folder: Path, tag: str, *, resume: Any = None, workers: int = 0, data: Any = None, **given: Any
) -> tuple[Any, ...]:
    """A run; what it saw is in ``tag-RANK``."""
    arguments = arguments_in(folder, **given)
    config = WorkerConfig.default_worker_config(num_workers=workers)
    loader = get_savable_loader(train_data(leaf, config, **(data or {})))
    val = val_data(leaf, config) if arguments.eval_strategy != "no" else None
    trainer = Seen(Model(), arguments, train_dataset=loader, eval_dataset=val, compute_metrics=metrics)
    trainer.seen_file = folder / f"{tag}-{arguments.process_index}"
    trainer.train(resume_from_checkpoint=resume)
    state = trainer.state
    return state.global_step, state.epoch, loader.stats()["batches"], state.log_history, state.best_model_checkpoint


def test_killed_on_two_processes_and_resumed_on_three(tmp_path: Path, leaf_of: Leaf) -> None:
    """With gradient accumulation: each step of the optimizer is two of the loader on each rank."""
    leaf, steps = leaf_of(SAMPLES, "hf"), {"gradient_accumulation_steps": 2}
    slow = partial(train, leaf, tmp_path, "killed", max_steps=10_000, workers=1, **steps)

    run_processes(2, slow, tmp_path, kill_when=reached(tmp_path, "killed-0", 9))
    whole = tmp_path / "out" / "checkpoint-6"
    for number, (name, text) in enumerate([("trainer_state.json", '{"epo'), ("optimizer.pt", "PK"), (MARK, "")]):
        half = tmp_path / "out" / f"checkpoint-{990 + number}"  # what a kill leaves of a checkpoint
        shutil.copytree(whole, half)
        (half / name).write_text(text)
    again = partial(train, leaf, tmp_path, "resumed", max_steps=16, resume=str(whole), **steps)
    found = run_processes(3, again, tmp_path)
    before, after = micro_batches(tmp_path, "killed", before=6), micro_batches(tmp_path, "resumed")
    assert before + after == expected(leaf, len(before + after))
    assert (len(before), len(after)) == (22, 51)  # the last step of an epoch accumulates what is left of it
    assert [(step, batches) for step, _, batches, *_ in found] == [(16, 17)] * 3  # nothing was read to be skipped

    newest = run_processes(1, partial(train, leaf, tmp_path, "newest", max_steps=18, resume=True, **steps), tmp_path)
    assert [(step, batches) for step, _, batches, *_ in newest] == [(18, 3)]  # from 16 on, the newest that is whole
    assert micro_batches(tmp_path, "newest") == expected(leaf, 73 + 3)[73:]


@pytest.mark.parametrize(
    "saved, resumed, repeat", [(1, 1, True), (2, 1, False), pytest.param(1, 3, False, marks=pytest.mark.slow)]
)
def test_epochs_are_counted_for_the_processes_there_are(
    saved: int, resumed: int, repeat: bool, tmp_path: Path, leaf_of: Leaf
) -> None:
    leaf, data = leaf_of(SAMPLES, "hf"), {"repeat": repeat}
    epochs = {"max_steps": -1, "save_strategy": "steps", "save_steps": 5, "data": data}
    run_processes(saved, partial(train, leaf, tmp_path, "first", num_train_epochs=1.5, **epochs), tmp_path)
    folder = str(tmp_path / "out" / "checkpoint-10")
    again = partial(train, leaf, tmp_path, "again", num_train_epochs=3, resume=folder, **epochs)
    found = run_processes(resumed, again, tmp_path)
    assert {epoch for _, epoch, *_ in found} == {3.0}
    seen = micro_batches(tmp_path, "first", before=10) + micro_batches(tmp_path, "again")
    assert without_copies(seen, passes := expected(leaf, 39, **data)) == passes


def without_copies(seen: list[list[int]], passes: list[list[int]]) -> list[list[int]]:
    """What was seen without what filled the last steps of passes of 13 batches."""
    kept: list[list[int]] = []
    for batch in seen:
        if len(kept) % 13 or batch in passes[len(kept) :][:1]:
            kept.append(batch)
    return kept


@pytest.mark.nightly
def test_killed_at_any_moment_again_and_again(tmp_path: Path, leaf_of: Leaf) -> None:
    """Also in the middle of a save, which is at every step: what is left half written is passed over."""
    leaf, drawn, kills, resumed = leaf_of(SAMPLES, "hf"), random.Random(0), 0, 0
    while kills < 25:
        resume = newest_checkpoint(tmp_path / "out") is not None
        run = partial(train, leaf, tmp_path, f"part{kills}", max_steps=100_000, save_steps=1, resume=resume or None)
        begun, wait = None, drawn.uniform(0.0, 0.4)

        def is_time() -> bool:
            nonlocal begun
            begun = begun or (time.monotonic() if list(tmp_path.glob(f"part{kills}-0")) else None)  # noqa: B023
            return begun is not None and time.monotonic() > begun + wait  # noqa: B023

        run_processes(2, run, tmp_path, kill_when=is_time)
        kills, resumed = kills + 1, resumed + resume
    lines = logged(tmp_path, "part*")
    last = max(line["step"] for line in lines)
    everything = expected(leaf, 2 * last + 2)
    assert all(line["numbers"] == everything[2 * line["step"] + line["rank"]] for line in lines)
    assert {line["step"] for line in lines} == set(range(last + 1)) and resumed > 20


def test_evaluation_sees_each_sample_once_and_leaves_the_training_alone(tmp_path: Path, leaf_of: Leaf) -> None:
    """26 samples in batches of four on three ranks: the last step has 2 samples, and two ranks have none of them."""
    leaf = leaf_of(SAMPLES, "hf")
    evaluating = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 0.1}
    run = partial(train, leaf, tmp_path, "seen", max_steps=6, metric_for_best_model="loss", **evaluating)
    for step, _, _, history, best in run_processes(3, run, tmp_path):
        evaluations = [entry for entry in history if "eval_seen" in entry]
        assert [entry["step"] for entry in evaluations] == [2, 4, 6] == list(range(2, step + 1, 2))
        assert all(sorted(entry["eval_seen"]) == list(range(SAMPLES)) for entry in evaluations)
        assert best.endswith("checkpoint-6")
    assert micro_batches(tmp_path, "seen") == expected(leaf, 18)


class SavesInBetween(TrainerCallback):
    """A machine that goes: a checkpoint when the batches of the next step were taken, as Trainer's own does it."""

    trainer: Trainer

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5:
            self.trainer._save_checkpoint(self.trainer.model, trial=None)  # type: ignore[arg-type]
            control.should_training_stop = True


def one_run(leaf: Path, folder: Path, kind: type[Trainer] = Seen, **given: Any) -> Any:
    """In this process: a trainer and what it is to see."""
    data = train_data(leaf, ALONE, packed=given.pop("packed", False))
    trainer = kind(Model(), arguments_in(folder, **given), train_dataset=data)
    trainer.seen_file = folder / "one-0"
    return trainer


@pytest.mark.parametrize("packed", [False, True])
def test_a_checkpoint_between_steps_counts_no_batch_of_the_next_one(
    packed: bool, tmp_path: Path, leaf_of: Leaf
) -> None:
    """Also where hooks make the batches, of which nobody knows how many an epoch has."""
    leaf, given = leaf_of(SAMPLES, "hf"), {"gradient_accumulation_steps": 3, "save_strategy": "no", "packed": packed}
    trainer, saves = one_run(leaf, tmp_path, **given), SavesInBetween()
    saves.trainer = trainer
    trainer.add_callback(saves)
    trainer.train()
    one_run(leaf, tmp_path, **given).train(resume_from_checkpoint=True)
    lines = logged(tmp_path, "one-0")
    lost = next(place for place, line in enumerate(lines) if line["step"] == 5)  # three batches, and no step
    seen = [line["numbers"] for line in lines[:lost] + lines[lost + 3 :]]
    assert len(seen) > 30 and seen == expected(leaf, len(seen), packed=packed)


class Prepares(Trainer):
    """As TRL's: looks at its data when it is made, and makes other data of them."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.first = next(iter(self.train_dataset))
        self.train_dataset = list(self.train_dataset)


class Keeps(Prepares, Seen):
    """Asks for the loader of its data, and keeps it."""

    def get_train_dataloader(self) -> Any:
        self.kept = super().get_train_dataloader()
        return self.kept


def test_one_call_for_a_trainer_that_prepares_its_data(tmp_path: Path, leaf_of: Leaf) -> None:
    leaf = leaf_of(SAMPLES, "hf")
    rows = [{"number": 1.0, "labels": 1}]
    for kind in (Prepares, Keeps):
        trainer = kind(Model(), arguments_in(tmp_path, max_steps=4), train_dataset=rows, compute_metrics=metrics)
        trainer.seen_file = tmp_path / "one-0"
        use_loaders(trainer, train=train_data(leaf, ALONE), evaluation={"a": val_data(leaf, ALONE), "b": rows})
        trainer.train()
    assert isinstance(trainer, Keeps) and trainer.first == rows[0] and len(trainer.kept) == 13
    assert micro_batches(tmp_path, "one") == expected(leaf, 4)
    assert (tmp_path / "out" / "checkpoint-4" / "energon_lite_loader.json").exists()
    found = trainer.evaluate()
    assert found["eval_a_seen"] == list(range(SAMPLES)) and found["eval_b_seen"] == [1]
    assert trainer.predict(val_data(leaf, ALONE)).label_ids.tolist() == list(range(SAMPLES))


def test_what_does_not_fit_is_named(tmp_path: Path, leaf_of: Leaf) -> None:
    leaf = leaf_of(SAMPLES, "hf")
    trainer = one_run(leaf, tmp_path, per_device_train_batch_size=3)
    for _ in range(2):
        with pytest.raises(UsageError, match="batches have 2 samples, but the trainer assumes 3"):
            trainer.train()
    one_run(leaf, tmp_path, max_steps=2).train()
    os.remove(tmp_path / "out" / "checkpoint-2" / "energon_lite_loader.json")
    with pytest.raises(StateError, match=r"energon_lite_loader\.json"):
        one_run(leaf, tmp_path).train(resume_from_checkpoint=True)
    trainer = one_run(leaf, tmp_path, ignore_data_skip=True, max_steps=3)
    trainer.train(resume_from_checkpoint=True)
    assert logged(tmp_path, "one-0")[-1]["numbers"] == expected(leaf, 1)[0]


def test_another_trainer_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would skip, in its own way, what is behind the loader already."""
    monkeypatch.delattr(Trainer, "_run_epoch")
    with pytest.raises(UsageError, match=r"transformers>=5\.3"):
        runpy.run_path(adapter.__file__)


def test_a_checkpoint_that_is_passed_over_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number, text in ((1, "{}"), (2, ""), (3, "{}")):
        (tmp_path / f"checkpoint-{number}").mkdir()
        (tmp_path / f"checkpoint-{number}" / "trainer_state.json").write_text(text)
    (tmp_path / "checkpoint-3" / "optimizer.pt").write_bytes(b"cut")
    assert newest_checkpoint(tmp_path) == str(tmp_path / "checkpoint-1")
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "checkpoint-3 is passed over: optimizer.pt is cut short" in said[0]
    assert "checkpoint-2 is passed over: the checkpoint cannot be resumed" in said[1]


# -- TRL's supervised fine-tuning, as it is: a class of its own between Trainer and the user, that prepares its data ---

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


@pytest.mark.slow
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
