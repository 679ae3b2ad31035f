"""Cooking: how crude samples, dicts of parts, become samples."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from types import GenericAlias
from typing import Any, ClassVar, TypeVar, cast, overload

from energon_lite.errors import UsageError
from energon_lite.hooks.stateless import stateless
from energon_lite.samples import BASE_FIELDS, CrudeSample, Sample, SourceInfo
from energon_lite.storage.stores.file_store import PrimaryFileStore

__all__ = ["Cooker", "basic_sample_keys", "cook_function", "cooker", "given_stores", "places", "required", "takes"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Cooker:
    """How crude samples become samples.

    Args:
        cook: ``(crude sample, **stores) -> sample``. It gets the ``aux`` of its data set by name; and, if it was marked
            so by :func:`cooker`, ``primary`` and ``cache``.
        has_subflavors: only for data sets whose subflavors contain all of these entries; None: for all.
        has_tags: the same by Energon 8's name.
    """

    __class_getitem__: ClassVar[Any] = classmethod(GenericAlias)  # annotations may say what is in it

    cook: Callable[..., Any]
    has_subflavors: dict[str, Any] | None = None
    has_tags: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.has_tags is not None:
            if self.has_subflavors not in (None, self.has_tags):
                raise UsageError("has_tags beside has_subflavors, which are the same", fix="give one of them")
            object.__setattr__(self, "has_subflavors", self.has_tags)

    @property
    def need_primary(self) -> bool:
        """Whether it wants its own data set as a store."""
        return bool(getattr(self.cook, "__cooker_need_primary__", False))

    @property
    def need_cache(self) -> bool:
        """Whether it wants the loader's cache pool."""
        return bool(getattr(self.cook, "__cooker_need_cache__", False))

    def is_match(self, subflavors: dict[str, Any] | None) -> bool:
        """Whether this cooker is meant for a data set with these subflavors."""
        given = subflavors or {}
        return all(key in given and given[key] == value for key, value in (self.has_subflavors or {}).items())


@overload
def cooker(fn: F) -> F: ...


@overload
def cooker(*, need_cache: bool = False, need_primary: bool = False) -> Callable[[F], F]: ...


def cooker(fn: F | None = None, *, need_cache: bool = False, need_primary: bool = False) -> Any:
    """Mark a function as a cooker: a pure function that makes a sample out of a crude one.

    Args:
        need_cache: it is given ``cache``, the :class:`~energon_lite.storage.stores.CachePool` of the loader.
        need_primary: it is given ``primary``, its own data set as a :class:`~energon_lite.storage.stores.FileStore`;
        a key that begins
            with a dot is a part of the sample that is cooked.

    Example:
        >>> @cooker
        ... def cook_text(sample):
        ...     return TextSample(**basic_sample_keys(sample), text=sample["txt"])
    """
    if fn is None:
        return functools.partial(cooker, need_cache=need_cache, need_primary=need_primary)
    marked: Any = stateless(fn)
    marked.__cooker_need_cache__, marked.__cooker_need_primary__ = need_cache, need_primary
    return marked


def cook_function(encoder: Any) -> Callable[[Any, Cooker, Mapping[str, Any]], Any]:
    """``cook_crude_sample`` of a task encoder, to be called with (sample, cooker, aux), whatever of these it takes."""
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
    """Whether a function can be given an argument of this name."""
    kinds = {one.name: one.kind for one in _parameters(function)}
    if inspect.Parameter.VAR_KEYWORD in kinds.values():
        return True
    return kinds.get(name) in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def places(function: Callable[..., Any]) -> int | None:
    """How many arguments can be given by place; None: any number."""
    kinds = [one.kind for one in _parameters(function)]
    if inspect.Parameter.VAR_POSITIONAL in kinds:
        return None
    return sum(kind <= inspect.Parameter.POSITIONAL_OR_KEYWORD for kind in kinds)


def required(function: Callable[..., Any]) -> list[str]:
    """The arguments that a function has to be given."""
    any_number = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        one.name
        for one in _parameters(function)
        if one.default is inspect.Parameter.empty and one.kind not in any_number
    ]


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:  # one of C, which does not say
        return [inspect.Parameter(f"any_{kind.name}", kind) for kind in _ANY]


_ANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def given_stores(
    cooker: Cooker, sample: Any, aux: Mapping[str, Any] | None, cache: Callable[[], Any]
) -> dict[str, Any]:
    """What a cooker is given beside its sample.

    Args:
        aux: the stores of the data set by name, ``primary`` among them if the cooker needs it.
        cache: gives the loader's pool.
    """
    given = dict(aux or {})
    if cooker.need_cache:
        given["cache"] = cache()
    if cooker.need_primary:
        given["primary"] = PrimaryFileStore(given["primary"], sample["__key__"])
    return given


def basic_sample_keys(
    sample: CrudeSample | Sample, additional_source_info: tuple[SourceInfo, ...] = ()
) -> dict[str, Any]:
    """The base fields (key, restore key, subflavors, sources) of a sample, to be passed on to the one made of it.

    Args:
        sample: the crude one.
        additional_source_info: where else something was read for it.

    Example:
        >>> @cooker
        ... def cook_text(sample):
        ...     return TextSample(**basic_sample_keys(sample), text=sample["txt"])
    """
    get = sample.get if isinstance(sample, dict) else functools.partial(getattr, sample)
    found = {name: get(name) for name in BASE_FIELDS}
    if additional_source_info:
        found["__sources__"] = (*(found["__sources__"] or ()), *additional_source_info)
    return found
