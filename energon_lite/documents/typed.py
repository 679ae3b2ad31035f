"""Conversion of a node to a dataclass, by the annotations of its fields.

An annotation may be ``str``, ``int``, ``float``, ``bool``, ``Any``, :class:`Node` (the node itself), a ``Literal``, a
dataclass, a list, tuple or mapping of these, or any of them ``| None``, for null. ``Annotated[..., "words"]`` describes
the expected text (or list entries); ``Annotated[..., function]`` reads the node by a function.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

from energon_lite.documents.node import Node
from energon_lite.errors import ConfigError, UsageError

T = TypeVar("T")


class Key(NamedTuple):
    """Key of a document: the annotation of its value, and whether the key is required."""

    annotation: Any
    required: bool


def read(
    node: Node, cls: type[T], /, *, without: Collection[str] = (), ignored: Collection[str] = (), **given: Any
) -> T:
    """Convert the entries of a mapping to a dataclass.

    Args:
        node: the mapping.
        cls: the dataclass; errors of its ``__post_init__`` get the place of the key.
        without: fields that are not allowed in the document here.
        ignored: keys that are allowed, but not read.
        given: values of fields that are not keys of the document.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid.
    """
    keys = {name: key for name, key in keys_of(cls).items() if name not in given and name not in without}
    values = read_keys(node, keys, ignored)
    with located(node):
        return cls(**values, **given)


_KEYS: dict[type[Any], Mapping[str, Key]] = {}


def keys_of(cls: type[Any]) -> Mapping[str, Key]:
    """Keys of a document that correspond to the fields of a dataclass."""
    if cls not in _KEYS:
        annotations, missing = get_type_hints(cls, include_extras=True), dataclasses.MISSING
        _KEYS[cls] = {
            field.name: Key(annotations[field.name], field.default is missing and field.default_factory is missing)
            for field in dataclasses.fields(cls)
        }
    return _KEYS[cls]


def read_keys(node: Node, keys: Mapping[str, Key], ignored: Collection[str] = ()) -> dict[str, Any]:
    """Read the values of the keys that a mapping has.

    Raises:
        ConfigError: a key is unknown or missing, or a value is invalid.
    """
    required = [name for name, key in keys.items() if key.required]
    entries = node.mapping(required, {*keys, *ignored} - {*required})
    return {name: _value(entries[name], key.annotation) for name, key in keys.items() if name in entries}


@contextmanager
def located(node: Node) -> Iterator[None]:
    """Give errors raised inside the block the place of the node, or of the key that they name."""
    try:
        yield
    except UsageError as error:
        raise node.error(error.what, error.fix, found=None) from None
    except ConfigError as error:
        if error.file is not None or error.at is None:
            raise
        entries = node.value if isinstance(node.value, dict) else {}
        wrong = dataclasses.replace(entries.get(error.at.rpartition(".")[2], node), path=error.at)
        raise wrong.error(error.what, error.fix, found=None) from None


def _value(node: Node, annotation: Any, words: str | None = None) -> Any:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        inner, note = arguments
        if isinstance(note, str):
            return _value(node, inner, note)
        return None if node.is_null and type(None) in get_args(inner) else note(node)
    if origin in (Union, types.UnionType) and len(arguments) == 2 and type(None) in arguments:
        inner = arguments[arguments[0] is type(None)]
        return None if node.is_null else _value(node, inner, words)
    if annotation is Node:
        return node
    if annotation is Any:
        return node.plain()
    if dataclasses.is_dataclass(annotation):
        return read(node, annotation)  # type: ignore[arg-type]
    if origin is Literal:
        if node.value not in arguments:
            raise node.wrong(f"one of {', '.join(map(str, arguments))}", choices=arguments)
        return node.value
    if origin is tuple and arguments[-1] is not Ellipsis:
        entries = node.sequence(f"{len(arguments)}")
        if len(entries) != len(arguments):
            raise node.wrong(f"a list of {len(arguments)}")
        return tuple(_value(entry, argument) for entry, argument in zip(entries, arguments, strict=True))
    if origin in (tuple, list):
        return origin(_value(entry, arguments[0]) for entry in node.sequence(words or "entries"))
    if origin in (dict, Mapping):
        return {name: _value(entry, arguments[1]) for name, entry in node.entries().items()}
    if annotation is str:
        return node.string(words or "text")
    scalars = {int: node.integer, float: node.number, bool: node.boolean}
    if annotation not in scalars:
        what = f"a field cannot be read from a document: {annotation}"
        fix = "annotate it with str, int, float, bool, a list or mapping of these, or Annotated[..., function of Node]"
        raise UsageError(what, where=node.path, fix=fix)
    return scalars[annotation]()
