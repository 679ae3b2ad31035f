"""Names of files, kinds of decoding, and access to nested fields."""

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

#: Whatever it is set to in a program, paths are looked up by the environment variable.
NVDATASET_CACHE_DIR = os.environ.get("NVDATASET_CACHE_DIR")

DEFAULT_DECODER = SampleDecoder()
AV_DECODE_AVAILABLE = importlib.util.find_spec("av") is not None

ImageDecoderType = str
AVDecoderType = Literal["torch", "AVDecoder", "pyav"]


def split_field_access(field_desc: str) -> list[list[str]]:
    """The alternatives of an entry of a field map, each as the part and the keys inside it.

    Example:
        >>> split_field_access("json[text][0],txt")
        [['json', 'text', '0'], ['txt']]
    """
    return [option.replace("]", "").split("[") for option in field_desc.split(",")]


def field_access(value: Any, field: Sequence[Sequence[str]]) -> Any:
    """The first of some alternatives that there is.

    Raises:
        FieldAccessError: there is none.

    Example:
        >>> field_access({"json": {"text": ["a"]}}, [["txt"], ["json", "text", "0"]])
        'a'
    """
    for keys in field:
        found = value
        try:
            for key in keys:
                found = found[int(key)] if isinstance(found, (list, tuple)) else dict(found)[key]
        except (KeyError, IndexError, TypeError, ValueError):
            continue
        return found
    raise FieldAccessError(
        f"there is no {' and no '.join('.'.join(keys) for keys in field)}", fix="correct the field map"
    )


def to_json_object(obj: Any) -> Any:
    """A value as plain data: dataclasses and named tuples as dicts of their fields, classes and functions as the names
    by which YAML calls them."""
    if obj is None or isinstance(obj, (str, int, float, bool)):
        return obj
    if isinstance(obj, tuple) and hasattr(obj, "_asdict"):
        return to_json_object(obj._asdict())
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        return {one.name: to_json_object(getattr(obj, one.name)) for one in dataclasses.fields(obj) if one.init}
    if isinstance(obj, (list, tuple, set)):
        return [to_json_object(one) for one in obj]
    if isinstance(obj, dict):
        return {key: to_json_object(one) for key, one in obj.items()}
    if isinstance(obj, (type, types.FunctionType)):
        kind = "__class__" if isinstance(obj, type) else "__function__"
        return {"__module__": obj.__module__, kind: obj.__name__}
    raise UsageError(
        f"a {type(obj).__name__} is no plain data", fix="give dataclasses, dicts, lists, texts and numbers"
    )
