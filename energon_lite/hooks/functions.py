"""Whether hooks are functions that can be called as they will be; and whether one was meant that has another name."""

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

#: What hooks are called with. (cook_crude_sample may take less; it is looked at elsewhere.)
_ARGUMENTS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(HOOK_ORDER, ("sample",)),
    **dict.fromkeys(("select_samples_to_pack", "pack_selected_samples", "batch"), ("samples",)),
    **dict.fromkeys(("sample_length", "sample_costs"), ("encoded",)),
    "encode_batch": ("batch",),
    "empty_batch": ("like", "rows"),
}
#: What else of an encoder the loader looks at.
_ATTRIBUTES = ("cookers", "decoder", "failure_tolerance", "padding")
#: From this likeness on a name may be meant for another.
_ALIKE = 0.88
#: What was warned of: a class, and a name of it.
_warned: set[tuple[type, str]] = set()


def check_functions(encoder: TaskEncoder) -> None:
    """Refuse hooks that cannot be called, and names that are hooks' but for the order of their letters; warn of those
    that are nearly.

    Raises:
        UsageError: names the hook, and where it is.
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
    except (TypeError, ValueError):  # one of C, which does not say; or a method that has no place for `self`
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
    """Look for methods and settings that nobody calls or reads, and that are named nearly as one is that is."""
    for inner in _layers(encoder):
        members = _members(type(inner))
        used = {name for function in map(_code_of, members.values()) for name in _names_in(function)}
        for name, (cls, value) in members.items():
            if name.startswith("_") or name in used or hasattr(TaskEncoder, name) or hasattr(AugmentTaskEncoder, name):
                continue
            is_function = callable(value) or isinstance(value, (staticmethod, classmethod))
            choices = [*HOOK_ORDER] if is_function else [*_ATTRIBUTES]
            meant = max(choices, key=lambda one: _likeness(name, one))
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
    """The encoder, and those that it augments."""
    yield encoder
    while isinstance(encoder, AugmentTaskEncoder):
        encoder = encoder.task_encoder
        yield encoder


def _owner(encoder: Any, name: str) -> Any:
    """The encoder, of those in each other, that has a hook of its own."""
    mine = getattr(AugmentTaskEncoder, name, None)  # sample_length is no method of every encoder
    while isinstance(encoder, AugmentTaskEncoder) and getattr(type(encoder), name, None) is mine:
        encoder = encoder.task_encoder
    return encoder


def _members(cls: type) -> dict[str, tuple[type, Any]]:
    """What the user's classes have, with the class that has it."""
    own = [one for one in cls.__mro__ if one is not object and not one.__module__.startswith("energon_lite.")]
    return {name: (one, value) for one in reversed(own) for name, value in vars(one).items()}


def _code_of(member: tuple[type, Any]) -> Any:
    value = member[1]
    value = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return getattr(inspect.unwrap(value) if callable(value) else value, "__code__", None)


def _names_in(code: Any) -> Iterator[str]:
    """The names that code uses, that of functions in it included."""
    if code is not None:
        yield from code.co_names
        for constant in code.co_consts:
            if inspect.iscode(constant):
                yield from _names_in(constant)


def _likeness(name: str, hook: str) -> float:
    """1: the same letters, in some order."""
    plain, other = name.lower().replace("_", ""), hook.replace("_", "")
    return 1.0 if sorted(plain) == sorted(other) else min(0.999, SequenceMatcher(None, plain, other).ratio())


def place_of(function: Any) -> str | None:
    """File and line at which a function begins; None: it is none of Python's."""
    function = getattr(function, "__func__", function)
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"
