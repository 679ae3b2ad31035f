"""The user's choices about a folder of shards: its division into splits, and the description of its samples.

Splits consist of whole shards. The ratio is applied as in Energon (the n-th split ends at the integer part of its
cumulated share), but with exact fractions: 0.7,0.2,0.1 of ten shards are seven, two and one.

The contents of ``dataset.yaml`` are checked against the data before they are written: a wrong field map is cheap to
detect here, where a few samples are available, and expensive in a training run.
"""

from __future__ import annotations

import dataclasses
import json
import random
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import Any

from energon_lite.documents.paths import expand_braces
from energon_lite.errors import ConfigError, DecodeError, FieldAccessError, UsageError, counted
from energon_lite.samples import SAMPLE_TYPES, Sample
from energon_lite.samples.sample import is_required, own_fields
from energon_lite.storage.dataset_scan import DatasetScan
from energon_lite.storage.index.nv_meta import DATASET_YAML
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import FieldMap, compile_field_map

#: The splits that a ratio divides shards among.
RATIO_SPLITS = ("train", "val", "test")
_NUMBER = re.compile(r"([0-9]+)")
#: The seed with which Energon shuffles shards, so that both libraries make the same splits.
_SHUFFLE_SEED = 42
#: The class name of crude data sets, as in Energon.
CRUDE = "CrudeWebdataset"
#: The file next to ``dataset.yaml`` that may define the fields by code.
SAMPLE_LOADER = "sample_loader.py"
#: Samples that a field map is tried on; the map is wrong if it fits none of them.
_TRIED = 8


@dataclass(frozen=True)
class Choice:
    """The user's choices about a folder: splits, and the description of samples.

    Args:
        splits: shard names by split.
        may_be_empty: splits that are expected to have no shards.
        dataset_document: contents of ``dataset.yaml``; None leaves that file as it is, or missing.
        dataset_yaml_name: name of that file.
        files: contents of other files in ``.nv-meta``, by name; existing ones are not replaced.
    """

    splits: Mapping[str, Sequence[str]]
    may_be_empty: Collection[str] = ()
    dataset_document: Mapping[str, Any] | None = None
    dataset_yaml_name: str = DATASET_YAML
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)


# -- splits ----------------------------------------------------------------------------------------------------------


def parse_ratio(ratio: str | Sequence[float]) -> tuple[Fraction, ...]:
    """Parse the shares of train, val and test: ``"8,1,1"``, ``"0.8, 0.1, 0.1"`` or numbers.

    Raises:
        UsageError: not three numbers >= 0 with a sum > 0.
    """
    values = ratio.split(",") if isinstance(ratio, str) else list(ratio)
    try:
        shares = tuple(Fraction(str(value).strip()) for value in values)
    except (ValueError, ZeroDivisionError):
        shares = ()
    if len(shares) != 3 or min(shares) < 0 or not sum(shares):
        raise UsageError(
            f"{ratio!r} is not a ratio of train, val and test",
            fix='give three numbers >= 0 like "8,1,1" or "0.9,0.1,0"; for other splits use --split-parts name:regex',
        )
    return shares


def divide_by_ratio(
    shards: Sequence[str], ratio: str | Sequence[float], *, shuffle: bool = False
) -> dict[str, list[str]]:
    """Divide shards among train, val and test.

    Args:
        shards: names, in order.
        ratio: see :func:`parse_ratio`; counted in shards.
        shuffle: mix the shards first (always in the same way).

    Example:
        >>> divide_by_ratio(["a", "b", "c", "d"], "2,1,1")
        {'train': ['a', 'b'], 'val': ['c'], 'test': ['d']}
    """
    shares = parse_ratio(ratio)
    order = list(shards)
    if shuffle:
        random.Random(_SHUFFLE_SEED).shuffle(order)
    stops = [int(len(order) * until / sum(shares)) for until in accumulate(shares, initial=Fraction(0))]
    return {name: order[start:stop] for name, (start, stop) in zip(RATIO_SPLITS, pairwise(stops), strict=True)}


def meant_to_be_empty(ratio: str | Sequence[float]) -> tuple[str, ...]:
    """Return the splits without a share in a ratio.

    Example:
        >>> meant_to_be_empty("9,1,0")
        ('test',)
    """
    return tuple(name for name, share in zip(RATIO_SPLITS, parse_ratio(ratio), strict=True) if not share)


def parse_pattern(text: str) -> tuple[str, str]:
    """Parse ``"name:regex"`` into (name, regex).

    Raises:
        UsageError: the name or the regex is missing.
    """
    name, colon, pattern = text.partition(":")
    if not name.strip() or not colon or not pattern.strip():
        raise UsageError(
            f"{text!r} is not of the form name:regex",
            fix='write --split-parts "train:train/.*" --split-parts "val:val/.*"',
        )
    return name.strip(), pattern


def divide_by_patterns(shards: Sequence[str], patterns: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """Divide shards by regular expressions that match from the start of their names.

    Args:
        shards: names, in order.
        patterns: (split, regular expression); braces such as ``{00..12}`` are expanded. A split may appear repeatedly.

    Raises:
        UsageError: an expression is invalid, or matches no shard.

    Example:
        >>> divide_by_patterns(["a/0.tar", "b/0.tar"], [("train", "a/.*"), ("val", "b/.*")])
        {'train': ['a/0.tar'], 'val': ['b/0.tar']}
    """
    chosen: dict[str, set[str]] = {}
    for split, pattern in patterns:
        try:
            expressions = [re.compile(text) for text in expand_braces(pattern)]
        except (re.error, ValueError, RecursionError) as error:
            words = error if isinstance(error, re.error) else f"its braces {error}"
            raise UsageError(
                f"{pattern!r} (for split {split!r}) is not a regular expression: {words}",
                fix="a pattern is a regular expression, not a glob: write '.*' for any text, '\\.' for a dot",
            ) from None
        matching = {name for name in shards if any(expression.match(name) for expression in expressions)}
        if not matching:
            raise UsageError(
                f"{pattern!r} (for split {split!r}) matches none of the {counted(len(shards), 'shard')}",
                fix="it is a regular expression (not a glob) matched from the start of the name; shards are called "
                + ", ".join(repr(name) for name in shards[:3]),
            )
        chosen[split] = chosen.get(split, set()) | matching
    return {split: [name for name in shards if name in selected] for split, selected in chosen.items()}


def divide(
    shards: Sequence[str],
    ratio: str | Sequence[float] | None,
    patterns: Sequence[tuple[str, str]] = (),
    *,
    shuffle: bool = False,
) -> tuple[dict[str, list[str]], tuple[str, ...]]:
    """Divide shards by a ratio, or by patterns if that is None; return the splits, and those that may be empty.

    Raises:
        UsageError: as :func:`divide_by_ratio`, :func:`divide_by_patterns`.
    """
    if ratio is None:
        return divide_by_patterns(shards, patterns), ()
    return divide_by_ratio(shards, ratio, shuffle=shuffle), meant_to_be_empty(ratio)


def split_notes(
    splits: Mapping[str, Sequence[str]], shards: Sequence[str], may_be_empty: Collection[str] = ()
) -> list[str]:
    """Describe oddities of a division: splits without shards, shards in two splits or in none."""
    notes = []
    empty = [name for name, chosen in splits.items() if not chosen and name not in may_be_empty]
    if empty:
        split = "split" if len(empty) == 1 else "splits"
        notes.append(
            f"{split} {', '.join(map(repr, empty))} got no shard, because whole shards are divided, and there are "
            f"{len(shards)}: write more and smaller shards, or choose with --split-parts name:regex"
        )
    owner: dict[str, str] = {}
    for name, chosen in splits.items():
        shared = [(owner[shard], shard) for shard in chosen if shard in owner]
        if shared:
            notes.append(
                f"splits {shared[0][0]!r} and {name!r} share {counted(len(shared), 'shard')}, such as {shared[0][1]!r}"
            )
        owner |= dict.fromkeys(chosen, name)
    unused = [shard for shard in shards if shard not in owner]
    if unused:
        notes.append(f"{counted(len(unused), 'shard')} in no split, such as {unused[0]!r}")
    return notes


def collapse_names(names: Sequence[str]) -> list[str]:
    """Write runs of names that differ in one ascending number as brace patterns, in the same order.

    Example:
        >>> collapse_names(["a/000.tar", "a/001.tar", "a/002.tar", "b.tar"])
        ['a/{000..002}.tar', 'b.tar']
    """
    #: For each run the words of its first and of its last name, and the position of the ascending number.
    runs: list[tuple[list[str], list[str], int | None]] = []
    for words in map(_NUMBER.split, names):
        first, last, place = runs[-1] if runs else ([], [], None)
        changed = _counted_up(last, words)
        if changed is None or place not in (None, changed):
            runs.append((words, words, None))
        else:
            runs[-1] = first, words, changed
    return [
        "".join(first if place is None else [*first[:place], f"{{{first[place]}..{last[place]}}}", *first[place + 1 :]])
        for first, last, place in runs
    ]


def _counted_up(before: list[str], after: list[str]) -> int | None:
    """The only position where ``after`` has the next number in the same width; None if there is none."""
    if len(before) != len(after):
        return None
    places = [place for place, (earlier, later) in enumerate(zip(before, after, strict=True)) if earlier != later]
    if len(places) != 1 or places[0] % 2 == 0:  # text stands at even places, numbers at odd ones
        return None
    earlier, later = before[places[0]], after[places[0]]
    return places[0] if len(earlier) == len(later) and int(later) == int(earlier) + 1 else None


# -- dataset.yaml ----------------------------------------------------------------------------------------------------


def sample_fields(sample_type: str) -> tuple[dataclasses.Field[Any], ...]:
    """The fields of a sample type that a field map may name; those that every sample has are left out."""
    return own_fields(find_sample_type(sample_type))


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
    compiled.check_parts(scan.parts)
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
