"""The content of one metadataset document, checked, but not yet resolved: no path is looked at here.

All splits are checked when the document is read, not only the one that is asked for, so a mistake in ``val`` shows
before training starts. What Energon knows and this library does not support yet is kept as an error, which is raised
only if that split is used.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from energon_lite.config.class_names import CLASS_KEYS, metadataset_class
from energon_lite.config.dataset import read_subflavors
from energon_lite.config.subset import Subset, read_subset
from energon_lite.config.weight_schedule import ShareIntegral, WeightSchedule, blend_shares, read_schedule
from energon_lite.config.yaml_node import YamlNode
from energon_lite.errors import ConfigError

__all__ = ["MetadatasetDocument", "Reference", "Split", "parse_metadataset"]

_REFERENCE_KEYS = frozenset(
    {"split_part", "subflavors", "shuffle_over_epochs_multiplier", "dataset_config", "split_config"}
)
_NOT_YET = frozenset({"aux"})
_REFERENCE_KEYS_V2 = _REFERENCE_KEYS | _NOT_YET | {"subset"}
_SPLIT_KINDS = ("path", "blend", "blend_epochized", "join")


@dataclass(frozen=True)
class Reference:
    """One ``path:`` with its options.

    Args:
        node: the mapping, for messages.
        path: the node of the path, not yet resolved.
        weight: as written, or 1.
        repetitions: as written, or 1; exact.
        subset: which part of what the path leads to.
        unsupported: the error to raise if this reference is used.
    """

    node: YamlNode
    path: YamlNode
    weight: float | WeightSchedule = 1.0
    repetitions: Fraction = Fraction(1)
    subset: Subset | None = None
    split_part: str | None = None
    subflavors: dict[str, Any] = field(default_factory=dict)
    shuffle_over_epochs_multiplier: int | None = 1
    dataset_config: str | None = None
    split_config: str | None = None
    unsupported: ConfigError | None = None


@dataclass(frozen=True)
class Split:
    """One entry of ``splits``.

    Args:
        references: what it is made of.
        blend: the node of the list, for messages; None for a single reference, which goes into blends of both kinds.
        epochized: the list is under ``blend_epochized``.
        subset: which part of all that.
        unsupported: the error to raise if this split is used.
    """

    references: tuple[Reference, ...]
    blend: YamlNode | None = None
    epochized: bool = False
    subset: Subset | None = None
    unsupported: ConfigError | None = None

    def shares(self) -> list[ShareIntegral]:
        """The weights, normalised to sum to 1."""
        return blend_shares([reference.weight for reference in self.references])


@dataclass(frozen=True)
class MetadatasetDocument:
    """A metadataset as written.

    Args:
        splits: by name.
        splits_node: where they stand.
        folder: what relative paths count from.
    """

    splits: dict[str, Split]
    splits_node: YamlNode
    folder: str


def parse_metadataset(document: YamlNode, folder: str) -> MetadatasetDocument:
    """Check a document of either version. If it names no class, the form of each split tells the version.

    Raises:
        ConfigError: anything wrong in it.
    """
    entries = dict(document.items())
    version = metadataset_class({key: entries[key] for key in CLASS_KEYS if key in entries})
    splits = document.mapping(required={"splits"}, optional=CLASS_KEYS)["splits"]
    parsed = {name: _split(node, version) for name, node in splits.items()}
    if not parsed:
        raise splits.error(
            "the metadataset has no splits", expected="at least one split", found=splits.describe(), fix="add 'train:'"
        )
    return MetadatasetDocument(parsed, splits, folder)


def _split(node: YamlNode, version: str | None) -> Split:
    keys = dict(node.items())
    if version == "Metadataset" or (version is None and "datasets" in keys):
        _refuse_v2(keys, version)
        entries = node.mapping(required={"datasets"})
        return Split(_blend(entries["datasets"], _reference_v1), blend=entries["datasets"])
    if "datasets" in keys:
        raise keys["datasets"].error(
            "'datasets' is the key of the older Metadataset, but this is a MetadatasetV2",
            expected=f"one of the keys {', '.join(_SPLIT_KINDS)}",
            found="'datasets'",
            fix="rename 'datasets' to 'blend'",
            at_key=True,
        )
    kinds = [kind for kind in _SPLIT_KINDS if kind in keys]
    if len(kinds) > 1:
        raise keys[kinds[1]].error(
            f"{kinds[0]!r} and {kinds[1]!r} in one split",
            expected=f"exactly one of the keys {', '.join(_SPLIT_KINDS)}",
            found=" and ".join(repr(kind) for kind in kinds),
            fix="keep one of them; what is to be blended goes into the list under 'blend'",
            at_key=True,
        )
    if not kinds:
        return _unknown_split(node, keys)
    if kinds[0] == "path":
        return Split((_reference(node),))
    if kinds[0] == "join":
        return Split((), unsupported=_not_yet(keys[kinds[0]], kinds[0]))
    entries = node.mapping(required={kinds[0]}, optional={"subset"})
    epochized = kinds[0] == "blend_epochized"
    return Split(
        _blend(entries[kinds[0]], _epochized_entry if epochized else _weighted_entry),
        blend=entries[kinds[0]],
        epochized=epochized,
        subset=_subset_of_blend(entries.get("subset"), kinds[0]),
    )


def _subset_of_blend(node: YamlNode | None, kind: str) -> Subset | None:
    if node is None or node.is_null:
        return None
    subset = read_subset(node)
    if subset.first is not None:
        raise numbers_above_leaf(node, f"a {kind}")
    return subset


def numbers_above_leaf(node: YamlNode, what: str) -> ConfigError:
    """The error for a subset by sample numbers of something that is not one data set."""
    return node.error(
        f"sample numbers count in one data set, but this is {what}",
        expected="percentages, such as [0%, 80%]",
        found=f"the range [{', '.join(str(bound) for bound in node.value['range'].plain())}]",
        fix="use percentages here, or write the subset where the folder of the data set is referred to",
        at_key=True,
    )


def _refuse_v2(keys: dict[str, YamlNode], version: str | None) -> None:
    for kind in _SPLIT_KINDS:
        if kind in keys:
            raise keys[kind].error(
                f"{kind!r} is a key of MetadatasetV2, but this is a Metadataset",
                expected="the key datasets",
                found=repr(kind),
                fix="write '__class__: MetadatasetV2' at the top"
                + (" and 'blend' instead of 'datasets'" if version is None else ""),
                at_key=True,
            )


def _unknown_split(node: YamlNode, keys: dict[str, YamlNode]) -> Split:
    """Neither path nor blend: the first key is most likely a misspelt one."""
    for key, child in keys.items():
        if key not in _REFERENCE_KEYS_V2:
            raise child.error(
                f"unknown key {key!r}",
                expected=f"one of the keys {', '.join(_SPLIT_KINDS)}",
                found=repr(key),
                choices=[*_SPLIT_KINDS, "datasets"],
                suggest_for=key,
                fix="write 'path:' for a single data set, or 'blend:' with a list of them",
                at_key=True,
            )
    raise node.error(
        "the split says no data set",
        expected=f"one of the keys {', '.join(_SPLIT_KINDS)}",
        found=node.describe(),
        fix="add 'path:' for a single data set, or 'blend:' with a list of them",
    )


def _not_yet(node: YamlNode, name: str) -> ConfigError:
    return node.error(
        f"{name!r} is not supported yet",
        expected="path, blend or blend_epochized",
        found=repr(name),
        fix="remove it; data sets can be blended, not joined" if name == "join" else "remove it",
        at_key=True,
    )


def _blend(node: YamlNode, parse: Callable[[YamlNode], Reference]) -> tuple[Reference, ...]:
    entries = node.sequence("data sets, each with a path")
    if not entries:
        raise node.error(
            "the blend is empty",
            expected="at least one data set",
            found=node.describe(),
            fix="add '- path: ...', or remove the split",
        )
    references = tuple(parse(entry) for entry in entries)
    try:
        blend_shares([reference.weight for reference in references])
    except ValueError as nothing:
        raise node.error(
            f"all weights of the blend are zero at position {nothing.args[0]}, or just before it",
            expected="a weight above 0 at every position",
            found="none",
            fix="let one data set begin before the others end",
            at_key=True,
        ) from None
    return references


def _weighted_entry(node: YamlNode) -> Reference:
    return _blend_entry(node, own="weight", other="repetitions", other_blend="blend_epochized")


def _epochized_entry(node: YamlNode) -> Reference:
    return _blend_entry(node, own="repetitions", other="weight", other_blend="blend")


def _blend_entry(node: YamlNode, own: str, other: str, other_blend: str) -> Reference:
    keys = dict(node.items())
    for kind in ("blend", "blend_epochized", "join"):
        if kind not in keys:
            continue
        if kind == "join":
            return Reference(node, path=keys[kind], unsupported=_not_yet(keys[kind], kind))
        raise keys[kind].error(
            f"{kind!r} inside of a blend",
            expected="a reference with the key path",
            found=repr(kind),
            fix="put the inner blend into a metadataset file of its own, and give that file's path here",
            at_key=True,
        )
    if other in keys:
        raise keys[other].error(
            f"{other!r} belongs to {other_blend}",
            expected=own,
            found=repr(other),
            fix=f"use {own!r}",
            at_key=True,
        )
    return _reference(node, optional=_REFERENCE_KEYS_V2 | {own})


def _reference_v1(node: YamlNode) -> Reference:
    return _reference(node, optional=_REFERENCE_KEYS | {"weight", "subflavor"})


def _reference(node: YamlNode, optional: frozenset[str] = _REFERENCE_KEYS_V2) -> Reference:
    keys = dict(node.items())
    for key, blend in (("weight", "blend"), ("repetitions", "blend_epochized")):
        if key in keys and not optional & {"weight", "repetitions"}:
            raise keys[key].error(
                f"{key!r} outside of a blend has no meaning",
                expected=f"a list under {blend!r}",
                found=repr(key),
                fix=f"remove it, or write '{blend}:' and this as an entry of its list",
                at_key=True,
            )
    entries = node.mapping(required={"path"}, optional=optional)
    used = {key: entry for key, entry in entries.items() if not entry.is_null}
    refused = [_not_yet(used[key], key) for key in sorted(_NOT_YET) if key in used]
    entries["path"].string("the path of a data set's folder or of a metadataset")
    return Reference(
        node=node,
        path=entries["path"],
        weight=_weight(entries.get("weight")),
        repetitions=_repetitions(entries.get("repetitions")),
        subset=read_subset(used["subset"]) if "subset" in used else None,
        split_part=used["split_part"].string("the name of a split") if "split_part" in used else None,
        subflavors=_subflavors(entries),
        shuffle_over_epochs_multiplier=_multiplier(entries.get("shuffle_over_epochs_multiplier")),
        dataset_config=_file_name(used.get("dataset_config")),
        split_config=_file_name(used.get("split_config")),
        unsupported=refused[0] if refused else None,
    )


def _weight(node: YamlNode | None) -> float | WeightSchedule:
    if node is None:
        return 1.0
    if isinstance(node.value, dict):
        return read_schedule(node)
    return _positive(node, "a weight")


def _repetitions(node: YamlNode | None) -> Fraction:
    """Exactly what is written: 0.1 is a tenth."""
    if node is not None and isinstance(node.value, dict):
        raise node.error(
            "repetitions cannot change along the run",
            expected="a number above 0",
            found=node.describe(),
            fix="use 'blend' with weights, which can",
        )
    return Fraction(1) if node is None else Fraction(str(_positive(node, "the number of repetitions")))


def _positive(node: YamlNode, what: str) -> float:
    number = node.number()
    if number <= 0:
        raise node.error(
            f"{what} must be above zero",
            expected="a number above 0",
            found=node.describe(),
            fix="remove the entry if it is not to be used" if number == 0 else "write a number above 0",
        )
    return number


def _subflavors(entries: dict[str, YamlNode]) -> dict[str, Any]:
    labels = read_subflavors(entries.get("subflavors"))
    older = entries.get("subflavor")
    if older is not None and not older.is_null:
        labels.setdefault("__subflavor__", older.string("a label"))
    return labels


def _multiplier(node: YamlNode | None) -> int | None:
    if node is None:
        return 1
    if node.is_null:
        return None
    value = node.integer()
    if value < 1 and value != -1:
        raise node.error(
            "'shuffle_over_epochs_multiplier' is out of range",
            expected="a whole number above 0, -1 (drawing with replacement) or null (no shuffling)",
            found=node.describe(),
            fix="remove it for the usual shuffling within each epoch",
        )
    return value


def _file_name(node: YamlNode | None) -> str | None:
    if node is None:
        return None
    name = node.string("the name of a file in .nv-meta")
    if os.path.isabs(name) or ".." in name.split("/"):
        raise node.error(
            "the configuration is outside of the data set's .nv-meta folder",
            expected="the name of a file in .nv-meta",
            found=node.describe(),
            fix="put the file there, and write its name",
        )
    return name
