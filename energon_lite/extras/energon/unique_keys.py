"""Makes keys unique in a data set, by prefixing each member's name with the name of its shard.

``0001.jpg`` of ``a.tar`` becomes ``a.tar/0001.jpg``, as with Energon's ``--fix-duplicates``. Only names in headers are
written, in place; the bytes of samples are neither changed nor moved. A call that was killed is completed by the next
one.
"""

from __future__ import annotations

import os
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import click

from energon_lite.errors import ShardFormatError, counted
from energon_lite.storage.files.byte_ranges import open_file
from energon_lite.storage.index.nv_meta import read_info
from energon_lite.storage.prepare import PrepareOptions, index_again
from energon_lite.storage.tar_headers import BLOCK, TarHeaders
from energon_lite.storage.tar_scan import scan_shard, split_member_name

#: Option of ``prepare``.
fix_duplicates_option = click.option(
    "--fix-duplicates", is_flag=True, help="Add the shard's name to members of shards, if keys collide."
)


def begin(options: Mapping[str, Any]) -> Callable[[str], None] | None:
    """Return the step of ``prepare`` that makes the keys of the folder unique; None: it was not requested."""

    def step(root: str) -> None:
        renamed = make_keys_unique(root, list(read_info(root)))
        if renamed:
            index_again(root, PrepareOptions(workers=options["num_workers"], sqlite=options["sqlite"]))
        click.echo(
            f"Keys collided: the members of {counted(len(renamed), 'shard')} now begin with the name of their shard"
            if renamed
            else "No two shards have a key in common; no shard was changed",
            err=options["as_json"],
        )

    return step if options["fix_duplicates"] else None


def make_keys_unique(root: str, shards: Sequence[str]) -> list[str]:
    """Rename the members of all shards of a folder if two shards share a key.

    Args:
        root: the folder.
        shards: names of its shards.

    Returns:
        The shards that were changed; none if all keys were unique.

    Raises:
        ShardFormatError: a header has no room for the new name; then no shard is changed.
    """
    if not _is_needed(root, shards):
        return []
    plans = {name: [*_renamings(root, name)] for name in shards}  # all plans before the first write
    for name, plan in plans.items():
        fd = os.open(os.path.join(root, name), os.O_RDWR)
        try:
            for place, block in plan:
                os.pwrite(fd, block, place)
            os.fsync(fd)
        finally:
            os.close(fd)
    return [name for name, plan in plans.items() if plan]


def _is_needed(root: str, shards: Sequence[str]) -> bool:
    """Return True if two shards share a key, or an earlier call was interrupted."""
    seen: set[str] = set()
    begun = whole = False
    for name in shards:
        keys = set(scan_shard(root, name).all_keys())
        if not seen.isdisjoint(keys):
            return True
        own = [key.startswith(f"{name}/") for key in keys]
        begun, whole = begun or any(own), whole or not all(own)
        seen |= keys
    return begun and whole


def _renamings(root: str, shard: str) -> Iterator[tuple[int, bytes]]:
    """Place and new contents of each header that has to be written."""
    path = os.path.join(root, shard)
    with open(path, "rb", buffering=0, opener=open_file) as file:
        fd = file.fileno()
        for member in TarHeaders(fd, os.fstat(fd).st_size, path):
            name = f"{shard}/{member.name}"
            if member.name.startswith(f"{shard}/") or split_member_name(member.name) is None:
                continue
            block = os.pread(fd, BLOCK, member.offset - BLOCK)
            is_plain = member.header_offset == member.offset - BLOCK
            new = _renamed(block, name) if is_plain else None
            if new is None:
                raise ShardFormatError(
                    f"the member {member.name!r} cannot be renamed in place: there is no room for {name!r}",
                    where=path,
                    fix="write the shards again with unique keys, such as ones that begin with the shard's name",
                )
            yield member.offset - BLOCK, new


def _renamed(block: bytes, name: str) -> bytes | None:
    """A header with another name; None: the name does not fit."""
    member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
    member.name = name
    # POSIX headers have more room for names, GNU's for numbers.
    for form in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT):
        with suppress(ValueError):
            made = member.tobuf(form, "utf-8", "surrogateescape")
            if len(made) == BLOCK:  # else a header for the name is in front
                return made
    return None
