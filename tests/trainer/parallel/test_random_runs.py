"""Random runs of a model of one's own, moved between layouts, beside a plain loop of torch in the same precision."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from energon_lite import Batch, TaskEncoder, edataclass
from energon_lite.trainer import LossSums, Trainer, TrainerConfig, config_from_dict, learning_rate
from tests.testing import nightly_but
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.small_runs import run_part

STEPS, WORDS, WIDTH = 6, 11, 6
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


@edataclass
class Words(Batch):
    words: torch.Tensor
    following: torch.Tensor

    @property
    def loss_tokens(self) -> int:
        return int((self.following >= 0).sum())


class WordsEncoder(TaskEncoder):
    """Rows of as many words as their text says; a row of one word has no term in the loss."""

    def batch(self, samples: list[Any]) -> Words:
        rows = torch.full((len(samples), 9), -1)
        for row, sample in zip(rows, samples, strict=True):
            number = int(sample["json"]["text"])
            count = 1 + number % 8
            row[:count] = torch.arange(count).mul(number + 1).add(number) % WORDS
        return Words.from_samples(samples, words=rows[:, :-1], following=rows[:, 1:])


class Net(nn.Module):
    """A tied table, a layer that is used twice, a frozen one, one that is never used, and a scalar."""

    def __init__(self, dtype: torch.dtype, *, tied: bool, frozen: bool, layers: int):
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.table.weight
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.norm, self.unused, self.scale = nn.LayerNorm(WIDTH), nn.Linear(3, 5), nn.Parameter(torch.tensor(1.5))
        self.mixer = nn.Conv1d(WIDTH, WIDTH, 3, groups=2)
        self.to(dtype)
        self.layers[0].requires_grad_(not frozen)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.table(words.clamp(min=0))
        for layer in [*self.layers, self.layers[-1]]:
            x = x + torch.tanh(layer(self.norm(x))) * self.scale
        return self.head(x + self.mixer(F.pad(x.mT, (2, 0))).mT)


def loss(model: nn.Module, batch: Words) -> LossSums:
    logits, right = model(batch.words), batch.following >= 0
    logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(logits[right], batch.following[right], reduction="sum")
    return LossSums(losses, right.sum())


@dataclasses.dataclass(frozen=True)
class Case:
    """What a run has, by its number."""

    number: int

    def parts(self) -> tuple[dict[str, Any], dict[str, Any], int, list[tuple[int, int]]]:
        """The net, the optimizer, micro-batches of a step, and the parts of the run: their last step and ranks."""
        draw = random.Random(self.number)
        dtype = ("float64", "float32", "bfloat16")[self.number % 3]
        net = {"dtype": DTYPES[dtype], "tied": draw.random() < 0.5, "frozen": draw.random() < 0.5}
        net["layers"] = draw.randint(1, 4)
        optimizer = {
            **{"lr": 3e-2, "warmup": draw.randint(0, 3), "eps": 1e-4, "clip": draw.choice([0.0, 0.3, 2.0])},
            **{"bucket_size": draw.choice([20, 50, 10_000]), "reduce": draw.choice(["last", "every"])},
            **{"schedule": draw.choice(["cosine", "linear", "wsd"]), "weight_decay": draw.choice([0.0, 0.3])},
            **{"algorithm": draw.choice(["adamw", "adamw", "sgd"])},
        }
        count = draw.randint(1, 5)
        ranks = [size for size in (1, 2, 3) if count % size == 0]
        stops = [*sorted(draw.sample(range(1, STEPS), draw.randint(0, 2))), STEPS]
        return net, optimizer, count, [(stop, draw.choice(ranks)) for stop in stops]

    def config(self, data: Path, output: Path, **train: Any) -> TrainerConfig:
        _, optimizer, count, _ = self.parts()
        return config_from_dict(
            {
                "output": str(output),
                "seed": self.number,
                "data": {"path": str(data), "micro_batch_size": 2, "micro_batches_per_step": count, "workers": 0},
                "optimizer": optimizer,
                "train": {"steps": STEPS, "save_every": 1} | train,
            }
        )

    def seam(self) -> dict[str, Any]:
        def make_model(config: TrainerConfig, mesh: Any) -> nn.Module:
            torch.manual_seed(config.seed)
            return Net(**self.parts()[0])

        return {"make_model": make_model, "loss": loss, "task_encoder": WordsEncoder()}

    def run(self, config: TrainerConfig, until: int) -> list[torch.Tensor]:
        """The parameters after the steps up to ``until``, which end as by a signal."""
        with Trainer(config, **self.seam()) as trainer:
            run_part(trainer, until)
            return [p.detach().clone() for p in trainer.model.parameters()]

    def by_hand(self, config: TrainerConfig) -> list[torch.Tensor]:
        """Those of a loop with torch's optimizer; of narrow weights, a copy in float32 is updated."""
        with Trainer(dataclasses.replace(config, output=f"{config.output}-by-hand"), **self.seam()) as trainer:
            batches = iter(trainer.loader)
            steps = [trainer.data.take_step(batches) for _ in range(STEPS)]
            model = self.seam()["make_model"](config, trainer.mesh)
        settings, trained = config.optimizer, [p for p in model.parameters() if p.requires_grad]
        wide = [p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in trained]
        groups = [{"params": [w for w in wide if (w.dim() > 1) is many]} for many in (True, False)]
        groups[0]["weight_decay"], groups[1]["weight_decay"] = settings.weight_decay, 0.0  # type: ignore[assignment]
        if settings.algorithm == "sgd":
            optimizer: torch.optim.Optimizer = torch.optim.SGD(groups, lr=1.0, momentum=settings.momentum)
        else:
            optimizer = torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps)
        for number, step in enumerate(steps):
            count = sum(batch.loss_tokens for batch in step)
            sums = [torch.zeros_like(w) for w in wide]
            for batch in step:
                (loss(model, batch).loss / max(count, 1)).backward()
                for total, p in zip(sums, trained, strict=True):
                    total += 0 if p.grad is None else p.grad
                    p.grad = None
            norm = torch.stack([total.norm() for total in sums]).double().norm()
            for w, total in zip(wide, sums, strict=True):
                w.grad = total * min(1.0, settings.clip / float(norm)) if settings.clip else total
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(number, STEPS, settings)
            optimizer.step()
            with torch.no_grad():
                for p, w in zip(trained, wide, strict=True):
                    p.copy_(w)
        return [p.detach() for p in model.parameters()]


#: How far from the plain loop a weight may be.
FAR = {torch.float64: 1e-12, torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.mark.parametrize("number", nightly_but({0, 1, 2}, range(30)))
def test_a_run_in_parts_on_any_ranks_is_a_plain_loop(run_ranks: RunRanks, tmp_path: Path, number: int) -> None:
    data, case = tmp_path / "numbers.jsonl", Case(number)
    data.write_text("".join(json.dumps({"text": str(number)}) + "\n" for number in range(30)))
    config = case.config(data, tmp_path / "run")
    (expected,) = run_ranks(1, lambda rank: case.by_hand(config))
    for stop, ranks in case.parts()[-1]:
        made = run_ranks(ranks, lambda rank, stop=stop: case.run(config, stop))
    for weights in made:
        for one, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=FAR[one.dtype])
    again = case.config(data, tmp_path / "again")
    ranks = case.parts()[-1][-1][1]
    if all(each == ranks for _, each in case.parts()[-1]):
        whole = run_ranks(ranks, lambda rank: case.run(again, STEPS))[0]
        assert all(map(torch.equal, whole, made[0])), "a part resumes with the same bits"
