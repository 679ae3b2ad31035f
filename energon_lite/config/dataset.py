"""``.nv-meta/dataset.yaml``: how the parts of a shard become a sample."""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from energon_lite.config.class_names import CLASS_KEYS, dataset_class, sample_type
from energon_lite.config.paths import missing_file_fix
from energon_lite.config.yaml_document import YamlNode, load_yaml
from energon_lite.errors import ConfigError, TrustError
from energon_lite.samples import SAMPLE_TYPES, Sample

__all__ = ["DatasetConfig", "load_dataset_config"]

logger = logging.getLogger(__name__)

_CRUDE_KEYS = frozenset({"part_filter", "subflavors"})
_STANDARD_KEYS = frozenset({"sample_type", "field_map", "sample_loader", "part_filter", "subflavors"})

#: Keys of Energon that tune how its workers walk over shards. Our workers walk over nothing, so they do nothing here.
_IGNORED_KEYS = frozenset({"parallel_shard_iters", "shuffle_over_epochs", "max_samples_per_sequence"})

#: Keys that older versions of Energon read from here.
_DECODER_KEYS = ("auto_decode", "image_decode", "av_decode", "video_decode_audio", "ignore_decoder_errors")

_BASE_FIELDS = frozenset(f.name for f in dataclasses.fields(Sample))


@dataclass(frozen=True)
class DatasetConfig:
    """What a ``dataset.yaml`` says.

    Args:
        kind: ``"standard"`` makes samples of ``sample_type``, ``"crude"`` hands the parts over as they are.
        sample_type: a key of ``SAMPLE_TYPES``; a class if the document named one of the caller's own; None if crude.
        field_map: which part (and which entry in it) fills which field of the sample.
        sample_loader: ``file.py:function`` relative to the document's folder, instead of a field map (trusted code).
        part_filter: names of the parts to read; or ``file.py:function`` (trusted code); None = all, or by field map.
        subflavors: labels for every sample of this data set.
        origin: the file, for later messages.
    """

    kind: Literal["standard", "crude"]
    sample_type: str | type[Sample] | None = None
    field_map: dict[str, str] | None = None
    sample_loader: str | None = None
    part_filter: str | list[str] | None = None
    subflavors: dict[str, Any] = field(default_factory=dict)
    origin: str = ""


def load_dataset_config(path: str | os.PathLike[str], *, trust_code: bool = False) -> DatasetConfig:
    """Read and check a ``dataset.yaml``, as written by hand or by either library's ``prepare``.

    Args:
        path: the file.
        trust_code: allow the document to name Python code (a sample type of another module, a ``sample_loader``).

    Raises:
        ConfigError: anything wrong in it, with line, place and cure.
        TrustError: it names code and ``trust_code`` is False.

    Example:
        >>> load_dataset_config("digits/.nv-meta/dataset.yaml").field_map
        {'image': 'png', 'caption': 'txt'}
    """
    file = os.fspath(path)
    if not os.path.isfile(file):
        raise ConfigError(
            "the data set's configuration is missing",
            file=file,
            expected="a YAML file that says how to load a sample",
            found=f"no such file: {os.path.abspath(file)}",
            fix=_write_it(file),
        )
    document = load_yaml(file)
    entries = dict(document.items())
    kind, typed = dataset_class({key: entries[key] for key in CLASS_KEYS if key in entries})
    for key in _DECODER_KEYS:
        if key in entries:
            raise entries[key].error(
                f"{key!r} does not belong into dataset.yaml",
                found=repr(key),
                fix="remove it, and set the task encoder's decoder: decoder = SampleDecoder(...)",
                at_key=True,
            )
    if kind == "crude":
        return _crude(document, trust_code)
    return _standard(document, typed, trust_code)


def _write_it(file: str) -> str:
    folder, name = os.path.split(os.path.abspath(file))
    if name != "dataset.yaml":
        return missing_file_fix(file, "correct the name (dataset_config), or write the file")
    return f"write it, or run: energon-lite prepare {os.path.dirname(folder)}"


def _note_ignored(entries: Mapping[str, YamlNode]) -> None:
    for key in sorted(_IGNORED_KEYS & entries.keys()):
        logger.info("%s: %r has no effect here (order does not depend on workers or shards)", entries[key].origin, key)


def _crude(document: YamlNode, trust_code: bool) -> DatasetConfig:
    entries = dict(document.items())
    for key in ("sample_loader", "field_map", "sample_type"):
        if key in entries:
            raise entries[key].error(
                f"{key!r} does not go with CrudeWebdataset, which hands the parts over as they are",
                expected="part_filter, subflavors",
                found=repr(key),
                fix="remove it, or remove '__class__: CrudeWebdataset'",
                at_key=True,
            )
    entries = document.mapping(optional=CLASS_KEYS | _CRUDE_KEYS | _IGNORED_KEYS)
    _note_ignored(entries)
    return DatasetConfig(
        kind="crude",
        part_filter=_part_filter(entries.get("part_filter"), document.file, trust_code),
        subflavors=read_subflavors(entries.get("subflavors")),
        origin=document.file,
    )


def _standard(document: YamlNode, typed: str | None, trust_code: bool) -> DatasetConfig:
    entries = document.mapping(
        required=() if typed else {"sample_type"}, optional=CLASS_KEYS | _STANDARD_KEYS | _IGNORED_KEYS
    )
    _note_ignored(entries)
    if typed is not None and "sample_type" in entries:
        raise entries["sample_type"].error(
            "the data set's class already says the sample type",
            expected=f"no sample_type (the class means {typed})",
            found=entries["sample_type"].describe(),
            fix="remove '__module__' and '__class__' at the top",
            at_key=True,
        )
    chosen = typed or sample_type(entries["sample_type"], trust_code=trust_code)
    ways = [entries[key] for key in ("field_map", "sample_loader") if key in entries and not entries[key].is_null]
    if len(ways) != 1:
        raise (ways[1] if ways else document).error(
            "both 'field_map' and 'sample_loader'" if ways else "neither 'field_map' nor 'sample_loader'",
            expected="exactly one of field_map, sample_loader",
            found="both" if ways else document.describe(),
            fix="remove one of them" if ways else f"add 'field_map:' with {_example(chosen)}",
            at_key=True,
        )
    fields: dict[str, str] | None = None
    loader: str | None = None
    parts = entries.get("part_filter")
    has_filter = parts is not None and not parts.is_null
    if ways[0].path == "field_map":
        fields = _field_map(ways[0], chosen)
        if parts is not None and has_filter:
            raise parts.error(
                "'part_filter' does not go with 'field_map', which already says the parts",
                expected="no part_filter",
                found=parts.describe(),
                fix="remove part_filter",
                at_key=True,
            )
    else:
        loader = _code(ways[0], document.file, trust_code)
        if not has_filter:
            raise ways[0].error(
                "'sample_loader' without 'part_filter'",
                expected="both keys",
                found="'sample_loader' alone",
                fix="add 'part_filter: [jpg, json]' with the parts that it needs",
                at_key=True,
            )
    return DatasetConfig(
        kind="standard",
        sample_type=chosen,
        field_map=fields,
        sample_loader=loader,
        part_filter=_part_filter(parts, document.file, trust_code),
        subflavors=read_subflavors(entries.get("subflavors")),
        origin=document.file,
    )


def _fields_of(chosen: str | type[Sample]) -> tuple[str, list[str], list[str]]:
    """Name, required and optional fields of a sample type."""
    cls = SAMPLE_TYPES[chosen] if isinstance(chosen, str) else chosen
    own = [f for f in dataclasses.fields(cls) if f.name not in _BASE_FIELDS and f.init]
    required = [f.name for f in own if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]
    return cls.__name__, required, [f.name for f in own if f.name not in required]


def _example(chosen: str | type[Sample]) -> str:
    _, required, optional = _fields_of(chosen)
    return "{" + ", ".join(f"{name}: <part>" for name in required or optional[:1]) + "}"


def _field_map(node: YamlNode, chosen: str | type[Sample]) -> dict[str, str]:
    name, required, optional = _fields_of(chosen)
    fields: dict[str, str] = {}
    for key, value in node.items():
        if key not in required and key not in optional:
            raise value.error(
                f"{name} has no field {key!r}",
                expected=f"the fields {', '.join(required + optional)}",
                found=repr(key),
                choices=required + optional,
                suggest_for=key,
                fix="map the fields of this sample type, or choose another sample_type",
                at_key=True,
            )
        if isinstance(value.value, list):
            raise value.wrong("text that names a part of the sample", 'write alternatives as one text: "jpg,png"')
        fields[key] = value.string("text that names a part of the sample, e.g. jpg or json[text]")
    missing = [key for key in required if key not in fields]
    if missing:
        raise node.error(
            f"field_map leaves out the field {missing[0]!r} of {name}",
            expected=f"the fields {', '.join(required)}",
            found=node.describe(),
            fix=f"add '{missing[0]}: <part>'",
            at_key=True,
        )
    return fields


def _part_filter(node: YamlNode | None, file: str, trust_code: bool) -> str | list[str] | None:
    if node is None or node.is_null:
        return None
    if isinstance(node.value, str):
        return _code(node, file, trust_code)
    return [part.string("the name of a part, e.g. jpg") for part in node.sequence("names of parts")]


def _code(node: YamlNode, file: str, trust_code: bool) -> str:
    """A reference ``file.py:function`` to code beside the document."""
    text = node.string("file.py:function")
    name = node.path
    if not trust_code:
        is_filter = name == "part_filter"
        raise node.error(
            f"{name!r} names Python code, which would have to be run",
            expected="a list of part names" if is_filter else "a field_map",
            found=node.describe(),
            fix="if you trust the document and the code, pass trust_code=True"
            + ("; or write the parts as a list: [jpg, json]" if is_filter else ""),
            kind=TrustError,
        )
    script = Path(file).parent / text.rpartition(":")[0] if ":" in text else Path(file).parent / text
    if not script.is_file():
        raise node.error(
            f"the code that {name!r} names is not there",
            expected="a Python file, relative to the folder of this document",
            found=f"no such file: {os.path.abspath(script)}",
            fix=missing_file_fix(str(script), "correct the name, or put the file there"),
        )
    return text


def read_subflavors(node: YamlNode | None) -> dict[str, Any]:
    """The labels under ``subflavors:``; none if it is not there or empty."""
    if node is None or node.is_null:
        return {}
    return {key: value.plain() for key, value in node.items()}
