"""A step that is launched: what is read of it, what it launches beside one by hand, and when it updates nothing."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from energon_lite.errors import UsageError
from energon_lite.trainer import (
    LlamaModel,
    ModelConfig,
    MultimodalBatch,
    OptimizerConfig,
    OverlappedDistributedOptimizer,
    build_mesh,
    train_step,
    vocab_parallel_cross_entropy,
)
from energon_lite.trainer.models import named_layers
from energon_lite.trainer.models.interface import document_lengths
from energon_lite.trainer.models.llama import rotate
from energon_lite.trainer.models.sequence import rotation_table
from energon_lite.trainer.training.guards import SpikeGuard
from energon_lite.trainer.training.step import evaluate, launch_step
from tests.testing import examples
from tests.trainer.training.host_reads import Operations, host_reads

MODEL = ModelConfig(hidden_size=16, num_layers=2, num_heads=2, ffn_size=24, vocab_size=29, vocab_multiple=1)


def made(warm_up: int = 0, clip: float = 1.0, **changes: Any) -> tuple[LlamaModel, OverlappedDistributedOptimizer]:
    """A model and its optimizer, after a step of so many micro-batches, which learns the order of gradients."""
    model = LlamaModel(dataclasses.replace(MODEL, **changes), build_mesh())
    optimizer = OverlappedDistributedOptimizer(model, model.mesh, OptimizerConfig(clip=clip))
    if warm_up:
        launch_step(model, optimizer, [text()] * warm_up, model.mesh, lr=1e-3)
    return model, optimizer


def text(rows: int = 2, length: int = 8, *, packed: bool = False, seed: int = 0) -> MultimodalBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, MODEL.vocab_size, (rows, length + 1), generator=generator)
    documents = (torch.rand(rows, length, generator=generator) < 0.3).long().cumsum(1) if packed else None
    masks = {"loss_mask": torch.ones(rows, length), "documents": documents}
    masks |= {"document_lengths": None if documents is None else document_lengths(documents)}
    return MultimodalBatch(tokens=tokens[:, :-1], labels=tokens[:, 1:], **masks)


def test_no_launch_reads_and_the_numbers_come_in_one() -> None:
    model, optimizer = made(2, loss_chunk=5, attention="sdpa")
    steps = [[text(seed=seed), text(packed=True)] for seed in (1, 2)]
    with host_reads() as found:
        launched = [launch_step(model, optimizer, batches, model.mesh, lr=1e-3) for batches in steps]
    assert found == []
    with host_reads() as found:
        result = launched[0].result()
    assert found == ["tolist"] and math.isfinite(result.loss) and result.tokens == 32
    assert [each.result().updates for each in launched] == [2, 3]


def test_the_mask_of_a_sliding_window_is_made_once_and_a_kernel_needs_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a row of 32,768 tokens, the mask would take 1 GB."""
    seen: list[tuple[int, int]] = []

    def kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, window_size: Any, **__: Any) -> torch.Tensor:
        seen.append(window_size)
        return q * v.sum()

    def masks(length: int) -> int:
        model, _ = made(sliding_window=3)
        with Operations() as operations, torch.no_grad():
            model.all_logits(text(length=length).tokens)
        return sum("tril" in name or "triu" in name for name, _ in operations.found)

    assert masks(11) > 0 and masks(11) == 0
    monkeypatch.setattr(named_layers, "_varlen_attn", lambda: kernel)
    monkeypatch.setattr(named_layers, "has_varlen_kernel", lambda device, dtype: True)
    assert masks(13) == 0 and seen == [(2, 0)] * MODEL.num_layers


def test_a_count_of_the_loader_that_is_wrong_is_noticed_without_a_wait() -> None:
    """The weights that the loss used are summed on the device, and compared when the numbers are read anyway."""
    model, optimizer = made()
    right = dataclasses.replace(text(), counted=16.0)
    assert train_step(model, optimizer, [right], model.mesh, lr=1e-3).tokens == 16
    with host_reads() as found:
        launched = launch_step(model, optimizer, [dataclasses.replace(right, counted=15.0)], model.mesh, lr=1e-3)
    assert found == []
    with pytest.raises(UsageError, match="16 terms, its micro-batches 15 loss_tokens"):
        launched.result()


def test_weights_of_less_than_one_in_all_have_a_mean() -> None:
    found = []
    for weight in (1.0, 2.0**-9):
        model, optimizer = made()
        rows = dataclasses.replace(text(), loss_mask=text().loss_mask * weight)
        of_eval, *_ = evaluate(model, [rows], model.mesh)
        of_step = launch_step(model, optimizer, [rows], model.mesh, lr=1e-3).result()
        found.append([of_eval, of_step.loss, of_step.grad_norm])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_an_evaluation_leaves_each_part_in_its_mode() -> None:
    model, _ = made()
    still = {*model.layers["0"].eval().modules()}
    evaluate(model, [text()], model.mesh)
    assert {module for module in model.modules() if not module.training} == still


def test_a_rate_by_tokens_reads_their_number_only() -> None:
    model, optimizer = made(2)
    seen: list[int] = []
    with host_reads() as found:
        batches = [text(), text(rows=0)]
        launch_step(model, optimizer, batches, model.mesh, lr=lambda tokens: seen.append(tokens) or 1e-3)
    assert seen == [16] and found == ["tolist"]


def test_what_is_read_late_is_what_was_read_at_once() -> None:
    """The third step is not finite: it is left out, and the count says so for it and not for the one before."""

    def run(late: bool) -> tuple[list[object], list[int], list[torch.Tensor]]:
        model, optimizer = made(clip=0.1)
        launched, results = [], []
        for number in range(5):
            batch = text(seed=number)
            spoiled = model.layers["0"].mlp.up_proj.weight.register_hook(lambda grad, n=number: grad / (n != 2))
            if late:
                launched.append(launch_step(model, optimizer, [batch], model.mesh, lr=1e-2))
            else:
                results.append(train_step(model, optimizer, [batch], model.mesh, lr=1e-2))
            spoiled.remove()
        optimizer.wait_parameters()
        results += [each.result() for each in launched]
        return [repr(each) for each in results], [each.result().updates for each in launched], [*model.parameters()]

    at_once, _, weights = run(late=False)
    late, updates, same = run(late=True)
    assert late == at_once and updates == [1, 2, 2, 3, 4]
    assert all(torch.equal(a, b) for a, b in zip(weights, same, strict=True))


def test_gradients_are_moved_into_buckets_together() -> None:
    """Not by a kernel for each parameter, and in each micro-batch."""
    model, optimizer = made(2)
    with Operations() as operations:
        launch_step(model, optimizer, [text(), text()], model.mesh, lr=1e-3)
    names = [name for name, _ in operations.found]
    assert names.count("aten._foreach_copy_.default") == names.count("aten._foreach_add_.List") == 1  # of one bucket
    shapes = {tuple(p.shape) for p in model.parameters()}
    one_by_one = ("aten.copy_.default", "aten.add_.Tensor")
    assert [name for name, shape in operations.found if shape in shapes and name in one_by_one] == []


# -- kernels, beside a step by hand -----------------------------------------------------------------------------------

#: Kernels of a step of one micro-batch that a step by hand has not, besides those of the loss over a cut vocabulary. A
#: further micro-batch has none: by hand, each gradient is added by a kernel; here, those of a bucket are.
NAMED = {
    "the number of tokens: zero, addition, bound": 3,
    "the number of terms of the loss, summed on the device": 1,
    "sums of the loss and of its terms, in float64": 4,
    "gradients: a kernel that moves those of a bucket": 1,
    "their norm: in float64, over all buckets": 5,
    "leaving out a step that is not finite, without a read": 7,
    "the count of updates on the device": 2,
    "a second update, of what is not decayed": 1,
    "the numbers of the step in one tensor": 2,
}
VIEWS = """
    view reshape _unsafe_view transpose permute t split split_with_sizes chunk slice select expand unsqueeze squeeze
    flatten unflatten detach alias unbind as_strided promote_types _record_function_enter_new _record_function_exit
"""


def kernels(call: Callable[[], object]) -> int:
    """Operations that are no views."""
    with Operations() as operations:
        call()
    return sum(number for name, number in operations.count().items() if name not in VIEWS.split())


def per_micro_batch_and_step(step: Callable[[int], object]) -> tuple[int, int]:
    """Kernels of each further micro-batch, and of a step besides those."""
    one, three = (kernels(lambda count=count: step(count)) for count in (1, 3))
    more, over = divmod(three - one, 2)
    assert over == 0
    return more, one - more


class ByHand(nn.Module):
    """The model in one function, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        hidden, inner = MODEL.hidden_size, MODEL.ffn_size
        sizes = [*[(hidden, hidden)] * 4, *[(inner, hidden)] * 2, (hidden, inner)] * MODEL.num_layers
        self.table, self.head = (nn.Parameter(0.02 * torch.randn(MODEL.vocab_size, hidden)) for _ in range(2))
        self.matrices = nn.ParameterList(0.02 * torch.randn(size) for size in sizes)
        self.norms = nn.ParameterList(torch.ones(hidden) for _ in range(2 * MODEL.num_layers + 1))
        self.rotation = rotation_table(torch.arange(8), MODEL)

    def forward(self, rows: MultimodalBatch) -> torch.Tensor:
        norms, x = iter(self.norms), F.embedding(rows.tokens, self.table)

        def normed() -> torch.Tensor:
            weight = next(norms)
            return F.rms_norm(x, weight.shape, weight, MODEL.norm_eps)

        for i in range(MODEL.num_layers):
            *qkv, out, gate, up, down = self.matrices[7 * i : 7 * i + 7]
            y = normed()
            q, k, v = (F.linear(y, w).unflatten(-1, (MODEL.num_heads, -1)).transpose(1, 2) for w in qkv)
            q, k = rotate(q, self.rotation), rotate(k, self.rotation)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), out)
            y = normed()
            x = x + F.linear(F.silu(F.linear(y, gate)) * F.linear(y, up), down)
        return F.cross_entropy(F.linear(normed(), self.head).flatten(0, 1), rows.labels.flatten())


def test_kernels_are_those_of_a_step_by_hand_and_what_is_named() -> None:
    rows, (model, optimizer), plain = dataclasses.replace(text(), counted=16.0), made(), ByHand()
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)

    def by_hand(count: int) -> None:
        for _ in range(count):
            (plain(rows) / count).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, foreach=True)
        adamw.step()
        adamw.zero_grad()

    def ours(count: int) -> None:
        launch_step(model, optimizer, [rows] * count, model.mesh, lr=1e-3)

    for warm_up in (by_hand, ours, ours):
        warm_up(2)  # the first step learns the order of gradients
    logits, labels = torch.randn(16, MODEL.vocab_size, requires_grad=True), rows.labels.flatten()

    def of_loss() -> None:
        losses = vocab_parallel_cross_entropy(logits, labels, model.mesh, vocab_size=MODEL.vocab_size)
        (losses * rows.loss_mask.flatten()).sum().backward()

    loss = kernels(of_loss) - kernels(lambda: F.cross_entropy(logits, labels).backward())
    assert loss <= 24, "compiled, it is one kernel"
    mine, its = per_micro_batch_and_step(ours), per_micro_batch_and_step(by_hand)
    assert mine[0] <= its[0] + loss
    assert sum(mine) <= sum(its) + loss + sum(NAMED.values())


# -- the rule by which updates are left out for their losses -----------------------------------------------------------

LOSSES = st.lists(st.sampled_from([1.0, 1.1, 1.4, 1.6, 2.0, 3.0, 9.0, math.nan, math.inf]), max_size=40)


def judged(guard: SpikeGuard, losses: list[float]) -> list[bool]:
    return [bool(guard.judge(torch.tensor(loss, dtype=torch.float64))) for loss in losses]


@settings(max_examples=examples(50), deadline=None)
@given(losses=LOSSES, sign=st.sampled_from([1, -1]), window=st.integers(2, 9), cut=st.integers(0, 40))
def test_a_loss_is_judged_by_the_median_of_those_before_it(
    losses: list[float], sign: int, window: int, cut: int
) -> None:
    """As plain Python has it; and a guard that goes on from a state judges as the one that was saved."""
    mesh, losses = build_mesh(), [sign * loss for loss in losses]
    expected = []
    for step, loss in enumerate(losses):
        known = [one for one in losses[max(0, step - window) : step] if math.isfinite(one)]
        enough = len(known) >= window / 2
        median = statistics.median_high(known) if known else 0.0
        expected.append(enough and math.isfinite(loss) and loss > median + 0.5 * abs(median))
    guard, other, whole = (SpikeGuard(1.5, window, mesh) for _ in range(3))
    before = judged(guard, losses[:cut])
    other.restore(guard.state())
    assert before + judged(other, losses[cut:]) == expected
    assert judged(whole, losses) == expected and whole.state() == other.state()
    assert other.state()["left_out"] == sum(expected)


def test_a_state_fits_another_window_and_none_is_a_beginning() -> None:
    mesh = build_mesh()
    guard, smaller = SpikeGuard(1.5, 6, mesh), SpikeGuard(1.5, 2, mesh)
    judged(guard, [9.0, 9.0, 9.0, 9.0, 1.0, 1.0])
    smaller.restore(guard.state())
    assert judged(guard, [2.0]) == [False] and judged(smaller, [2.0]) == [True]
    smaller.restore({})
    assert smaller.state() == {"losses": [], "left_out": 0.0}
