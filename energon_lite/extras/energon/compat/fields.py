"""Energon's file names, decoder types, and functions for nested fields."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import types
from collections.abc import Sequence
from typing import Any, Literal

from energon_lite.errors import FieldAccessError, UsageError
from energon_lite.storage.samples.decoding import SampleDecoder

__all__ = [
    "AV_DECODE_AVAILABLE",
    "DEFAULT_DECODER",
    "INDEX_SQLITE_FILENAME",
    "INDEX_UUID_FILENAME",
    "INFO_JSON_FILENAME",
    "INFO_YAML_FILENAME",
    "MAIN_FOLDER_NAME",
    "NVDATASET_CACHE_DIR",
    "SPLIT_YAML_FILENAME",
    "AVDecoderType",
    "ImageDecoderType",
    "field_access",
    "split_field_access",
    "to_json_object",
]

MAIN_FOLDER_NAME = ".nv-meta"
INDEX_SQLITE_FILENAME = "index.sqlite"
INDEX_UUID_FILENAME = "index.uuid"
INFO_JSON_FILENAME = ".info.json"
INFO_YAML_FILENAME = ".info.yaml"
SPLIT_YAML_FILENAME = "split.yaml"

#: Value of the environment variable. Setting this constant has no effect: paths use the variable.
NVDATASET_CACHE_DIR = os.environ.get("NVDATASET_CACHE_DIR")

DEFAULT_DECODER = SampleDecoder()
AV_DECODE_AVAILABLE = importlib.util.find_spec("av") is not None

ImageDecoderType = str
AVDecoderType = Literal["torch", "AVDecoder", "pyav"]


def split_field_access(field_desc: str) -> list[list[str]]:
    """Split an entry of a field map into alternatives, each as the part and the keys inside it.

    Example:
        >>> split_field_access("json[text][0],txt")
        [['json', 'text', '0'], ['txt']]
    """
    return [option.replace("]", "").split("[") for option in field_desc.split(",")]


def field_access(value: Any, field: Sequence[Sequence[str]]) -> Any:
    """Return the first alternative that exists.

    Raises:
        FieldAccessError: none exists.

    Example:
        >>> field_access({"json": {"text": ["a"]}}, [["txt"], ["json", "text", "0"]])
        'a'
    """
    for keys in field:
        current = value
        try:
            for key in keys:
                current = current[int(key)] if isinstance(current, (list, tuple)) else dict(current)[key]
        except (KeyError, IndexError, TypeError, ValueError):
            continue
        return current
    raise FieldAccessError(
        f"there is no {' and no '.join('.'.join(keys) for keys in field)}", fix="correct the field map"
    )


def to_json_object(obj: Any) -> Any:
    """Convert a value to plain data.

    Dataclasses and named tuples become dicts of their fields; classes and functions become the names by which YAML
    calls them.
    """
    if obj is None or isinstance(obj, (str, int, float, bool)):
        return obj
    if isinstance(obj, tuple) and hasattr(obj, "_asdict"):
        return to_json_object(obj._asdict())
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {field.name: to_json_object(getattr(obj, field.name)) for field in dataclasses.fields(obj) if field.init}
    if isinstance(obj, (list, tuple, set)):
        return [to_json_object(item) for item in obj]
    if isinstance(obj, dict):
        return {key: to_json_object(item) for key, item in obj.items()}
    if isinstance(obj, (type, types.FunctionType)):
        kind = "__class__" if isinstance(obj, type) else "__function__"
        return {"__module__": obj.__module__, kind: obj.__name__}
    raise UsageError(
        f"a {type(obj).__name__} is no plain data", fix="give dataclasses, dicts, lists, texts and numbers"
    )
