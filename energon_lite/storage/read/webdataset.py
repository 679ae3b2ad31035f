"""The samples of a prepared folder of tar shards, or of a JSONL file, as a numbered list."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

from energon_lite.documents.paths import absolute_path, is_url
from energon_lite.errors import DataIndexError, EmptyDatasetError, MissingShardError, counted, did_you_mean
from energon_lite.samples import SourceInfo
from energon_lite.storage.files.byte_ranges import file_version, found_at
from energon_lite.storage.files.shard_store import changed_shard, shared_store
from energon_lite.storage.index.columns import Column, RaggedColumn
from energon_lite.storage.index.index_cache import local_meta, open_index, shard_counts, url_datasets
from energon_lite.storage.index.nv_meta import folder_of_shards, is_jsonl
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.ranges import ReadAhead
from energon_lite.storage.read.sample_choice import SampleChoice, excluded_positions
from energon_lite.storage.read.source import SampleFilter


class RawSample(NamedTuple):
    """A sample as it is stored in its shard.

    Attributes:
        key: the sample's key.
        parts: bytes by part name, in the order of the tar.
        source: the place that they were read from.
    """

    key: str
    parts: dict[str, Any]
    source: SourceInfo


class Columns(NamedTuple):
    """Samples by columns: one list for each part, with one value for each sample.

    Attributes:
        keys: the key of each sample.
        shards: the name of each sample's shard.
        names: the parts that were read, in the order of the tar.
        parts: by name, each sample's part: bytes from tar shards, values of any kind from other sources.
    """

    keys: list[str]
    shards: list[str]
    names: tuple[str, ...]
    parts: dict[str, list[Any]]


class Runs(NamedTuple):
    """Length and window of the runs in which the samples of a source are read.

    Attributes:
        length: samples in a run.
        window: samples of the source that are mixed with each other.
    """

    length: int
    window: int = 0

    @property
    def kept(self) -> int:
        """Runs to keep: those of the current window, the ones that it cuts at either end, and two of margin."""
        return self.window // self.length + 4


class SampleRange(Protocol):
    """A run of consecutive samples of a data set."""

    @property
    def origin(self) -> str:
        """The place of its declaration, for messages."""

    def bounds(self, samples: int) -> tuple[int, int]:
        """Start and stop in a data set of ``samples`` samples; 0 <= start <= stop <= samples."""


class WebdatasetSource:
    """The samples of some shards of a prepared folder, by number. Make one with :meth:`open`; a
    :class:`~energon_lite.storage.read.sample_reader.SampleReader` reads them.

    The object can be pickled (small: no samples, no file handles, no index) and used after a fork; copies share the
    memory of the index and, in one process, the open files. An unpickled copy opens the index at the first request for
    a sample, and checks that it is the index of the original: so a worker of a thousand data sets starts at once.

    Attributes:
        path: the folder, absolute, or its URL; or the JSONL file.
        split_part: the name of the split, for messages.
        fingerprint, skipped: see :class:`SampleChoice`; the order of the samples comes from the fingerprint.
        part_names: the names of all parts that any sample of the folder has.
        mean_bytes: bytes of shard per sample, headers and padding included.
        store: the store that bytes are read with, which all data sets of this process share.
        read_ahead: settings for fetching samples from slow storage in advance; None: samples are read on demand.
        runs: neighbours that are read together; None: none.

    Example:
        >>> source = WebdatasetSource.open("data/coco", shards=["s000.tar", "s001.tar"])
        >>> len(source), source.key(7)
        (413, '000007')
    """

    def __init__(self, choice: SampleChoice, *, index_path: str = "", split_part: str = ""):
        index, self.choice = choice.index, choice
        self.path = choice.path
        self.split_part = split_part
        self.store = shared_store()
        self.read_ahead: ReadAhead | None = None
        self.runs: Runs | None = None
        self.fingerprint = choice.fingerprint
        self.skipped = choice.skipped
        self.part_names = frozenset(index.part_names)
        self.mean_bytes = float(index.shards[:-1, 2].sum()) / max(1, len(index))
        self._length = len(choice)
        self._shard_count = len(choice.shards)
        # The arguments that rebuild the choice in a copy; the names of all shards are in the index.
        names = None if choice.shard_names == index.shard_names else choice.shard_names
        verified = choice.checksums is not None
        how = choice.excluded, choice.span, choice.skips, choice.filters, choice.versions, verified
        self._again = index_path, index.digest, names, how

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        *,
        shards: Sequence[str] | None = None,
        excluded_samples: Sequence[tuple[str, str]] = (),
        split_part: str = "",
        subset: SampleRange | None = None,
        skips: str | None = None,
        filters: Sequence[SampleFilter] = (),
        asked: Sequence[str] = (),
        verified: bool = True,
    ) -> WebdatasetSource:
        """Open a prepared folder or a JSONL file. Every shard has to exist with the size that it was indexed with.

        Of more than 1,000 shards, 1,000 sizes are checked now, and the others when the shards are first read.

        Args:
            path: the folder that holds ``.nv-meta``, or a URL that fsspec knows; or a local JSONL file.
            shards: names of the wanted shards relative to the folder, in the wanted order; None for all.
            excluded_samples: (shard, key) of samples to leave out.
            split_part: the name of the split, for messages.
            subset: the part to read. Its positions count all samples of ``shards``; the excluded ones among them are
                left out afterwards, as in Energon, so an exclusion does not move the bounds of a subset.
            skips: name of a column, such as ``"skip"``: samples that were skipped during measuring are left out in the
                same way. It changes neither the rest of the order nor the places of other samples.
            filters: conditions; samples that do not meet all of them are left out in the same way.
            asked: the data set as arguments of ``energon-lite measure``, for messages about columns.
            verified: compare the bytes with their checksums, where checksums were measured.

        Raises:
            NotPreparedError: the folder does not exist or was not prepared.
            MissingShardError, ShardChangedError: a shard is missing, or differs from the indexed one.
            ShardFormatError: the index had to be made, and a shard cannot be parsed.
            EmptyDatasetError: no sample is left to read.
            ConfigError: the subset does not fit the data set.
            DataIndexError: the column ``skips``, or a column of a filter, does not exist, is older than the data, or
                lacks values for these shards; or there is no such filter index.
        """
        root = absolute_path(path)
        root = root.rstrip("/") if is_url(root) else root
        meta = local_meta(root)
        counts = shard_counts(meta)
        names = list(counts if shards is None else shards)
        check_known(root, names, counts, split_part)
        if is_url(root) and is_jsonl(root):
            index, index_path = open_index(root)
            versions: tuple[int, ...] = (file_version(found_at(root)),)
        elif is_url(root):
            index, index_path, versions = url_datasets(root).open_index(root, meta, counts, names)
        else:
            index, index_path = open_index(root, counts)
            versions = check_files(folder_of_shards(root), names, index)
        samples = sum(map(index.shard_counts.__getitem__, names))
        span = None if subset is None else subset.bounds(samples)
        excluded = excluded_positions(index, names, excluded_samples)
        choice = SampleChoice(index, root, names, excluded, span, skips, filters, versions, verified, asked)
        source = cls(choice, index_path=index_path, split_part=split_part)
        if not len(source):
            raise _empty(source, samples, subset)
        return source

    def __len__(self) -> int:
        return self._length

    def __str__(self) -> str:
        split = f" [{self.split_part}]" if self.split_part else ""
        return f"{self.path}{split}: {counted(self._length, 'sample')} in {counted(self._shard_count, 'shard')}"

    @cached_property
    def choice(self) -> SampleChoice:
        """The chosen samples, with their places in the shards.

        Raises:
            DataIndexError: the index is damaged, or the data set was prepared or measured anew after the original of
                this copy was opened.
        """
        index_path, digest, names, others = self._again
        how = "removed"
        try:
            index = PackedIndex.open(index_path)
            how = "prepared again"
            if index.digest == digest:
                choice = SampleChoice(index, self.path, index.shard_names if names is None else names, *others)
                how = "measured again"
                if choice.fingerprint == self.fingerprint:
                    return choice
        except FileNotFoundError:
            pass
        raise DataIndexError(f"the data set was {how} while it was in use", where=self.path, fix="start the run again")

    @property
    def index_path(self) -> str:
        """The file of the packed index."""
        return self._again[0]

    @property
    def version(self) -> tuple[str, tuple[int, ...]]:
        """The digest of the index and the versions of the shards, known without the index. It distinguishes sources of
        the same files with earlier or later contents."""
        return self._again[1], self._again[3][4]

    @property
    def members(self) -> tuple[WebdatasetSource, ...]:
        """The data sets that its bytes come from: itself."""
        return (self,)

    @property
    def index(self) -> PackedIndex:
        """The packed index."""
        return self.choice.index

    @property
    def shard_names(self) -> tuple[str, ...]:
        """The chosen shards, in order."""
        return self.choice.shard_names

    @property
    def contents(self) -> str:
        """Digest that identifies the data as well; see :class:`SampleChoice`."""
        return self.choice.contents

    def locate(self, index: int) -> tuple[int, int]:
        """Return (position among the chosen shards, number of the sample over all shards of the folder)."""
        return self.choice.locate(index)

    def key(self, index: int) -> str:
        """The key of a sample; reads the index only."""
        return self.index.key(self.locate(index)[1])

    def column(self, name: str) -> Column:
        """The values of a column for these samples; see :meth:`SampleChoice.column`."""
        return self.choice.column(name)

    def ragged_column(self, name: str) -> RaggedColumn:
        """The values of a ragged column for these samples; see :meth:`SampleChoice.ragged_column`."""
        return self.choice.ragged_column(name)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("choice", "store")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, store=shared_store())


def _empty(source: WebdatasetSource, samples: int, subset: SampleRange | None) -> EmptyDatasetError:
    """The error for a source without samples; ``samples`` counts those of its shards, excluded ones included."""
    path = source.path
    split = split_words(source.split_part)
    where = source.path
    if source.choice.filtered:
        left = " and ".join(sample_filter.text for sample_filter in source.choice.filters)
        what = f"the filter {left!r} leaves none of the {counted(samples, 'sample')} in {split}"
        fix = "allow more, or leave the data set out"
    elif source.skipped:
        what = f"all {counted(source.skipped, 'sample')} in {split} were skipped when they were measured"
        fix = "see what the task encoder skips, or read the data set without use_measured_skips"
    elif subset is not None:
        what = f"the subset ({subset}) of the {counted(samples, 'sample')} in {split} is empty"
        fix = "make its range wider, or leave the data set out"
        where = f"{path}, subset at {subset.origin}" if subset.origin else path
    elif is_jsonl(path):
        what, fix = "there are no samples in the data set", "each line of the file is a sample; there are no lines"
    else:
        what = f"there are no samples in {split}"
        fix = "check split_parts and exclude in .nv-meta/split.yaml"
    return EmptyDatasetError(what, where=where, fix=fix)


#: Most shards whose sizes are checked when a data set is opened.
_SIZES_CHECKED = 1000


def split_words(split_part: str) -> str:
    """Return the name of a split for messages."""
    return f"split {split_part!r}" if split_part else "the data set"


def check_known(root: str, shards: Sequence[str], counts: dict[str, int], split_part: str) -> None:
    """Check that at least one shard is chosen, and that the data set has all of them.

    Args:
        counts: number of samples of each shard of the data set.

    Raises:
        EmptyDatasetError, MissingShardError: a check failed.
    """
    if not shards:
        raise EmptyDatasetError(
            f"there are no shards in {split_words(split_part)}",
            where=root,
            fix="check split_parts and exclude in .nv-meta/split.yaml, or give --split-ratio another division",
        )
    for name in shards:
        if name not in counts:
            correct = f"correct .nv-meta/split.yaml, or run `energon-lite prepare --force-overwrite {root}`"
            raise MissingShardError(
                f"{split_words(split_part)} lists shard {name!r}, which the data set does not have",
                where=root,
                fix=did_you_mean(name, counts, correct, always=True),
            )


def check_files(root: str, shards: Sequence[str], index: PackedIndex) -> tuple[int, ...]:
    """Check that every shard exists and has the indexed size. If there are very many shards, only some sizes are
    checked now, the others when they are read. Return the versions of the shards; those of unchecked ones are the times
    of change in the index.

    Raises:
        MissingShardError, ShardChangedError: a check failed.
    """
    if len(shards) > _SIZES_CHECKED:
        _check_there(root, shards)
    rows = [index.shard_rows[name] for name in shards]
    sizes, versions = index.shards[rows, 0].tolist(), index.shard_times[rows].tolist()
    for place in range(0, len(shards), -(-len(shards) // _SIZES_CHECKED)):
        name, expected, time = shards[place], sizes[place], versions[place]
        path = os.path.join(root, name)
        try:
            status = os.stat(path)
        except FileNotFoundError:
            raise missing_shard(root, name) from None
        if status.st_size != expected:
            raise changed_shard(path, expected, status.st_size)
        versions[place] = file_version(status, time)
    return tuple(versions)


def _check_there(root: str, shards: Sequence[str]) -> None:
    """Check that every shard exists, by listing folders: that takes a few requests instead of one for each file."""
    listed: dict[str, set[str]] = {}
    for name in shards:
        folder, _, file = name.rpartition("/")
        if folder not in listed:
            try:
                listed[folder] = set(os.listdir(os.path.join(root, folder)))
            except (FileNotFoundError, NotADirectoryError):
                listed[folder] = set()
        if file not in listed[folder]:
            raise missing_shard(root, name)


def missing_shard(root: str, shard: str) -> MissingShardError:
    """Return the error for a shard that does not exist."""
    return MissingShardError(
        "a shard of the data set does not exist",
        where=os.path.join(root, shard),
        fix=f"put it back, or leave it out with `energon-lite prepare --force-overwrite {root}`",
    )
