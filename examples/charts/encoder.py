"""The task encoder of this run: ``data.task_encoder`` of ``examples/configs/charts.yaml`` names it."""

from __future__ import annotations

from typing import Any

import torch

from energon_lite import VQASample, stateless
from energon_lite.batching import TokenSequence, next_token_pairs
from energon_lite.trainer.data.task_encoder import MultimodalTaskEncoder, resize_image
from energon_lite.trainer.tokenizing.tokenizer import Tokenizer


class QuestionEncoder(MultimodalTaskEncoder):
    """Rows of an image, a question and an answer; only the answer counts in the loss.

    Texts become what they become in the trainer's own task encoder, from which this one is derived. That would write
    questions as chats; these have no more around them than a space, since each byte is a token here.
    """

    @stateless(restore_seeds=False)
    def encode_sample(self, sample: Any) -> TokenSequence:
        if not isinstance(sample, VQASample):
            return super().encode_sample(sample)
        assert sample.answers
        asked = prompt(self.tokenizer, self.image_length, sample.context)
        end = [] if self.tokenizer.eos is None else [self.tokenizer.eos]
        answer = [*self.tokenizer.encode_plain(sample.answers[0]), *end]
        learned = torch.tensor([False] * len(asked) + [True] * len(answer))
        tokens, labels, mask = next_token_pairs(torch.tensor([*asked, *answer], dtype=torch.int64), learned)
        media = {
            "image": resize_image(sample.image, self.image_size)[None],
            "image_starts": torch.zeros(1, dtype=torch.int64),
        }
        return TokenSequence.derive_from(sample, tokens=tokens, labels=labels, loss_mask=mask, media=media)


def prompt(tokenizer: Tokenizer, image_length: int, question: str) -> list[int]:
    """The tokens before an answer: places for the image, then the question."""
    begin = [] if tokenizer.bos is None else [tokenizer.bos]
    return [tokenizer.pad] * image_length + begin + tokenizer.encode_plain(f"{question} ")
