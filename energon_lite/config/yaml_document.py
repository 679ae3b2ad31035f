"""YAML documents that remember where everything stands.

:func:`load_yaml` turns a file into a tree of :class:`YamlNode`.

Scalars are read by YAML 1.2's rules as Energon applies them, which differ from PyYAML's defaults where those surprise:
``1e-3`` is a number; ``1:30``, dates, ``on`` and ``off`` are text; keys are always text.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from energon_lite.config.paths import missing_file_fix
from energon_lite.config.yaml_node import MAX_DEPTH, YamlNode, from_plain, join_path, parse_bool, shorten, too_deep
from energon_lite.errors import ConfigError

if TYPE_CHECKING:
    import yaml

__all__ = ["YamlNode", "from_plain", "load_yaml"]

#: Aliases may repeat a subtree; a document that grows by more values than this is an attack or a mistake.
MAX_REPEATED = 100_000
#: A larger document is none that was written for this.
_MAX_BYTES = 1 << 28

_CORE = "tag:yaml.org,2002:"


def load_yaml(path: str | os.PathLike[str]) -> YamlNode:
    """Read a YAML file (or a ``.json`` file, whose nodes have no lines).

    Raises:
        ConfigError: the file cannot be read, is not UTF-8, is not valid YAML, is empty, holds several documents,
            a key twice, a merge key, or a tag that would make objects; or it is nested too deeply, or too large.

    Example:
        >>> load_yaml("blend.yaml").mapping(required={"splits"})["splits"].line
        3
    """
    file = os.fspath(path)
    text = _read_text(file)
    if file.endswith(".json"):
        return _parse_json(text, file)
    return _parse_yaml(text, file)


def _read_text(file: str) -> str:
    try:
        if os.path.getsize(file) > _MAX_BYTES:
            raise ConfigError(f"the document has more than {_MAX_BYTES} bytes", file=file, fix="is it the right file?")
        data = Path(file).read_bytes()
    except OSError as error:
        cure = "check the path and its permissions"
        raise ConfigError(
            f"cannot read the document: {error.strerror or error}",
            file=file,
            fix=missing_file_fix(file, cure) if isinstance(error, FileNotFoundError) else cure,
        ) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - (data.rfind(b"\n", 0, error.start) + 1) + 1
        raise ConfigError(
            "the document is not UTF-8",
            file=file,
            line=line,
            column=column,
            found=f"the byte 0x{data[error.start]:02x}",
            fix="save the file as UTF-8",
        ) from error


def _parse_json(text: str, file: str) -> YamlNode:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entries = dict(pairs)
        if len(entries) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise ConfigError(f"the key {twice!r} stands twice", file=file, fix="remove one of them")
        return entries

    try:
        return from_plain(json.loads(text, object_pairs_hook=unique), file)
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"not valid JSON: {error.msg}",
            file=file,
            line=error.lineno,
            column=error.colno,
            fix="correct the JSON at this place",
        ) from error
    except ConfigError:
        raise
    except ValueError as error:  # a number of thousands of digits
        raise ConfigError(f"not valid JSON: {error}", file=file, fix="write a smaller number") from error
    except RecursionError as error:
        raise too_deep(YamlNode(None, file)) from error


def _parse_yaml(text: str, file: str) -> YamlNode:
    import yaml

    try:
        _check_depth(text, file)
        loader = _loader_class()(text)
        try:
            root = loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, file) from error
    except yaml.YAMLError as error:
        raise ConfigError(
            f"not valid YAML: {str(error).splitlines()[0]}", file=file, fix="remove characters that are not text"
        ) from error
    if root is None:
        raise ConfigError("the document is empty", file=file, line=1, column=1, fix="write the configuration into it")
    return _Converter(file).convert(root, "", None)


def _check_depth(text: str, file: str) -> None:
    """Refuse what is nested without end, before it is composed: libyaml does that on the stack of C, and ends the
    process where that ends. Its events come one by one, in a fifth of the time that the rest takes."""
    import yaml

    loader, depth = _loader_class()(text), 0
    try:
        while loader.check_event():
            event = loader.get_event()
            if isinstance(event, yaml.CollectionStartEvent):
                depth += 1
            elif isinstance(event, yaml.CollectionEndEvent):
                depth -= 1
            if depth > MAX_DEPTH:
                mark = event.start_mark
                raise too_deep(YamlNode(None, file, "", mark.line + 1, mark.column + 1))
    finally:
        loader.dispose()


#: What a YAML parser complains about, and what most often cures it. Parts of libyaml's and PyYAML's own messages.
_CURES = (
    ("tab", "indent with spaces, not with tabs"),
    ("mapping values are not allowed", "check the indentation, and put text that contains ': ' into quotes"),
    ("could not find expected ':'", "write a colon and a space after the key, and check the line before"),
    ("',' or", "close the bracket, or separate its entries with commas"),
    ("flow", "close the bracket, or separate its entries with commas"),
    ("escape", "use single quotes, or double the backslash"),
    ("quoted scalar", "close the quotes"),
    ("undefined alias", "define the anchor (&name) before it is used, or put text that begins with '*' into quotes"),
    ("single document", "keep one document per file: remove '---' and what follows it"),
    ("cannot start any token", "put text that begins with '@', '`' or '%' into quotes"),
    ("block", "indent all entries of a mapping or list alike"),
)


def _syntax_error(error: yaml.MarkedYAMLError, text: str, file: str) -> ConfigError:
    mark = error.problem_mark or error.context_mark
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (None, None)
    lines = text.splitlines()
    culprit = lines[line - 1] if line is not None and line <= len(lines) else ""
    problem = error.problem or "cannot be parsed"
    hints = " ".join(["tab" if "\t" in culprit[:column] else "", problem, error.context or ""])
    cure = next((cure for part, cure in _CURES if part in hints), "check quotes and indentation at this place")
    return ConfigError(
        f"not valid YAML: {problem}",
        file=file,
        line=line,
        column=column,
        found=f"the line {shorten(repr(culprit.strip()))}" if culprit.strip() else None,
        fix=cure,
    )


class _Converter:
    """Turns PyYAML's composed nodes into ours, and refuses what would be ambiguous or unsafe."""

    def __init__(self, file: str):
        self.file = file
        self.repeated = 0
        self.seen: set[int] = set()
        self.above: set[int] = set()

    def convert(self, node: Any, path: str, key: Any) -> YamlNode:
        def place(value: object) -> YamlNode:
            mark, key_mark = node.start_mark, key.start_mark if key is not None else None
            return YamlNode(
                value,
                self.file,
                path,
                mark.line + 1,
                mark.column + 1,
                None if key_mark is None else key_mark.line + 1,
                None if key_mark is None else key_mark.column + 1,
            )

        self.repeated += id(node) in self.seen
        self.seen.add(id(node))
        if self.repeated > MAX_REPEATED:
            raise place(None).error(f"aliases make the document larger by {MAX_REPEATED} values", fix="write it out")
        if node.id == "scalar":
            return place(self._scalar(node, place(None)))
        expected_tag = _CORE + ("map" if node.id == "mapping" else "seq")
        if node.tag != expected_tag:
            raise _tag_error(place(None), node.tag)
        if id(node) in self.above:
            raise place(None).error("an alias refers to something that contains it", fix="write the value out")
        if len(self.above) >= MAX_DEPTH:
            raise too_deep(place(None))
        self.above.add(id(node))
        children: object
        if node.id == "mapping":
            children = self._entries(node, path, place(None))
        else:
            children = [self.convert(child, f"{path}[{i}]", None) for i, child in enumerate(node.value)]
        self.above.discard(id(node))
        return place(children)

    def _entries(self, node: Any, path: str, here: YamlNode) -> dict[str, YamlNode]:
        entries: dict[str, YamlNode] = {}
        for key, value in node.value:
            line, column = key.start_mark.line + 1, key.start_mark.column + 1
            if key.id != "scalar":
                place = YamlNode(None, self.file, path, line, column)
                raise place.error("a key is not text", expected="text", found=f"a {key.id}", fix="use text as the key")
            at = join_path(path, key.value)
            place = YamlNode(None, self.file, at, line, column)
            if key.value == "<<" and not key.style:
                raise place.error("merge keys (<<) are not supported", fix="write the entries out")
            if key.value in entries:
                first = entries[key.value].key_line
                raise place.error(
                    f"the key {key.value!r} stands twice",
                    expected="each key once",
                    found=f"the same key in line {first}",
                    fix=f"remove one of the lines {first} and {line}",
                )
            entries[key.value] = self.convert(value, at, key)
        return entries

    @staticmethod
    def _scalar(node: Any, place: YamlNode) -> object:
        kind, text = node.tag.removeprefix(_CORE), node.value
        parse = _SCALARS.get(kind)
        if parse is None:
            raise _tag_error(place, node.tag)
        try:
            return parse(text)
        except ValueError:
            # Only possible with an explicit tag, e.g. `!!int many`.
            raise place.error(
                "the value does not fit its tag", expected=f"!!{kind}", found=f"text {text!r}", fix="remove the tag"
            ) from None


def _tag_error(place: YamlNode, tag: str) -> ConfigError:
    return place.error(
        "YAML tags that make objects are not allowed",
        expected="a mapping, a list, text or a number",
        found=f"the tag {tag!r}",
        fix="remove the tag; put text that begins with '!' into quotes",
    )


def _parse_float(text: str) -> float:
    return float(text.lower().replace(".inf", "inf").replace(".nan", "nan"))


_SCALARS: dict[str, Callable[[str], object]] = {
    "str": str,
    "int": int,
    "float": _parse_float,
    "bool": parse_bool,
    "null": lambda text: None,
}

_DIGITS = r"[0-9]+(?:_[0-9]+)*"
_IMPLICIT = (
    ("null", r"(?:~|null|Null|NULL|)\Z", ["~", "n", "N", ""]),
    ("bool", r"(?i:true|false|yes|no)\Z", list("tTfFyYnN")),
    ("int", rf"[-+]?{_DIGITS}\Z", list("-+0123456789")),
    (
        "float",
        rf"[-+]?(?:\.{_DIGITS}|{_DIGITS}(?:\.(?:{_DIGITS})?)?)(?:[eE][-+]?[0-9]+)?\Z|[-+]?\.(?:inf|Inf|INF)\Z|\.(?:nan|NaN|NAN)\Z",
        list("-+.0123456789"),
    ),
)

_loader: Any = None


def _loader_class() -> Any:
    """libyaml's loader (a hundred times PyYAML's speed) if PyYAML was built with it, with our rules for scalars."""
    global _loader
    if _loader is None:
        import yaml

        base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        loader: Any = type("_Loader", (base,), {"yaml_implicit_resolvers": {}})
        for name, pattern, first in _IMPLICIT:
            loader.add_implicit_resolver(_CORE + name, re.compile(pattern), first)
        _loader = loader
    return _loader
