"""Cooking: how crude samples, dicts of parts, become samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, TypeVar, overload

from energon_lite.errors import UsageError
from energon_lite.hooks.stateless import stateless
from energon_lite.samples import BASE_FIELDS, CrudeSample, Sample

__all__ = ["Cooker", "basic_sample_keys", "check_needs", "cooker"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Cooker:
    """How crude samples become samples.

    Args:
        cook: ``(crude sample) -> sample``.
        has_subflavors: only for data sets whose subflavors contain all of these entries; None: for all.
        has_tags: the same by Energon 8's name.
    """

    cook: Callable[..., Any]
    has_subflavors: dict[str, Any] | None = None
    has_tags: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.has_tags is not None:
            if self.has_subflavors not in (None, self.has_tags):
                raise UsageError("has_tags beside has_subflavors, which are the same", fix="give one of them")
            object.__setattr__(self, "has_subflavors", self.has_tags)

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
        need_cache, need_primary: as in Energon, whose caches and file stores do not exist here. A data set that such a
            cooker is for is refused.

    Example:
        >>> @cooker
        ... def cook_text(sample):
        ...     return TextSample(**basic_sample_keys(sample), text=sample["txt"])
    """
    if fn is None:
        return functools.partial(cooker, need_cache=need_cache, need_primary=need_primary)
    needs = {"need_cache": need_cache, "need_primary": need_primary}
    marked = stateless(fn)
    marked.__cooker_needs__ = [name for name, needed in needs.items() if needed]  # type: ignore[attr-defined]
    return marked


def check_needs(cooker: Cooker, where: str) -> None:
    """See that a cooker needs nothing but its sample.

    Raises:
        UsageError: it was marked as one that needs more.
    """
    for need in getattr(cooker.cook, "__cooker_needs__", ()):
        raise UsageError(
            f"{getattr(cooker.cook, '__name__', cooker.cook)} is a cooker with {need}=True, which is not supported",
            where=where,
            fix="put all parts of a sample into its tar, and take them from the sample; then leave this argument out",
        )


def basic_sample_keys(sample: CrudeSample | Sample) -> dict[str, Any]:
    """The base fields (key, restore key, subflavors, sources) of a sample, to be passed on to the one made of it.

    Example:
        >>> @cooker
        ... def cook_text(sample):
        ...     return TextSample(**basic_sample_keys(sample), text=sample["txt"])
    """
    if isinstance(sample, dict):
        return {name: sample.get(name) for name in BASE_FIELDS}
    return {name: getattr(sample, name) for name in BASE_FIELDS}
