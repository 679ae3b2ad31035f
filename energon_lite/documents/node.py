"""Values of a document, with their places.

A :class:`Node` holds a value and its place (file, line, column, path inside the document), so that any error about it
can name the place. :func:`from_plain` makes the same tree of Python objects, so a configuration given as a dict is
checked by the same code.

The form of the messages (expected, found, path) follows msgspec's validation errors, with lines added.
"""

from __future__ import annotations

import json
import numbers
import os
import re
import sys
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from energon_lite.errors import ConfigError

#: Largest nesting depth of lists and mappings.
MAX_DEPTH = 100
#: Bound on integers, exclusive: larger than any position, count or size, and within the range of array integers.
_TOO_LARGE = 1 << 62
_PLAIN_KEY = re.compile(r"[\w-]+\Z")
#: Placeholder for "the value (or the key) itself" in messages.
_ITSELF = "itself"


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """One value of a document, with its place.

    Args:
        value: dict of nodes, list of nodes, or a scalar (str, int, float, bool, None).
        file: the document's name, as messages show it; empty if it has none.
        path: place inside the document, e.g. ``splits.train.blend[1].weight``; empty for the whole document.
        line: counted from 1; None if the document is not a file.
        column: counted from 1.
        key: the key of this value in its mapping; None for list entries.
        key_line: line of the key.
        key_column: column of the key.

    Example:
        >>> node = from_plain({"weight": "2"}, "<dict>").mapping(required={"weight"})["weight"]
        >>> node.number()
        Traceback (most recent call last):
        ...
        energon_lite.errors.ConfigError: 'weight' is not right; expected a number; found text '2'
          where: <dict> at weight
          fix:   remove the quotes
    """

    value: Any
    file: str
    path: str = ""
    line: int | None = None
    column: int | None = None
    key: str | None = None
    key_line: int | None = None
    key_column: int | None = None

    # ---------------------------------------------------------------------------------------------------- messages

    @property
    def origin(self) -> str:
        """Short form of the place: ``file:line``, or ``<dict> at path`` without a file."""
        if self.line is not None:
            return f"{self.file}:{self.line}"
        return f"{self.file} at {self.path}" if self.path else self.file

    @property
    def is_null(self) -> bool:
        """True for an explicit ``null`` and for a key with nothing after it."""
        return self.value is None

    def describe(self) -> str:
        """Describe the value in a few words, for messages."""
        if isinstance(self.value, dict):
            return f"a mapping with the keys {', '.join(self.value)}" if self.value else "an empty mapping"
        if isinstance(self.value, list):
            return f"a list of {len(self.value)}" if self.value else "an empty list"
        if isinstance(self.value, bool):
            return f"the truth value {str(self.value).lower()}"
        if isinstance(self.value, str):
            return f"text {shorten(repr(self.value))}"
        return "nothing (null)" if self.value is None else f"the number {self.value!r}"

    def error(
        self,
        what: str,
        fix: str | None = None,
        *,
        expected: str | None = None,
        found: str | None = _ITSELF,
        choices: Collection[object] = (),
        word: object = None,
        at_key: bool = False,
        kind: type[ConfigError] = ConfigError,
    ) -> ConfigError:
        """Make a :class:`ConfigError` at this node's place, for the caller to raise.

        Args:
            what: the mistake in one sentence.
            fix: the fix, unless a proposal from ``choices`` replaces it.
            expected: description of a correct value.
            found: description of the actual value; by default the value, or the key; None: left out.
            choices: the allowed values; the nearest one is proposed.
            word: the text to compare ``choices`` with; None: the value, or the key.
            at_key: the key is wrong, not its value; the error has the place of the key.
            kind: a more specific error class.
        """
        if word is None and choices:
            word = self.key if at_key else self.value
        if found == _ITSELF:
            found = repr(self.key) if at_key else self.describe()
        at_key = at_key and self.key_line is not None
        return kind(
            what,
            file=self.file or None,
            line=self.key_line if at_key else self.line,
            column=self.key_column if at_key else self.column,
            at=self.path or None,
            expected=expected,
            found=found,
            choices=list(choices),
            suggest_for=word,
            fix=fix,
        )

    def key_error(self, what: str, fix: str | None = None, **more: Any) -> ConfigError:
        """Make the error for a wrong key; the arguments are those of :meth:`error`."""
        return self.error(what, fix, at_key=True, **more)

    def wrong(self, expected: str, fix: str | None = None, choices: Collection[object] = ()) -> ConfigError:
        """Make the error for a value of a wrong type."""
        name = repr(self.path) if self.path else "the document"
        return self.error(f"{name} is not right", fix, expected=expected, choices=choices)

    # -------------------------------------------------------------------------------------------------- conversion

    def mapping(self, required: Collection[str] = (), optional: Collection[str] = ()) -> dict[str, Node]:
        """Return the entries of a mapping with a fixed set of keys.

        Raises:
            ConfigError: it is no mapping, has an unknown key, or lacks a required one.
        """
        allowed = [*sorted(required), *sorted(optional)]
        if not isinstance(self.value, dict):
            raise self.wrong(f"a mapping with {_keys(allowed)}")
        for key, node in self.value.items():
            if key not in allowed:
                fix = f"remove it, or use {_keys(allowed)}"
                raise node.key_error(f"unknown key {key!r}", fix, expected=_keys(allowed), choices=allowed)
        for key in sorted(required):
            if key not in self.value:
                fix = f"add '{key}:' here"
                raise self.error(f"missing key {key!r}", fix, expected=_keys(sorted(required)))
        return dict(self.value)

    def entries(self) -> dict[str, Node]:
        """Return the entries of a mapping with arbitrary keys."""
        if not isinstance(self.value, dict):
            raise self.wrong("a mapping")
        return dict(self.value)

    def refuse(self, keys: Collection[str], what: str, fix: str, expected: str) -> None:
        """Refuse keys of a mapping that are known, but not allowed here. ``what`` follows the key in the message.

        Raises:
            ConfigError: the mapping has one of the keys.
        """
        for key in keys:
            if key in self.value:
                raise self.value[key].key_error(f"{key!r} {what}", fix, expected=expected)

    def sequence(self, of: str = "entries") -> list[Node]:
        """Return the entries of a list."""
        if not isinstance(self.value, list):
            fix = "write a list: each entry on a line of its own, after '- '" if self.value is not None else None
            raise self.wrong(f"a list of {of}", fix)
        return list(self.value)

    def string(self, what: str = "text") -> str:
        """Return a text that is not empty."""
        if not isinstance(self.value, str):
            raise self.wrong(what, "put it into quotes" if isinstance(self.value, (bool, int, float)) else None)
        if not self.value:
            raise self.wrong(f"{what}, not empty")
        return self.value

    def number(self) -> float:
        """Return a finite number."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise self.wrong("a number", self._unquote(lambda text: int(float(text))))  # not nan
        if not abs(self.value) <= sys.float_info.max:
            raise self.wrong("a finite number")
        return float(self.value)

    def integer(self) -> int:
        """Return an integer above -2**62 and below 2**62."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.wrong("a whole number", self._unquote(int))
        if abs(self.value) >= _TOO_LARGE:
            raise self.wrong("a whole number below 2**62")
        return self.value

    def boolean(self) -> bool:
        """Return the value of ``true`` or ``false``."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false", self._unquote(parse_bool))
        return self.value

    def plain(self) -> Any:
        """Return the value as plain Python objects: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def _unquote(self, parse: Callable[[str], object]) -> str | None:
        """The fix for a text that would be correct without its quotes; None for other values."""
        if not isinstance(self.value, str):
            return None
        try:
            parse(self.value)
        except (ValueError, OverflowError):
            return None
        return "remove the quotes"


def _keys(keys: Collection[str]) -> str:
    return f"the {'key' if len(keys) == 1 else 'keys'} {', '.join(keys)}"


def too_deep(node: Node) -> ConfigError:
    """Make the error for a document that is nested too deeply."""
    what, fix = "the document is nested too deeply", "split it into several documents"
    return node.error(what, fix, expected=f"at most {MAX_DEPTH} levels", found=None)


def shorten(text: str) -> str:
    """Cut a text to at most 60 characters."""
    return text if len(text) <= 60 else text[:57] + "..."


def join_path(path: str, key: str) -> str:
    """Append a key to the path of a mapping."""
    if not _PLAIN_KEY.match(key):
        return f"{path}[{json.dumps(key, ensure_ascii=False)}]"
    return f"{path}.{key}" if path else key


def parse_bool(text: str) -> bool:
    """Convert a plain scalar to a truth value.

    Raises:
        ValueError: it is not one.
    """
    words = {"true": True, "yes": True, "false": False, "no": False}
    if text.lower() not in words:
        raise ValueError(text)
    return words[text.lower()]


# ------------------------------------------------------------------------------------------------------ from Python


def from_plain(value: Any, name: str, path: str = "") -> Node:
    """Make the tree of nodes of plain Python objects; ``name`` stands for the file in messages.

    Paths become text, numpy's numbers become Python's, tuples become lists. Keys that are numbers become text.

    Raises:
        ConfigError: a value is not a dict, list, text, number, truth value or None; or the nesting is too deep.
    """
    return _from_plain(value, name, path, None, frozenset())


def _from_plain(value: Any, file: str, path: str, key: str | None, above: frozenset[int]) -> Node:
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    elif isinstance(value, numbers.Integral) and not isinstance(value, bool):
        value = int(value)
    elif isinstance(value, numbers.Real) and not isinstance(value, (bool, int)):
        value = float(value)
    node = Node(value, file, path, key=key)
    if value is None or isinstance(value, (bool, str, int, float)):
        return node
    if id(value) in above:
        raise node.error("the object contains itself", "copy the inner object", expected="a tree", found=None)
    if len(above) >= MAX_DEPTH:
        raise too_deep(node)
    above |= {id(value)}
    if isinstance(value, Mapping):
        entries = {}
        for name, item in value.items():
            if isinstance(name, numbers.Real) and not isinstance(name, bool):
                name = str(name)  # as in a document
            if not isinstance(name, str):
                raise node.error("a key is not text", f"write {str(name)!r}", expected="text", found=repr(name))
            entries[name] = _from_plain(item, file, join_path(path, name), name, above)
        return Node(entries, file, path, key=key)
    if isinstance(value, (list, tuple)):
        items = [_from_plain(item, file, f"{path}[{i}]", None, above) for i, item in enumerate(value)]
        return Node(items, file, path, key=key)
    raise node.error(
        f"{type(value).__name__} is not a value that a document can hold",
        "convert it to one of these",
        expected="a mapping, list, text, number, truth value or None",
        found=shorten(repr(value)),
    )
