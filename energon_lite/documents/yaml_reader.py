"""YAML documents that remember where everything stands.

:func:`load_yaml` turns a file into a tree of :class:`~energon_lite.documents.node.Node`.

Scalars are read by YAML 1.2's rules as Energon applies them, which differ from PyYAML's defaults where those surprise:
``1e-3`` is a number; ``1:30``, dates, ``on`` and ``off`` are text; keys are always text. The parser's events are read,
not what it composes of them: composing goes as deep as the document, on the stack of C, and knows no keys' places.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from energon_lite.documents.node import MAX_DEPTH, Node, from_plain, join_path, parse_bool, shorten, too_deep
from energon_lite.documents.paths import missing_file_fix
from energon_lite.errors import ConfigError

__all__ = ["load_yaml", "parse_yaml"]

#: Aliases may repeat a subtree; a document that grows by more values than this is an attack or a mistake.
MAX_REPEATED = 100_000
#: A larger document is none that was written for this.
_MAX_BYTES = 1 << 28


def load_yaml(path: str | os.PathLike[str], *, may_be_empty: bool = False) -> Node:
    """Read a YAML file (or a ``.json`` file, whose nodes have no lines).

    Args:
        path: the file.
        may_be_empty: an empty document is a mapping without entries, and no error.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, is not valid YAML, is empty, holds several documents,
            a key twice, a merge key, or a tag that would make objects; or it is nested too deeply, or too large.

    Example:
        >>> load_yaml("blend.yaml").mapping(required={"splits"})["splits"].line
        3
    """
    file = os.fspath(path)
    text = _read_text(file)
    return _parse_json(text, file) if file.endswith(".json") else parse_yaml(text, file, may_be_empty=may_be_empty)


def parse_yaml(text: str, file: str, *, may_be_empty: bool = False) -> Node:
    """The same for a text; ``file`` stands for it in messages.

    Raises:
        ConfigError: as :func:`load_yaml`.
    """
    try:
        events = _events(text, file)
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, file) from error
    except yaml.YAMLError as error:
        what = f"not valid YAML: {str(error).splitlines()[0]}"
        raise ConfigError(what, file=file, fix="remove characters that are not text") from error
    documents = [number for number, event in enumerate(events) if isinstance(event, yaml.DocumentStartEvent)]
    if not documents:
        if may_be_empty:
            return Node({}, file, "", 1, 1)
        raise ConfigError("the document is empty", file=file, line=1, column=1, fix="write the configuration into it")
    if len(documents) > 1:
        fix = "keep one document per file: remove '---' and what follows it"
        raise _place(events[documents[1]], file).error("not valid YAML: two documents in one file", fix, found=None)
    return _TreeBuilder(events, documents[0] + 1, file).build("")


def _read_text(file: str) -> str:
    try:
        if os.path.getsize(file) > _MAX_BYTES:
            raise ConfigError(f"the document has more than {_MAX_BYTES} bytes", file=file, fix="is it the right file?")
        data = Path(file).read_bytes()
    except OSError as error:
        fix = "check the path and its permissions"
        fix = missing_file_fix(file, fix) if isinstance(error, FileNotFoundError) else fix
        what = f"cannot read the document: {error.strerror or error}"
        raise ConfigError(what, file=file, fix=fix) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        place = Node(None, file, "", line, error.start - data.rfind(b"\n", 0, error.start))
        found = f"the byte 0x{data[error.start]:02x}"
        raise place.error("the document is not UTF-8", "save the file as UTF-8", found=found) from error


def _parse_json(text: str, file: str) -> Node:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys if len(set(keys)) < len(keys) else ():
            if keys.count(key) > 1:
                raise ConfigError(f"the key {key!r} stands twice", file=file, fix="remove one of them")
        return dict(pairs)

    try:
        return from_plain(json.loads(text, object_pairs_hook=unique), file)
    except json.JSONDecodeError as error:
        place = Node(None, file, "", error.lineno, error.colno)
        raise place.error(f"not valid JSON: {error.msg}", "correct the JSON at this place", found=None) from error
    except ConfigError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"not valid JSON: {error}", file=file, fix="write a smaller number") from error
    except RecursionError as error:
        raise too_deep(Node(None, file)) from error


# -- YAML -----------------------------------------------------------------------------------------------------------


def _events(text: str, file: str) -> list[Any]:
    """What the parser finds: libyaml, a hundred times PyYAML's speed, if PyYAML was built with it."""
    found, depth = [], 0
    for event in yaml.parse(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise too_deep(_place(event, file))
        found.append(event)
    return found


def _place(event: Any, file: str) -> Node:
    return Node(None, file, "", event.start_mark.line + 1, event.start_mark.column + 1)


#: What a YAML parser complains about, and what most often cures it. Parts of libyaml's and PyYAML's own messages.
_CURES = (
    ("tab", "indent with spaces, not with tabs"),
    ("mapping values are not allowed", "check the indentation, and put text that contains ': ' into quotes"),
    ("could not find expected ':'", "write a colon and a space after the key, and check the line before"),
    ("',' or", "close the bracket, or separate its entries with commas"),
    ("flow", "close the bracket, or separate its entries with commas"),
    ("escape", "use single quotes, or double the backslash"),
    ("quoted scalar", "close the quotes"),
    ("cannot start any token", "put text that begins with '@', '`' or '%' into quotes"),
    ("block", "indent all entries of a mapping or list alike"),
)


def _syntax_error(error: Any, text: str, file: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (None, None)
    lines = text.splitlines()
    culprit = lines[line - 1] if line is not None and line <= len(lines) else ""
    problem = error.problem or "cannot be parsed"
    hints = " ".join(["tab" if "\t" in culprit[:column] else "", problem, error.context or ""])
    cure = next((cure for part, cure in _CURES if part in hints), "check quotes and indentation at this place")
    found = f"the line {shorten(repr(culprit.strip()))}" if culprit.strip() else None
    return Node(None, file, "", line, column).error(f"not valid YAML: {problem}", cure, found=found)


class _TreeBuilder:
    """Makes nodes of the parser's events, and refuses what would be ambiguous or unsafe."""

    def __init__(self, events: list[Any], start: int, file: str):
        self.events, self.next, self.file = events, start, file
        #: Where the value of an anchor begins.
        self.anchors: dict[str, int] = {}
        #: Where the lists and mappings begin that are being built, the outermost first.
        self.open: list[int] = []
        #: Values that came from aliases, and how many aliases are being followed.
        self.repeated = self.aliases = 0

    def build(self, path: str, key: Any = None) -> Node:
        """The value whose first event is the next one."""
        start, event = self.next, self._take()
        if isinstance(event, yaml.AliasEvent):
            return self._follow(event, path, key)
        place: tuple[Any, ...] = (self.file, path, event.start_mark.line + 1, event.start_mark.column + 1)
        if key is not None:
            place += (key.value, key.start_mark.line + 1, key.start_mark.column + 1)
        here = Node(None, *place)
        self.repeated += self.aliases > 0
        if self.repeated > MAX_REPEATED:
            what = f"aliases make the document larger by {MAX_REPEATED} values"
            raise here.error(what, "write it out", found=None)
        if isinstance(event, yaml.ScalarEvent):
            return Node(_scalar(event, here), *place)
        kind = "map" if isinstance(event, yaml.MappingStartEvent) else "seq"
        if event.tag not in (None, "!", _CORE + kind):
            raise _tag_error(here, event.tag)
        if len(self.open) >= MAX_DEPTH:
            raise too_deep(here)
        self.open.append(start)
        children: object = self._entries(path) if kind == "map" else self._items(path)
        self.open.pop()
        self.next += 1  # past the end of it
        return Node(children, *place)

    def _take(self) -> Any:
        """The next event; its anchor is kept."""
        event = self.events[self.next]
        anchor = None if isinstance(event, yaml.AliasEvent) else event.anchor
        if anchor in self.anchors and not self.aliases:
            what = f"not valid YAML: the anchor &{anchor} stands twice"
            raise _place(event, self.file).error(what, "give each anchor a name of its own", found=None)
        if anchor is not None:
            self.anchors[anchor] = self.next
        self.next += 1
        return event

    def _follow(self, alias: Any, path: str, key: Any) -> Node:
        target = self.anchors.get(alias.anchor)
        if target is None:
            fix = "define the anchor (&name) before it is used, or put text that begins with '*' into quotes"
            raise _place(alias, self.file).error("not valid YAML: undefined alias", fix, found=f"*{alias.anchor}")
        if target in self.open:
            place = replace(_place(self.events[target], self.file), path=path)
            raise place.error("an alias refers to something that contains it", "write the value out", found=None)
        after, self.next = self.next, target
        self.aliases += 1
        node = self.build(path, key)
        self.aliases -= 1
        self.next = after
        return node

    def _items(self, path: str) -> list[Node]:
        items: list[Node] = []
        while not isinstance(self.events[self.next], yaml.CollectionEndEvent):
            items.append(self.build(f"{path}[{len(items)}]"))
        return items

    def _entries(self, path: str) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        while not isinstance(self.events[self.next], yaml.CollectionEndEvent):
            key = self._take()
            place = replace(_place(key, self.file), path=path)
            if not isinstance(key, yaml.ScalarEvent):
                found = "an alias" if isinstance(key, yaml.AliasEvent) else "a list or a mapping"
                raise place.error("a key is not text", "use text as the key", expected="text", found=found)
            place = replace(place, path=join_path(path, key.value))
            if key.value == "<<" and not key.style:
                raise place.error("merge keys (<<) are not supported", "write the entries out", found=None)
            if key.value in entries:
                first = entries[key.value].key_line
                raise place.error(
                    f"the key {key.value!r} stands twice",
                    f"remove one of the lines {first} and {place.line}",
                    expected="each key once",
                    found=f"the same key in line {first}",
                )
            entries[key.value] = self.build(place.path, key)
        return entries


# -- scalars --------------------------------------------------------------------------------------------------------

_CORE = "tag:yaml.org,2002:"
_PARSERS: dict[str, Callable[[str], object]] = {
    "str": str,
    "int": int,
    "float": lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    "bool": parse_bool,
    "null": lambda text: None,
}
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
#: What a scalar without quotes is; all else is text.
_PLAIN = re.compile(
    r"(?P<null>~|null|Null|NULL|)\Z|(?P<bool>(?i:true|false|yes|no))\Z"
    rf"|(?P<int>[-+]?{_DIGITS})\Z"
    rf"|(?P<float>[-+]?(?:\.{_DIGITS}|{_DIGITS}(?:\.(?:{_DIGITS})?)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)


def _scalar(event: Any, place: Node) -> object:
    kind = "str" if event.tag in (None, "!") else event.tag.removeprefix(_CORE)
    if event.tag in (None, "!") and event.implicit[0] and (plain := _PLAIN.match(event.value)):
        kind = str(plain.lastgroup)
    if kind not in _PARSERS:
        raise _tag_error(place, event.tag)
    try:
        return _PARSERS[kind](event.value)
    except ValueError:  # an explicit tag, e.g. `!!int many`, or thousands of digits
        what, found = "the value does not fit its tag", f"text {shorten(repr(event.value))}"
        raise place.error(what, "remove the tag", expected=f"!!{kind}", found=found) from None


def _tag_error(place: Node, tag: str) -> ConfigError:
    return place.error(
        "YAML tags that make objects are not allowed",
        "remove the tag; put text that begins with '!' into quotes",
        expected="a mapping, a list, text or a number",
        found=f"the tag {tag!r}",
    )
