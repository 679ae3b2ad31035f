"""One value of a YAML document, and its place.

A :class:`YamlNode` holds its value and where it stands (file, line, column, path inside the document), so whoever
interprets it can say exactly what is wrong and where, and the reader need not search. :func:`from_plain` makes the
same tree out of Python objects, so a configuration given as a dict is checked by the same code.

The shape of the messages (expected, found, path) follows msgspec's validation errors, with lines added.
"""

from __future__ import annotations

import json
import numbers
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from energon_lite.errors import ConfigError, nearest

__all__ = ["YamlNode", "from_plain"]

#: How deep lists and mappings may stand in one another.
MAX_DEPTH = 100
_PLAIN_KEY = re.compile(r"[\w-]+\Z")


@dataclass(frozen=True, slots=True, eq=False)
class YamlNode:
    """One value of a document, and its place.

    Args:
        value: dict of nodes, list of nodes, or a scalar (str, int, float, bool, None).
        file: the document's name, as messages show it.
        path: place inside the document, e.g. ``splits.train.blend[1].weight``; empty for the whole document.
        line: counted from 1; None if the document never was a file.
        column: counted from 1.
        key_line: where the key that leads here stands; None for list entries.
        key_column: likewise.

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
    key_line: int | None = None
    key_column: int | None = None

    # ------------------------------------------------------------------------------------------------- saying what

    @property
    def origin(self) -> str:
        """Where this node stands, short: ``file:line``, or ``<dict> at path`` without a file."""
        if self.line is not None:
            return f"{self.file}:{self.line}"
        return f"{self.file} at {self.path}" if self.path else self.file

    @property
    def is_null(self) -> bool:
        """True for an explicit ``null`` and for a key with nothing after it."""
        return self.value is None

    def describe(self) -> str:
        """The value in a few words, for messages."""
        if self.value is None:
            return "nothing (null)"
        if isinstance(self.value, dict):
            return f"a mapping with the keys {', '.join(self.value)}" if self.value else "an empty mapping"
        if isinstance(self.value, list):
            return f"a list of {len(self.value)}" if self.value else "an empty list"
        if isinstance(self.value, bool):
            return f"the truth value {str(self.value).lower()}"
        if isinstance(self.value, str):
            return f"text {shorten(repr(self.value))}"
        return f"the number {self.value!r}"

    def error(
        self,
        what: str,
        *,
        expected: str | None = None,
        found: str | None = None,
        choices: Collection[object] = (),
        suggest_for: object = None,
        fix: str | None = None,
        at_key: bool = False,
        kind: type[ConfigError] = ConfigError,
    ) -> ConfigError:
        """A :class:`ConfigError` at this node's place, to be raised by the caller.

        Args:
            what: the mistake in one sentence.
            expected: what would have been right.
            found: what is there instead.
            choices: what may stand here; the one nearest to ``suggest_for`` is proposed.
            suggest_for: the word that was written.
            fix: the cure, if no proposal from ``choices`` says it.
            at_key: the key is wrong, not its value; point there.
            kind: a more special error class.
        """
        suggestion = nearest(suggest_for, choices) if suggest_for is not None else None
        at_key = at_key and self.key_line is not None
        return kind(
            what,
            file=self.file,
            line=self.key_line if at_key else self.line,
            column=self.key_column if at_key else self.column,
            at=self.path or None,
            expected=expected,
            found=found,
            choices=list(choices),
            suggest_for=suggest_for,
            fix=None if suggestion is not None else fix,
        )

    def wrong(self, expected: str, fix: str | None = None) -> ConfigError:
        """The error for a value of the wrong type."""
        name = repr(self.path) if self.path else "the document"
        return self.error(f"{name} is not right", expected=expected, found=self.describe(), fix=fix)

    # ----------------------------------------------------------------------------------------------- interpreting

    def mapping(self, required: Collection[str] = (), optional: Collection[str] = ()) -> dict[str, YamlNode]:
        """The entries of a mapping with a fixed set of keys.

        Raises:
            ConfigError: not a mapping, a key that is not among these, or a required one that is missing.
        """
        allowed = [*sorted(required), *sorted(optional)]
        if not isinstance(self.value, dict):
            raise self.wrong(f"a mapping with {_keys(allowed)}")
        for key, node in self.value.items():
            if key not in required and key not in optional:
                raise node.error(
                    f"unknown key {key!r}",
                    expected=_keys(allowed),
                    found=repr(key),
                    choices=allowed,
                    suggest_for=key,
                    fix=f"remove it, or use {_keys(allowed)}",
                    at_key=True,
                )
        missing = [key for key in sorted(required) if key not in self.value]
        if missing:
            raise self.error(
                f"missing key {missing[0]!r}",
                expected=_keys(sorted(required)),
                found=self.describe(),
                fix=f"add '{missing[0]}:' here",
            )
        return dict(self.value)

    def items(self) -> Iterator[tuple[str, YamlNode]]:
        """The entries of a mapping whose keys are free."""
        if not isinstance(self.value, dict):
            raise self.wrong("a mapping")
        return iter(self.value.items())

    def sequence(self, of: str = "entries") -> list[YamlNode]:
        """The entries of a list."""
        if not isinstance(self.value, list):
            fix = "write a list: each entry on a line of its own, after '- '" if self.value is not None else None
            raise self.wrong(f"a list of {of}", fix)
        return list(self.value)

    def string(self, what: str = "text") -> str:
        """A text that is not empty."""
        if not isinstance(self.value, str):
            scalar = isinstance(self.value, (bool, int, float))
            raise self.wrong(what, "put it into quotes" if scalar else None)
        if not self.value:
            raise self.wrong(f"{what}, not empty")
        return self.value

    def number(self) -> float:
        """A finite number."""
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise self.wrong("a number", self._unquote(float))
        try:
            result = float(self.value)
        except OverflowError:
            result = float("inf")
        if not abs(result) < float("inf"):
            raise self.wrong("a finite number")
        return result

    def integer(self) -> int:
        """A whole number."""
        if isinstance(self.value, bool) or not isinstance(self.value, int):
            raise self.wrong("a whole number", self._unquote(int))
        return self.value

    def boolean(self) -> bool:
        """``true`` or ``false``."""
        if not isinstance(self.value, bool):
            raise self.wrong("true or false", self._unquote(parse_bool))
        return self.value

    def plain(self) -> Any:
        """The value as plain Python: dicts, lists and scalars."""
        if isinstance(self.value, dict):
            return {key: node.plain() for key, node in self.value.items()}
        if isinstance(self.value, list):
            return [node.plain() for node in self.value]
        return self.value

    def _unquote(self, parse: Callable[[str], object]) -> str | None:
        """The cure for a text that would be right without its quotes."""
        if not isinstance(self.value, str):
            return None
        try:
            parse(self.value)
        except ValueError:
            return None
        return "remove the quotes"


def _keys(keys: Collection[str]) -> str:
    if len(keys) == 1:
        return f"the key {next(iter(keys))}"
    return f"the keys {', '.join(keys)}"


def too_deep(node: YamlNode) -> ConfigError:
    return node.error(
        "the document is nested too deeply",
        expected=f"at most {MAX_DEPTH} levels",
        fix="split it into several documents",
    )


def shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def join_path(path: str, key: str) -> str:
    if not _PLAIN_KEY.match(key):
        return f"{path}[{json.dumps(key, ensure_ascii=False)}]"
    return f"{path}.{key}" if path else key


def parse_bool(text: str) -> bool:
    lowered = text.lower()
    if lowered in ("true", "yes"):
        return True
    if lowered in ("false", "no"):
        return False
    raise ValueError(text)


# ------------------------------------------------------------------------------------------------------ from Python


def from_plain(value: Any, name: str) -> YamlNode:
    """The tree of nodes for plain Python objects; ``name`` stands for the file in messages.

    Paths become text, numpy's numbers become Python's, tuples become lists. Numbers that are keys become text.

    Raises:
        ConfigError: something in it is none of dict, list, text, number, truth value and None; or it is nested too
            deeply.
    """
    return _from_plain(value, name, "", frozenset())


def _from_plain(value: Any, file: str, path: str, above: frozenset[int]) -> YamlNode:
    node = YamlNode(value, file, path)
    if value is None or isinstance(value, (bool, str)):
        return node
    if isinstance(value, os.PathLike):
        return YamlNode(os.fspath(value), file, path)
    if isinstance(value, numbers.Integral):
        return YamlNode(int(value), file, path)
    if isinstance(value, numbers.Real):
        return YamlNode(float(value), file, path)
    if id(value) in above:
        raise node.error("the object contains itself", expected="a tree", fix="copy the inner object")
    if len(above) >= MAX_DEPTH:
        raise too_deep(node)
    above |= {id(value)}
    if isinstance(value, Mapping):
        entries = {}
        for key, item in value.items():
            if isinstance(key, numbers.Real) and not isinstance(key, bool):
                key = str(key)  # as it would be in a document
            if not isinstance(key, str):
                raise node.error("a key is not text", expected="text", found=repr(key), fix=f"write {str(key)!r}")
            entries[key] = _from_plain(item, file, join_path(path, key), above)
        return YamlNode(entries, file, path)
    if isinstance(value, (list, tuple)):
        return YamlNode([_from_plain(v, file, f"{path}[{i}]", above) for i, v in enumerate(value)], file, path)
    raise node.error(
        f"{type(value).__name__} is not a value that a document can hold",
        expected="a mapping, list, text, number, truth value or None",
        found=shorten(repr(value)),
        fix="convert it to one of these",
    )
