"""Contents of one metadataset document, checked but not yet resolved: paths are not accessed here.

All splits are checked when the document is read, not only the requested one, so a mistake in ``val`` is reported
before training starts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Annotated, Any, Protocol, TypeVar

from energon_lite.config.class_names import CLASS_KEYS, metadataset_class
from energon_lite.config.dataset import meta_file_name
from energon_lite.config.leaf_spec import JoinSpec, Subset, Weight, read_subset
from energon_lite.documents import Node, keys_of, read
from energon_lite.entry_points import metadataset_guest
from energon_lite.errors import ConfigError

_SPLIT_KINDS = ("path", "blend", "blend_epochized", "join")
#: Keys for the unit of which a blend's weights are shares: this library's, and Megatron-Energon's.
_UNITS = ("weight_unit", "blend_weight_unit")
#: Expected value of an entry of ``aux``, for messages.
EXPECTED_STORE = "a data set's folder or URL, or filesystem://folder"
_EXPECTED_KIND = f"one of the keys {', '.join(_SPLIT_KINDS)}"


# -- values of the keys of a reference ------------------------------------------------------------------------------


def _path(node: Node) -> Node:
    node.string("the path of a data set's folder or of a metadataset")
    return node


class ScheduleReader(Protocol):
    """Guest of weights that change: entry ``weight`` of the table ``METADATASET_KEYS``."""

    def read(self, node: Node) -> Weight:
        """Read the value of a key ``weight`` that is a mapping.

        Raises:
            ConfigError: the value has a mistake.
        """


def _weight(node: Node) -> Weight:
    if not isinstance(node.value, dict):
        return _positive(node, "a weight")
    guest: ScheduleReader = metadataset_guest("weight", node.origin)
    return guest.read(node)


def _repetitions(node: Node) -> Fraction:
    """Read a number of repetitions exactly: 0.1 is a tenth."""
    if isinstance(node.value, dict):
        what, fix = "repetitions cannot change along the run", "use 'blend' with weights, which can"
        raise node.error(what, fix, expected="a number above 0")
    return Fraction(str(_positive(node, "the number of repetitions")))


def _positive(node: Node, what: str) -> float:
    number = node.number()
    if number <= 0:
        fix = "remove the entry if it is not to be used" if number == 0 else "write a number above 0"
        raise node.error(f"{what} must be above zero", fix, expected="a number above 0")
    return number


def _multiplier(node: Node) -> int:
    value = node.integer()
    if value < 1 and value != -1:
        raise node.error(
            "'shuffle_over_epochs_multiplier' is out of range",
            "remove it for the usual shuffling within each epoch",
            expected="a whole number above 0, -1 (drawing with replacement) or null (no shuffling)",
        )
    return value


def _aux(node: Node) -> Node:
    for entry in node.entries().values():
        entry.string(EXPECTED_STORE)
    return node


# -- the document ---------------------------------------------------------------------------------------------------


class Join(Protocol):
    """Joined data sets as written in a document."""

    def resolved(
        self, split_part: str, subflavors: Mapping[str, Any], filters: tuple[str, ...], missing_ok: bool
    ) -> JoinSpec:
        """Resolve the data sets.

        Args:
            split_part: split of those that name none.
            subflavors: labels that take precedence over theirs.
            filters: conditions of the documents above on the joined samples.
            missing_ok: data sets need not exist.

        Raises:
            ConfigError: a data set does not exist, or is a metadataset.
        """


class JoinReader(Protocol):
    """Guest of joined data sets: entry ``join`` of the table ``METADATASET_KEYS``."""

    def read(self, node: Node, without: Collection[str]) -> Reference:
        """Read a reference with the key ``join``; ``without`` are keys that it may not have.

        Raises:
            ConfigError: the reference has a mistake.
        """


@dataclass(frozen=True)
class Reference:
    """One ``path:`` with its options; all fields except ``node`` are keys of the document.

    Args:
        node: the mapping, for messages.
        path: the node of the path, not yet resolved.
        weight: as written; 1 by default.
        repetitions: as written, exact; 1 by default.
        subset: part of the data at the path.
        tags: Energon 8's name of the subflavors.
        subflavor: one more label, in the older Metadataset.
        join: the data sets that are joined; then the path is that of the first one.
        aux: the node of the references for its cooker, not yet resolved.
        filter: a comparison of columns, or the name of a filter index: only samples that meet it are used.
    """

    node: Node
    path: Annotated[Node, _path]
    weight: Annotated[Weight, _weight] = 1.0
    repetitions: Annotated[Fraction, _repetitions] = Fraction(1)
    subset: Annotated[Subset | None, read_subset] = None
    split_part: Annotated[str | None, "the name of a split"] = None
    subflavors: dict[str, Any] | None = None
    tags: dict[str, Any] | None = None
    subflavor: Annotated[str | None, "a label"] = None
    filter: Annotated[str | None, "a comparison of columns such as tokens <= 4096, or a filter index"] = None
    shuffle_over_epochs_multiplier: Annotated[int | None, _multiplier] = 1
    dataset_config: Annotated[str | None, meta_file_name] = None
    split_config: Annotated[str | None, meta_file_name] = None
    join: Join | None = None
    aux: Annotated[Node | None, _aux] = None

    @property
    def labels(self) -> dict[str, Any]:
        """Labels for its samples."""
        oldest = {} if self.subflavor is None else {"__subflavor__": self.subflavor}
        return oldest | (self.tags or self.subflavors or {})


R = TypeVar("R", bound=Reference)


@dataclass(frozen=True)
class Split:
    """One entry of ``splits``.

    Args:
        references: its data sets and metadatasets.
        shares: share of each of them, by its weight; at every position they sum to 1.
        blend: the node of the list, for messages; None for a single reference, which is allowed in both kinds of blend.
        epochized: True if the list is under ``blend_epochized``.
        subset: the part of the whole split to use.
        unit: unit of which the weights are shares, if not samples: ``tokens``, or the name of a measured column.
    """

    references: Sequence[Reference]
    shares: Sequence[Weight] = (1.0,)
    blend: Node | None = None
    epochized: bool = False
    subset: Subset | None = None
    unit: str | None = None


@dataclass(frozen=True)
class MetadatasetDocument:
    """Metadataset as written.

    Args:
        splits: the splits by name.
        node: the node of ``splits``.
    """

    splits: dict[str, Split]
    node: Node


def parse_metadataset(document: Node) -> MetadatasetDocument:
    """Check a document of either version. If it names no class, the form of each split determines the version.

    Raises:
        ConfigError: the document has a mistake.
    """
    version = metadataset_class(document.entries())
    splits = document.mapping(required={"splits"}, optional=CLASS_KEYS)["splits"]
    parsed = {name: _split(node, version) for name, node in splits.entries().items()}
    if not parsed:
        raise splits.error("the metadataset has no splits", "add 'train:'", expected="at least one split")
    return MetadatasetDocument(parsed, splits)


def _split(node: Node, version: str | None) -> Split:
    keys = node.entries()
    if version == "Metadataset" or (version is None and "datasets" in keys):
        fix = "write '__class__: MetadatasetV2' at the top"
        fix += " and 'blend' instead of 'datasets'" if version is None else ""
        node.refuse(_SPLIT_KINDS, "is a key of MetadatasetV2, but this is a Metadataset", fix, "the key datasets")
        blend = node.mapping(required={"datasets"})["datasets"]
        return _blend(blend)
    what = "is the key of the older Metadataset, but this is a MetadatasetV2"
    node.refuse(["datasets"], what, "rename 'datasets' to 'blend'", _EXPECTED_KIND)
    kinds = [kind for kind in _SPLIT_KINDS if kind in keys]
    if len(kinds) > 1:
        raise keys[kinds[1]].key_error(
            f"{kinds[0]!r} and {kinds[1]!r} in one split",
            "keep one of them; what is to be blended goes into the list under 'blend'",
            expected=f"exactly {_EXPECTED_KIND}",
            found=" and ".join(repr(kind) for kind in kinds),
        )
    if not kinds:
        raise _no_kind(node)
    kind = kinds[0]
    if kind in ("path", "join"):
        return Split((_reference(node, "path"),))
    if kind != "blend":
        fix = "write 'blend' with weights, or remove it"
        node.refuse(_UNITS, "belongs to a blend by weight", fix, "no unit of weights here")
    entries = node.mapping(required={kind}, optional={"subset", *_UNITS})
    subset = read_subset(entries["subset"]) if "subset" in entries and not entries["subset"].is_null else None
    if subset is not None and subset.first is not None:
        raise numbers_above_leaf(entries["subset"], f"a {kind}")
    unit = None
    named = [entries[key] for key in _UNITS if key in entries and not entries[key].is_null]
    if len(named) > 1:
        raise named[1].key_error("the unit of the weights is given twice", f"leave out {named[1].key}")
    if named:
        unit = named[0].string("samples, tokens, or the name of a measured column")
    return replace(_blend(entries[kind], subset), unit=None if unit == "samples" else unit)


def numbers_above_leaf(node: Node, what: str) -> ConfigError:
    """Make the error for a subset by sample numbers of something other than one data set."""
    return node.key_error(
        f"sample numbers are only allowed for a leaf dataset, in which they count, but this is {what}",
        "use percentages here, or write the subset where the folder of the data set is referred to",
        expected="percentages, such as [0%, 80%]",
        found=f"the range [{', '.join(str(bound) for bound in node.value['range'].plain())}]",
    )


def _no_kind(node: Node) -> ConfigError:
    """Make the error for a split without a path or a blend: the first unknown key is probably a misspelled one."""
    known = keys_of(Reference).keys() - _WITHOUT["path"] - {"node", "path"}
    for key, child in node.value.items():
        if key not in known:
            fix = "write 'path:' for a single data set, or 'blend:' with a list of them"
            choices = [*_SPLIT_KINDS, "datasets"]
            return child.key_error(f"unknown key {key!r}", fix, expected=_EXPECTED_KIND, choices=choices)
    fix = "add 'path:' for a single data set, or 'blend:' with a list of them"
    return node.error("the split names no data set", fix, expected=_EXPECTED_KIND)


def _blend(node: Node, subset: Subset | None = None) -> Split:
    references = [_reference(entry, str(node.key)) for entry in node.sequence("data sets, each with a path")]
    if not references:
        fix = "add '- path: ...', or remove the split"
        raise node.error("the blend is empty", fix, expected="at least one data set")
    shares = _shares([reference.weight for reference in references], node)
    return Split(references, shares, node, node.key == "blend_epochized", subset)


def _shares(weights: Sequence[Weight], blend: Node) -> list[Weight]:
    schedule = next((weight for weight in weights if not isinstance(weight, float)), None)
    constant = [weight for weight in weights if isinstance(weight, float)]
    return [*normalised(constant)] if schedule is None else schedule.shares(weights, blend)


def normalised(weights: Sequence[float]) -> list[float]:
    """Divide weights, not all zero, by their sum."""
    largest = max(weights, default=1.0)
    scaled = [weight / largest for weight in weights]
    total = math.fsum(scaled)
    return [weight / total for weight in scaled]


#: Key for the share of an entry, by the kind of blend.
_SHARE_KEYS = {"blend": "weight", "blend_epochized": "repetitions"}
#: Keys that a reference may not have, by the key that it is under.
_WITHOUT = {
    "datasets": {"repetitions", "subset", "join", "aux"},
    "path": {"weight", "repetitions", "subflavor", "join"},
    "blend": {"repetitions", "subflavor", "join"},
    "blend_epochized": {"weight", "subflavor", "join"},
    "join": {"weight", "repetitions", "subflavor", "join"},
}


def _reference(node: Node, kind: str) -> Reference:
    if kind == "datasets" or "join" not in node.entries():
        return read_reference(node, kind, Reference)
    _check_keys(node, kind)
    guest: JoinReader = metadataset_guest("join", node.origin)
    return guest.read(node, _WITHOUT[kind])


def read_reference(node: Node, kind: str, cls: type[R]) -> R:
    """Read a reference to a data set or a metadataset.

    Args:
        node: its mapping.
        kind: the key that it is under.
        cls: class with all keys that it may have.

    Raises:
        ConfigError: the reference has a mistake.
    """
    _check_keys(node, kind)
    return read(node, cls, without=_WITHOUT[kind], node=node)


def _check_keys(node: Node, kind: str) -> None:
    """Refuse keys that do not go together, or with the key that the reference is under."""
    keys = node.entries()
    if "tags" in keys and "subflavors" in keys:
        raise keys["tags"].key_error(
            "both 'tags' and 'subflavors', which mean the same", "keep one of them", expected="one"
        )
    if kind == "datasets":
        return
    if kind not in ("path", "join"):
        fix = "put the inner blend into a metadataset file of its own, and give that file's path here"
        node.refuse(_SHARE_KEYS, "inside of a blend", fix, "a reference with the key path")
    for blend, key in _SHARE_KEYS.items():
        if kind in ("path", "join"):
            fix = f"remove it, or write '{blend}:' and this as an entry of its list"
            node.refuse([key], "outside of a blend has no meaning", fix, f"a list under {blend!r}")
        elif blend != kind:
            own = _SHARE_KEYS[kind]
            node.refuse([key], f"belongs to {blend}", f"use {own!r}", own)
