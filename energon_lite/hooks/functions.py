"""Checks that hooks can be called with their arguments, and that no hook has a misspelled name."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from difflib import SequenceMatcher
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.hooks.augment import AugmentTaskEncoder
from energon_lite.hooks.base import TaskEncoder
from energon_lite.hooks.hooks import HOOK_ORDER, hook_of, is_overridden

__all__ = ["check_functions", "place_of"]

logger = logging.getLogger(__name__)

#: Arguments of the hooks. (cook_crude_sample may take fewer; it is checked elsewhere.)
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(HOOK_ORDER, ("sample",)),
    **dict.fromkeys(("select_samples_to_pack", "pack_selected_samples", "batch"), ("samples",)),
    **dict.fromkeys(("sample_length", "sample_costs"), ("encoded",)),
    "encode_batch": ("batch",),
    "empty_batch": ("like", "rows"),
}
#: Other attributes of an encoder that the loader reads.
_ATTRIBUTES = ("cookers", "decoder", "failure_tolerance", "padding")
#: Least similarity at which a name may be a misspelled hook.
_ALIKE = 0.88
#: Warnings that were given: a class, and a name in it.
_warned: set[tuple[type, str]] = set()


def check_functions(encoder: TaskEncoder) -> None:
    """Refuse hooks that cannot be called, and names that are permutations of a hook's letters; warn of similar names.

    Raises:
        UsageError: a hook or a name is refused; the message has its name and place.
    """
    for name in HOOK_ORDER:
        if is_overridden(encoder, name) and hook_of(encoder, name) is not None:
            own = _owner(encoder, name)
            _check_kind(f"{type(own).__name__}.{name}", hook_of(encoder, name))
            if name != "cook_crude_sample":
                _check_call(own, name)
    for cooker in encoder.cookers:
        name = f"the cooker {getattr(cooker.cook, '__name__', cooker.cook)}"
        _check_kind(name, cooker.cook)
        if inspect.isgeneratorfunction(inspect.unwrap(cooker.cook)):
            raise UsageError(
                f"{name} is a generator", where=place_of(cooker.cook), fix="return one sample; yield in encode_sample"
            )
    _check_names(encoder)


def _check_kind(name: str, function: Any) -> None:
    plain = inspect.unwrap(function) if callable(function) else function
    if inspect.iscoroutinefunction(plain) or inspect.isasyncgenfunction(plain):
        raise UsageError(
            f"{name} is `async def`, and nobody would await it",
            where=place_of(function),
            fix="write it with `def`; have it run what is asynchronous: asyncio.run(...)",
        )
    if not callable(function) and not isinstance(function, (staticmethod, classmethod)):
        raise UsageError(f"{name} is a {type(function).__name__}, and no function", fix="write it with `def`")


def _check_call(encoder: TaskEncoder, name: str) -> None:
    arguments, hook = _ARGUMENTS[name], getattr(encoder, name)
    try:
        signature = inspect.signature(hook)
    except (TypeError, ValueError):  # a C function without a signature; or a method without `self`
        if not hasattr(hook, "__code__"):
            return
        signature = inspect.Signature()
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise UsageError(
            f"{type(encoder).__name__}.{name} is called with ({', '.join(arguments)}), which it does not take: {error}",
            where=place_of(hook),
            fix=f"write `def {name}(self, {', '.join(arguments)})`",
        ) from None


def _check_names(encoder: TaskEncoder) -> None:
    """Find unused methods and settings with names similar to a hook's or a setting's."""
    for inner in _layers(encoder):
        members = _members(type(inner))
        used = {name for function in map(_code_of, members.values()) for name in _names_in(function)}
        for name, (cls, value) in members.items():
            if name.startswith("_") or name in used or hasattr(TaskEncoder, name) or hasattr(AugmentTaskEncoder, name):
                continue
            is_function = callable(value) or isinstance(value, (staticmethod, classmethod))
            choices = [*HOOK_ORDER] if is_function else [*_ATTRIBUTES]
            meant = max(choices, key=lambda choice: _likeness(name, choice))
            likeness = _likeness(name, meant)
            if likeness < _ALIKE or meant in members:
                continue
            what = f"{cls.__name__}.{name} is {'called' if is_function else 'read'} by nobody"
            where = place_of(value)
            if likeness == 1.0:
                raise UsageError(f"{what}: did you mean {meant!r}?", where=where, fix=f"rename it to {meant}")
            if (cls, name) not in _warned:
                _warned.add((cls, name))
                logger.warning(
                    "%s: did you mean %r? If not, name it with an underscore before it.%s",
                    what,
                    meant,
                    f"\n  where: {where}" if where else "",
                )


def _layers(encoder: Any) -> Iterator[Any]:
    """Yield the encoder, and the encoders that it wraps, from outer to inner."""
    yield encoder
    while isinstance(encoder, AugmentTaskEncoder):
        encoder = encoder.task_encoder
        yield encoder


def _owner(encoder: Any, name: str) -> Any:
    """Outermost of the nested encoders that has a hook of its own."""
    mine = getattr(AugmentTaskEncoder, name, None)  # sample_length is no method of every encoder
    while isinstance(encoder, AugmentTaskEncoder) and getattr(type(encoder), name, None) is mine:
        encoder = encoder.task_encoder
    return encoder


def _members(cls: type) -> dict[str, tuple[type, Any]]:
    """Attributes of the user's classes by name, each with the class that defines it."""
    own = [base for base in cls.__mro__ if base is not object and not base.__module__.startswith("energon_lite.")]
    return {name: (base, value) for base in reversed(own) for name, value in vars(base).items()}


def _code_of(member: tuple[type, Any]) -> Any:
    value = member[1]
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)


def _names_in(code: Any) -> Iterator[str]:
    """Yield the names that a code object uses, including nested functions."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if inspect.iscode(constant):
                yield from _names_in(constant)


def _likeness(name: str, hook: str) -> float:
    """Similarity of a name and a hook's, 0 to 1; 1: the same letters, in any order."""
    plain, other = name.lower().replace("_", ""), hook.replace("_", "")
    return 1.0 if sorted(plain) == sorted(other) else min(0.999, SequenceMatcher(None, plain, other).ratio())


def place_of(function: Any) -> str | None:
    """File and line of a function's definition; None: it is not a Python function."""
    function = getattr(function, "__func__", function)
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"
