"""Where checkpoints are: folders on a local disk or under any URL that fsspec knows, whole or not there.

    <root>/step-00000200/                a checkpoint
    <root>/step-00000200/manifest.json   its files with their sizes and checksums; written last, so it is whole
    <root>/latest                        the name of the newest one

On a local disk a checkpoint is written under another name, ``.saving-00000300``, and gets its own by a rename. What a
crash leaves under such a name is not read, and the next save removes it before it begins. Object stores have no rename
for folders; there an empty object ``.saving-00000300`` stands beside the files until the manifest is written. So a
checkpoint without a manifest was either never finished, or has lost it since.
"""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import json
import math
import os
import pickle
import re
import shutil
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import torch
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from energon_lite.errors import StateError
from energon_lite.trainer.parallel.neighbours import neighbours

#: Size in bytes and CRC-32 of a file.
FileSum = tuple[int, int]

#: Bytes after which the next file is begun. Ranks share the work of checking by files.
FILE_BYTES = 4 << 30
#: Bytes that torch's archive of a tensor takes beside its values, about.
_ARCHIVE_BYTES = 1500
#: There is no room: on the disk, in a quota, or in a file of limited size.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MANIFEST = "manifest.json"
_LATEST = "latest"
#: What was saved and where it is, as torch names it.
_INDEX = ".metadata"


class CheckpointFiles:
    """The checkpoints of a run.

    Args:
        root: a local folder, or a URL such as ``s3://bucket/run`` or ``memory://run``.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = os.fspath(root)
        self.fs, self.base = fsspec.core.url_to_fs(self.root)
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self._release: Callable[[], object] = lambda: None  # what is being written, for others to remove

    def place(self, name: str) -> Path | str:
        """Path or URL of something under the root."""
        return Path(self.base) / name if self.is_local else f"{self.root.rstrip('/')}/{name}"

    def begin(self, step: int) -> Path | str:
        """An empty place for the files of a checkpoint. What ended saves have left behind goes: it takes the room.

        Raises:
            StateError: another process is saving the same step here.
        """
        self._release()
        if self.is_local:
            self._remove_remains()
            place = Path(self.base, self._unfinished(step))
            place.mkdir(parents=True, exist_ok=True)
            if (descriptor := _locked(place)) is None:
                what = f"another process is saving step {step} here"
                raise StateError(what, where=place, fix="give each run a folder of its own")
            self._release = weakref.finalize(self, _unlock, descriptor)
            return place
        self._put(self._mark(step), "")
        if self.fs.exists(f"{self.base}/{self._unfinished(step)}"):
            self._forget(self._unfinished(step))
        return self.place(self._unfinished(step))

    def abandon(self, step: int) -> None:
        """Remove what was written since :meth:`begin`: the save has failed, and the next one needs the room."""
        if self.is_local:
            shutil.rmtree(self.place(self._unfinished(step)), ignore_errors=True)
        self._release()

    def publish(self, step: int, files: Mapping[str, FileSum]) -> Path | str:
        """Make what was written since :meth:`begin` a checkpoint, and the latest one. Each is one atomic change.

        Args:
            step: its number.
            files: all of its files.
        """
        name, unfinished = f"step-{step:08d}", self._unfinished(step)
        manifest = {"files": {file: list(known) for file, known in sorted(files.items())}}
        self._put(f"{unfinished}/{_MANIFEST}", json.dumps(manifest))
        if self.is_local:
            # The same step again, e.g. after a crash before it became the latest.
            replaced = self._hide(name, "replaced") if Path(self.base, name).exists() else None
            Path(self.base, unfinished).rename(Path(self.base, name))
            _flush_folder(Path(self.base))
            self._release()
            if replaced is not None:
                shutil.rmtree(replaced)
        self._put(_LATEST, f"{name}\n")
        if not self.is_local:
            self.fs.rm_file(f"{self.base}/{self._mark(step)}")
        return self.place(name)

    def is_one(self) -> bool:
        """True if the root is itself a checkpoint, and not a folder of them."""
        return bool(self.fs.exists(f"{self.base}/{_MANIFEST}"))

    def names(self) -> list[str]:
        """Checkpoints whose files are all there in full length, oldest first."""
        return [name for name in self._finished() if self.damage(name, sums=False) is None]

    def newest_first(self) -> list[str]:
        """All that were finished once, whatever has become of them, newest first; what ``latest`` names before all
        others."""
        latest = self._latest()
        # Without it: a crash just before it was written.
        newest_first = reversed(self._finished())
        return sorted(newest_first, key=lambda name: name != latest)

    def damage(self, name: str, *, sums: bool = True, share: slice = slice(None)) -> str | None:
        """What is wrong with a checkpoint, in words; None if nothing.

        Args:
            name: of the checkpoint.
            sums: compare checksums too, which reads all of it; otherwise sizes only.
            share: which of the files, in the order of their names.
        """
        folder = f"{self.base}/{name}"
        try:
            files = json.loads(self.fs.cat_file(f"{folder}/{_MANIFEST}"))["files"]
            known = [(file, int(size), int(known)) for file, (size, known) in sorted(files.items())]
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} has no {_MANIFEST}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"the manifest of {name} is damaged: {error}"
        if sums and _INDEX not in files:
            return f"the manifest of {name} is damaged: there is no {_INDEX} in it"
        for file, size, crc in known[share]:
            try:
                found = self.fs.size(f"{folder}/{file}")
            except FileNotFoundError:
                return f"{name}/{file} is missing"
            if found != size:
                return f"{name}/{file} has {found} bytes instead of {size}"
            if sums and self._checksum(f"{folder}/{file}") != crc:
                return f"{name}/{file} is damaged: its checksum is another one"
        return None

    def prune(self, keep: int, every: int = 0) -> None:
        """Remove checkpoints. Those behind the latest, which the run has passed over and will replace, do not count.

        Args:
            keep: this many stay, the newest.
            every: so does the first one at or after each multiple of this number of steps; 0: no other one.
        """
        latest, names, permanent = self._latest(), self.names(), dict[int, str]()
        names = names[: names.index(latest) + 1] if latest in names else names
        for name in names if every else ():
            permanent.setdefault(int(name.removeprefix("step-")) // every, name)
        permanent.pop(0, None)  # before the first multiple
        for name in names[:-keep]:
            if name not in permanent.values():
                self._forget(name)

    def _finished(self) -> list[str]:
        """Checkpoints that were written to their end once, oldest first."""
        self.fs.invalidate_cache()
        if not self.fs.exists(self.base):
            return []
        found = {os.path.basename(path.rstrip("/")) for path in self.fs.ls(self.base, detail=False)}
        steps = sorted(int(name[5:]) for name in found if re.fullmatch(r"step-\d{8,}", name))
        return [
            name
            for step, name in ((step, f"step-{step:08d}") for step in steps)
            if self.is_local or self._mark(step) not in found or self.fs.exists(f"{self.base}/{name}/{_MANIFEST}")
        ]

    def _latest(self) -> str:
        """What ``latest`` names; nothing, if it is not there."""
        try:
            return str(self.fs.cat_file(f"{self.base}/{_LATEST}").decode(errors="replace").strip())
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def _remove_remains(self) -> None:
        """Of saves that have ended, on a local disk."""
        for remains in Path(self.base).glob(".*-*"):
            with suppress(FileNotFoundError):  # its save has just come to its end
                if (descriptor := _locked(remains)) is not None:
                    shutil.rmtree(remains, ignore_errors=True)
                    _unlock(descriptor)

    def _mark(self, step: int) -> str:
        """What says in a store that a checkpoint is being written."""
        return f".saving-{step:08d}"

    def _unfinished(self, step: int) -> str:
        """The name under which a checkpoint is written."""
        return self._mark(step) if self.is_local else f"step-{step:08d}"

    def _forget(self, name: str) -> None:
        """Remove a checkpoint. First out of sight: one that is half removed must not look whole."""
        if self.is_local:
            shutil.rmtree(self._hide(name, "deleted"))
            return
        manifest = f"{self.base}/{name}/{_MANIFEST}"
        if self.fs.exists(manifest):
            self.fs.rm_file(manifest)
        self.fs.rm(f"{self.base}/{name}", recursive=True)

    def _hide(self, name: str, why: str) -> Path:
        """Give a local checkpoint a name by which it is none; returns its path."""
        hidden = Path(self.base, f".{why}-{name}")
        shutil.rmtree(hidden, ignore_errors=True)
        Path(self.base, name).rename(hidden)
        return hidden

    def _put(self, name: str, text: str) -> None:
        """Write a file that is there whole or not at all."""
        if not self.is_local:
            self.fs.pipe_file(f"{self.base}/{name}", text.encode())
            return
        final = Path(self.base, name)
        temporary = final.with_name(f".{final.name}")
        with open(temporary, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.rename(final)
        _flush_folder(final.parent)

    def _checksum(self, path: str) -> int:
        known = 0
        with self.fs.open(path, "rb") as stream:
            while block := stream.read(1 << 20):
                known = zlib.crc32(block, known)
        return known


def told(error: OSError, place: str | os.PathLike[str], needed: int = 0) -> OSError | StateError:
    """An error of writing a checkpoint; for want of room, one that says how much there was.

    Args:
        error: of the system.
        place: the checkpoint's, with what is written of it.
        needed: its size in bytes; 0: not known.
    """
    if error.errno not in _NO_ROOM:
        return error
    takes = f"it takes {needed / 2**20:,.1f} MiB" if needed else "its size is not known"
    free = ""
    if os.path.isdir(place):
        written = sum(file.stat().st_size for file in Path(place).iterdir())
        room = shutil.disk_usage(place).free + written
        free = f", {room / 2**20:,.1f} MiB were free for it on the disk"
    return StateError(
        f"there is no room for the checkpoint ({os.strerror(error.errno)}): {takes}{free}",
        where=place,
        fix="make room there (on the disk, in a quota, or by `ulimit -f`) for one more than are kept, keep fewer "
        "(train.keep), or write elsewhere (train.checkpoints); the checkpoint before it is untouched",
    )


def _locked(folder: Path) -> int | None:
    """A descriptor of a folder that this process alone may write now; None: another one does, and lives.

    Where a file system has no locks, every folder is free.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        pass
    return descriptor


def _unlock(descriptor: int) -> None:
    with suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a process that was forked meanwhile may have it open still
    os.close(descriptor)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- the same for torch.distributed.checkpoint ---------------------------------------------------------------------


class CheckpointWriter(StorageWriter):
    """Writes a checkpoint's tensors to a path or URL, box by box, and remembers the size and checksum of each file.

    torch's own keeps all that it has written until it closes a file; this one keeps nothing. Files are as torch's
    readers expect them.

    Args:
        place: an empty folder.
    """

    def __init__(self, place: str | os.PathLike[str]):
        self.sums: dict[str, FileSum] = {}
        self._fs, self._folder = fsspec.core.url_to_fs(os.fspath(place))
        self._needed = 0  # bytes of all ranks' tensors

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell the ranks their numbers, which are in the names of their files, and how much all of them write."""
        needed = sum(_nbytes(item) + _ARCHIVE_BYTES for plan in plans for item in plan.items)
        return [dataclasses.replace(plan, storage_data=(rank, needed)) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        rank, self._needed = plan.storage_data
        for number, items in enumerate(neighbours(((item, _nbytes(item)) for item in plan.items), FILE_BYTES)):
            name = f"__{rank}_{number}.distcp"
            with self._writing(name) as file:
                for item in items:
                    offset = file.size
                    values = planner.resolve_data(item).detach().cpu()  # type: ignore[union-attr]
                    # Of a view, the memory of all would be written.
                    whole = values.untyped_storage().size() == values.nbytes
                    torch.save(values if whole else values.clone(), file)  # type: ignore[arg-type]
                    del values  # before the next one is made: two of the largest would be in memory
                    length = file.size - offset
                    results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the index: what was saved, and where it is."""
        metadata.storage_data = {one.index: one.storage_data for part in results for one in part}
        with self._writing(_INDEX) as file:
            pickle.dump(metadata, file)

    @contextmanager
    def _writing(self, name: str) -> Iterator[_SummedFile]:
        file = _SummedFile()
        try:
            with self._fs.open(f"{self._folder}/{name}", "wb") as file.stream:
                yield file
                file.stream.flush()
                # A stream to a server is there when it is closed.
                if isinstance(self._fs, LocalFileSystem):
                    os.fsync(file.stream.fileno())
        except (OSError, RuntimeError) as error:
            # What torch says of a file that could not be written is about its archive, not about the disk.
            why = file.error or error
            raise (told(why, self._folder, self._needed) if isinstance(why, OSError) else why) from error
        self.sums[name] = (file.size, file.known)

    # What torch asks for, and nothing is to be done about.

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _nbytes(item: WriteItem) -> int:
    assert item.tensor_data is not None  # there is nothing else in our checkpoints
    return math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize


class _SummedFile:
    """Passes on what is written, and sums it up; remembers why it could not."""

    stream: Any

    def __init__(self) -> None:
        self.size = self.known = 0
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.known, self.size = zlib.crc32(view, self.known), self.size + view.nbytes
        try:
            self.stream.write(view)
        except OSError as error:
            self.error = self.error or error
            raise
        return view.nbytes

    def flush(self) -> None:
        """The file is flushed when all is written."""
