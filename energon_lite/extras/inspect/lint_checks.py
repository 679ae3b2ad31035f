"""Checks of linting: the structure of a shard, also if it is damaged, and single samples.

A shard that can be scanned is read by its headers. For a damaged shard, the index that was made when it was intact has
the places of the samples; the header of each part is then checked at its place, so that one damaged header costs one
part. Without an index, samples are searched from the places in ``.tar.idx``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from energon_lite.errors import (
    DatasetError,
    EnergonLiteError,
    FatalSampleError,
    ShardFormatError,
    SkipSample,
    counted,
    listed,
)
from energon_lite.hooks import TaskEncoder
from energon_lite.loading.makers.chunk_runner import ChunkRunner
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.storage.files.byte_ranges import open_file
from energon_lite.storage.index.nv_meta import shard_index_path
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.read.opened_source import OpenedSource
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import RawSample, WebdatasetSource
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import SampleLoader
from energon_lite.storage.samples.part_decoder import MediaFile
from energon_lite.storage.tar_headers import BLOCK, TarHeaders, is_header
from energon_lite.storage.tar_members import Member, MemberColumns
from energon_lite.storage.tar_scan import SampleColumns, ShardScan, scan_shard, unchanged_file


class Fault(NamedTuple):
    """A problem without its place.

    Args:
        kind: as of a :class:`~energon_lite.extras.inspect.lint_work.Problem`.
        what: description.
        part: the part of the sample; empty: the sample, or the shard, as a whole.
        note: it is a remark, and nothing is broken.
    """

    kind: str
    what: str
    part: str = ""
    note: bool = False


@dataclass
class ShardState:
    """State of a shard.

    Args:
        scan: its samples; None: nothing of it can be read.
        findings: problems of the shard as a whole.
        parts: problems in the structure of a sample, by its number in the shard.
    """

    scan: ShardScan | None
    findings: list[Fault] = field(default_factory=list)
    parts: dict[int, list[Fault]] = field(default_factory=dict)

    @property
    def is_damaged(self) -> bool:
        """True if the shard has a problem, so that not all of its samples may be there."""
        return any(fault.kind == "shard" and not fault.note for fault in self.findings)


def examine_shard(root: str, name: str, samples: int, index: PackedIndex | None) -> ShardState:
    """Examine the headers of a shard of a local folder.

    Args:
        root: the data set's folder.
        name: name of the shard.
        samples: number of its samples when it was prepared.
        index: the packed index, if there is one.
    """
    stored = None
    if index is not None and name in index.shard_rows:
        stored = index.scan(index.shard_rows[name])
    try:
        scan = scan_shard(root, name)
    except ShardFormatError as error:
        state = _of_index(root, stored) if stored is not None else _in_front(root, name)
        state.findings.append(Fault("shard", error.what))
    except DatasetError as error:
        return ShardState(None, [Fault("shard", error.what)])
    else:
        if stored is not None and len(scan.parts) < len(stored.parts) and _is_front(scan, stored):
            what = f"its samples end at byte {scan.end}, in or behind the {scan.samples}th of {stored.samples}"
            state = _of_index(root, stored)
            state.findings.append(Fault("shard", what))
        else:
            state = ShardState(scan, [*_differences(root, scan, samples, stored)])
    if state.scan is not None:
        state.findings += [Fault("shard", note, note=True) for note in state.scan.notes]
    return state


def _differences(root: str, scan: ShardScan, samples: int, stored: ShardScan | None) -> Iterator[Fault]:
    """Yield the differences between a shard and the files next to it."""
    held = counted(scan.samples, "sample")
    if scan.samples != samples:
        yield Fault("shard", f"it has {held}, and had {samples:,} when it was prepared{_gone(scan, stored)}")
    elif stored is not None and not (_is_front(scan, stored) and _is_front(stored, scan)):
        what = "the samples are not where the packed index has them; prepare again with --force-overwrite --rescan"
        yield Fault("index", what)
    offsets = _offsets(shard_index_path(root, scan.name))
    wanted = scan.headers.astype("<u8").tobytes() + scan.end.to_bytes(8, "little")
    if offsets is None:
        yield Fault("index", "there is no .tar.idx, which Energon needs", note=True)
    elif offsets != wanted:
        places = counted(max(0, len(offsets) // 8 - 1), "sample")
        places = "other places of samples" if len(offsets) == len(wanted) else places
        yield Fault("index", f".tar.idx has {places}, the shard has {held}")


def _gone(scan: ShardScan, stored: ShardScan | None) -> str:
    if stored is None:
        return ""
    keys = [key for key in stored.all_keys() if key not in set(scan.all_keys())] if scan.samples < 1_000_000 else []
    return f"; gone: {listed(keys, 20)}" if keys else ""


def _is_front(scan: ShardScan, stored: ShardScan) -> bool:
    """Return whether the shard has the first parts of the stored scan, at the same places."""
    parts = len(scan.parts)
    if parts > len(stored.parts) or not stored.keys.startswith(scan.keys):
        return False
    return bool((scan.parts[:, :2] == stored.parts[:parts, :2]).all())


def _offsets(path: str) -> bytes | None:
    try:
        with open(path, "rb", opener=open_file) as file:
            return file.read()
    except OSError:
        return None


def _of_index(root: str, stored: ShardScan) -> ShardState:
    """Return the samples that the index has for a damaged shard; each part is checked at its place."""
    path = os.path.join(root, stored.name)
    with open(path, "rb", buffering=0, opener=open_file) as file:
        fd = file.fileno()
        with unchanged_file(fd, path) as file_state:
            state = ShardState(replace(stored, **file_state))
            for sample, (first, stop) in enumerate(pairwise(stored.first_part)):
                faults = [
                    Fault("shard", words, stored.part_names[number])
                    for offset, size, number in stored.parts[first:stop].tolist()
                    if (words := _part_fault(fd, file_state["size"], offset, size))
                ]
                if len(faults) == stop - first:  # all parts: the whole sample is lost
                    faults = [Fault("shard", faults[0].what)]
                if faults:
                    state.parts[sample] = faults
    return state


def _part_fault(fd: int, whole: int, offset: int, size: int) -> str:
    """Return the error of the part with its payload at a place; empty if there is none."""
    if offset + size > whole:
        return f"the shard ends at byte {whole}, and it would end at byte {offset + size}"
    block = os.pread(fd, BLOCK, offset - BLOCK)
    if not is_header(block):
        return f"its header, at byte {offset - BLOCK} of the shard, is damaged"
    return ""


def _in_front(root: str, name: str) -> ShardState:
    """Return the samples that can be found in a damaged shard, from each place of a sample in ``.tar.idx`` on; without
    that file, the samples before the damage."""
    path = os.path.join(root, name)
    state = ShardState(None)
    members: list[Member] = []
    offsets = np.frombuffer(_offsets(shard_index_path(root, name)) or bytes(16), dtype="<u8").tolist()
    with open(path, "rb", buffering=0, opener=open_file) as file:
        fd = file.fileno()
        with unchanged_file(fd, path) as file_state:
            headers = TarHeaders(fd, file_state["size"], path)
            for number, (start, stop) in enumerate(pairwise(offsets)):
                there = len(members)
                try:
                    for member in headers.members_from(start):
                        if stop and member.offset > stop:  # 0: there is no .tar.idx, so all members are taken
                            break
                        members.append(member)
                    why = f"the shard ends at byte {file_state['size']}"
                except ShardFormatError as error:
                    why = error.what
                if stop and len(members) == there:
                    state.findings.append(Fault("shard", f"sample {number}, at byte {start}, is lost: {why}"))
    if members:
        samples = SampleColumns()
        samples.add(MemberColumns.from_members(members))
        end = members[-1].offset + -(-members[-1].size // BLOCK) * BLOCK
        state.scan = ShardScan(name=name, end=end, **file_state, **samples.fields())
    return state


@dataclass
class SampleExaminer:
    """Examiner of the samples of a leaf.

    Args:
        leaf: the leaf.
        encoder: the user's hooks, which are run as well; None: no hooks are run.
        usual: parts that nearly every sample has; None: not known. A crude sample that has a strict subset of them is
            reported.
        optional: parts that may be missing, or empty.
    """

    leaf: Leaf
    encoder: TaskEncoder | None
    usual: frozenset[str] | None
    optional: frozenset[str]
    skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        loader = self.leaf.loader
        assert isinstance(loader, SampleLoader)
        own = loader.decoder
        #: Each part is decoded once, also for the sample, if the decoder of the data set decodes images.
        self._shares = own is not None and own.image_decode is not None
        decoder = own if own is not None else SampleDecoder()
        self._decoder = decoder if self._shares else replace(decoder, image_decode="torchrgb8")
        self._loader = replace(loader, decoder=None) if self._shares else loader
        hooks = self.encoder
        self._runner = None if hooks is None else ChunkRunner([self.leaf], hooks, seed=0, batch_size=None)

    @cached_property
    def all_parts(self) -> SampleReader | OpenedSource:
        """Reader of all parts of a sample, including parts that it is not made of."""
        source = self.leaf.source
        if isinstance(source, OpenedSource):
            return source
        assert isinstance(source, WebdatasetSource)  # the data sets of a join are examined one by one
        return SampleReader(source)

    def faults(self, index: int, raw: RawSample) -> list[Fault]:
        """Return the problems of a sample.

        Args:
            index: its number in the leaf.
            raw: all of its parts.

        Raises:
            FatalSampleError: a package is missing, or a hook is broken.
        """
        faults = [*self._missing(raw)]
        decoded: dict[str, Any] = {}
        for name, data in raw.parts.items():
            if isinstance(data, bytes) and not data and name not in self.optional:
                faults.append(Fault("empty part", "the part has no bytes", name))
            elif fault := self._decode(name, data, decoded):
                faults.append(fault)
        return faults or [*self._made(index, raw, decoded)]

    def _missing(self, raw: RawSample) -> Iterator[Fault]:
        there = raw.parts.keys()
        field_map = self._loader.field_map
        if field_map is not None:  # it determines the needed parts exactly
            for name, accesses in field_map.fields:
                parts = list(dict.fromkeys(access.part for access in accesses))
                if there.isdisjoint(parts) and self.optional.isdisjoint(parts):
                    what = f"field {name!r} cannot be filled: there is no {' or '.join(parts)}"
                    yield Fault("missing part", what, parts[0])
        elif self.usual is not None and there < self.usual:
            for name in sorted(self.usual - there - self.optional):
                what = f"it has {', '.join(there) or 'nothing'}, and nearly all others {name} too"
                yield Fault("missing part", what, name)

    def _decode(self, name: str, data: Any, decoded: dict[str, Any]) -> Fault | None:
        decoded[name] = data
        wanted = self._loader.parts is None or name in self._loader.parts
        if not isinstance(data, bytes) or (not wanted and self._decoder.refuses(name)):
            return None
        try:
            value = self._decoder.decode(name, data)
            if isinstance(value, MediaFile):
                value.check()
        except FatalSampleError:
            raise
        except EnergonLiteError as error:
            return Fault("decode", error.what, name)
        if self._shares:
            decoded[name] = value
        words = _damage(data) if name.rpartition(".")[2].lower() in ("jpg", "jpeg") else ""
        return Fault("decode", f"part {name!r} is damaged inside: {words}", name) if words else None

    def _made(self, index: int, raw: RawSample, decoded: dict[str, Any]) -> Iterator[Fault]:
        if self._runner is not None:
            for failure in self._runner.results((0, index, 0))[1]:
                self.skipped += failure.skipped and not failure.dropped
                if not failure.skipped:
                    yield Fault(failure.stage, failure.reason)
            return
        parts = self._loader.parts
        wanted = {name: value for name, value in decoded.items() if parts is None or name in parts}
        try:
            self._loader.load(raw._replace(parts=wanted), ("sample", 0, index, 0, 0))
        except FatalSampleError:
            raise
        except SkipSample:
            self.skipped += 1
        except EnergonLiteError as error:
            yield Fault("field_map", error.what)
        except Exception as error:  # from a sample_loader of the user's, or from the class of the sample
            yield Fault("sample", f"{type(error).__name__}: {error}")


def _damage(data: bytes) -> str:
    """Return the error of a strict decoder for a JPEG that a lenient one accepts; empty: no error, or no decoder."""
    try:
        import simplejpeg
    except ImportError:
        return ""
    try:
        simplejpeg.decode_jpeg(data, "GRAY", fastdct=True, min_height=1, min_width=1, strict=True)
    except ValueError as error:
        text = str(error)
        return text if "orrupt" in text or "remature" in text else ""
    return ""
