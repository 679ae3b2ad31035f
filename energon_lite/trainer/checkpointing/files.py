"""Storage of checkpoints: folders on a local disk or under any fsspec URL, which appear atomically.

    <root>/step-00000200/                a checkpoint
    <root>/step-00000200/manifest.json   its files with sizes and checksums; written last: marks it complete
    <root>/latest                        the name of the newest one

On a local disk, a checkpoint is written under a temporary name, ``.saving-00000300``, and then renamed. Remains of a
crash under such a name are not read, and the next save removes them before it begins. Object stores cannot rename
folders; there, an empty object ``.saving-00000300`` exists next to the files until the manifest is written. So a
checkpoint without a manifest was either never finished, or has lost it since.

A run resumes from the newest complete checkpoint; skipped ones are logged. If checkpoints exist and none is complete,
that is an error: the user must decide whether to restart at step 0.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import weakref
import zlib
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import fsspec
import torch.distributed as dist
from fsspec.implementations.local import LocalFileSystem

from energon_lite.errors import StateError, UsageError
from energon_lite.storage import replacing
from energon_lite.trainer.parallel.mesh import ParallelMesh

logger = logging.getLogger(__name__)

T = TypeVar("T")
Place = Path | str
#: Size in bytes and CRC-32 of a file.
FileSum = tuple[int, int]

_MANIFEST = "manifest.json"
_LATEST = "latest"
#: Names of the remains of a save that was cut off, on a local disk.
_REMAINS = re.compile(r"\.(saving|(replaced|deleted)-step)-\d{8,}")
#: Most bytes that are read at a time.
_BLOCK = 1 << 20
#: File with the index of the tensors, as torch names it.
INDEX = ".metadata"


class CheckpointFiles:
    """The checkpoints of a run.

    Args:
        root: a local folder, or a URL such as ``s3://bucket/run`` or ``memory://run``.

    Raises:
        UsageError: no installed package opens such a URL.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = os.fspath(root)
        try:
            self.fs, self.base = fsspec.core.url_to_fs(self.root)
        except (ValueError, ImportError) as error:
            fix = "check the URL, or install the package that fsspec names for it"
            raise UsageError(f"fsspec cannot open it here: {error}", where=self.root, fix=fix) from error
        self.is_local = isinstance(self.fs, LocalFileSystem)
        self._release: Callable[[], object] = lambda: None  # releases the lock of the save in progress

    def place(self, name: str) -> Place:
        """Return the path or URL of a name under the root."""
        return Path(self.base) / name if self.is_local else f"{self.root.rstrip('/')}/{name}"

    def begin(self, step: int) -> Place:
        """Make an empty place for the files of a checkpoint, and remove remains of former saves to free their space.

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
        """Remove the files written since :meth:`begin`, after the save has failed, to free their space."""
        if self.is_local:
            shutil.rmtree(self.place(self._unfinished(step)), ignore_errors=True)
        self._release()

    def publish(self, step: int, files: Mapping[str, FileSum]) -> Place:
        """Publish the files written since :meth:`begin` as a checkpoint, and as the latest one; each change is atomic.

        Args:
            step: number of the step.
            files: size and checksum of all of its files.
        """
        name, unfinished = f"step-{step:08d}", self._unfinished(step)
        manifest = {"files": {file: list(known) for file, known in sorted(files.items())}}
        self._put(f"{unfinished}/{_MANIFEST}", json.dumps(manifest))
        if self.is_local:
            # The step may exist already, e.g. after a crash before it became the latest.
            replaced = self._hide(name, "replaced") if os.path.lexists(Path(self.base, name)) else None
            Path(self.base, unfinished).rename(Path(self.base, name))
            _flush_folder(Path(self.base))
            self._release()
            if replaced is not None:
                _remove(replaced)
        self._put(_LATEST, f"{name}\n")
        if not self.is_local:
            self.fs.rm_file(f"{self.base}/{self._mark(step)}")
        return self.place(name)

    def is_one(self) -> bool:
        """Return whether the root is itself a checkpoint, and not a folder of them."""
        return bool(self.fs.exists(f"{self.base}/{_MANIFEST}"))

    def names(self) -> list[str]:
        """Return the checkpoints whose files all exist in full length, oldest first."""
        return [name for name in self._finished() if self.damage(name, sums=False) is None]

    def newest_first(self) -> list[str]:
        """Return all checkpoints that were once finished, even if damaged since, newest first.

        The one that ``latest`` names comes before all others.
        """
        latest = self._latest()
        # ``latest`` is missing after a crash just before it was written.
        newest_first = reversed(self._finished())
        return sorted(newest_first, key=lambda name: name != latest)

    def damage(self, name: str, *, sums: bool = True, share: slice = slice(None)) -> str | None:
        """Return a description of the damage of a checkpoint; None if it is intact.

        Args:
            name: name of the checkpoint.
            sums: compare checksums too, which reads all of it; otherwise sizes only.
            share: the files to check, in the order of their names.
        """
        folder = f"{self.base}/{name}"
        try:
            files = json.loads(self.fs.cat_file(f"{folder}/{_MANIFEST}"))["files"]
            known = [(file, int(size), int(known)) for file, (size, known) in sorted(files.items())]
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} has no {_MANIFEST}"
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            return f"the manifest of {name} is damaged: {error}"
        if sums and INDEX not in files:
            return f"the manifest of {name} is damaged: there is no {INDEX} in it"
        for file, size, crc in known[share]:
            try:
                actual = self.fs.size(f"{folder}/{file}")
            except FileNotFoundError:
                return f"{name}/{file} is missing"
            if actual != size:
                return f"{name}/{file} has {actual} bytes instead of {size}"
            if sums and self._checksum(f"{folder}/{file}") != crc:
                return f"{name}/{file} is damaged: its checksum differs"
        return None

    def prune(self, keep: int, every: int = 0) -> None:
        """Remove old checkpoints. Those after the latest, which the run will replace, do not count.

        Args:
            keep: number of newest checkpoints to keep.
            every: also keep the first one at or after each multiple of this number of steps; 0 for none.
        """
        latest = self._latest()
        names = self.names()
        permanent = dict[int, str]()
        names = names[: names.index(latest) + 1] if latest in names else names
        for name in names if every else ():
            permanent.setdefault(int(name.removeprefix("step-")) // every, name)
        permanent.pop(0, None)  # steps before the first multiple
        for name in names[:-keep]:
            if name not in permanent.values():
                self._forget(name)

    def _finished(self) -> list[str]:
        """Return the checkpoints that were completely written once, oldest first."""
        self.fs.invalidate_cache()
        if not self.fs.exists(self.base):
            return []
        names = {os.path.basename(path.rstrip("/")) for path in self.fs.ls(self.base, detail=False)}
        steps = sorted(int(name[5:]) for name in names if re.fullmatch(r"step-\d{8,}", name))
        return [
            name
            for step, name in ((step, f"step-{step:08d}") for step in steps)
            if self.is_local or self._mark(step) not in names or self.fs.exists(f"{self.base}/{name}/{_MANIFEST}")
        ]

    def _latest(self) -> str:
        """Return the name in ``latest``; an empty text if that does not exist."""
        try:
            return str(self.fs.cat_file(f"{self.base}/{_LATEST}").decode(errors="replace").strip())
        except (FileNotFoundError, NotADirectoryError):
            return ""

    def _remove_remains(self) -> None:
        """Remove the remains of saves that are no longer running, on a local disk."""
        for remains in (path for path in Path(self.base).glob(".*-*") if _REMAINS.fullmatch(path.name)):
            with suppress(FileNotFoundError):  # its save has just finished
                if (descriptor := _locked(remains)) is not None:
                    shutil.rmtree(remains, ignore_errors=True)
                    _unlock(descriptor)

    def _mark(self, step: int) -> str:
        """Return the name of the marker of an unfinished checkpoint in a store."""
        return f".saving-{step:08d}"

    def _unfinished(self, step: int) -> str:
        """Return the name under which a checkpoint is written."""
        return self._mark(step) if self.is_local else f"step-{step:08d}"

    def _forget(self, name: str) -> None:
        """Remove a checkpoint. It is hidden first: one that is partly removed must not look complete."""
        if self.is_local:
            _remove(self._hide(name, "deleted"))
            return
        manifest = f"{self.base}/{name}/{_MANIFEST}"
        if self.fs.exists(manifest):
            self.fs.rm_file(manifest)
        self.fs.rm(f"{self.base}/{name}", recursive=True)

    def _hide(self, name: str, why: str) -> Path:
        """Rename a local checkpoint to a hidden name; returns its path."""
        hidden = Path(self.base, f".{why}-{name}")
        with suppress(OSError):  # mostly there is none
            _remove(hidden)
        Path(self.base, name).rename(hidden)
        return hidden

    def _put(self, name: str, text: str) -> None:
        """Write a file atomically."""
        if not self.is_local:
            self.fs.pipe_file(f"{self.base}/{name}", text.encode())
            return
        final = Path(self.base, name)
        with replacing(str(final), flush=True) as temporary:
            Path(temporary).write_text(text)
        _flush_folder(final.parent)

    def _checksum(self, path: str) -> int:
        known = 0
        with self.fs.open(path, "rb") as stream:
            while block := stream.read(_BLOCK):
                known = zlib.crc32(block, known)
        return known


def _locked(folder: Path) -> int | None:
    """Lock a folder for this process and return its descriptor; None if another live process holds the lock.

    On a file system without locks, every folder counts as free.
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
        fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked process may still have it open
    os.close(descriptor)


def _remove(path: Path) -> None:
    """Remove a folder with all in it; a file; of a link the link, and not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def latest_checkpoint(root: str | os.PathLike[str]) -> Place | None:
    """Return the newest checkpoint under ``root`` whose files all exist, or None if there is none.

    Contents are not read.

    Each that is passed over is reported as a warning.

    Raises:
        StateError: checkpoints exist and none is complete; the message lists them.
    """
    files = CheckpointFiles(root)
    return _first_whole(files, files.newest_first(), lambda name: files.damage(name, sums=False), tell=True)


def find_checkpoint(root: str | os.PathLike[str], mesh: ParallelMesh) -> Place | None:
    """Return the newest undamaged checkpoint, or None if there is none.

    Every rank must call it, and reads a share of the files.

    Each that is passed over is reported as a warning, by the main rank.

    Raises:
        StateError: on all ranks: checkpoints exist and none is complete; the message lists them.
    """
    files = CheckpointFiles(root)

    def damage(name: str) -> str | None:
        mine = files.damage(name, share=slice(mesh.global_rank, None, mesh.world_size))
        return next(filter(None, of_all(mine, mesh.world_size)), None)

    return _first_whole(files, of_main(files.newest_first(), mesh), damage, tell=mesh.is_main)


def _first_whole(
    files: CheckpointFiles, names: list[str], damage: Callable[[str], str | None], *, tell: bool
) -> Place | None:
    """Return the first checkpoint without damage, or None if there are no names."""
    wrong: list[str] = []
    for name in names:
        if (problem := damage(name)) is None:
            break
        wrong.append(problem)
    else:
        if wrong:
            raise StateError(
                f"there are {len(wrong)} checkpoints, and none of them is complete: {'; '.join(wrong)}",
                where=files.root,
                fix="copy a complete one there again; or, to begin at step 0, move this folder away or name "
                "another one (train.checkpoints): what the former run wrote is kept",
            )
        return None
    behind = [other for other in names[names.index(name) + 1 :] if int(other[5:]) > int(name[5:])]
    wrong += [damage(other) or f"{other} is behind the one that `latest` names" for other in behind]
    if wrong and tell:
        logger.warning("%s: passed over, %s is used", "; ".join(wrong), name)
    return files.place(name)


def of_main(value: T, mesh: ParallelMesh, group: dist.ProcessGroup | None = None) -> T:
    """Return the main rank's value. Every rank (of a group of all of them) must call it."""
    values = [value]
    if mesh.world_size > 1:
        dist.broadcast_object_list(values, src=0, group=group)
    return values[0]


def of_all(value: T, ranks: int, group: dist.ProcessGroup | None = None) -> list[T]:
    """Gather the values of all ranks."""
    values = [value] * ranks
    if ranks > 1:
        dist.all_gather_object(values, value, group=group)
    return values
