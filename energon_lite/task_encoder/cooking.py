"""Cooking: how crude samples, dicts of parts, become samples."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

from energon_lite.samples import BASE_FIELDS, CrudeSample, Sample
from energon_lite.task_encoder.stateless import stateless

__all__ = ["Cooker", "basic_sample_keys", "cooker"]

F = TypeVar("F", bound=Callable[..., Any])


@dataclasses.dataclass(frozen=True)
class Cooker:
    """How crude samples become samples.

    Args:
        cook: ``(crude sample) -> sample``.
        has_subflavors: only for data sets whose subflavors contain all of these entries; None: for all.
    """

    cook: Callable[..., Any]
    has_subflavors: dict[str, Any] | None = None

    def is_match(self, subflavors: dict[str, Any] | None) -> bool:
        """Whether this cooker is meant for a data set with these subflavors."""
        given = subflavors or {}
        return all(key in given and given[key] == value for key, value in (self.has_subflavors or {}).items())


def cooker(fn: F) -> F:
    """Mark a function as a cooker: a pure function that makes a sample out of a crude one."""
    return stateless(fn)


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
