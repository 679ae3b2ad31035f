"""A field of a sample that travels as the sample's key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from energon_lite.errors import UsageError, field_of
from energon_lite.extras.frameworks.ray import SampleKey

__all__ = ["FieldByAddress"]


class FieldByAddress:
    """A field of a sample that is read where, and when, somebody looks into it. It has no length, so that numpy and
    tensordict leave it as it is.

    Args:
        key: the sample.
        name: the field's.
    """

    __slots__ = ("key", "name")

    def __init__(self, key: SampleKey, name: str):
        self.key, self.name = key, name

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldByAddress, (self.key, self.name)

    def fetch(self) -> Any:
        """The field. Its dicts and lists are the caller's; what is in them is shared.

        Raises:
            UsageError: the sample has no such field.
        """
        value = field_of(self.key.fetch(), self.name)
        if value is None:
            fix = "have encode_sample return it, or leave it out of data.energon_lite.columns"
            raise UsageError(f"samples have no {self.name!r}", where=self.key.data.function, fix=fix)
        return _own(value)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.fetch())

    def __getitem__(self, item: Any) -> Any:
        return self.fetch()[item]

    def get(self, item: Any, default: Any = None) -> Any:
        """An entry of a field that is a dict."""
        return self.fetch().get(item, default)


def _own(value: Any) -> Any:
    """A copy of dicts and lists, with the same values in them."""
    if isinstance(value, dict):
        return {name: _own(one) for name, one in value.items()}
    return [_own(one) for one in value] if isinstance(value, list) else value
