"""Answers of a trained model to held-out questions, and the number of right ones by kind of question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from energon_lite import WorkerConfig, get_loader, get_val_dataset
from energon_lite.trainer import load_model
from energon_lite.trainer.data.task_encoder import resize_image
from energon_lite.trainer.training.generate import generate, load_tokenizer
from examples.charts.encoder import prompt
from examples.charts.questions import KINDS

#: Tokens after which an answer is cut; the longest right one has seven, its end included.
LONGEST = 10


@dataclass(frozen=True)
class Answer:
    """An answer of a model.

    Args:
        key: the sample; that of a chart ends with the kind of its question.
        image: float ``[3, height, width]`` in [0, 1].
        question: the question.
        wanted: the right answer.
        said: the model's.
    """

    key: str
    image: torch.Tensor
    question: str
    wanted: str
    said: str

    @property
    def right(self) -> bool:
        """True if the answer equals the right one exactly."""
        return self.said == self.wanted


def answer_held_out(data: Path, checkpoint: Path, *, batch_size: int = 64) -> list[Answer]:
    """Answer all questions of a data set's val split, each once.

    Args:
        data: a prepared folder of images with questions.
        checkpoint: a trained model's.
        batch_size: questions at a time.
    """
    torch.set_num_threads(1)  # a model this small is fastest with one thread
    model, tokenizer = load_model(checkpoint), load_tokenizer(checkpoint)
    size, length = model.config.image_size, model.config.prefix_length
    alone = WorkerConfig(rank=0, world_size=1, num_workers=0)
    answers = []
    with get_loader(get_val_dataset(data, worker_config=alone, batch_size=batch_size)) as loader:
        for batch in loader:
            images = torch.stack([resize_image(image, size) for image in batch.image])
            prompts = [prompt(tokenizer, length, question) for question in batch.context]
            rows = torch.arange(len(prompts))
            where = images, rows, torch.zeros_like(rows)
            made = generate(model, prompts, *where, max_new_tokens=LONGEST, eos=tokenizer.eos)
            said = [tokenizer.decode(tokens) for tokens in made]
            wanted = [right[0] for right in batch.answers]
            for one in zip(batch.__key__, images, batch.context, wanted, said, strict=True):
                answers.append(Answer(*one))
    return answers


def accuracy(answers: Sequence[Answer]) -> float:
    """The share of right answers."""
    return sum(answer.right for answer in answers) / len(answers)


def by_question(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """Answers to charts by the kind of their question, which is the end of their key."""
    kinds: dict[str, list[Answer]] = {}
    for kind in KINDS:
        found = [answer for answer in answers if answer.key.endswith("-" + kind.replace(" ", "-"))]
        kinds |= {kind: found} if found else {}
    return kinds


def table(parts: Mapping[str, Sequence[Answer]]) -> str:
    """Lines with the share of right answers of each kind."""
    lines = []
    for name, answers in parts.items():
        right = sum(answer.right for answer in answers)
        lines.append(f"  {name:10}  {right:5d} of {len(answers):5d}  {accuracy(answers):6.1%}  {answers[0].question}")
    return "\n".join(lines)
