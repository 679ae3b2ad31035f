"""Hooks of a task encoder that are in use, and their properties."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from energon_lite.hooks.base import AugmentTaskEncoder, DefaultTaskEncoder, TaskEncoder
from energon_lite.hooks.marks import asks_for_seeds, failure_tolerance_of, restores_seeds

#: All hooks that process samples, in the order in which they run.
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
    """Names of the hooks that a loader calls, and their effect on batches.

    Args:
        sample: hooks that run on each sample, in order; with packing, before the selection.
        selected: hooks that run on each sample that was selected for a pack.
        packs: True if samples are packed.
        groups: True if batches consist of groups.
        batched: True if samples are batched.
        generators: hooks that yield any number of results.
        by_tokens: True if batches are made by the lengths of encoded samples.

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
        """True if the number of samples and batches is unknown before the hooks have run."""
        return self.packs or self.groups or self.by_tokens or bool(self.generators)

    @property
    def whole_chunks(self) -> bool:
        """True if the contents of any batch depend on all samples of its chunk."""
        return self.groups or self.by_tokens


def hooks_of(encoder: TaskEncoder, *, packing: bool, batched: bool, by_tokens: bool = False) -> Hooks:
    """Determine the hooks of an encoder that are in use.

    Args:
        packing: True if there is a ``packing_buffer_size``.
        batched: True if there is a ``batch_size``.
        by_tokens: True if batches are made by the lengths of encoded samples.
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


def layers_of(encoder: TaskEncoder) -> Iterator[TaskEncoder]:
    """Yield the encoder, and the encoders that it wraps, from outer to inner."""
    yield encoder
    while isinstance(encoder, AugmentTaskEncoder):
        encoder = encoder.task_encoder
        yield encoder


def owner_of(encoder: TaskEncoder, name: str) -> TaskEncoder:
    """The encoder itself, or of the encoders that it wraps, the outermost that has a hook of its own."""
    default = getattr(AugmentTaskEncoder, name, None)  # sample_length is no method of every encoder
    *outer, inmost = layers_of(encoder)
    return next((layer for layer in outer if getattr(type(layer), name, None) is not default), inmost)


def hook_of(encoder: TaskEncoder, name: str) -> Any:
    """Function of a hook, from the class of the encoder or of the encoder that it wraps."""
    return getattr(type(owner_of(encoder, name)), name, None)


def is_overridden(encoder: TaskEncoder, name: str) -> bool:
    """True if a hook is the user's own."""
    own = hook_of(encoder, name)
    return own not in (getattr(TaskEncoder, name, None), getattr(DefaultTaskEncoder, name, None))


def returns_its_argument(encoder: TaskEncoder, name: str) -> bool:
    """True if a hook is the default ``encode_sample`` or ``encode_batch``, and returns its argument unchanged."""
    made = {"encode_sample": "encoded_sample_type", "encode_batch": "batch_type"}.get(name)
    return made is not None and not is_overridden(encoder, name) and getattr(encoder, made, None) is None


def own_hooks(encoder: TaskEncoder) -> frozenset[str]:
    """Names of the hooks with user code."""
    return frozenset(name for name, _ in _own_functions(encoder))


def seeded_hooks(encoder: TaskEncoder) -> frozenset[str]:
    """Names of the user hooks that need the global generators seeded: all without ``restore_seeds=False``."""
    return frozenset(name for name, function in _own_functions(encoder) if restores_seeds(function))


def always_seeded(encoder: TaskEncoder) -> frozenset[str]:
    """Names of the user hooks that ask for seeds: ``restore_seeds=True``."""
    return frozenset(name for name, function in _own_functions(encoder) if asks_for_seeds(function))


def failure_tolerances(encoder: TaskEncoder) -> dict[str, int]:
    """Tolerances of the hooks that have one of their own. Of several cookers the strictest counts; 0: no limit."""
    tolerances: dict[str, int] = {}
    for name, function in _own_functions(encoder):
        tolerance = failure_tolerance_of(function)
        if tolerance is not None:
            tolerances[name] = min(tolerances.get(name) or tolerance, tolerance or tolerances.get(name, 0))
    return tolerances


def _own_functions(encoder: TaskEncoder) -> Iterator[tuple[str, Callable[..., Any]]]:
    for name in HOOK_ORDER:
        if is_overridden(encoder, name):
            yield name, hook_of(encoder, name)
    for cooker in encoder.cookers:
        yield "cook_crude_sample", cooker.cook


def is_generator(encoder: TaskEncoder, name: str) -> bool:
    """True if a hook is written with ``yield``."""
    return inspect.isgeneratorfunction(inspect.unwrap(hook_of(encoder, name)))
