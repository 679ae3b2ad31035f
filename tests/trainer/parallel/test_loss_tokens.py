"""The loss tokens of a step, over micro-batches and ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from energon_lite import pack_sequences, pad_sequences
from energon_lite.batching import TokenSequence, count_loss_tokens


def sequence(length: int) -> TokenSequence:
    """So many tokens, of which the first does not count."""
    tokens, mask = torch.arange(length), torch.ones(length)
    mask[0] = 0.0
    return TokenSequence(__key__="", __restore_key__=(), tokens=tokens, labels=tokens, loss_mask=mask)


def test_alone() -> None:
    batches = [pack_sequences([sequence(4), sequence(2)], pad=0), pad_sequences([sequence(7)], pad=0, multiple=4)]
    assert all(batch.global_loss_tokens is None for batch in batches)
    assert count_loss_tokens(batches) == 3 + 1 + 6
    assert [batch.global_loss_tokens for batch in batches] == [10.0, 10.0]
    assert count_loss_tokens([]) == 0


def test_the_same_gradient_on_any_number_of_ranks(run_ranks: Any) -> None:
    """A weight per position: the summed gradient of three ranks, one of which has nothing, is that of one."""
    lengths = [[2, 9], [5], []]

    def gradient(mine: list[int]) -> tuple[float, torch.Tensor]:
        weight = torch.ones(1, dtype=torch.float64, requires_grad=True)
        batches = [pack_sequences([sequence(length)], pad=0) for length in mine]
        count_loss_tokens(batches)
        for batch in batches:
            losses = weight * batch.labels.double()
            ((losses * batch.loss_mask).sum() / batch.global_loss_tokens).backward()
        return batches[0].global_loss_tokens or 0.0 if batches else 0.0, (
            torch.zeros(1, dtype=torch.float64) if weight.grad is None else weight.grad
        )

    def rank(number: int) -> tuple[float, float]:
        count, grad = gradient(lengths[number])
        dist.all_reduce(grad)
        return count, grad.item()

    count, grad = gradient([length for mine in lengths for length in mine])
    found = run_ranks(3, rank)
    assert [one for one, _ in found] == [count, count, 0.0] and count == 1 + 8 + 4
    assert all(abs(one - grad.item()) < 1e-12 for _, one in found)
