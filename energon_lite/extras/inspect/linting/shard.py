"""Present state of a shard: its samples, and the errors in its structure, also if it is damaged.

A shard that can be scanned is read by its headers. For a damaged shard, the index that was made when it was intact has
the places of the samples; the header of each part is then checked at its place, so that one damaged header costs one
part. Without an index, samples are searched from the places in ``.tar.idx``.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from energon_lite.errors import DatasetError, ShardFormatError, counted, listed
from energon_lite.storage.files.open_file import open_file
from energon_lite.storage.index.nv_meta import shard_index_path
from energon_lite.storage.index.packed_index import PackedIndex
from energon_lite.storage.tar.members import Member, MemberColumns
from energon_lite.storage.tar.sample_columns import SampleColumns
from energon_lite.storage.tar.tar_headers import BLOCK, TarHeaders, is_header
from energon_lite.storage.tar.tar_scan import ShardScan, scan_shard, unchanged_file

__all__ = ["ShardState", "examine_shard"]

#: ``(kind, description, whether it is only a note)`` of a problem.
Finding = tuple[str, str, bool]


@dataclass
class ShardState:
    """State of a shard.

    Args:
        scan: its samples; None: nothing of it can be read.
        findings: problems of the shard as a whole.
        parts: ``(part, description)`` of the problems in the structure of a sample, by its number in the shard.
    """

    scan: ShardScan | None
    findings: list[Finding] = field(default_factory=list)
    parts: dict[int, list[tuple[str, str]]] = field(default_factory=dict)


def examine_shard(root: str, name: str, samples: int, index: PackedIndex | None) -> ShardState:
    """Examine the headers of a shard of a local folder.

    Args:
        root: the data set's folder.
        name: name of the shard.
        samples: number of its samples when it was prepared.
        index: the packed index, if there is one.
    """
    row = index.shard_names.index(name) if index is not None and name in index.shard_names else None
    stored = None if row is None or index is None else index.scan(row)
    try:
        scan = scan_shard(root, name)
        state = ShardState(scan)
    except ShardFormatError as error:
        state = _of_index(root, stored) if stored is not None else _in_front(root, name)
        state.findings.append(("shard", error.what, False))
    except DatasetError as error:
        return ShardState(None, [("shard", error.what, False)])
    else:
        if stored is not None and _is_front(scan, stored):
            what = f"its samples end at byte {scan.end}, in or behind the {scan.samples}th of {stored.samples}"
            state = _of_index(root, stored)
            state.findings.append(("shard", what, False))
        else:
            _compare(root, state, samples, stored)
    if state.scan is not None:
        state.findings += [("shard", note, True) for note in state.scan.notes]
    return state


def _compare(root: str, state: ShardState, samples: int, stored: ShardScan | None) -> None:
    """Compare a shard with the files next to it, and add the differences to its findings."""
    scan = state.scan
    assert scan is not None
    if scan.samples != samples:
        gone = _gone(scan, stored)
        words = f"it has {counted(scan.samples, 'sample')}, and had {samples:,} when it was prepared{gone}"
        state.findings.append(("shard", words, False))
    elif stored is not None and not _agree(scan, stored):
        words = "the samples are not where the packed index has them; prepare again with --force-overwrite --rescan"
        state.findings.append(("index", words, False))
    offsets = _offsets(shard_index_path(root, scan.name))
    wanted = scan.headers.astype("<u8").tobytes() + scan.end.to_bytes(8, "little")
    if offsets is None:
        state.findings.append(("index", "there is no .tar.idx, which Energon needs", True))
    elif offsets != wanted:
        counts = counted(len(offsets) // 8 - 1, "sample") if len(offsets) != len(wanted) else "other places of samples"
        state.findings.append(
            ("index", f".tar.idx has {counts}, the shard has {counted(scan.samples, 'sample')}", False)
        )


def _gone(scan: ShardScan, stored: ShardScan | None) -> str:
    if stored is None:
        return ""
    keys = [key for key in stored.all_keys() if key not in set(scan.all_keys())] if scan.samples < 1_000_000 else []
    return f"; gone: {listed(keys, 20)}" if keys else ""


def _is_front(scan: ShardScan, stored: ShardScan) -> bool:
    """Return whether the shard has the first parts of the stored scan, at the same places, and the others are gone."""
    parts = len(scan.parts)
    if parts >= len(stored.parts) or not stored.keys.startswith(scan.keys):
        return False
    return bool((scan.parts[:, :2] == stored.parts[:parts, :2]).all())


def _agree(scan: ShardScan, stored: ShardScan) -> bool:
    same = scan.keys == stored.keys and scan.parts.shape == stored.parts.shape
    return bool(same and (scan.parts[:, :2] == stored.parts[:, :2]).all())


def _offsets(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
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
            for sample, (first, stop) in enumerate(zip(stored.first_part[:-1], stored.first_part[1:], strict=True)):
                faults = [
                    (stored.part_names[number], words)
                    for offset, size, number in stored.parts[first:stop].tolist()
                    if (words := _part_fault(fd, file_state["size"], offset, size))
                ]
                if len(faults) == stop - first:  # all parts: the whole sample is lost
                    faults = [("", faults[0][1])]
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
                    state.findings.append(("shard", f"sample {number}, at byte {start}, is lost: {why}", False))
    if members:
        samples = SampleColumns()
        samples.add(MemberColumns.from_members(members))
        end = members[-1].offset + -(-members[-1].size // BLOCK) * BLOCK
        state.scan = ShardScan(name=name, end=end, **file_state, **samples.fields())
    return state
