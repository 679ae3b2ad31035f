"""Which hooks of a task encoder are in force, and whether they leave the number of samples to arithmetic."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

from energon_lite.task_encoder.base import TaskEncoder
from energon_lite.task_encoder.default import DefaultTaskEncoder

__all__ = ["Hooks", "hooks_of", "is_generator", "is_overridden"]


@dataclass(frozen=True)
class Hooks:
    """The hooks that a loader calls, by name.

    Args:
        sample: those that run on each sample, one after the other; with packing, before the selection.
        selected: those that run on each sample that was selected for a pack.
        packs: samples are packed.
        groups: batches are made of groups.
        batched: there are batches at all.
        generators: those that yield any number of results.
        by_tokens: batches are made by the lengths of encoded samples.

    Example:
        >>> hooks_of(TaskEncoder(), packing=False, batched=True).sample
        ('encode_sample',)
    """

    sample: tuple[str, ...]
    selected: tuple[str, ...]
    packs: bool
    groups: bool
    batched: bool
    generators: frozenset[str]
    by_tokens: bool = False

    @property
    def content_decides(self) -> bool:
        """Whether nobody knows, before the hooks have run, how many samples and batches there will be."""
        return self.packs or self.groups or self.by_tokens or bool(self.generators)

    @property
    def whole_chunks(self) -> bool:
        """Whether each sample of a chunk must be made to know what is in any batch of it."""
        return self.groups or self.by_tokens


def hooks_of(encoder: TaskEncoder, *, packing: bool, batched: bool, by_tokens: bool = False) -> Hooks:
    """The hooks of an encoder that are in force.

    Args:
        packing: there is a ``packing_buffer_size``.
        batched: there is a ``batch_size``.
        by_tokens: batches are made by the lengths of encoded samples.
    """
    first = "preencode_sample" if is_overridden(encoder, "preencode_sample") else "encode_sample"
    last = ("postencode_sample",) if is_overridden(encoder, "postencode_sample") else ()
    groups = is_overridden(encoder, "batch_group_criterion")
    batched = batched or groups or by_tokens
    called = [first, *last]
    called += ["pack_selected_samples"] if packing else []
    called += ["batch", "encode_batch"] if batched else []
    return Hooks(
        sample=(first,) if packing else (first, *last),
        selected=last if packing else (),
        packs=packing,
        groups=groups,
        batched=batched,
        generators=frozenset(name for name in called if is_generator(encoder, name)),
        by_tokens=by_tokens,
    )


def is_overridden(encoder: TaskEncoder, name: str) -> bool:
    """Whether a hook is the user's own."""
    return getattr(type(encoder), name) not in (getattr(TaskEncoder, name), getattr(DefaultTaskEncoder, name))


def is_generator(encoder: TaskEncoder, name: str) -> bool:
    """Whether a hook is written with ``yield``."""
    return inspect.isgeneratorfunction(inspect.unwrap(getattr(type(encoder), name)))
