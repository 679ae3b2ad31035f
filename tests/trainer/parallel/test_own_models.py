"""Models of one's own: the programs of the examples, against a plain loop of torch, killed, and on other ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from energon_lite import Batch, TaskEncoder, edataclass
from energon_lite.errors import TopologyError, UsageError
from energon_lite.trainer import (
    LossSums,
    Trainer,
    TrainerConfig,
    config_from_dict,
    latest_checkpoint,
    learning_rate,
    read_state,
    save_checkpoint,
)
from energon_lite.trainer.checkpointing.tensors import CheckpointReader
from examples.own_models import contrastive, preferences, speech
from tests.testing import errors_of
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.small_runs import metrics

STEPS = 6


def write_answers(path: Path) -> Path:
    """Pairs of answers."""
    records = [{"prompt": f"{n} + 1 = ", "chosen": f"{n + 1}", "rejected": f"{n * 7}!"} for n in range(40)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def parts_of(name: str) -> dict[str, Any]:
    return preferences.parts() if name == "preferences" else {"contrastive": contrastive, "speech": speech}[name].PARTS


@pytest.fixture(params=["contrastive", "speech", "preferences"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def data(name: str, blend: Path, tmp_path: Path) -> Path:
    """Pictures with captions, texts, or pairs of answers."""
    if name == "preferences":
        return write_answers(tmp_path / "answers.jsonl")
    return tmp_path / {"contrastive": "pictures", "speech": "lines"}[name]


def config_of(data: Path, output: Path, **train: Any) -> TrainerConfig:
    return config_from_dict(
        {
            "seed": 3,
            "output": str(output),
            "data": {"path": str(data), "micro_batch_size": 3, "micro_batches_per_step": 4, "workers": 0},
            "model": {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_size": 24},
            # With a smaller eps, AdamW makes steps of the rounding of gradients that are zero, as of biases of keys.
            "optimizer": {"lr": 5e-3, "warmup": 2, "eps": 1e-4},
            "train": {"steps": STEPS, "save_every": 2} | train,
        }
    )


def trained(config: TrainerConfig, name: str, kill_at: int = 0) -> list[torch.Tensor]:
    """The parameters after a run; with ``kill_at``, the process dies before that step."""
    with Trainer(config, **parts_of(name)) as trainer:
        launch = trainer.launch

        def disturbed(step: int, batches: Any) -> Any:
            if step == kill_at:
                trainer.saver.finish()
                os.kill(os.getpid(), signal.SIGKILL)
            return launch(step, batches)

        trainer.launch = disturbed  # type: ignore[method-assign]
        trainer.run()
        return [p.detach().clone() for p in trainer.model.parameters()]


def by_hand(config: TrainerConfig, name: str) -> tuple[list[torch.Tensor], list[float]]:
    """A loop with torch's optimizer, over the batches that one rank's run would have."""
    parts, optimizer = parts_of(name), config.optimizer
    with Trainer(dataclasses.replace(config, output=f"{config.output}-by-hand"), **parts) as trainer:
        batches = iter(trainer.loader)
        steps = [trainer.data.take_step(batches) for _ in range(STEPS)]
        model = parts["make_model"](config, trainer.mesh)
    groups = [{"params": [p for p in model.parameters() if (p.dim() > 1) == matrix]} for matrix in (True, False)]
    groups[0]["weight_decay"], groups[1]["weight_decay"] = optimizer.weight_decay, 0.0
    adam = torch.optim.AdamW(groups, betas=optimizer.betas, eps=optimizer.eps)
    losses = []
    for number, step in enumerate(steps):
        count = sum(int(batch.loss_tokens) for batch in step)
        loss = sum(parts["loss"](model, batch).loss for batch in step) / count
        adam.zero_grad()
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        for p in model.parameters():
            p.grad = None if p.grad is None else p.grad * min(1.0, optimizer.clip / float(norm))
        for group in adam.param_groups:
            group["lr"] = learning_rate(number, config.train.steps, optimizer)
        adam.step()
        losses.append(float(loss))
    return [p.detach() for p in model.parameters()], losses


def far(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def test_a_run_is_a_plain_loop_on_any_ranks_and_goes_on_after_a_kill(
    run_ranks: RunRanks, data: Path, name: str, tmp_path: Path
) -> None:
    ((alone, (weights, losses)),) = run_ranks(
        1, lambda rank: (trained(config := config_of(data, tmp_path / "one"), name), by_hand(config, name))
    )
    lines = metrics(tmp_path / "one")
    assert [line["loss"] for line in lines] == pytest.approx(losses, rel=1e-6)
    assert far(alone, weights) < 1e-6
    assert losses[-1] < losses[0], "it learns"

    two = run_ranks(2, lambda rank: trained(config_of(data, tmp_path / "two"), name))
    assert far(two[0], two[1]) == 0.0 and far(two[0], weights) < 1e-6
    assert [line["loss"] for line in metrics(tmp_path / "two")] == pytest.approx(losses, rel=1e-6)

    with pytest.raises(RankFailure, match="died without a word"):
        run_ranks(2, lambda rank: trained(config_of(data, tmp_path / "killed"), name, kill_at=4))
    shutil.copytree(tmp_path / "killed", tmp_path / "moved")
    again = run_ranks(2, lambda rank: trained(config_of(data, tmp_path / "killed"), name))
    assert far(again[0], two[0]) == 0.0
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "two")
    (moved,) = run_ranks(1, lambda rank: trained(config_of(data, tmp_path / "moved"), name))
    assert far(moved, weights) < 1e-6


def test_the_reference_has_no_optimizer_and_is_in_no_checkpoint(
    run_ranks: RunRanks, blend: Path, tmp_path: Path
) -> None:
    path = write_answers(tmp_path / "answers.jsonl")

    def job(rank: int) -> tuple[bool, bool, set[str]]:
        config, dpo = config_of(path, tmp_path / "dpo"), preferences.Preferences()
        with Trainer(
            config, make_model=dpo.make_model, loss=dpo.loss, task_encoder=preferences.AnswersEncoder()
        ) as trainer:
            before = [p.clone() for p in dpo.reference.parameters()]
            trainer.run()
            same = all(map(torch.equal, before, dpo.reference.parameters()))
            moved = not any(map(torch.equal, before, trainer.model.parameters()))
            with CheckpointReader(str(latest_checkpoint(trainer.checkpoints))) as saved:
                names = {name for name in saved.shapes if name.startswith("model.")}
            return same, moved, names ^ {f"model.{name}" for name, _ in trainer.model.named_parameters()}

    assert run_ranks(1, job) == [(True, True, set())]


@edataclass
class Numbers(Batch):
    value: torch.Tensor

    @property
    def loss_tokens(self) -> int:
        return len(self.value)


class NumbersEncoder(TaskEncoder):
    def batch(self, samples: list[Any]) -> Numbers:
        value = torch.tensor([[float(len(sample.text))] for sample in samples])
        return Numbers.from_samples(samples, value=value)


def make_line(config: TrainerConfig, mesh: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5))


def square(model: nn.Module, batch: Numbers) -> LossSums:
    made = model(batch.value)
    assert len(batch.value), "an empty micro-batch is passed over"
    more = {"learning": len(made) * model.training, "largest": made.detach().max()}
    return LossSums((made - 1).square().sum(), len(made), more)


LINE: dict[str, Any] = {"make_model": make_line, "loss": square, "task_encoder": NumbersEncoder()}


def test_metrics_are_means_in_training_and_validation(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path / "lines", tmp_path / "run", eval_every=3)
    run_ranks(2, lambda rank: Trainer(config, **LINE, metrics=["learning"]).run())
    lines = metrics(tmp_path / "run")
    assert [line["learning"] for line in lines] == [1.0] * STEPS
    assert [line["eval_learning"] for line in lines if "eval_loss" in line] == [0.0, 0.0]
    assert {line["eval_tokens"] for line in lines if "eval_loss" in line} == {7}, "one of the ranks has an empty batch"


def test_a_loss_that_counts_other_terms_is_refused(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    def twice(model: nn.Module, batch: Numbers) -> LossSums:
        made = square(model, batch)
        return made._replace(terms=2 * len(batch.value))

    def job(rank: int) -> None:
        with Trainer(config_of(tmp_path / "lines", tmp_path / "run"), **(LINE | {"loss": twice})) as trainer:
            trainer.run()

    found = errors_of(run_ranks, 2, UsageError, job)
    assert all("24 terms, its micro-batches 12 loss_tokens" in text for text in found)


@pytest.mark.parametrize(("axis", "value"), [("tp", 2), ("cp", 2), ("pp", 2), ("share_images", True)])
def test_a_layout_that_a_model_does_not_know_is_refused(
    run_ranks: RunRanks, blend: Path, tmp_path: Path, axis: str, value: int
) -> None:
    config = config_of(tmp_path / "lines", tmp_path / "run")
    config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **{axis: value}))
    for text in errors_of(run_ranks, 2, TopologyError, lambda rank: Trainer(config, **LINE)):
        assert f"mesh.{axis}={value}, which the model or the loss of this run does not support" in text


def test_a_model_that_is_cut_and_a_loss_of_ones_own_go_together(run_ranks: RunRanks, tmp_path: Path) -> None:
    """DPO of the built-in model on two tensor-parallel ranks, as on one; a pipeline would not call the loss."""
    path = write_answers(tmp_path / "answers.jsonl")

    def job(rank: int, **sizes: int) -> int:
        config = config_of(path, tmp_path / str(sizes))
        config = dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, **sizes))
        with Trainer(config, **preferences.parts()) as trainer:
            return trainer.run()

    run_ranks(1, job)
    run_ranks(2, lambda rank: job(rank, tp=2))
    one, two = (metrics(tmp_path / name) for name in ("{}", "{'tp': 2}"))
    for name in ("loss", "grad_norm", "preferred", "margin"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-5, abs=1e-5)
    with pytest.raises(RankFailure, match=r"mesh\.pp=2, which the model or the loss"):
        run_ranks(2, lambda rank: job(rank, pp=2))


def test_costs_of_another_model_are_refused(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path / "lines", tmp_path / "run", measure_costs=2)
    (text,) = errors_of(run_ranks, 1, UsageError, lambda rank: Trainer(config, **LINE))
    assert "the costs of another model are not known" in text


def test_batches_of_a_loss_of_ones_own_are_not_rows(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    config = config_of(tmp_path / "lines", tmp_path / "run")
    with pytest.raises(RankFailure, match="returned a Numbers, which has no rows of tokens"):
        run_ranks(1, lambda rank: Trainer(config, task_encoder=NumbersEncoder()).run())


def test_hooks_see_each_step_and_add_to_each_evaluation(run_ranks: RunRanks, blend: Path, tmp_path: Path) -> None:
    """The best checkpoint and a metric of one's own, as the page shows them; a signal of a hook ends the run."""

    def job(rank: int) -> tuple[list[int], list[float]]:
        seen: list[int] = []
        best: list[float] = []

        def on_eval(trainer: Trainer, values: dict[str, Any]) -> None:
            values["eval_weight"] = float(trainer.model[0].weight)
            if not best or values["eval_loss"] < best[-1]:
                best.append(values["eval_loss"])
                state = trainer.state() | {"best": best[-1]}
                parts = trainer.model, trainer.optimizer, trainer.mesh, state
                save_checkpoint(tmp_path / "best", values["step"], *parts, keep=1)

        def on_step(trainer: Trainer, values: dict[str, Any]) -> None:
            seen.append(values["step"])
            values["half"] = values["loss"] / 2
            if values["step"] == 4 and rank == 1:
                signal.raise_signal(signal.SIGUSR1)

        config = config_of(tmp_path / "lines", tmp_path / "run", eval_every=2, eval_at_start=True)
        with Trainer(config, **LINE, on_step=on_step, on_eval=on_eval) as trainer:
            trainer.run()
        return seen, best

    (seen, best), other = run_ranks(2, job)
    assert (seen, best) == other and seen == list(range(1, len(seen) + 1)) and 4 <= len(seen) < STEPS + 1
    lines = [json.loads(text) for text in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, *seen]
    assert all(line["half"] == line["loss"] / 2 for line in lines[1:])
    assert [line["eval_weight"] is not None for line in lines if "eval_loss" in line][:3] == [True] * 3
    checkpoint = latest_checkpoint(tmp_path / "best")
    assert checkpoint is not None and read_state(checkpoint)["best"] == best[-1] == min(best)
