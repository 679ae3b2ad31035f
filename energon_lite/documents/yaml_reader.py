"""Reader of YAML documents that records the place of every value.

:func:`load_yaml` converts a file to a tree of :class:`~energon_lite.documents.node.Node`.

Scalars are read by YAML 1.2's rules as Energon applies them, which differ from surprising defaults of PyYAML: ``1e-3``
is a number; ``1:30``, dates, ``on`` and ``off`` are text; keys are always text.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.resolver import BaseResolver

from energon_lite.documents.node import MAX_DEPTH, Node, from_plain, join_path, parse_bool, shorten, too_deep
from energon_lite.documents.paths import is_url, missing_file_fix
from energon_lite.errors import ConfigError, EnergonLiteError

#: Bound on the values that aliases add to a document: beyond it, the document is an attack or a mistake.
MAX_REPEATED = 100_000
#: Largest document, in bytes.
_MAX_BYTES = 1 << 28
#: Largest document, in characters, whose tree is cached: data sets prepared in the same way have identical documents.
_SMALL = 1 << 12


def load_yaml(
    path: str | os.PathLike[str], *, may_be_empty: bool = False, read: Callable[[str], bytes] | None = None
) -> Node:
    """Read a YAML file (or a ``.json`` file, whose nodes have no lines).

    Args:
        path: the file.
        may_be_empty: an empty document is a mapping without entries, and not an error.
        read: function that returns the bytes of a file that is not local; raises FileNotFoundError.

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, is not valid YAML, is empty, nested too deeply or too large,
            or has several documents, a duplicate key, a merge key, or a tag that would make objects.

    Example:
        >>> load_yaml("blend.yaml").mapping(required={"splits"})["splits"].line
        3
    """
    file = os.fspath(path)
    text = _read_text(file, _read_local if read is None else read)
    if file.endswith(".json"):
        return _parse_json(text, file)
    if len(text) > _SMALL:
        return parse_yaml(text, file, may_be_empty=may_be_empty)
    try:
        return _in_file(_parsed(text, may_be_empty), file)
    except ConfigError:
        return parse_yaml(text, file, may_be_empty=may_be_empty)  # parse again, for a message with the file's name


@lru_cache(maxsize=64)
def _parsed(text: str, may_be_empty: bool) -> Node:
    return parse_yaml(text, "", may_be_empty=may_be_empty)


def _in_file(node: Node, file: str) -> Node:
    """Copy a tree of nodes, with the name of another file."""
    value = node.value
    if type(value) is dict:
        value = {key: _in_file(child, file) for key, child in value.items()}
    elif type(value) is list:
        value = [_in_file(child, file) for child in value]
    return Node(value, file, node.path, node.line, node.column, node.key, node.key_line, node.key_column)


def parse_yaml(text: str, file: str, *, may_be_empty: bool = False) -> Node:
    """Parse the text of a YAML document; ``file`` is its name in messages.

    Raises:
        ConfigError: as :func:`load_yaml`.
    """
    try:
        document = _Composer(text, file).get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, file) from error
    except yaml.YAMLError as error:
        what = f"not valid YAML: {str(error).splitlines()[0]}"
        raise ConfigError(what, file=file, fix="remove characters that are not text") from error
    if document is not None:
        return _TreeBuilder(file).build(document, "")
    if may_be_empty:
        return Node({}, file, "", 1, 1)
    raise ConfigError("the document is empty", file=file, line=1, column=1, fix="write the configuration into it")


def _read_local(file: str) -> bytes:
    if os.path.getsize(file) > _MAX_BYTES:
        raise ConfigError(f"the document has more than {_MAX_BYTES} bytes", file=file, fix="is it the right file?")
    return Path(file).read_bytes()


def _read_text(file: str, read: Callable[[str], bytes]) -> str:
    try:
        data = read(file)
    except EnergonLiteError:
        raise
    except OSError as error:
        fix = "check the path and its permissions"
        is_missing = isinstance(error, FileNotFoundError) and not is_url(file)
        fix = missing_file_fix(file, fix) if is_missing else fix
        what = f"cannot read the document: {error.strerror or type(error).__name__}"
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
        entries = dict(pairs)
        if len(entries) < len(pairs):
            key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
            raise ConfigError(f"the key {key!r} appears twice", file=file, fix="remove one of them")
        return entries

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


class _Composer(Composer, BaseResolver):
    """PyYAML's composer with this module's types of scalars, and with a bound on the depth.

    The parser is libyaml, a hundred times as fast as PyYAML's, if PyYAML was built with it. Its own composer is not
    used: it recurses as deep as the document, on the C stack.
    """

    def __init__(self, text: str, file: str):
        super().__init__()
        self.file = file
        self.depth = 0
        parser = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
        self.check_event = parser.check_event
        self.peek_event = parser.peek_event
        self.get_event = parser.get_event

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.depth >= MAX_DEPTH and isinstance(self.peek_event(), yaml.CollectionStartEvent):
            raise too_deep(_place(self.peek_event(), self.file))
        if index is None and parent is not None and self.check_event(yaml.AliasEvent):
            raise _key_error(_place(self.peek_event(), self.file), "an alias")
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _place(found: Any, file: str, path: str = "", key: yaml.Node | None = None) -> Node:
    """Place of an event, or of a PyYAML node with or without a key, as a node without a value."""
    start = found.start_mark
    if key is None:
        return Node(None, file, path, start.line + 1, start.column + 1)
    at = key.start_mark
    return Node(None, file, path, start.line + 1, start.column + 1, key.value, at.line + 1, at.column + 1)


#: Parts of error messages of libyaml and PyYAML, and the most frequent fix for each.
_CURES = (
    ("another document", "keep one document per file: remove '---' and what follows it"),
    ("undefined alias", "define the anchor (&name) before it is used, or put text that begins with '*' into quotes"),
    ("duplicate anchor", "give each anchor a name of its own"),
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
    if "nesting depth" in (error.problem or ""):  # a limit of PyYAML's own, from 6.0.4 on
        return too_deep(Node(None, file, "", line, column))
    lines = text.splitlines()
    culprit = lines[line - 1] if line is not None and line <= len(lines) else ""
    problem = ", ".join(filter(None, [error.context, error.problem])) or "it cannot be parsed"
    hints = problem + " tab" * ("\t" in culprit[:column])
    cure = next((cure for part, cure in _CURES if part in hints), "check quotes and indentation at this place")
    found = f"the line {shorten(repr(culprit.strip()))}" if culprit.strip() else None
    return Node(None, file, "", line, column).error(f"not valid YAML: {problem}", cure, found=found)


class _TreeBuilder:
    """Conversion of PyYAML's nodes to :class:`Node`, which refuses ambiguous or unsafe constructs."""

    def __init__(self, file: str):
        self.file = file
        #: Ids of the nodes that were converted: a node that is met again is an alias.
        self.seen: set[int] = set()
        #: The lists and mappings that are being converted, the outermost first.
        self.open: list[yaml.Node] = []
        #: Number of values that came from aliases.
        self.repeated = 0

    def build(self, found: yaml.Node, path: str, key: yaml.Node | None = None) -> Node:
        """Convert a PyYAML node and everything in it."""
        here = _place(found, self.file, path, key)
        if found in self.open:
            what = "an alias refers to something that contains it"
            raise here.error(what, "write the value out", found=None)
        self.repeated += id(found) in self.seen
        self.seen.add(id(found))
        if self.repeated > MAX_REPEATED:
            what = f"aliases make the document larger by {MAX_REPEATED} values"
            raise here.error(what, "write it out", found=None)
        if isinstance(found, yaml.ScalarNode):
            return replace(here, value=_scalar(found, here))
        is_mapping = isinstance(found, yaml.MappingNode)
        if found.tag != _CORE + ("map" if is_mapping else "seq"):
            raise _tag_error(here, found.tag)
        if len(self.open) >= MAX_DEPTH:
            raise too_deep(here)
        self.open.append(found)
        if is_mapping:
            here = replace(here, value=self._entries(found, path))
        else:
            items = [self.build(item, f"{path}[{number}]") for number, item in enumerate(found.value)]
            here = replace(here, value=items)
        self.open.pop()
        return here

    def _entries(self, found: yaml.Node, path: str) -> dict[str, Node]:
        entries: dict[str, Node] = {}
        for key, value in found.value:
            place = _place(key, self.file, path)
            if not isinstance(key, yaml.ScalarNode):
                raise _key_error(place, "a list or a mapping")
            place = replace(place, path=join_path(path, key.value))
            if key.value == "<<" and not key.style:
                raise place.error("merge keys (<<) are not supported", "write the entries out", found=None)
            # A duplicate of an empty list is harmless: tools write `exclude: []`, and users add their own entry below.
            if key.value in entries and entries[key.value].value != []:
                first = entries[key.value].key_line
                raise place.error(
                    f"the key {key.value!r} appears twice",
                    f"remove one of the lines {first} and {place.line}",
                    expected="each key once",
                    found=f"the same key in line {first}",
                )
            entries[key.value] = self.build(value, place.path, key)
        return entries


def _key_error(place: Node, found: str) -> ConfigError:
    return place.error("a key is not text", "use text as the key", expected="text", found=found)


# -- scalars --------------------------------------------------------------------------------------------------------

_CORE = "tag:yaml.org,2002:"
_DIGITS = r"[0-9]+(?:_[0-9]+)*"
#: Pattern of an unquoted scalar of each kind, and its conversion. All other scalars are text.
_SCALARS: dict[str, tuple[str, Callable[[str], object]]] = {
    "null": ("~|null|Null|NULL|", lambda text: None),
    "bool": ("(?i:true|false|yes|no)", parse_bool),
    "int": (rf"[-+]?{_DIGITS}", int),
    "float": (
        rf"[-+]?(\.{_DIGITS}|{_DIGITS}(\.({_DIGITS})?)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        lambda text: float(text.lower().replace(".inf", "inf").replace(".nan", "nan")),
    ),
    "str": ("(?s:.*)", str),
}
for _kind, (_pattern, _) in _SCALARS.items():
    _Composer.add_implicit_resolver(_CORE + _kind, re.compile(rf"(?:{_pattern})\Z"), None)


def _scalar(found: yaml.ScalarNode, place: Node) -> object:
    kind = found.tag.removeprefix(_CORE)
    if kind not in _SCALARS:
        raise _tag_error(place, found.tag)
    try:
        return _SCALARS[kind][1](found.value)
    except ValueError:  # an explicit tag, e.g. `!!int many`, or thousands of digits
        what, text = "the value does not fit its tag", f"text {shorten(repr(found.value))}"
        raise place.error(what, "remove the tag", expected=f"!!{kind}", found=text) from None


def _tag_error(place: Node, tag: str) -> ConfigError:
    return place.error(
        "YAML tags that make objects are not allowed",
        "remove the tag; put text that begins with '!' into quotes",
        expected="a mapping, a list, text or a number",
        found=f"the tag {tag!r}",
    )
