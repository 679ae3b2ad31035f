"""Models of one's own, against a plain loop of torch: the programs of the examples, killed, and on other ranks; and
random runs, moved between layouts, in the same precision."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from energon_lite import Batch, TaskEncoder, edataclass
from energon_lite.errors import TopologyError, UsageError
from energon_lite.trainer import LossSums, Trainer, TrainerConfig, latest_checkpoint, read_state, save_checkpoint
from energon_lite.trainer.checkpointing.tensors import CheckpointReader
from examples.own_models import contrastive, preferences, speech
from tests.testing import errors_of, nightly_but
from tests.trainer.parallel.nets import F32, make_net
from tests.trainer.parallel.plain_loop import run_by_hand
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.small_runs import SmallRuns, disturb_steps, make_config, metrics, run_part

STEPS = 6


def write_answers(path: Path) -> Path:
    """Pairs of answers."""
    records = [{"prompt": f"{n} + 1 = ", "chosen": f"{n + 1}", "rejected": f"{n * 7}!"} for n in range(40)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def parts_of(name: str) -> dict[str, Any]:
    return preferences.parts() if name == "preferences" else {"contrastive": contrastive, "speech": speech}[name].PARTS


def config_of(path: Path, output: Path, *, mesh: dict[str, Any] | None = None, **train: Any) -> TrainerConfig:
    shape = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_size": 24, "tie_embeddings": False}
    # With a smaller eps, AdamW makes steps of the rounding of gradients that are zero, as of biases of keys.
    optimizer = {"eps": 1e-4}
    return make_config(path, output, mesh=mesh, model=shape | {"image_size": 0}, optimizer=optimizer, **train)


def trained(config: TrainerConfig, name: str, kill_at: int = 0) -> list[torch.Tensor]:
    """The parameters after a run; with ``kill_at``, the process dies before that step."""

    def kill(trainer: Trainer[Any], step: int) -> None:
        if step == kill_at:
            trainer.saver.finish()
            os.kill(os.getpid(), signal.SIGKILL)

    with Trainer(config, **parts_of(name)) as trainer:
        disturb_steps(trainer, kill)
        trainer.run()
        return [p.detach().clone() for p in trainer.model.parameters()]


def far(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("name", "data"), [("contrastive", "pictures"), ("speech", "lines"), ("preferences", "answers.jsonl")]
)
def test_a_run_is_a_plain_loop_on_any_ranks_and_goes_on_after_a_kill(runs: SmallRuns, name: str, data: str) -> None:
    write_answers(runs.folder / "answers.jsonl")

    def config(output: str) -> TrainerConfig:
        return config_of(runs.folder / data, runs.folder / output)

    ((alone, (weights, losses)),) = runs.run_ranks(
        1, lambda rank: (trained(config("one"), name), run_by_hand(config("one"), parts_of(name)))
    )
    assert [line["loss"] for line in runs.metrics("one")] == pytest.approx(losses, rel=1e-6)
    assert far(alone, weights) < 1e-6
    assert losses[-1] < losses[0], "it learns"

    two = runs.run_ranks(2, lambda rank: trained(config("two"), name))
    assert far(two[0], two[1]) == 0.0 and far(two[0], weights) < 1e-6
    assert [line["loss"] for line in runs.metrics("two")] == pytest.approx(losses, rel=1e-6)

    with pytest.raises(RankFailure, match="died without a word"):
        runs.run_ranks(2, lambda rank: trained(config("killed"), name, kill_at=4))
    shutil.copytree(runs.folder / "killed", runs.folder / "moved")
    again = runs.run_ranks(2, lambda rank: trained(config("killed"), name))
    assert far(again[0], two[0]) == 0.0
    assert runs.metrics("killed") == runs.metrics("two")
    (moved,) = runs.run_ranks(1, lambda rank: trained(config("moved"), name))
    assert far(moved, weights) < 1e-6


def test_the_reference_has_no_optimizer_and_is_in_no_checkpoint(run_ranks: RunRanks, tmp_path: Path) -> None:
    path = write_answers(tmp_path / "answers.jsonl")

    def job(rank: int) -> tuple[bool, bool, set[str]]:
        dpo, encoder = preferences.Preferences(), preferences.AnswersEncoder()
        parts: dict[str, Any] = {"make_model": dpo.make_model, "loss": dpo.loss, "task_encoder": encoder}
        with Trainer(config_of(path, tmp_path / "dpo"), **parts) as trainer:
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


def line_config(runs: SmallRuns, **settings: Any) -> TrainerConfig:
    return config_of(runs.folder / "lines", runs.folder / "run", **settings)


def test_metrics_are_means_in_training_and_validation(runs: SmallRuns) -> None:
    config = line_config(runs, eval_every=3)
    runs.run_ranks(2, lambda rank: Trainer(config, **LINE, metrics=["learning"]).run())
    lines = runs.metrics()
    assert [line["learning"] for line in lines] == [1.0] * STEPS
    assert [line["eval_learning"] for line in lines if "eval_loss" in line] == [0.0, 0.0]
    assert {line["eval_tokens"] for line in lines if "eval_loss" in line} == {7}, "one of the ranks has an empty batch"


def test_a_loss_that_counts_other_terms_is_refused(runs: SmallRuns) -> None:
    def twice(model: nn.Module, batch: Numbers) -> LossSums:
        made = square(model, batch)
        return made._replace(terms=2 * len(batch.value))

    def job(rank: int) -> None:
        with Trainer(line_config(runs), **(LINE | {"loss": twice})) as trainer:
            trainer.run()

    found = errors_of(runs.run_ranks, 2, UsageError, job)
    assert all("24 terms, its micro-batches 12 loss_tokens" in text for text in found)


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda sums: None, "the loss has returned NoneType, not LossSums"),
        (lambda sums: sums.loss, "the loss has returned Tensor, not LossSums"),
        (lambda sums: sums._replace(loss=sums.loss.expand(2)), "LossSums.loss is not a scalar tensor: torch.Size([2])"),
        (lambda sums: sums._replace(loss=sums.loss.item()), "LossSums.loss is not a scalar tensor: "),
        (lambda sums: sums._replace(more={}), "LossSums.more lacks metrics of the run: largest, learning"),
    ],
)
def test_a_loss_that_returns_something_else_is_told(runs: SmallRuns, made: Any, what: str) -> None:
    parts = LINE | {"loss": lambda model, batch: made(square(model, batch)), "metrics": ["largest", "learning"]}
    (text,) = errors_of(runs.run_ranks, 1, UsageError, lambda rank: Trainer(line_config(runs), **parts).run())
    assert what in text and "return LossSums(loss, terms, more)" in text


@pytest.mark.parametrize(("axis", "value"), [("tp", 2), ("cp", 2), ("pp", 2), ("share_images", True)])
def test_a_layout_that_a_model_does_not_know_is_refused(runs: SmallRuns, axis: str, value: int) -> None:
    config = line_config(runs, mesh={axis: value})
    for text in errors_of(runs.run_ranks, 2, TopologyError, lambda rank: Trainer(config, **LINE)):
        assert f"mesh.{axis}={value}, which the model or the loss of this run does not support" in text


def test_a_model_that_is_cut_and_a_loss_of_ones_own_go_together(run_ranks: RunRanks, tmp_path: Path) -> None:
    """DPO of the built-in model on two tensor-parallel ranks, as on one; a pipeline would not call the loss."""
    path = write_answers(tmp_path / "answers.jsonl")

    def job(rank: int, **sizes: int) -> int:
        with Trainer(config_of(path, tmp_path / str(sizes), mesh=sizes), **preferences.parts()) as trainer:
            return trainer.run()

    run_ranks(1, job)
    run_ranks(2, lambda rank: job(rank, tp=2))
    one, two = (metrics(tmp_path / name) for name in ("{}", "{'tp': 2}"))
    for name in ("loss", "grad_norm", "preferred", "margin"):
        assert [line[name] for line in two] == pytest.approx([line[name] for line in one], rel=1e-5, abs=1e-5)
    with pytest.raises(RankFailure, match=r"mesh\.pp=2, which the model or the loss"):
        run_ranks(2, lambda rank: job(rank, pp=2))


def test_costs_of_another_model_are_refused(runs: SmallRuns) -> None:
    config = line_config(runs, measure_costs=2)
    (text,) = errors_of(runs.run_ranks, 1, UsageError, lambda rank: Trainer(config, **LINE))
    assert "the costs of another model are not known" in text


def test_metrics_with_names_that_a_run_reports_are_refused(runs: SmallRuns) -> None:
    more = LINE | {"metrics": ["learning", "loss", "tokens"]}
    (text,) = errors_of(runs.run_ranks, 1, UsageError, lambda rank: Trainer(line_config(runs), **more))
    assert "the run itself reports loss, tokens" in text


def test_batches_of_a_loss_of_ones_own_are_not_rows(runs: SmallRuns) -> None:
    config = line_config(runs)
    with pytest.raises(RankFailure, match="returned a Numbers, which has no rows of tokens"):
        runs.run_ranks(1, lambda rank: Trainer(config, task_encoder=NumbersEncoder()).run())


def test_hooks_see_each_step_and_add_to_each_evaluation(runs: SmallRuns) -> None:
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
                save_checkpoint(runs.folder / "best", values["step"], *parts, keep=1)

        def on_step(trainer: Trainer, values: dict[str, Any]) -> None:
            seen.append(values["step"])
            values["half"] = values["loss"] / 2
            if values["step"] == 4 and rank == 1:
                signal.raise_signal(signal.SIGUSR1)

        config = line_config(runs, eval_every=2, eval_at_start=True)
        with Trainer(config, **LINE, on_step=on_step, on_eval=on_eval) as trainer:
            trainer.run()
        return seen, best

    (seen, best), other = runs.run_ranks(2, job)
    assert (seen, best) == other and seen == list(range(1, len(seen) + 1)) and 4 <= len(seen) < STEPS + 1
    lines = [json.loads(text) for text in (runs.folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, *seen]
    assert all(line["half"] == line["loss"] / 2 for line in lines[1:])
    assert [line["eval_weight"] is not None for line in lines if "eval_loss" in line][:3] == [True] * 3
    checkpoint = latest_checkpoint(runs.folder / "best")
    assert checkpoint is not None and read_state(checkpoint)["best"] == best[-1] == min(best)


# -- random runs -------------------------------------------------------------------------------------------------------

DTYPES = (torch.float64, torch.float32, torch.bfloat16)


def of_seeds(net: nn.Module, batch: Numbers) -> LossSums:
    """Each number is a seed of the net."""
    losses = [net(int(seed)).to(torch.promote_types(net.head_bias.dtype, F32)) for seed in batch.value]
    return LossSums(torch.stack(losses).sum(), len(losses))


@dataclasses.dataclass(frozen=True)
class Case:
    """What a run has, by its number."""

    number: int

    def parts(self) -> tuple[dict[str, Any], int, list[tuple[int, int]]]:
        """The optimizer, micro-batches of a step, and the parts of the run: their last step and ranks."""
        draw = random.Random(self.number)
        optimizer = {
            **{"lr": 3e-2, "warmup": draw.randint(0, 3), "eps": 1e-4, "clip": draw.choice([0.0, 0.3, 2.0])},
            **{"bucket_size": draw.choice([20, 50, 10_000]), "reduce": draw.choice(["last", "every"])},
            **{"schedule": draw.choice(["cosine", "linear", "wsd"]), "weight_decay": draw.choice([0.0, 0.3])},
            **{"algorithm": draw.choice(["adamw", "adamw", "sgd"])},
        }
        count = draw.randint(1, 5)
        ranks = [size for size in (1, 2, 3) if count % size == 0]
        stops = [*sorted(draw.sample(range(1, STEPS), draw.randint(0, 2))), STEPS]
        return optimizer, count, [(stop, draw.choice(ranks)) for stop in stops]

    def config(self, data: Path, output: Path) -> TrainerConfig:
        optimizer, count, _ = self.parts()
        rows = {"micro_batch_size": 2, "micro_batches_per_step": count}
        return make_config(data, output, seed=self.number, data=rows, optimizer=optimizer, steps=STEPS, save_every=1)

    def seam(self) -> dict[str, Any]:
        def make_model(config: TrainerConfig, mesh: Any) -> nn.Module:
            return make_net("awkward", config.seed, DTYPES[self.number % 3])

        return {"make_model": make_model, "loss": of_seeds, "task_encoder": NumbersEncoder()}

    def run(self, config: TrainerConfig, until: int) -> list[torch.Tensor]:
        """The parameters after the steps up to ``until``, which end as by a signal."""
        with Trainer(config, **self.seam()) as trainer:
            run_part(trainer, until)
            return [p.detach().clone() for p in trainer.model.parameters()]


#: How far from the plain loop a weight may be.
FAR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("number", nightly_but({0, 1, 2}, range(30)))
def test_a_run_in_parts_on_any_ranks_is_a_plain_loop(runs: SmallRuns, number: int) -> None:
    case, run_ranks = Case(number), runs.run_ranks
    config = case.config(runs.folder / "lines", runs.folder / "run")
    ((expected, _),) = run_ranks(1, lambda rank: run_by_hand(config, case.seam()))
    for stop, ranks in case.parts()[-1]:
        made = run_ranks(ranks, lambda rank, stop=stop: case.run(config, stop))
    for weights in made:
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=FAR[one.dtype])
    again = case.config(runs.folder / "lines", runs.folder / "again")
    ranks = case.parts()[-1][-1][1]
    if all(each == ranks for _, each in case.parts()[-1]):
        whole = run_ranks(ranks, lambda rank: case.run(again, STEPS))[0]
        assert all(map(torch.equal, whole, made[0])), "a part resumes with the same bits"
