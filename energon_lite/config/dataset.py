"""Reader of ``.nv-meta/dataset.yaml``, which maps the parts of a sample to its fields."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from energon_lite.config.class_names import CLASS_KEYS, dataset_class, foreign_dataset_class, sample_type
from energon_lite.documents import Node, read
from energon_lite.documents.paths import missing_file_fix
from energon_lite.errors import ConfigError, TrustError
from energon_lite.samples import SAMPLE_TYPES, Sample
from energon_lite.samples.sample import is_required, own_fields

logger = logging.getLogger(__name__)

#: Keys of Energon that tune how its workers iterate over shards. They have no effect here: workers do not own shards.
_IGNORED_KEYS = frozenset({"parallel_shard_iters", "shuffle_over_epochs", "max_samples_per_sequence"})

#: Keys of decoder settings that older versions of Energon read from this file.
_DECODER_KEYS = ("auto_decode", "image_decode", "av_decode", "video_decode_audio", "ignore_decoder_errors")


@dataclass(frozen=True)
class DatasetConfig:
    """Contents of a ``dataset.yaml``.

    Args:
        kind: ``"standard"`` makes samples of ``sample_type``, ``"crude"`` returns the parts unchanged.
        sample_type: a key of ``SAMPLE_TYPES``; a class if the document names one of the user's own; None if crude.
        field_map: field of the sample -> part (and entry in it) that fills it.
        sample_loader: ``file.py:function`` relative to the document's folder, instead of a field map (trusted code).
        columns: for a table (Parquet, Arrow, Lance): part -> column.
        part_filter: names of the parts to read; or ``file.py:function`` (trusted code); None: all, or by field map.
        subflavors: labels for every sample of this data set.
        origin: the file, for messages.
        factory: a data set class of the user's own (trusted code); then the rest of the document is its
            ``arguments``, and ``kind`` has no meaning.
        image_size: size of decoded images, in place of the decoder's.
    """

    kind: Literal["standard", "crude"]
    sample_type: str | type[Sample] | None = None
    field_map: dict[str, str] | None = None
    sample_loader: str | None = None
    part_filter: str | list[str] | None = None
    subflavors: dict[str, Any] = field(default_factory=dict)
    origin: str = ""
    factory: Any = None
    arguments: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, str] | None = None
    image_size: Node | None = None


def load_dataset_config(path: str | os.PathLike[str], *, trust_code: bool = False) -> DatasetConfig:
    """Read and check a ``dataset.yaml``, written by hand or by either library's ``prepare``.

    Args:
        path: the file.
        trust_code: allow the document to name Python code (a sample type of another module, a ``sample_loader``).

    Raises:
        ConfigError: the document has a mistake; the message has its line, place and fix.
        TrustError: the document names code and ``trust_code`` is False.

    Example:
        >>> load_dataset_config("digits/.nv-meta/dataset.yaml").field_map
        {'image': 'png', 'caption': 'txt'}
    """
    from energon_lite.documents import load_yaml  # PyYAML is imported when there is something to parse

    file = os.fspath(path)
    if not os.path.isfile(file):
        what, expected = "the data set's configuration is missing", "a YAML file that says how to load a sample"
        raise missing_meta_file(what, file, "dataset.yaml", "dataset_config", expected)
    document = load_yaml(file)
    if (factory := foreign_dataset_class(document.entries(), trust_code=trust_code)) is not None:
        others = {key: node for key, node in document.entries().items() if key not in CLASS_KEYS}
        arguments = {key: node.plain() for key, node in others.items()}
        if "sample_type" in others:
            named = sample_type(others["sample_type"], trust_code=True)
            arguments["sample_type"] = SAMPLE_TYPES[named] if isinstance(named, str) else named
        return DatasetConfig("standard", origin=file, factory=factory, arguments=arguments)
    kind, typed = dataset_class(document.entries())
    fix = "remove it, and set the task encoder's decoder: decoder = SampleDecoder(...)"
    document.refuse(_DECODER_KEYS, "does not belong in dataset.yaml", fix, "no decoder's settings here")
    given: dict[str, Any] = {}
    if kind == "crude":
        what = "cannot be used with CrudeWebdataset, which keeps the parts unchanged"
        fix = "remove it, or remove '__class__: CrudeWebdataset'"
        given = dict.fromkeys(("sample_loader", "field_map", "sample_type"))
        document.refuse(given, what, fix, "part_filter, subflavors")
    elif typed is not None:
        what = "repeats the sample type, which the class already determines"
        fix = "remove '__module__' and '__class__' at the top"
        given = {"sample_type": None}
        document.refuse(given, what, fix, f"no sample_type (the class means {typed})")
    keys = read(document, _Document, ignored=CLASS_KEYS | _IGNORED_KEYS, **given)
    for key in sorted(_IGNORED_KEYS & document.value.keys()):
        where = document.value[key].origin
        logger.info("%s: %r has no effect here (order does not depend on workers or shards)", where, key)
    if keys.tags is not None and keys.subflavors is not None:
        what, fix = "both 'tags' and 'subflavors', which mean the same", "keep one of them"
        raise document.value["tags"].key_error(what, fix, expected="one of them")
    loader = keys.sample_loader
    parts = keys.part_filter
    labels = keys.tags or keys.subflavors or {}
    chosen = fields = None
    if kind == "standard":
        chosen = typed or sample_type(keys.sample_type, trust_code=trust_code)
        fields = _field_map(document, keys, chosen)
    code = None if loader is None else _code(loader, trust_code)
    part_filter = None if parts is None else _part_filter(parts, trust_code)
    columns = None if keys.columns is None else _columns(keys.columns)
    size = keys.image_size
    return DatasetConfig(kind, chosen, fields, code, part_filter, labels, file, columns=columns, image_size=size)


def meta_file_name(node: Node) -> str:
    """Read the name of a file in ``.nv-meta`` or in a folder below it."""
    expected = "the name of a file in .nv-meta"
    name = node.string(expected)
    if os.path.isabs(name) or ".." in name.split("/"):
        what = "the configuration is outside of the data set's .nv-meta folder"
        raise node.error(what, "put the file there, and write its name", expected=expected)
    return name


def load_own_splits(path: str | os.PathLike[str]) -> tuple[str | None, str | None]:
    """Read ``split_config`` and ``split_part`` of a ``dataset.yaml``; None for each that is missing.

    They take precedence over those of a reference to the data set, as in Energon. The rest of the document is not read.

    Raises:
        ConfigError: one of them is invalid.
    """
    try:
        with open(path, "rb") as file:
            if b"split_" not in file.read():
                return None, None
    except (OSError, ValueError):
        return None, None  # the error is raised where the whole document is read
    from energon_lite.documents import load_yaml

    entries = load_yaml(path).entries()
    config, part = entries.get("split_config"), entries.get("split_part")
    return (
        None if config is None or config.is_null else meta_file_name(config),
        None if part is None or part.is_null else part.string("the name of a split"),
    )


@dataclass(frozen=True)
class _Document:
    """The keys of a ``dataset.yaml``."""

    sample_type: Node
    field_map: Node | None = None
    sample_loader: Node | None = None
    part_filter: Node | None = None
    subflavors: dict[str, Any] | None = None
    split_config: Annotated[str | None, meta_file_name] = None
    split_part: Annotated[str | None, "the name of a split"] = None
    columns: Node | None = None
    image_size: Node | None = None
    tags: dict[str, Any] | None = None


def missing_meta_file(what: str, file: str, usual: str, option: str, expected: str) -> ConfigError:
    """Make the error for a missing file of ``.nv-meta``.

    Args:
        what: the mistake in one sentence.
        file: the file.
        usual: its default name.
        option: the option that sets another name.
        expected: description of a correct file.
    """
    folder, name = os.path.split(os.path.abspath(file))
    fix = f"write it, or run: energon-lite prepare {os.path.dirname(folder)}"
    if name != usual:
        fix = missing_file_fix(file, f"correct the name ({option}), or write the file")
    return ConfigError(what, file=file, expected=expected, found=f"no such file: {os.path.abspath(file)}", fix=fix)


def _part_filter(node: Node, trust_code: bool) -> str | list[str]:
    if isinstance(node.value, str):
        return _code(node, trust_code)
    return [part.string("the name of a part, e.g. jpg") for part in node.sequence("names of parts")]


def _columns(node: Node) -> dict[str, str]:
    """Map parts to columns. In a list of columns, each part has the name of its column."""
    expected = "the name of a column, e.g. caption or image[bytes]"
    if isinstance(node.value, list):
        return {name: name for name in (column.string(expected) for column in node.sequence("names of columns"))}
    return {part: column.string(expected) for part, column in node.entries().items()}


def _fields_of(chosen: str | type[Sample]) -> tuple[str, list[str], list[str]]:
    """Name, required and optional fields of a sample type."""
    cls = SAMPLE_TYPES[chosen] if isinstance(chosen, str) else chosen
    own = [field for field in own_fields(cls) if field.init]
    required = [field.name for field in own if is_required(field)]
    return cls.__name__, required, [field.name for field in own if not is_required(field)]


def _field_map(document: Node, keys: _Document, chosen: str | type[Sample]) -> dict[str, str] | None:
    """Map fields to parts; None: a sample loader makes samples of the parts."""
    name, required, optional = _fields_of(chosen)
    node = keys.field_map
    loader = keys.sample_loader
    expected = "exactly one of field_map, sample_loader"
    if node is None and loader is None:
        example = ", ".join(f"{field}: <part>" for field in required or optional[:1])
        what, fix = "neither 'field_map' nor 'sample_loader'", f"add 'field_map:' with {{{example}}}"
        raise document.error(what, fix, expected=expected)
    if node is not None and loader is not None:
        what = "both 'field_map' and 'sample_loader'"
        raise loader.key_error(what, "remove one of them", expected=expected, found="both")
    if loader is not None and keys.part_filter is None:
        what, fix = "'sample_loader' without 'part_filter'", "add 'part_filter: [jpg, json]' with the parts it needs"
        raise loader.key_error(what, fix, expected="both keys", found="'sample_loader' alone")
    if node is None:
        return None
    if keys.part_filter is not None:
        what = "'part_filter' cannot be used with 'field_map', which already names the parts"
        raise keys.part_filter.key_error(what, "remove part_filter", expected="no part_filter")
    known, fields = required + optional, {}
    for key, value in node.entries().items():
        if key not in known:
            what = f"{name} has no field {key!r}"
            fix = "map the fields of this sample type, or choose another sample_type"
            raise value.key_error(what, fix, expected=f"the fields {', '.join(known)}", choices=known)
        if isinstance(value.value, list):
            raise value.wrong("text that names a part of the sample", 'write alternatives as one text: "jpg,png"')
        fields[key] = value.string("text that names a part of the sample, e.g. jpg or json[text]")
    for key in required:
        if key not in fields:
            what, fix = f"field_map leaves out the field {key!r} of {name}", f"add '{key}: <part>'"
            expected, found = f"the fields {', '.join(required)}", node.describe()
            raise node.key_error(what, fix, expected=expected, found=found)
    return fields


def _code(node: Node, trust_code: bool) -> str:
    """Check a reference ``file.py:function`` to code in the document's folder."""
    text, name = node.string("file.py:function"), node.path
    if not trust_code:
        expected, fix = "a field_map", "if you trust the document and the code, pass trust_code=True"
        if name == "part_filter":
            expected, fix = "a list of part names", f"{fix}; or write the parts as a list: [jpg, json]"
        what = f"{name!r} names Python code, which would have to be run"
        raise node.error(what, fix, expected=expected, kind=TrustError)
    script = Path(node.file).parent / (text.rpartition(":")[0] or text)
    if not script.is_file():
        raise node.error(
            f"the code that {name!r} names is not there",
            missing_file_fix(str(script), "correct the name, or put the file there"),
            expected="a Python file, relative to the folder of this document",
            found=f"no such file: {os.path.abspath(script)}",
        )
    return text
