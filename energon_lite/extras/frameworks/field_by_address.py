"""A field of a sample that is sent as the sample's key."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from energon_lite.errors import UsageError, field_of
from energon_lite.extras.frameworks.ray import SampleKey

__all__ = ["FieldByAddress"]


class FieldByAddress:
    """A field of a sample that is read on access, in the process that accesses it.

    It has no length, so numpy and tensordict do not convert it.

    Args:
        key: key of the sample.
        name: name of the field.
    """

    __slots__ = ("key", "name")

    def __init__(self, key: SampleKey, name: str):
        self.key = key
        self.name = name

    def __reduce__(self) -> tuple[Any, ...]:
        return FieldByAddress, (self.key, self.name)

    def fetch(self) -> Any:
        """Return the field. Its dicts and lists are copies; the values in them are shared.

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
        """Return an entry of a field that is a dict."""
        return self.fetch().get(item, default)


def _own(value: Any) -> Any:
    """Copy dicts and lists, with the same values in them."""
    if isinstance(value, dict):
        return {name: _own(entry) for name, entry in value.items()}
    return [_own(entry) for entry in value] if isinstance(value, list) else value
