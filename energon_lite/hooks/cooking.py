"""Cooking: conversion of crude samples, dicts of parts, into samples."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import Any, ClassVar, TypeVar, cast, overload

from energon_lite.errors import UsageError
from energon_lite.hooks.global_generators import stateless
from energon_lite.samples import BASE_FIELDS, CrudeSample, Sample, SourceInfo
from energon_lite.storage.stores import PrimaryFileStore

F = TypeVar("F", bound=Callable[..., Any])
#: Kinds of parameters that accept any number of arguments.
_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@dataclasses.dataclass(frozen=True)
class Cooker:
    """Conversion of crude samples into samples, with the data sets it is meant for.

    Args:
        cook: ``(crude sample, **stores) -> sample``. It gets the ``aux`` of its data set by name, and ``primary`` and
            ``cache`` if it is marked so by :func:`cooker`.
        has_subflavors: entries that the subflavors of a data set must contain; None: any data set.
        has_tags: Energon 8's name for ``has_subflavors``.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations may have type arguments

    cook: Callable[..., Any]
    has_subflavors: dict[str, Any] | None = None
    has_tags: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.has_tags is not None and self.has_subflavors not in (None, self.has_tags):
            raise UsageError("both has_tags and has_subflavors, which mean the same", fix="give one of them")

    @property
    def need_primary(self) -> bool:
        """True if the cooker requires its own data set as a store."""
        return bool(getattr(self.cook, "__cooker_need_primary__", False))

    @property
    def need_cache(self) -> bool:
        """True if the cooker requires the loader's cache pool."""
        return bool(getattr(self.cook, "__cooker_need_cache__", False))

    def is_match(self, subflavors: dict[str, Any] | None) -> bool:
        """True if this cooker is meant for a data set with these subflavors."""
        given, wanted = subflavors or {}, self.has_subflavors or self.has_tags or {}
        return all(key in given and given[key] == value for key, value in wanted.items())


@overload
def cooker(fn: F) -> F: ...


@overload
def cooker(*, need_cache: bool = False, need_primary: bool = False) -> Callable[[F], F]: ...


def cooker(fn: F | None = None, *, need_cache: bool = False, need_primary: bool = False) -> Any:
    """Mark a function as a cooker: a pure function that makes a sample of a crude one.

    Args:
        need_cache: the function gets ``cache``, the :class:`~energon_lite.storage.stores.CachePool` of the loader.
        need_primary: the function gets ``primary``, its own data set as a
            :class:`~energon_lite.storage.stores.FileStore`; a key with a leading dot names a part of the current
            sample.

    Example:
        >>> @cooker
        ... def cook_text(sample):
        ...     return TextSample(**basic_sample_keys(sample), text=sample["txt"])
    """
    if fn is None:
        return functools.partial(cooker, need_cache=need_cache, need_primary=need_primary)
    marked: Any = stateless(fn)
    marked.__cooker_need_cache__ = need_cache
    marked.__cooker_need_primary__ = need_primary
    return marked


def cook_function(encoder: Any) -> Callable[[Any, Cooker, Mapping[str, Any]], Any]:
    """Adapt a task encoder's ``cook_crude_sample`` to the arguments (sample, cooker, aux), even if it takes fewer."""
    cook = encoder.cook_crude_sample
    by_place = places(cook)
    if by_place is None or by_place >= 3:
        return cast(Callable[[Any, Cooker, Mapping[str, Any]], Any], cook)
    takes_aux = takes(cook, "aux")

    def called(sample: Any, cooker: Cooker, aux: Mapping[str, Any]) -> Any:
        more: dict[str, Any] = {"aux": aux} if takes_aux else {}
        return cook(sample, cooker, **more) if by_place == 2 else cook(sample, cooker=cooker, **more)

    return called


def takes(function: Callable[..., Any], name: str) -> bool:
    """True if a function accepts an argument of this name."""
    kinds = {parameter.name: parameter.kind for parameter in _parameters(function)}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return True
    return kinds.get(name) in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def places(function: Callable[..., Any]) -> int | None:
    """Number of arguments that a function accepts by position; None: any number."""
    kinds = [parameter.kind for parameter in _parameters(function)]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)


def required(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments that a function requires."""
    return [
        parameter.name
        for parameter in _parameters(function)
        if parameter.default is inspect.Parameter.empty and parameter.kind not in _ANY
    ]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # a C function without a signature
        return [inspect.Parameter(f"any_{kind.name}", kind) for kind in _ANY]


def given_stores(
    cooker: Cooker, sample: Any, aux: Mapping[str, Any] | None, cache: Callable[[], Any]
) -> dict[str, Any]:
    """Return the stores that a cooker gets in addition to its sample.

    Args:
        aux: the stores of the data set by name, including ``primary`` if the cooker needs it.
        cache: function that returns the loader's pool.
    """
    given = dict(aux or {})
    if cooker.need_cache:
        given["cache"] = cache()
    if cooker.need_primary:
        given["primary"] = PrimaryFileStore(given["primary"], sample["__key__"])
    return given


def basic_sample_keys(
    crude_sample: CrudeSample | Sample, additional_source_info: tuple[SourceInfo, ...] = ()
) -> dict[str, Any]:
    """Return the base fields (key, restore key, subflavors, sources) of a sample, for the sample made of it.

    Args:
        crude_sample: the crude sample.
        additional_source_info: further sources that were read for it.

    Example:
        >>> @cooker
        ... def cook_text(sample):
        ...     return TextSample(**basic_sample_keys(sample), text=sample["txt"])
    """
    get = crude_sample.get if isinstance(crude_sample, dict) else functools.partial(getattr, crude_sample)
    fields = {name: get(name) for name in BASE_FIELDS}
    if additional_source_info:
        fields["__sources__"] = (*(fields["__sources__"] or ()), *additional_source_info)
    return fields
