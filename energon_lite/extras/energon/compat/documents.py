"""Energon's conversion of plain data to typed objects, its file names, nested fields, and preparation of media."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import os
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Union

import numpy as np

from energon_lite.documents import load_yaml
from energon_lite.errors import ConfigError, FieldAccessError, UsageError, did_you_mean
from energon_lite.extras.energon.epath import EPath
from energon_lite.extras.energon.factories import BaseCoreDatasetFactory
from energon_lite.extras.energon.factories.loaders import get_dataset_from_config
from energon_lite.storage.samples.decoding import SampleDecoder

if TYPE_CHECKING:
    from energon_lite.extras.media import MediaFilterConfig


_PLAIN = (str, int, float, bool, type(None))


@dataclasses.dataclass
class JsonParser:
    """Converter of plain data to typed objects. It imports nothing: the caller provides the classes.

    Args:
        strict: True to make names that a class does not have an error.

    Example:
        >>> JsonParser().raw_to_typed({"weight": 2, "tags": ["a"]}, Leaf)  # a dataclass
        Leaf(weight=2.0, tags=['a'])
    """

    strict: bool = True

    def raw_to_typed(self, raw_data: Any, inst_type: Any, allow_imports: bool = False, _path: str = "root") -> Any:
        """Convert data to a type: a dataclass, a named tuple, a container of typed values, a plain value.

        Args:
            raw_data: dicts, lists, texts and numbers.
            inst_type: the type. Values of other classes are returned unchanged.
            allow_imports: True to make data that names a class or a function (``__module__``) an error, since neither
                is imported here.

        Raises:
            ConfigError: the data is not of this type; with the place in the data.
        """
        if allow_imports and isinstance(raw_data, Mapping) and "__module__" in raw_data:
            raise ConfigError(
                f"the data names code: {raw_data['__module__']}",
                at=_path,
                fix="import it in the program, and give what it makes",
            )

        def inner(raw: Any, kind: Any, step: object) -> Any:
            return self.raw_to_typed(raw, kind, allow_imports, f"{_path}.{step}")

        origin, of = typing.get_origin(inst_type), typing.get_args(inst_type)
        if inst_type is None or (isinstance(inst_type, type) and inst_type in _PLAIN):
            kind = type(None) if inst_type is None else inst_type
            _see(isinstance(raw_data, kind) or (kind is float and isinstance(raw_data, int)), raw_data, kind, _path)
            return raw_data
        if origin is Literal:
            _see(raw_data in of, raw_data, inst_type, _path)
            return raw_data
        if origin in (Union, types.UnionType):
            return self._of_any(raw_data, of, allow_imports, _path)
        if isinstance(inst_type, type) and (dataclasses.is_dataclass(inst_type) or hasattr(inst_type, "_fields")):
            return self._record(raw_data, inst_type, allow_imports, _path)
        if origin in (list, set, tuple):
            _see(isinstance(raw_data, list), raw_data, inst_type, _path)
            if origin is tuple and of[-1] is not Ellipsis:
                _see(len(raw_data) == len(of), raw_data, inst_type, _path)
                return tuple(inner(item, kind, at) for at, (item, kind) in enumerate(zip(raw_data, of, strict=True)))
            made = origin(inner(item, of[0], at) for at, item in enumerate(raw_data))
            _see(len(made) == len(raw_data), raw_data, inst_type, _path)  # a set has no duplicates
            return made
        if origin is dict:
            _see(isinstance(raw_data, dict), raw_data, inst_type, _path)
            return {inner(key, of[0], key): inner(item, of[1], key) for key, item in raw_data.items()}
        if inst_type in (dict, list):
            _see(isinstance(raw_data, inst_type), raw_data, inst_type, _path)
        if inst_type is EPath:
            _see(isinstance(raw_data, (str, os.PathLike)), raw_data, inst_type, _path)
            return EPath(raw_data)
        return raw_data

    def safe_call_function(
        self, raw_data: Mapping[str, Any] | list[Any], fn: Callable[..., Any], allow_imports: bool = False
    ) -> Any:
        """Call a function with plain data converted to the declared types of its arguments.

        Args:
            raw_data: the arguments, by name or in order.
            fn: the function.

        Raises:
            ConfigError: an argument is missing, unknown, or not of its type.
        """
        if not isinstance(raw_data, Mapping):
            names = inspect.signature(fn).parameters
            _see(len(raw_data) <= len(names), raw_data, fn, "root")
            raw_data = dict(zip(names, raw_data, strict=False))
        return fn(**self._arguments(raw_data, fn, allow_imports, "root"))

    def _arguments(
        self, raw: Mapping[str, Any], fn: Callable[..., Any], allow_imports: bool, path: str, strict: bool = True
    ) -> dict[str, Any]:
        """Convert the arguments of a function, or the fields of a record, by their names."""
        parameters = inspect.signature(fn).parameters
        unknown = [name for name in raw if name not in parameters] if strict else []
        if unknown:
            fix = did_you_mean(unknown[0], list(parameters), f"use some of: {', '.join(parameters)}")
            raise ConfigError(f"{fn.__name__} has no {unknown[0]!r}", at=path, fix=fix)
        needed = [name for name, parameter in parameters.items() if parameter.default is parameter.empty]
        if missing := [name for name in needed if name not in raw]:
            raise ConfigError(f"{fn.__name__} needs {missing[0]!r}", at=path, fix="write it")
        hints = typing.get_type_hints(fn)
        return {
            name: self.raw_to_typed(raw[name], hints.get(name, Any), allow_imports, f"{path}.{name}")
            for name in parameters
            if name in raw
        }

    def _of_any(self, raw: Any, kinds: tuple[Any, ...], allow_imports: bool, path: str) -> Any:
        errors = []
        for kind in kinds:
            try:
                return self.raw_to_typed(raw, kind, allow_imports, path)
            except ConfigError as error:
                errors.append(error)
        raise max(errors, key=lambda error: len(error.at or ""))  # the error deepest in the data

    def _record(self, raw: Any, kind: Any, allow_imports: bool, path: str) -> Any:
        _see(isinstance(raw, dict), raw, kind, path)
        given = self._arguments(raw, kind, allow_imports, path, self.strict)
        try:
            return kind(**given)
        except Exception as error:
            raise ConfigError(f"{kind.__name__} refuses these arguments: {error}", at=path, fix="correct it") from error


def load_config(
    path: str | os.PathLike[str] | Mapping[str, Any],
    *,
    default_type: Any,
    default_kwargs: Mapping[str, Any] | None = None,
    parser: JsonParser = JsonParser(),  # noqa: B008  # it has no state
) -> Any:
    """Make the object that a file, or a dict, describes.

    Args:
        path: a ``dataset.yaml`` of a prepared folder, for a factory type; or any YAML or JSON.
        default_type: type of the object; a class that the data names must be known here.
        default_kwargs: further arguments, over which those in the file take precedence.
        parser: parser for types other than factories.

    Raises:
        ConfigError: the file does not describe this type, or names code.

    Example:
        >>> load_config(EPath("coco/.nv-meta/dataset.yaml"), default_type=StandardWebdatasetFactory,
        ...             default_kwargs={"path": "coco", "split_part": "train", "worker_config": config}).build()
    """
    given = dict(default_kwargs or {})
    is_factory = isinstance(default_type, type) and issubclass(default_type, BaseCoreDatasetFactory)
    if is_factory and not isinstance(path, Mapping):
        name, folder = os.path.basename(os.fspath(path)), given.pop("path")
        if os.path.join(os.fspath(folder), ".nv-meta", name) != os.fspath(path):
            raise ConfigError(
                "not a file of the data set", file=os.fspath(path), fix=f"give {folder}/.nv-meta/<name of the file>"
            )
        return get_dataset_from_config(folder, dataset_config=name, **given)
    data = path if isinstance(path, Mapping) else load_yaml(os.fspath(path)).plain()
    return parser.raw_to_typed({**given, **data}, default_type, allow_imports=True)


def _see(good: bool, raw: Any, kind: Any, path: str) -> None:
    if not good:
        wanted = getattr(kind, "__name__", None) if isinstance(kind, type) else None
        raise ConfigError("not of its type", at=path, expected=wanted or str(kind), found=repr(raw)[:200])


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
        f"a {type(obj).__name__} is not plain data", fix="give dataclasses, dicts, lists, texts and numbers"
    )


class _Frame(NamedTuple):
    timestamp: int
    is_keyframe: bool


class AVProbeIndex:
    """Frames of a video stream in the order of the file. The whole file is read, without decoding.

    Args:
        container: result of ``av.open``; its position is at the beginning afterwards.
        stream_idx: index among the video streams.

    Example:
        >>> AVProbeIndex(av.open("a.avi")).search_timestamp(1000)  # the number of the key frame at or before it
        250
    """

    def __init__(self, container: Any, stream_idx: int = 0):
        packets = (packet for packet in container.demux(video=stream_idx) if packet.pts is not None)
        self._frames = [_Frame(packet.pts, packet.is_keyframe) for packet in packets]
        container.seek(0)

    def __len__(self) -> int:
        return len(self._frames)

    def __getitem__(self, idx: int) -> _Frame:
        return self._frames[idx]

    def search_timestamp(self, timestamp: int, *, backward: bool = True, any_frame: bool = False) -> int:
        """Return the number of a frame near a time, or the first candidate if the time is before it.

        Args:
            timestamp: time in ticks of the stream's clock.
            backward: True for the last frame at or before the time; False for the first one at or after it.
            any_frame: True to consider all frames, not only key frames.

        Returns:
            The number of the frame; -1 if there is none.
        """
        candidates = [at for at, frame in enumerate(self._frames) if any_frame or frame.is_keyframe]
        times = np.array([self._frames[at].timestamp for at in candidates], dtype=np.int64)
        place = int(times.searchsorted(timestamp, "right" if backward else "left"))
        place = max(place - 1, 0) if backward else place
        return candidates[place] if place < len(candidates) else -1


def prepare_filesystem_dataset(
    root_path: str | os.PathLike[str],
    media_filter: MediaFilterConfig,
    *,
    progress: bool,
    workers: int = 16,
    index_sqlite_tmp_path: Any = None,
) -> int:
    """Extract the metadata of the media files below a folder; return their number.

    Args:
        root_path: the folder.
        media_filter: rule that selects media files.
        progress: ignored; the command `energon-lite prepare-media` shows progress.
        workers: the most processes.
        index_sqlite_tmp_path: a folder in which the database is first written.
    """
    from energon_lite.extras.media.media_scan import prepare_media

    tmp_path = None if index_sqlite_tmp_path is None else os.fspath(index_sqlite_tmp_path)
    return prepare_media(root_path, media_filter, workers=workers, tmp_path=tmp_path).found
