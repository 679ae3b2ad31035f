"""Joins in metadatasets: the key ``join`` with its data sets, and the class or function that combines their samples."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from energon_lite.config.class_names import (
    TRUST_FIX,
    NamedClass,
    check_class,
    imported_name,
    imported_sample_type,
    named_class,
)
from energon_lite.config.leaf_spec import JoinSpec, LeafSpec, Nonmatch
from energon_lite.config.metadataset import is_metadataset, located
from energon_lite.config.metadataset_document import Reference, read_reference
from energon_lite.documents import Node, read
from energon_lite.errors import TrustError
from energon_lite.samples import SAMPLE_TYPES, Sample

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Member(Reference):
    """Reference to one data set of a join.

    Args:
        nonmatch: treatment of samples of the first data set without a counterpart in this one.
    """

    nonmatch: Nonmatch = "error"


@dataclass(frozen=True)
class WrittenJoin:
    """Join as written in a document.

    Args:
        references: the data sets; all others are joined to the first one.
        names: their names, if the document has a mapping; None: it has a list.
        joiner: the node that names the function or class that combines samples.
    """

    references: tuple[Member, ...]
    names: tuple[str, ...] | None
    joiner: Node

    def resolved(
        self, split_part: str, subflavors: Mapping[str, Any], filters: tuple[str, ...], missing_ok: bool
    ) -> JoinSpec:
        """Resolve the data sets; see :class:`~energon_lite.config.metadataset_document.Join`."""
        members = []
        for reference in self.references:
            path = located(reference, missing_ok)
            if is_metadataset(path):
                what, fix = "a metadataset cannot be joined", "name the folder of a data set"
                raise reference.path.error(what, fix, expected="the folder of a data set, or a JSONL file")
            member = LeafSpec(
                path,
                reference.split_part or split_part,
                subset=reference.subset,
                subflavors={**reference.labels, **subflavors},
                dataset_config=reference.dataset_config or "dataset.yaml",
                split_config=reference.split_config or "split.yaml",
                origin=reference.node.origin,
                filters=(reference.filter,) if reference.filter else (),
            )
            members.append(member)
        # Filters of the join apply to its first data set, which provides the samples.
        members[0] = replace(members[0], filters=(*filters, *members[0].filters))
        nonmatch = tuple(reference.nonmatch for reference in self.references)
        return JoinSpec(tuple(members), nonmatch, self.names, joiner_name(self.joiner), self.joiner)


def read_join(node: Node, without: Collection[str]) -> Reference:
    """Read a reference with joined data sets; see :class:`~energon_lite.config.metadataset_document.JoinReader`."""
    keys = node.entries()
    if "path" in keys:
        what, fix = "'path' and 'join' in one entry", "keep one of them; the paths belong in the list under 'join'"
        raise keys["path"].key_error(what, fix, expected="one of them")
    for name in ("dataset_config", "split_config"):
        if name in keys and not keys[name].is_null:
            fix = "write it at the data sets that are joined"
            raise keys[name].key_error(f"{name!r} belongs to one data set", fix, expected=f"no {name} with 'join'")
    _refuse_aux(node)
    join = _joined(node)
    given = {"node": node, "path": join.references[0].path, "join": join}
    ignored = {"joiner", "join", "dataset_config", "split_config", "aux"}
    return read(node, Reference, without={*without} - {"join"}, ignored=ignored, **given)


def _joined(node: Node) -> WrittenJoin:
    entries = node.entries()
    listed, named = entries["join"], None
    if isinstance(listed.value, dict):
        named, nodes = tuple(listed.value), list(listed.value.values())
    else:
        nodes = listed.sequence("data sets, each with a path; or a mapping of them")
    if "joiner" not in entries or entries["joiner"].is_null:
        fix = "add 'joiner: {__module__: ..., __class__: ...}' with the sample type of the joined samples"
        raise listed.key_error("'join' without 'joiner'", fix, expected="both keys", found="'join' alone")
    joiner_name(entries["joiner"])
    references = tuple(_member(entry) for entry in nodes)
    if not references:
        raise listed.error("the join is empty", "add '- path: ...'", expected="at least one data set")
    if references[0].nonmatch != "error":
        what = "'nonmatch' at the first data set, which the others are joined to"
        fix = "remove it here, and write it at the data set that has no samples for some of these"
        expected = "nonmatch at the second data set, or a later one"
        raise nodes[0].value["nonmatch"].key_error(what, fix, expected=expected)
    return WrittenJoin(references, named, entries["joiner"])


def _member(node: Node) -> Member:
    """Read the reference to one data set of a join."""
    if "join" in node.entries():
        what, fix = "a join inside of a join", "write all data sets into one list"
        raise node.value["join"].key_error(what, fix, expected="a reference with the key path")
    _refuse_aux(node)
    reference = read_reference(node, "join", Member)
    if reference.shuffle_over_epochs_multiplier != 1:
        # Energon accepts it, and ignores it.
        logger.warning(
            "%s: shuffle_over_epochs_multiplier has no effect inside of a join; write it next to the join", node.origin
        )
    return reference


def _refuse_aux(node: Node) -> None:
    """Refuse ``aux`` at the data sets of a join, where Energon ignores it."""
    aux = node.entries().get("aux")
    if aux is not None and not aux.is_null:
        what = "'aux' is for the cooker of one data set, and joined samples have none"
        fix = "remove it, and join what it names as one more data set; or use cookers with aux instead of the join"
        raise aux.key_error(what, fix, expected="no aux in a join")


# -- joiners ----------------------------------------------------------------------------------------------------------


def joiner_name(node: Node) -> str:
    """Return the name of a ``joiner``; nothing is imported.

    Raises:
        ConfigError: it is no block with a class or a function, or the sample type does not exist.
    """
    named, is_function = _named_joiner(node)
    if not named.is_foreign and not is_function and named.name != Sample.__name__:
        check_class(named, "a sample type", sorted(SAMPLE_TYPES), TRUST_FIX)
    return f"{'' if named.module is None else named.module + '.'}{named.name}"


def joiner(node: Node, *, trust_code: bool = False) -> type[Sample] | Callable[..., Any]:
    """Resolve the class or function that a ``joiner`` names: a sample type of this library, or trusted code.

    Raises:
        ConfigError: the class or function does not exist.
        TrustError: it would have to be imported, and ``trust_code`` is False.
    """
    named, is_function = _named_joiner(node)
    if not is_function and not named.is_foreign:
        if named.name == Sample.__name__:
            return Sample
        check_class(named, "a sample type", sorted(SAMPLE_TYPES), TRUST_FIX)
        return SAMPLE_TYPES[named.name]
    if not trust_code:
        raise named.node.error(
            "the joiner is code that would have to be imported",
            TRUST_FIX,
            expected="a sample type of megatron.energon or energon_lite",
            found=joiner_name(node),
            kind=TrustError,
        )
    if not is_function:
        return imported_sample_type(named)
    imported = imported_name(named, "function")
    if not callable(imported):
        raise named.node.error(f"{joiner_name(node)} is not a function", "name one", expected="a function", found=None)
    return imported


def _named_joiner(node: Node) -> tuple[NamedClass, bool]:
    """The class or function of a joiner; the flag is True for a function."""
    entries = node.mapping(optional={"__class__", "__function__", "__module__"})
    if "__function__" in entries:
        if "__class__" in entries:
            what, fix = "'__class__' and '__function__' in one joiner", "keep one of them"
            raise entries["__function__"].key_error(what, fix, expected="one of them")
        module = node.mapping(required={"__function__", "__module__"})["__module__"]
        name = entries["__function__"]
        return NamedClass(
            name.string("the name of a function"), module.string("the name of a module"), name, module
        ), True
    named = named_class(entries, "sample type")
    if named is None:
        what, fix = "the joiner names no class or function", "write '__module__:' and '__class__:' (or '__function__:')"
        raise node.error(what, fix, expected="a sample type, or a function")
    return named, False
