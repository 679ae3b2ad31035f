"""What an optimizer can be told."""

from __future__ import annotations

from dataclasses import dataclass

from energon_lite.errors import ConfigError, require

__all__ = ["SCHEDULES", "OptimizerConfig"]

#: Schedules of the learning rate.
SCHEDULES = ("cosine", "linear", "constant", "wsd")

_CHOICES = {
    "schedule": list(SCHEDULES),
    "kind": ["overlapped", "plain"],
    "algorithm": ["adamw", "sgd"],
    "reduce": ["last", "every"],
    "grad_dtype": ["float32", "parameter"],
    "scale_rule": ["none", "linear", "sqrt"],
}


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW and its schedule: a linear warm-up to ``lr``, then as ``schedule`` says; see :func:`learning_rate`.

    Args:
        lr: highest learning rate.
        min_lr: learning rate at the end.
        warmup: steps until ``lr`` is reached.
        schedule: ``cosine``, ``linear``, ``constant`` or ``wsd``.
        decay_share: of ``wsd``: which share of the run's steps, at its end, the learning rate goes down.
        scale_rule: how the learning rate follows the tokens of a step, where these vary: ``linear``, ``sqrt`` or
            ``none``; see :func:`energon_lite.learning_rate_scale`.
        reference_tokens: tokens of the step for which ``lr`` was chosen; needed by ``scale_rule``.
        weight_decay: of matrices; norms and biases are not decayed.
        betas: decay rates of the two moments.
        eps: added to the root of the second moment.
        clip: largest global gradient norm; 0 for no clipping.
        kind: ``overlapped`` (:class:`OverlappedDistributedOptimizer`), or ``plain`` (:class:`AdamW`): state on each
            rank, communication behind nothing.
        algorithm: ``adamw`` or ``sgd`` (overlapped only).
        momentum: of SGD; 0 for none.
        bucket_size: elements of a bucket; None for 40 million, or a million per data-parallel rank if that is more.
        reduce: when gradients are summed over ranks: behind the ``last`` micro-batch of a step (ZeRO-1), or behind
            ``every`` one (ZeRO-2: less memory, more communication).
        grad_dtype: type in which gradients are summed: at least ``float32``, or that of the ``parameter``.
    """

    lr: float = 1e-3
    min_lr: float = 1e-4
    warmup: int = 10
    schedule: str = "cosine"
    decay_share: float = 0.2
    scale_rule: str = "none"
    reference_tokens: int = 0
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    kind: str = "overlapped"
    algorithm: str = "adamw"
    momentum: float = 0.9
    bucket_size: int | None = None
    reduce: str = "last"
    grad_dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("lr", "min_lr", "warmup", "weight_decay", "eps", "clip", "momentum"):
            require(getattr(self, name) >= 0, f"{name} is negative", f"optimizer.{name}", "give a number >= 0")
        share = 0 < self.decay_share <= 1
        require(share, f"decay_share={self.decay_share} is no share", "optimizer.decay_share", "e.g. 0.2")
        good = all(0 <= beta < 1 for beta in self.betas)
        require(good, f"betas={list(self.betas)} are not both in [0, 1)", "optimizer.betas", "e.g. [0.9, 0.95]")
        for name, choices in _CHOICES.items():
            value = getattr(self, name)
            if value not in choices:
                raise ConfigError(
                    f"unknown {name} {value!r}", at=f"optimizer.{name}", choices=choices, suggest_for=value
                )
        positive = self.bucket_size is None or self.bucket_size >= 1
        require(
            positive, "bucket_size is below 1", "optimizer.bucket_size", "leave it out, or give a number of elements"
        )
        known = self.scale_rule == "none" or self.reference_tokens >= 1
        require(known, "scale_rule needs reference_tokens", "optimizer.reference_tokens", "e.g. 65536")
        plain_sgd = self.kind == "plain" and self.algorithm != "adamw"
        require(not plain_sgd, "the plain optimizer knows AdamW only", "optimizer.algorithm", "use kind: overlapped")
