"""User hooks: functions that process each sample and assemble samples into a batch."""

from energon_lite.hooks.base import AugmentTaskEncoder, DefaultTaskEncoder, PackedSamplesOutput, TaskEncoder
from energon_lite.hooks.checks import check_hooks, check_stores, place_of
from energon_lite.hooks.context import HookContext, hook_context, running_context
from energon_lite.hooks.cooking import Cooker, basic_sample_keys, cook_function, cooker
from energon_lite.hooks.fingerprint import attributes, code_digests, code_hash
from energon_lite.hooks.global_generators import LendingScope, lending
from energon_lite.hooks.hooks import (
    HOOK_ORDER,
    Hooks,
    always_seeded,
    failure_tolerances,
    hooks_of,
    is_overridden,
    own_hooks,
    returns_its_argument,
    seeded_hooks,
)
from energon_lite.hooks.stateless import stateless

__all__ = [
    "HOOK_ORDER",
    "AugmentTaskEncoder",
    "Cooker",
    "DefaultTaskEncoder",
    "HookContext",
    "Hooks",
    "LendingScope",
    "PackedSamplesOutput",
    "TaskEncoder",
    "always_seeded",
    "attributes",
    "basic_sample_keys",
    "check_hooks",
    "check_stores",
    "code_digests",
    "code_hash",
    "cook_function",
    "cooker",
    "failure_tolerances",
    "hook_context",
    "hooks_of",
    "is_overridden",
    "lending",
    "own_hooks",
    "place_of",
    "returns_its_argument",
    "running_context",
    "seeded_hooks",
    "stateless",
]
