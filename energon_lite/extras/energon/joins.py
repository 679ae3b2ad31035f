"""Joins in metadatasets: the key ``join`` with its data sets and the class or function that combines their samples; and
the table of samples that belong together, made once from their keys and kept in the user's cache.

A row of the table stands for a sample of the first data set (the primary one): its number among the samples that are
read, and for each other data set the number of the sample with the same key, or -1. The table is a function of the keys
of the samples that are read, so the digests of the indexes and of the choices of shards and samples identify it. An
edited ``split.yaml``, another split, or data that were prepared anew have another table.

Matching takes seconds for millions of keys. Two hashes of each key are kept. Keys are read once, in their order, and
numbers are sorted. Keys of one data set with the same first hash are compared as texts.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
from energon_lite.errors import DatasetError, TrustError
from energon_lite.samples import SAMPLE_TYPES, Sample
from energon_lite.storage.files.array_file import FileKind, write_arrays
from energon_lite.storage.files.stored_array import Numbers, open_arrays, whole_or_none
from energon_lite.storage.index.index_cache import cache_folder, first_writable, made_once
from energon_lite.storage.index.key_index import hash_keys
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.tar_members import Int64

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
        return Sample if named.name == Sample.__name__ else SAMPLE_TYPES[named.name]
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


_TABLE = FileKind(b"ENRGLJOI", 1, "join table", "remove the file: it is made again when the data set is opened")


class JoinTable(NamedTuple):
    """The rows of a join, with their file and digest.

    Attributes:
        path: the file of the table.
        rows: ``[n, data sets]``, int64 sample numbers; -1: no match.
        digest: digest of the rows.
        left_out: skipped samples of the first data set, for want of a match.
    """

    path: str
    rows: Numbers
    digest: str
    left_out: int

    @classmethod
    def open(cls, path: str) -> JoinTable:
        """Open the file of a join table.

        Raises:
            DataIndexError: it is damaged, or of another kind.
            FileNotFoundError: there is no such file.
        """
        arrays, meta = open_arrays(path, _TABLE)
        try:
            return cls(path, arrays["rows"], str(meta["digest"]), int(meta["left_out"]))
        except (KeyError, TypeError, ValueError):
            raise _TABLE.damaged(path, "its tables do not fit together") from None


def join_table(sources: Sequence[WebdatasetSource], nonmatch: Sequence[Nonmatch]) -> JoinTable:
    """Return the table of some data sets, from the cache or made now; one of several processes makes it.

    Args:
        sources: the samples that are read; the first is the primary one.
        nonmatch: the treatment of missing matches for each source; ignored for the first.

    Raises:
        DatasetError: a joined data set has a key twice; or a sample has no match where ``nonmatch`` is ``"error"``.
        DataIndexError: no folder for the table can be written.
    """
    path = _place(sources, nonmatch)
    found = partial(whole_or_none, JoinTable.open)

    def made_at(path: str) -> JoinTable:
        return made_once(path, found, lambda: _write(path, *_make(sources, nonmatch)))

    return found(path) or first_writable(sources[0].path, "the join table", [path], "write there", made_at)


def _place(sources: Sequence[WebdatasetSource], nonmatch: Sequence[Nonmatch]) -> str:
    parts = [f"{source.index.digest} {source.fingerprint} {how}" for source, how in zip(sources, nonmatch, strict=True)]
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
    first = os.path.basename(sources[0].path.rstrip("/")) or "data"
    return os.path.join(cache_folder(), "joins", f"{first}-{name}.join")


def _write(path: str, rows: Int64, left_out: int) -> None:
    digest = hashlib.blake2b(np.ascontiguousarray(rows).data, digest_size=16).hexdigest()
    write_arrays(path, _TABLE, {"rows": rows}, {"digest": digest, "left_out": left_out})


def _make(sources: Sequence[WebdatasetSource], nonmatch: Sequence[Nonmatch]) -> tuple[Int64, int]:
    """Match the keys: the rows, and the number of skipped samples of the first data set."""
    keys = [SampleKeys(source.index, source.choice.locate_many(np.arange(len(source)))[1]) for source in sources]
    first, kept = keys[0], np.ones(len(sources[0]), dtype=bool)
    columns = [np.arange(len(sources[0]))]
    for source, mine, how in list(zip(sources, keys, nonmatch, strict=True))[1:]:
        if twice := mine.twice():
            raise DatasetError(
                f"a data set with repeated keys cannot be joined; repeated is {twice[0]!r}",
                where=str(source),
                fix="give each sample a key of its own, or exclude all but one of them in .nv-meta/split.yaml",
            )
        matches = match_keys(first, mine)
        missing = np.flatnonzero(matches < 0)
        if len(missing) and how == "error":
            what = (
                f"{len(missing)} of {len(sources[0])} samples of {sources[0].path} have no sample of the same key here"
            )
            raise DatasetError(
                f"{what}, such as {first.key(int(missing[0]))!r}",
                where=str(source),
                fix="write 'nonmatch: skip' to leave such samples out, or 'nonmatch: none' to join them with None",
            )
        if how == "skip":
            kept[missing] = False
        columns.append(matches)
    rows = np.stack(columns, axis=1)[kept]
    return rows.astype("<i8"), int(len(kept) - kept.sum())


# -- keys -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SampleKeys:
    """The keys of some samples of an index, as hashes.

    Args:
        index: the packed index.
        samples: their numbers over all shards of the data set, in the order of the match.
    """

    index: PackedIndex
    samples: Int64

    def __len__(self) -> int:
        return len(self.samples)

    def key(self, place: int) -> str:
        """The key at a place of ``samples``."""
        return self.index.key(int(self.samples[place]))

    def twice(self) -> list[str]:
        """Keys that appear more than once; at most some of them."""
        return sorted({name for name, count in Counter(map(self.key, self._alike)).items() if count > 1})

    @cached_property
    def hashes(self) -> NDArray[np.uint64]:
        """Two hashes of each key, ``[2, n]``."""
        return hash_keys(self.index, self.samples, words=2)

    @cached_property
    def order(self) -> Int64:
        """The places, sorted by the first hash of their keys."""
        return np.argsort(self.hashes[0], kind="stable")

    @cached_property
    def _alike(self) -> list[int]:
        """Places of keys that share their first hash with another key; at most some of them."""
        ordered = self.hashes[0][self.order]
        same = np.flatnonzero(ordered[1:] == ordered[:-1])[:1000]
        return self.order[np.unique(np.concatenate([same, same + 1]))].tolist()


def match_keys(wanted: SampleKeys, there: SampleKeys) -> Int64:
    """Return for each wanted key its place among ``there``, whose keys are unique; -1: the key is not there.

    Example:
        >>> match_keys(SampleKeys(images, np.arange(3)), SampleKeys(captions, np.arange(2)))
        array([ 1, -1,  0])
    """
    if not len(there):
        return np.full(len(wanted), -1, dtype=np.int64)
    if there._alike:  # different keys have equal hashes
        known = {there.key(place): place for place in range(len(there))}
        return np.array([known.get(wanted.key(place), -1) for place in range(len(wanted))], dtype=np.int64)
    if wanted.hashes.shape == there.hashes.shape and (wanted.hashes == there.hashes).all():
        return np.arange(len(wanted))  # the same keys in the same order, as in data sets that were made together
    at = np.empty(len(wanted), dtype=np.int64)
    at[wanted.order] = np.searchsorted(there.hashes[0][there.order], wanted.hashes[0][wanted.order])
    near = there.order[np.minimum(at, len(there) - 1)]
    return np.where((there.hashes[:, near] == wanted.hashes).all(axis=0), near, -1)
