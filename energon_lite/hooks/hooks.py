"""Which hooks of a task encoder are in force, and whether they leave the number of samples to arithmetic."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from energon_lite.hooks.augment import AugmentTaskEncoder
from energon_lite.hooks.base import TaskEncoder
from energon_lite.hooks.default import DefaultTaskEncoder
from energon_lite.hooks.stateless import failure_tolerance_of, restores_seeds

__all__ = [
    "HOOK_ORDER",
    "Hooks",
    "failure_tolerances",
    "hook_of",
    "hooks_of",
    "is_generator",
    "is_overridden",
    "own_hooks",
    "returns_its_argument",
    "seeded_hooks",
]

#: All hooks that make something of samples, as a sample meets them.
HOOK_ORDER = (
    "cook_crude_sample",
    "preencode_sample",
    "encode_sample",
    "select_samples_to_pack",
    "postencode_sample",
    "pack_selected_samples",
    "sample_length",
    "sample_costs",
    "batch_group_criterion",
    "batch",
    "encode_batch",
    "empty_batch",
)


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


def hook_of(encoder: TaskEncoder, name: str) -> Any:
    """The function that is a hook, of the class that has it: of the encoder, or of one that it augments."""
    own = getattr(type(encoder), name, None)
    if isinstance(encoder, AugmentTaskEncoder) and own is getattr(AugmentTaskEncoder, name, None):
        return hook_of(encoder.task_encoder, name)
    return own


def is_overridden(encoder: TaskEncoder, name: str) -> bool:
    """Whether a hook is the user's own."""
    own = hook_of(encoder, name)
    return own not in (getattr(TaskEncoder, name, None), getattr(DefaultTaskEncoder, name, None))


def returns_its_argument(encoder: TaskEncoder, name: str) -> bool:
    """Whether a hook is the default ``encode_sample`` or ``encode_batch``, and leaves what it gets as it is."""
    made = {"encode_sample": "encoded_sample_type", "encode_batch": "batch_type"}.get(name)
    return made is not None and not is_overridden(encoder, name) and getattr(encoder, made, None) is None


def own_hooks(encoder: TaskEncoder) -> frozenset[str]:
    """The hooks in which code of the user's runs."""
    return frozenset(name for name, _ in _own_functions(encoder))


def seeded_hooks(encoder: TaskEncoder) -> frozenset[str]:
    """Those of them that find the global generators seeded: all that do not say ``restore_seeds=False``."""
    return frozenset(name for name, function in _own_functions(encoder) if restores_seeds(function))


def failure_tolerances(encoder: TaskEncoder) -> dict[str, int]:
    """The tolerances of those that have one of their own. Of several cookers the strictest counts; 0: no limit."""
    found: dict[str, int] = {}
    for name, function in _own_functions(encoder):
        tolerance = failure_tolerance_of(function)
        if tolerance is not None:
            found[name] = min(found.get(name) or tolerance, tolerance or found.get(name, 0))
    return found


def _own_functions(encoder: TaskEncoder) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in HOOK_ORDER:
        if is_overridden(encoder, name):
            yield name, hook_of(encoder, name)
    for cooker in encoder.cookers:
        yield "cook_crude_sample", cooker.cook


def is_generator(encoder: TaskEncoder, name: str) -> bool:
    """Whether a hook is written with ``yield``."""
    return inspect.isgeneratorfunction(inspect.unwrap(hook_of(encoder, name)))
