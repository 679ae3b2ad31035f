"""The contents of ``dataset.yaml``, checked against the data before it is written.

A wrong field map is cheap to detect here, where a few samples are available, and expensive in a training run.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from energon_lite.errors import ConfigError, DecodeError, FieldAccessError, UsageError
from energon_lite.samples import BASE_FIELDS, SAMPLE_TYPES, Sample
from energon_lite.storage.prepare.dataset_scan import DatasetScan
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import FieldMap, compile_field_map

#: The class name of crude data sets, as in Energon.
CRUDE = "CrudeWebdataset"
#: The file next to ``dataset.yaml`` that may define the fields by code.
SAMPLE_LOADER = "sample_loader.py"
#: Samples that a field map is tried on; the map is wrong if it fits none of them.
_TRIED = 8


def sample_fields(sample_type: str) -> list[dataclasses.Field[Any]]:
    """The fields of a sample type that a field map may name; those that every sample has are left out."""
    return [field for field in dataclasses.fields(find_sample_type(sample_type)) if field.name not in BASE_FIELDS]


def is_required(field: dataclasses.Field[Any]) -> bool:
    """Return True if a field map must name a field."""
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def find_sample_type(name: str) -> type[Sample]:
    """Return the sample class of that name.

    Raises:
        ConfigError: there is none; the message suggests the nearest name.
    """
    if name not in SAMPLE_TYPES:
        raise ConfigError(
            f"sample type {name!r} is unknown", choices=[*SAMPLE_TYPES, CRUDE], suggest_for=name, at="sample_type"
        )
    return SAMPLE_TYPES[name]


def sample_document(
    scan: DatasetScan,
    *,
    sample_type: str | None,
    field_map: Mapping[str, str] | None,
    crude: bool = False,
) -> dict[str, Any] | None:
    """Return the document to write as ``dataset.yaml``; None if the arguments do not describe samples.

    Args:
        scan: the data set; the field map is tried on its samples.
        sample_type: name of a sample type, or :data:`CRUDE`.
        field_map: expression by field.
        crude: the same as ``sample_type=CRUDE``.

    Raises:
        UsageError: the arguments do not fit together.
        ConfigError: a type, field or part is unknown, a field is missing, or the map fits none of the tried samples.
    """
    if crude or sample_type == CRUDE:
        if field_map is not None or sample_type not in (None, CRUDE):
            raise UsageError("a crude data set has neither a sample type nor a field map", fix="leave one of them out")
        return {"__module__": "megatron.energon", "__class__": CRUDE}
    if sample_type is None:
        if field_map is not None:
            raise UsageError("a field map needs a sample type", fix="--sample-type CaptioningSample, for example")
        return None
    find_sample_type(sample_type)
    if field_map is None:
        fields = json.dumps({field.name: "..." for field in sample_fields(sample_type) if is_required(field)})
        raise UsageError(
            f"{sample_type} needs a field map, which says what part of a sample becomes which field",
            fix=f"--field-map '{fields}' with parts out of: {', '.join(list(scan.parts)[:10])}",
        )
    compiled = compile_field_map(field_map)
    _check_fields(sample_type, field_map)
    check_parts(compiled, scan.parts)
    _try_on_samples(compiled, scan)
    return {"sample_type": class_of(sample_type), "field_map": dict(field_map)}


def class_of(sample_type: str) -> dict[str, str]:
    """Return the name of a sample type in documents, under which Energon finds it, too."""
    # Energon does not export this one type at its top level.
    module = "megatron.energon.flavors.vqa_and_ocr" if sample_type == "VQAOCRSample" else "megatron.energon"
    return {"__module__": module, "__class__": sample_type}


def _check_fields(sample_type: str, field_map: Mapping[str, str]) -> None:
    fields = sample_fields(sample_type)
    names = [field.name for field in fields]
    for name in field_map:
        if name not in names:
            raise ConfigError(
                f"{sample_type} has no field {name!r}", at=f"field_map.{name}", choices=names, suggest_for=name
            )
    missing = [field.name for field in fields if is_required(field) and field.name not in field_map]
    if missing:
        raise ConfigError(
            f"{sample_type} needs {', '.join(map(repr, missing))}",
            at="field_map",
            found=f"only {', '.join(map(repr, field_map)) or 'nothing'}",
            fix=f"add an entry for {missing[0]!r}",
        )


def check_parts(field_map: FieldMap, parts: Mapping[str, int]) -> None:
    """Refuse a field map with a field whose parts no sample has.

    Raises:
        ConfigError: there is such a field; the message suggests the nearest name.
    """
    for field, accesses in field_map.fields:
        wanted = [access.part for access in accesses]
        if not any(part in parts for part in wanted):
            raise ConfigError(
                f"no sample has a part {' or '.join(map(repr, wanted))}",
                at=f"field_map.{field}",
                choices=list(parts)[:20],
                suggest_for=wanted[0],
            )


def _try_on_samples(field_map: FieldMap, scan: DatasetScan) -> None:
    """Apply the map to some samples, without decoding images and the like."""
    nested = {access.part for _, accesses in field_map.fields for access in accesses if access.steps}
    decoder = SampleDecoder(image_decode=None)
    step = max(1, scan.samples // _TRIED)
    failure: FieldAccessError | None = None
    for raw in scan.read(range(0, scan.samples, step)[:_TRIED]):
        try:
            field_map.apply({n: decoder.decode(n, data) if n in nested else data for n, data in raw.parts.items()})
            return
        except FieldAccessError as error:
            failure = failure or FieldAccessError(error.what, where=f"sample {raw.key!r}", fix=error.fix)
        except DecodeError:  # a broken sample does not tell if the map is right
            return
    if failure is not None:
        raise ConfigError(
            f"the field map fits none of the tried samples: {failure.what}",
            at=f"field_map, tried on {failure.where}",
            fix=failure.fix,
        )
