"""What a step launches beside one written by hand for the same model: no more than what is named here."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite.trainer import (
    LlamaModel,
    ModelConfig,
    MultimodalBatch,
    OverlappedDistributedOptimizer,
    build_mesh,
    vocab_parallel_cross_entropy,
)
from energon_lite.trainer.models.llama import rotate
from energon_lite.trainer.models.sequence import rotation_table
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.training.step import launch_step
from tests.trainer.training.counted_operations import Operations
from tests.trainer.training.host_reads import host_reads

MODEL = ModelConfig(
    hidden_size=16, num_layers=2, num_heads=2, ffn_size=24, vocab_size=29, vocab_multiple=1, fuse_projections=True
)
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
    "products of weights that lie side by side": 3,
}
VIEWS = """
    view reshape _unsafe_view transpose permute t split split_with_sizes chunk slice select expand unsqueeze squeeze
    flatten unflatten detach alias unbind as_strided promote_types _record_function_enter_new _record_function_exit
"""


def batch(seed: int = 0) -> MultimodalBatch:
    tokens = torch.randint(0, MODEL.vocab_size, (2, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(2, 8)
    return MultimodalBatch(tokens=tokens[:, :-1], labels=tokens[:, 1:], loss_mask=mask, counted=16.0)


def kernels(call: Callable[[], object]) -> int:
    """Operations that are no views."""
    with Operations() as operations:
        call()
    return sum(name.split(".")[1] not in VIEWS.split() for name, _ in operations.found)


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
        sizes = [(3 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)] * MODEL.num_layers
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
            qkv, out, gate_up, down = self.matrices[4 * i : 4 * i + 4]
            parts = F.linear(normed(), qkv).chunk(3, dim=-1)
            q, k, v = (part.unflatten(-1, (MODEL.num_heads, -1)).transpose(1, 2) for part in parts)
            q, k = rotate(q, self.rotation), rotate(k, self.rotation)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + F.linear(mixed.transpose(1, 2).flatten(2), out)
            gate, up = F.linear(normed(), gate_up).chunk(2, dim=-1)
            x = x + F.linear(F.silu(gate) * up, down)
        return F.cross_entropy(F.linear(normed(), self.head).flatten(0, 1), rows.labels.flatten())


def test_kernels_are_those_of_a_step_by_hand_and_what_is_named() -> None:
    mesh, rows = build_mesh(), batch()
    model = LlamaModel(MODEL, mesh)
    optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig())
    plain = ByHand()
    adamw = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)

    def by_hand(count: int) -> None:
        for _ in range(count):
            (plain(rows) / count).backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, foreach=True)
        adamw.step()
        adamw.zero_grad()

    def ours(count: int) -> None:
        launch_step(model, optimizer, [rows] * count, mesh, lr=1e-3)

    for warm_up in (by_hand, ours, ours):
        warm_up(2)  # the first step learns the order of gradients
    logits, labels = torch.randn(16, MODEL.vocab_size, requires_grad=True), rows.labels.flatten()

    def of_loss() -> None:
        losses = vocab_parallel_cross_entropy(logits, labels, mesh, vocab_size=MODEL.vocab_size)
        (losses * rows.loss_mask.flatten()).sum().backward()

    loss = kernels(of_loss) - kernels(lambda: F.cross_entropy(logits, labels).backward())
    assert loss <= 24, "compiled, it is one kernel"
    mine, its = per_micro_batch_and_step(ours), per_micro_batch_and_step(by_hand)
    assert mine[0] <= its[0] + loss
    assert sum(mine) <= sum(its) + loss + sum(NAMED.values())


def test_the_host_reads_nothing_where_a_step_by_hand_reads_nothing() -> None:
    """By hand, one reads the loss and the norm; here nothing is read before the next step is launched."""
    mesh = build_mesh()
    model = LlamaModel(MODEL, mesh)
    optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig())
    launch_step(model, optimizer, [batch()], mesh, lr=1e-3)
    with host_reads() as found:
        first = launch_step(model, optimizer, [batch(1)], mesh, lr=1e-3)
        launch_step(model, optimizer, [batch(2)], mesh, lr=1e-3)
    assert found == []
    with host_reads() as found:
        first.result()
    assert found == ["tolist"]
