"""Padded and packed batches: by hand, as laws, and in a model, where both must give the same loss and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from energon_lite.batching import flex_segment_mask, learning_rate_scale, segment_mask
from energon_lite.batching.sequence_batches import (
    PackedBatch,
    PaddedBatch,
    TokenSequence,
    as_planned,
    cut_sequence,
    next_token_pairs,
    pack_sequences,
    pad_sequences,
)
from energon_lite.errors import FatalSampleError, SampleError, SkipSample, UsageError

PAD = 99


def sequence(number: int, tokens: list[int], mask: list[int] | None = None, **more: Any) -> TokenSequence:
    return TokenSequence(
        __key__=f"s{number}",
        __restore_key__=("sample", 0, number, 0, 0),
        tokens=torch.tensor(tokens, dtype=torch.int64),
        labels=torch.tensor(tokens, dtype=torch.int64) + 1,
        loss_mask=None if mask is None else torch.tensor(mask, dtype=torch.float32),
        **more,
    )


TWO = [sequence(0, [5, 6], [0, 1]), sequence(1, [7, 8, 9])]


def test_padding_by_hand() -> None:
    batch = pad_sequences(TWO, pad=PAD, multiple=4)
    assert batch.tokens.tolist() == [[5, 6, PAD, PAD], [7, 8, 9, PAD]]
    assert batch.labels.tolist() == [[6, 7, PAD, PAD], [8, 9, 10, PAD]]
    assert batch.loss_mask.tolist() == [[0, 1, 0, 0], [1, 1, 1, 0]]
    assert batch.attention_mask.tolist() == [[True, True, False, False], [True, True, True, False]]
    assert batch.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert (batch.num_tokens, batch.num_loss_tokens) == (5, 4.0)
    assert batch.sample_ids == (("sample", 0, 0, 0, 0), ("sample", 0, 1, 0, 0)) and batch.__key__ == ["s0", "s1"]
    assert pad_sequences(TWO, pad=PAD).tokens.shape == (2, 3)


def test_packing_by_hand() -> None:
    batch = pack_sequences(TWO, pad=PAD)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9]] and batch.labels.tolist() == [[6, 7, 8, 9, 10]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 1]]
    assert batch.cu_seqlens.tolist() == [0, 2, 5] and batch.cu_seqlens.dtype == torch.int32
    assert batch.max_seqlen == 3 and batch.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert batch.segment_ids.tolist() == [[0, 0, 1, 1, 1]]
    assert (batch.num_tokens, batch.num_loss_tokens) == (5, 4.0)


def test_packing_to_multiples() -> None:
    batch = pack_sequences(TWO, pad=PAD, multiple=8, sample_multiple=2)
    assert batch.tokens.tolist() == [[5, 6, 7, 8, 9, PAD, PAD, PAD]]
    assert batch.cu_seqlens.tolist() == [0, 2, 6, 8] and batch.max_seqlen == 4
    assert batch.segment_ids.tolist() == [[0, 0, 1, 1, 1, 1, -1, -1]]
    assert batch.position_ids.tolist() == [[0, 1, 0, 1, 2, 3, 0, 1]]
    assert batch.loss_mask.tolist() == [[0, 1, 1, 1, 1, 0, 0, 0]] and batch.num_tokens == 5


def test_no_samples() -> None:
    padded, packed = pad_sequences([], pad=PAD), pack_sequences([], pad=PAD)
    assert padded.tokens.shape == (0, 0) and packed.tokens.shape == (1, 0)
    assert packed.cu_seqlens.tolist() == [0] and packed.max_seqlen == 0
    assert padded.num_tokens == packed.num_tokens == 0 and packed.num_loss_tokens == 0


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), max_size=8), st.sampled_from([1, 4]), st.sampled_from([1, 3]))
def test_both_hold_the_same(lengths: list[int], multiple: int, sample_multiple: int) -> None:
    samples = [sequence(n, list(range(10 * n, 10 * n + length))) for n, length in enumerate(lengths)]
    padded = pad_sequences(samples, pad=-1, multiple=multiple)
    packed = pack_sequences(samples, pad=-1, multiple=multiple, sample_multiple=sample_multiple)
    assert padded.tokens[padded.attention_mask].tolist() == packed.tokens[packed.tokens >= 0].tolist()
    assert padded.num_loss_tokens == packed.num_loss_tokens == padded.num_tokens == packed.num_tokens == sum(lengths)
    assert padded.tokens.shape[1] % multiple == 0 and packed.tokens.shape[1] % multiple == 0
    edges = packed.cu_seqlens.tolist()
    assert edges[-1] == packed.tokens.shape[1] == packed.position_ids.shape[1] == packed.segment_ids.shape[1]
    for number, sample in enumerate(samples):
        here = slice(edges[number], edges[number] + len(sample.tokens))
        assert packed.tokens[0, here].tolist() == sample.tokens.tolist()
        assert packed.position_ids[0, here].tolist() == list(range(len(sample.tokens)))
        assert set(packed.segment_ids[0, here].tolist()) == {number}
        assert (edges[number + 1] - edges[number]) % sample_multiple == 0


def test_media_stay_with_their_sample() -> None:
    samples = [
        sequence(0, [1], media={"image": torch.zeros(2, 3, 4, 4)}),
        sequence(1, [2]),
        sequence(2, [3], media={"image": torch.ones(1, 3, 4, 4), "audio": torch.ones(1, 50)}),
    ]
    batch = pack_sequences(samples, pad=PAD)
    assert batch.media["image"].shape == (3, 3, 4, 4) and batch.media["audio"].shape == (1, 50)  # type: ignore[union-attr]
    assert batch.media_samples["image"].tolist() == [0, 0, 2] and batch.media_samples["audio"].tolist() == [2]
    samples[1].media = {"image": torch.zeros(1, 3, 8, 8)}
    other = pad_sequences(samples, pad=PAD)
    assert [tuple(item.shape) for item in other.media["image"]] == [(3, 4, 4), (3, 4, 4), (3, 8, 8), (3, 4, 4)]
    assert other.media_samples["image"].tolist() == [0, 0, 1, 2]
    with pytest.raises(SampleError, match="with image cannot be cut"):
        cut_sequence(samples[0], 0, 0)


def test_cutting() -> None:
    sample = sequence(0, [1, 2, 3, 4, 5], [0, 0, 1, 1, 1])
    assert cut_sequence(sample, 0, 5) is sample
    part = cut_sequence(sample, 1, 3)
    assert part.tokens.tolist() == [2, 3, 4] and part.labels.tolist() == [3, 4, 5]
    assert part.loss_mask is not None and part.loss_mask.tolist() == [0, 1, 1] and part.__key__ == "s0"
    with pytest.raises(SampleError, match="measure the lengths again"):
        cut_sequence(sample, 3, 3)


def test_next_token_pairs() -> None:
    tokens, labels, mask = next_token_pairs(torch.tensor([5, 6, 7]), torch.tensor([False, False, True]))
    assert (tokens.tolist(), labels.tolist(), mask.tolist()) == ([5, 6], [6, 7], [0, 1])
    assert next_token_pairs(torch.tensor([5]))[0].tolist() == []
    for wrong in ((torch.zeros(0), None), (torch.zeros(2), torch.zeros(3))):
        with pytest.raises(UsageError, match="at least one token"):
            next_token_pairs(*wrong)


def test_wrong_shapes() -> None:
    sample = sequence(0, [1, 2], [1])
    for collate in (pad_sequences, pack_sequences):
        with pytest.raises(UsageError, match=r"tokens \[2\], labels \[2\] and loss mask \[1\] differ"):
            collate([sample], pad=PAD)
        with pytest.raises(UsageError, match="multiple of 0"):
            collate(TWO, pad=PAD, multiple=0)


# -- in a model -----------------------------------------------------------------------------------------------------

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class SmallModel(torch.nn.Module):
    """Two layers of attention with positions, so that a wrong mask or a wrong position shows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.position = torch.nn.Embedding(100, 16), torch.nn.Embedding(64, 16)
        self.mixing = torch.nn.ModuleList(torch.nn.Linear(16, 48) for _ in range(2))
        self.out = torch.nn.Linear(16, 101)

    def forward(self, batch: PaddedBatch | PackedBatch, attend: Attend) -> torch.Tensor:
        x = self.embedding(batch.tokens) + self.position(batch.position_ids)
        for layer in self.mixing:
            heads = layer(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
            x = x + attend(*heads).transpose(1, 2).flatten(2)
        losses = F.cross_entropy(self.out(x).flatten(0, 1), batch.labels.flatten(), reduction="none")
        return (losses * batch.loss_mask.flatten()).sum() / batch.num_loss_tokens


def _padded(batch: PaddedBatch) -> Attend:
    mask = batch.attention_mask[:, None, None, :] & torch.ones(batch.tokens.shape[1:] * 2, dtype=torch.bool).tril()
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def _masked(batch: PackedBatch) -> Attend:
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=segment_mask(batch.segment_ids))


def _variable_lengths(batch: PackedBatch) -> Attend:
    """What attention kernels for variable lengths do with ``cu_seqlens``."""
    edges = batch.cu_seqlens.tolist()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        parts = [
            F.scaled_dot_product_attention(q[:, :, a:b], k[:, :, a:b], v[:, :, a:b], is_causal=True)
            for a, b in pairwise(edges)
        ]
        return torch.cat(parts, dim=2)

    return attend


def _flex(batch: PackedBatch) -> Attend:
    length = batch.tokens.shape[1]
    mask = create_block_mask(flex_segment_mask(batch.segment_ids), 1, None, length, length, device="cpu")
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)  # type: ignore[return-value]


@pytest.mark.parametrize("attention", [_masked, _variable_lengths])
@pytest.mark.parametrize("multiples", [(1, 1), (16, 4)])
def test_packed_and_padded_give_the_same_loss_and_gradients(
    attention: Callable[[PackedBatch], Attend], multiples: tuple[int, int]
) -> None:
    samples = _samples()
    padded = pad_sequences(samples, pad=PAD)
    packed = pack_sequences(samples, pad=PAD, multiple=multiples[0], sample_multiple=multiples[1])
    model = SmallModel()
    expected, found = model(padded, _padded(padded)), model(packed, attention(packed))
    assert abs(expected.item() - found.item()) < 1e-5
    for left, right in zip(*(_gradients(model, loss) for loss in (expected, found)), strict=True):
        torch.testing.assert_close(left, right, atol=1e-6, rtol=1e-4)


@torch.no_grad()
def test_flex_attention_gives_the_same_loss() -> None:
    # On a CPU it has no backward.
    samples, model = _samples(), SmallModel()
    padded, packed = pad_sequences(samples, pad=PAD), pack_sequences(samples, pad=PAD, multiple=16)
    assert abs(model(padded, _padded(padded)).item() - model(packed, _flex(packed)).item()) < 1e-5


def _samples() -> list[TokenSequence]:
    generator = torch.Generator().manual_seed(1)
    return [
        sequence(n, torch.randint(0, 90, (length,), generator=generator).tolist(), [int(i > 1) for i in range(length)])
        for n, length in enumerate([3, 11, 7, 2, 20])
    ]


def _gradients(model: SmallModel, loss: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, list(model.parameters()))


def test_a_wrong_mask_would_show() -> None:
    packed, padded = pack_sequences(TWO, pad=PAD), pad_sequences(TWO, pad=PAD)
    model = SmallModel()
    everything = model(packed, lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    assert abs(model(padded, _padded(padded)).item() - everything.item()) > 1e-4


# -- the learning rate ----------------------------------------------------------------------------------------------


def test_learning_rates() -> None:
    assert learning_rate_scale(300, 100, "linear") == 3.0
    assert learning_rate_scale(400, 100) == 2.0
    assert learning_rate_scale(50, 100, "none") == 1.0
    assert learning_rate_scale(0, 100, "sqrt") == 0.0
    assert math.isclose(learning_rate_scale(50, 100, "sqrt") ** 2, learning_rate_scale(50, 100, "linear"))
    for size, reference in ((-1, 1), (1, 0), (float("nan"), 1)):
        with pytest.raises(UsageError, match="positive sizes"):
            learning_rate_scale(size, reference)
    with pytest.raises(UsageError, match="no rule 'cubic'"):
        learning_rate_scale(1, 1, "cubic")  # type: ignore[arg-type]


def test_a_plan_that_cuts_needs_sequences_as_long_as_it_says() -> None:
    tokens = torch.arange(5)
    sample = TokenSequence(__key__="k", __restore_key__=(), __subflavors__={}, tokens=tokens, labels=tokens)
    assert as_planned({"tokens": 1}, 0, 4, 0) == {"tokens": 1}
    assert as_planned(sample, 2, 2, 1).tokens.tolist() == [2, 3]
    assert as_planned(sample, 3, 4, 1).tokens.tolist() == [3, 4]
    with pytest.raises(FatalSampleError, match="the plan cuts samples, and encode_sample returned a dict"):
        as_planned({"tokens": 1}, 0, 4, 1)
    with pytest.raises(SkipSample, match="nothing is left of it from token 5 on"):
        as_planned(sample, 5, 2, 1)
    with pytest.raises(SampleError, match="has 5 tokens, and its batch was planned for 4"):
        as_planned(sample, 0, 4, 0)
