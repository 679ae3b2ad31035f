"""Metadatasets: YAML documents that blend data sets, and may nest.

:func:`load_metadataset` flattens a tree of documents into its leaves. At each blend the weights are normalised, and
they are multiplied along the path, so the leaves' weights sum to one. Repetitions (``blend_epochized``) are multiplied
along the path without normalisation; the two kinds of blend cannot be mixed in one tree. Subsets compose along the
path. Labels (``subflavors``) are merged; those of the outer document take precedence, as in Energon.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from itertools import count
from typing import Any

from energon_lite.config.leaf_spec import AuxReference, LeafSpec, Step, Subset, Weight, WeightUnit
from energon_lite.config.metadataset_document import (
    EXPECTED_STORE,
    Join,
    MetadatasetDocument,
    Reference,
    Split,
    numbers_above_leaf,
    parse_metadataset,
)
from energon_lite.documents import Node, from_plain
from energon_lite.documents.paths import is_data_path, is_url, join_url, local_path, missing_file_fix
from energon_lite.errors import ConfigError

#: Name of a metadataset given as a dict, for messages.
DICT_NAME = "<dict>"
#: References of ``aux`` to the files of a folder, or to ranges of their bytes.
_FILES = re.compile(r"(?P<kind>filesystem|byterange)(?:\+(?P<scheme>[A-Za-z0-9.-]+))?://(?P<path>.*)", re.DOTALL)


def load_metadataset(
    path_or_dict: str | os.PathLike[str] | Mapping[str, Any],
    *,
    split_part: str,
    read_url: Callable[[str], bytes] | None = None,
    missing_ok: bool = False,
) -> tuple[LeafSpec, ...]:
    """Read a metadataset and all metadatasets that it refers to, and flatten the tree into leaves.

    Args:
        path_or_dict: a YAML file (Metadataset or MetadatasetV2), its URL, or its content as a dict; relative paths in a
            file are relative to its folder, in a dict to the current one.
        split_part: the entry of ``splits`` to use; a ``split_part`` inside overrides it for everything below.
        read_url: function that reads the bytes of a document at a URL; None: such documents are refused.
        missing_ok: data sets need not exist.

    Returns:
        The leaves in document order. A data set may occur more than once.

    Raises:
        ConfigError: a document has a mistake; the message has its file, line, place and fix.

    Example:
        >>> [(leaf.path, leaf.weight) for leaf in load_metadataset("blend.yaml", split_part="train")]
        [('/data/digits', 0.75), ('/data/prose', 0.25)]
    """
    flattening = _Flattening(read_url, missing_ok)
    if isinstance(path_or_dict, Mapping):
        name, document = DICT_NAME, parse_metadataset(from_plain(path_or_dict, DICT_NAME))
    else:
        name = local_path(os.fspath(path_or_dict))
        if not is_url(name):
            name = _existing_file(name)
        document = flattening.document(name)
    return tuple(flattening.split(document, _Above(trail=(Step(name, split_part, "", ""),))))


def _existing_file(given: str) -> str:
    """Absolute path of a document."""
    path = os.path.abspath(given)
    if os.path.isdir(path):
        what = "this is a folder, not a metadataset"
        fix = "a single data set needs no metadataset: give its folder to get_train_dataset"
        raise ConfigError(what, file=path, expected="a .yaml file", found="a folder", fix=fix)
    if not os.path.isfile(path):
        fix, found = missing_file_fix(path, "correct the path"), f"no such file: {path}"
        raise ConfigError("the metadataset is missing", file=given, expected="a .yaml file", found=found, fix=fix)
    return path


@dataclass(frozen=True)
class _Above:
    """Settings that the documents above pass to those below.

    Args:
        trail: the documents on the path, the outermost first; no reference led to that one.
        blend: the nearest blend on the path.
    """

    trail: tuple[Step, ...]
    weight: Weight = 1.0
    repetitions: Fraction = Fraction(1)
    subset: Subset | None = None
    blend: Split | None = None
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    multiplier: int | None = 1
    filters: tuple[str, ...] = ()
    units: tuple[WeightUnit, ...] = ()


class _Flattening:
    """Traversal of a tree of documents; each file is read once, for any number of references to it."""

    def __init__(self, read_url: Callable[[str], bytes] | None, missing_ok: bool):
        self._read_url = read_url
        self._missing_ok = missing_ok
        self._documents: dict[str, MetadatasetDocument] = {}
        self._blends = count()

    def document(self, path: str) -> MetadatasetDocument:
        if path not in self._documents:
            from energon_lite.documents import load_yaml

            if is_url(path) and self._read_url is None:
                what, fix = "documents behind a URL are not read here", "copy the YAML file to a local folder"
                raise ConfigError(what, file=path, fix=fix)
            node = load_yaml(path, read=self._read_url if is_url(path) else None)
            self._documents[path] = parse_metadataset(node)
        return self._documents[path]

    def split(self, document: MetadatasetDocument, above: _Above) -> list[LeafSpec]:
        """Leaves of the split that the last step of the trail names."""
        _, split_part, origin, _ = above.trail[-1]
        split = document.splits.get(split_part)
        if split is None:
            asked = f", which {origin} asks for" if origin else ""
            raise document.node.error(
                f"the metadataset has no split {split_part!r}{asked}",
                f"use one of these (split_part), or add '{split_part}:' here",
                expected=f"one of: {', '.join(document.splits)}",
                found=repr(split_part),
                choices=document.splits,
                word=split_part,
            )
        if split.blend is not None:
            _refuse_mixture(split.blend, split, above.blend)
            above = replace(above, blend=split)
        above = replace(above, subset=_part(above.subset, split.subset))
        blend, leaves = next(self._blends), list[LeafSpec]()
        for number, (reference, share) in enumerate(zip(split.references, split.shares, strict=True)):
            here = above
            if split.unit is not None:
                unit = WeightUnit(split.unit, blend, number, reference.node.origin)
                here = replace(above, units=(*above.units, unit))
            leaves.extend(self._reference(reference, share, here))
        return leaves

    def _reference(self, reference: Reference, share: Weight, above: _Above) -> list[LeafSpec]:
        here = replace(
            above,
            weight=_product(above.weight, share, reference.node),
            repetitions=above.repetitions * reference.repetitions,
            subset=_part(above.subset, reference.subset),
            subflavors={**reference.labels, **above.subflavors},
            multiplier=multiply_epochs(above.multiplier, reference.shuffle_over_epochs_multiplier),
            filters=above.filters if reference.filter is None else (*above.filters, reference.filter),
        )
        if not here.weight:
            what = "the weight is too small compared with the others"
            raise reference.node.error(what, "raise it", expected="a share above 1e-300", found=None)
        split_part = reference.split_part or above.trail[-1].split_part
        if reference.join is not None:
            return [self._joined(reference, reference.join, split_part, here)]
        path = located(reference, self._missing_ok)
        if is_metadataset(path):
            return self._nested(path, split_part, reference, here)
        return [self._leaf(path, split_part, reference, here)]

    def _leaf(self, path: str, split_part: str, reference: Reference, here: _Above) -> LeafSpec:
        entries = {} if reference.aux is None else reference.aux.entries()
        aux = {name: _aux_reference(entry, self._missing_ok) for name, entry in entries.items()}
        weight = here.weight if isinstance(here.weight, float) else here.weight.start
        return LeafSpec(
            path=path,
            split_part=split_part,
            weight=weight,
            schedule=None if isinstance(here.weight, float) else here.weight,
            repetitions=_leaf_repetitions(reference.node, here),
            subset=here.subset,
            subflavors=dict(here.subflavors),
            shuffle_over_epochs_multiplier=here.multiplier,
            dataset_config=reference.dataset_config or "dataset.yaml",
            split_config=reference.split_config or "split.yaml",
            aux=aux,
            origin=reference.node.origin,
            trail=here.trail[1:],
            filters=here.filters,
            units=here.units,
        )

    def _joined(self, reference: Reference, join: Join, split_part: str, here: _Above) -> LeafSpec:
        """Leaf of a join; its place in the tree is that of the first data set."""
        spec = join.resolved(split_part, here.subflavors, here.filters, self._missing_ok)
        first = spec.members[0]
        leaf = self._leaf(first.path, first.split_part, reference, here)
        leaf = replace(leaf, filters=(), join=spec)
        return replace(leaf, dataset_config=first.dataset_config, split_config=first.split_config)

    def _nested(self, path: str, split_part: str, reference: Reference, here: _Above) -> list[LeafSpec]:
        node = reference.node
        for name in ("dataset_config", "split_config"):
            if getattr(reference, name) is not None:
                what = "goes with a data set's folder, but this path is a metadataset"
                fix = "remove it here, and write it where the metadataset refers to the folder"
                node.refuse([name], what, fix, f"no {name}")
        if reference.aux is not None:
            what = "is for the cooker of one data set, but this path is a metadataset"
            node.refuse(["aux"], what, "write it where the metadataset refers to the data set", "no aux")
        if reference.subset is not None and reference.subset.first is not None:
            raise numbers_above_leaf(node.value["subset"], "a metadataset")
        step = Step(path, split_part, node.origin, node.path)
        way = [(step_above.path, step_above.split_part) for step_above in (*here.trail, step)]
        if way[-1] in way[:-1]:
            found = " -> ".join(f"{os.path.basename(file)} ({part})" for file, part in way[way.index(way[-1]) :])
            what, fix = "the metadatasets refer to each other in a circle", "remove one of these references"
            raise reference.path.error(what, fix, expected="a tree", found=found)
        return self.split(self.document(path), replace(here, trail=(*here.trail, step)))


def _part(outer: Subset | None, inner: Subset | None) -> Subset | None:
    return inner if outer is None else outer.of(inner)


def _product(outer: Weight, inner: Weight, reference: Node) -> Weight:
    if not isinstance(outer, float):
        return outer.times(inner, reference)
    return outer * inner if isinstance(inner, float) else inner.times(outer, reference)


def _leaf_repetitions(node: Node, here: _Above) -> float | None:
    if here.blend is None or not here.blend.epochized:
        return None
    if not 1e-300 < here.repetitions < 1e300:
        what = "the repetitions, multiplied along the path, are out of range"
        expected = "a product above 1e-300 and below 1e300"
        raise node.error(what, "write a number nearer to 1", expected=expected, found=None)
    return float(here.repetitions)


def _refuse_mixture(node: Node, split: Split, outer: Split | None) -> None:
    if outer is None or outer.blend is None or outer.epochized == split.epochized:
        return
    inside = outer.blend
    raise node.key_error(
        f"{node.key!r} inside of {inside.key!r}, defined at {inside.origin}: weights and repetitions do not go "
        "together in one tree",
        "write the same kind of blend in both documents",
        expected="repetitions at every blend" if outer.epochized else "weights at every blend",
        found=f"{node.key!r} here and {inside.key!r} at {inside.origin}",
    )


def multiply_epochs(outer: int | None, inner: int | None) -> int | None:
    """Combine two ``shuffle_over_epochs_multiplier`` by Energon's rule.

    None (no shuffling) takes precedence over -1 (drawing with replacement), and -1 over the product.
    """
    if outer is None or inner is None:
        return None
    return -1 if -1 in (outer, inner) else outer * inner


def is_metadataset(path: str | os.PathLike[str] | Mapping[str, Any]) -> bool:
    """True for a dict and for the path of a ``.yaml`` or ``.yml`` file, False for a data set's folder.

    Example:
        >>> is_metadataset("blend.yaml"), is_metadataset("datasets/digits")
        (True, False)
    """
    if isinstance(path, Mapping):
        return True
    name = os.fspath(path)
    return name.endswith((".yaml", ".yml")) and not os.path.isdir(name)


#: Expected value of a path, for messages.
_EXPECTED_DATA = "the folder of a prepared data set, a JSONL file (.jsonl), or a metadataset (.yaml)"


def located(reference: Reference, missing_ok: bool) -> str:
    """Resolve the path of a reference. With ``missing_ok`` the path need not exist.

    Raises:
        ConfigError: there is no data set at the path.
    """
    node = reference.path
    text = local_path(node.value)
    fix = f"write {text.rpartition('::')[2]!r}; ReadAhead(folder=...) keeps what was read on a local disk"
    path = _resolved(node, node.value, fix, "the URL of a store")
    if is_url(path) or os.path.isdir(path) or (os.path.isfile(path) and is_metadataset(path)) or is_data_path(path):
        return path
    if os.path.isfile(path):
        what = "this file is neither a data set nor a metadataset"
        fix = f"name the folder that holds the shards: {os.path.dirname(text) or '.'}"
        raise node.error(what, fix, expected=_EXPECTED_DATA, found=f"the file {path}")
    if missing_ok:
        return path
    raise _missing(node, path, _EXPECTED_DATA, "file or folder")


def _aux_reference(node: Node, missing_ok: bool) -> AuxReference:
    text = node.string(EXPECTED_STORE)
    match = _FILES.fullmatch(text)
    kind = "dataset" if match is None else match["kind"]
    if match is not None:
        text = match["path"] if match["scheme"] is None else f"{match['scheme']}://{match['path']}"
    path = _resolved(node, text, "write the URL of one store", EXPECTED_STORE)
    is_file = kind == "dataset" and path.endswith(".jsonl") and os.path.isfile(path)
    if missing_ok or is_url(path) or os.path.isdir(path) or is_file:
        return AuxReference(kind, path, node.origin)
    raise _missing(node, path, EXPECTED_STORE, "folder")


def _resolved(node: Node, given: str, fix: str, expected: str) -> str:
    """Resolve a path in a document to an absolute path; a URL is returned unchanged.

    Relative paths are relative to the document's folder, which may be at a URL, or, in a dict, to the current one.

    Args:
        node: the node of the path, which knows its document.
        given: the path.
        fix: the fix for chained URLs.
        expected: description of a correct value.

    Raises:
        ConfigError: URLs are chained; or the document is at a URL, and the path is absolute, or leads out of the store.
    """
    text = local_path(given)
    if "::" in text or "\0" in text:
        what = "chained URLs are not read: they can make fsspec do more than reading"
        raise node.error(what, fix, expected=expected)
    if is_url(text):
        return text
    if not is_url(node.file) or text != given:
        return os.path.abspath(os.path.join(os.path.dirname(local_path(node.file)), text))
    expected = "a path relative to the document, or a URL"
    if os.path.isabs(text):
        fix = f"write 'file://{text}' if it is on local disks; else a relative path, or the URL"
        raise node.error("an absolute path in a document behind a URL", fix, expected=expected)
    try:
        return join_url(node.file, text)
    except ValueError:
        raise node.error("the path leads out of the store", "remove the '..' in front", expected=expected) from None


def _missing(node: Node, path: str, expected: str, kind: str) -> ConfigError:
    fix = missing_file_fix(path, "correct the path (a relative one counts from this document's folder)")
    return node.error("the path does not exist", fix, expected=expected, found=f"no such {kind}: {path}")
