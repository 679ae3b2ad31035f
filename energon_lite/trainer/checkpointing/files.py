"""Where checkpoints are: folders on a local disk or under any URL that fsspec knows, whole or not there.

    <root>/step-00000200/                a checkpoint
    <root>/step-00000200/manifest.json   its files with their sizes and checksums; written last, so it is whole
    <root>/latest                        the name of the newest one

On a local disk a checkpoint is written under another name, ``.saving-00000300``, and gets its own by a rename. Object
stores have no rename for folders; there the manifest alone says that all is written. What a crash leaves behind has no
manifest, nobody reads it, and the next save removes it.
"""

from __future__ import annotations

import io
import json
import math
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import torch
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from torch.distributed.checkpoint._fsspec_filesystem import FileSystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

#: Size in bytes and CRC-32 of a file.
FileSum = tuple[int, int]

#: Bytes after which the next file is begun. Ranks share the work of checking by files.
FILE_BYTES = 4 << 30
_MANIFEST = "manifest.json"
_LATEST = "latest"


class CheckpointFiles:
    """The checkpoints of a run.

    Args:
        root: a local folder, or a URL such as ``s3://bucket/run`` or ``memory://run``.
    """

    def __init__(self, root: str | os.PathLike[str]):
        self.root = os.fspath(root)
        self.fs, self.base = fsspec.core.url_to_fs(self.root)
        self.is_local = isinstance(self.fs, LocalFileSystem)

    def place(self, name: str) -> Path | str:
        """Path or URL of something under the root."""
        return Path(self.base) / name if self.is_local else f"{self.root.rstrip('/')}/{name}"

    def begin(self, step: int) -> Path | str:
        """An empty place for the files of a checkpoint."""
        name = f".saving-{step:08d}" if self.is_local else f"step-{step:08d}"
        if self.is_local:
            shutil.rmtree(self.place(name), ignore_errors=True)
            os.makedirs(self.place(name))
        elif self.fs.exists(f"{self.base}/{name}"):
            self._forget(name)
        return self.place(name)

    def publish(self, step: int, files: Mapping[str, FileSum]) -> Path | str:
        """Make what was written since :meth:`begin` a checkpoint, and the latest one. Each is one atomic change.

        Args:
            step: its number.
            files: all of its files.
        """
        name = f"step-{step:08d}"
        manifest = json.dumps({"files": {file: list(known) for file, known in sorted(files.items())}}).encode()
        if self.is_local:
            unfinished = Path(self.base) / f".saving-{step:08d}"
            _write_local(unfinished / _MANIFEST, manifest)
            _rename(unfinished, Path(self.base) / name)
        else:
            self.fs.pipe_file(f"{self.base}/{name}/{_MANIFEST}", manifest)
        self._set_latest(name)
        return self.place(name)

    def is_one(self) -> bool:
        """True if the root is itself a checkpoint, and not a folder of them."""
        return bool(self.fs.exists(f"{self.base}/{_MANIFEST}"))

    def names(self) -> list[str]:
        """Checkpoints whose files are all there in full length, oldest first."""
        self.fs.invalidate_cache()
        if not self.fs.exists(self.base):
            return []
        found = [os.path.basename(path.rstrip("/")) for path in self.fs.ls(self.base, detail=False)]
        return sorted(name for name in found if name.startswith("step-") and self.damage(name, sums=False) is None)

    def newest_first(self) -> list[str]:
        """The same, newest first; what ``latest`` names before all others."""
        names = self.names()[::-1]
        try:
            latest = self.fs.cat_file(f"{self.base}/{_LATEST}").decode().strip()
        except FileNotFoundError:
            latest = ""
        # Without it: a crash just before it was written.
        return sorted(names, key=lambda name: name != latest)

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
        except FileNotFoundError:
            return f"{name} was not written to its end"
        except (ValueError, KeyError, TypeError) as error:
            return f"the manifest of {name} is damaged: {error}"
        for file, (size, known) in sorted(files.items())[share]:
            try:
                found = self.fs.size(f"{folder}/{file}")
            except FileNotFoundError:
                return f"{name}/{file} is missing"
            if found != size:
                return f"{name}/{file} has {found} bytes instead of {size}"
            if sums and self._checksum(f"{folder}/{file}") != known:
                return f"{name}/{file} is damaged: its checksum is another one"
        return None

    def prune(self, keep: int) -> None:
        """Remove all but the newest ``keep`` checkpoints, and what crashes have left behind."""
        if self.is_local:
            for remains in Path(self.base).glob(".*-*"):
                shutil.rmtree(remains, ignore_errors=True)
        for name in self.names()[:-keep]:
            self._forget(name)

    def _forget(self, name: str) -> None:
        """Remove a checkpoint. First out of sight: one that is half removed must not look whole."""
        if self.is_local:
            hidden = Path(self.base) / f".deleted-{name}"
            shutil.rmtree(hidden, ignore_errors=True)
            (Path(self.base) / name).rename(hidden)
            shutil.rmtree(hidden)
            return
        manifest = f"{self.base}/{name}/{_MANIFEST}"
        if self.fs.exists(manifest):
            self.fs.rm_file(manifest)
        self.fs.rm(f"{self.base}/{name}", recursive=True)

    def _set_latest(self, name: str) -> None:
        if self.is_local:
            temporary = Path(self.base) / f".{_LATEST}"
            _write_local(temporary, f"{name}\n".encode())
            temporary.rename(Path(self.base) / _LATEST)
            _flush_folder(Path(self.base))
        else:
            self.fs.pipe_file(f"{self.base}/{_LATEST}", f"{name}\n".encode())

    def _checksum(self, path: str) -> int:
        known = 0
        with self.fs.open(path, "rb") as stream:
            while block := stream.read(1 << 20):
                known = zlib.crc32(block, known)
        return known


def _write_local(path: Path, content: bytes) -> None:
    with open(path, "wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())


def _rename(unfinished: Path, final: Path) -> None:
    """Give a checkpoint its final name."""
    _flush_folder(unfinished)
    if final.exists():
        # The same step again, e.g. after a crash before it became the latest.
        replaced = final.parent / f".replaced-{final.name}"
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        unfinished.rename(final)
        shutil.rmtree(replaced)
    else:
        unfinished.rename(final)
    _flush_folder(final.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- the same for torch.distributed.checkpoint ---------------------------------------------------------------------


class CheckpointWriter(dcp.FileSystemWriter):
    """Writes a checkpoint's tensors to a path or URL, box by box, and remembers the size and checksum of each file.

    torch's own keeps all that it has written until it closes a file; this one keeps nothing.

    Args:
        place: an empty folder.
    """

    def __init__(self, place: str | os.PathLike[str]):
        fs, path = fsspec.core.url_to_fs(os.fspath(place))
        # Flushed to disk where there is one; a stream to a server is there when it is closed.
        super().__init__(path, sync_files=isinstance(fs, LocalFileSystem))
        self.sums: dict[str, FileSum] = {}
        self.fs, self.path = _Streams(fs, self.sums), path  # type: ignore[assignment]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results = []
        for number, items in enumerate(_by_bytes(plan.items, FILE_BYTES)):
            name = f"{plan.storage_data.prefix}{number}.distcp"
            with self.fs.create_stream(self.fs.concat_path(self.path, name), "wb") as stream:
                for item in items:
                    offset = stream.tell()
                    values = planner.resolve_data(item).detach().cpu()  # type: ignore[union-attr]
                    # Of a view, the memory of all would be written.
                    whole = values.untyped_storage().size() == values.nbytes
                    torch.save(values if whole else values.clone(), stream)  # type: ignore[arg-type]
                    length = stream.tell() - offset
                    results.append(WriteResult(item.index, length, _StorageInfo(name, offset, length)))
                stream.flush()
                if self.sync_files:
                    os.fsync(stream.fileno())
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future


def _by_bytes(items: Sequence[WriteItem], limit: int) -> Iterator[list[WriteItem]]:
    """The items, in order, in groups of up to ``limit`` bytes or of one item."""
    group: list[WriteItem] = []
    size = 0
    for item in items:
        assert item.tensor_data is not None  # there is nothing else in our checkpoints
        more = math.prod(item.tensor_data.chunk.sizes) * item.tensor_data.properties.dtype.itemsize
        if group and size + more > limit:
            yield group
            group, size = [], 0
        group.append(item)
        size += more
    if group:
        yield group


class _Streams(FileSystem):
    """Files of an fsspec file system; of those that are written, checksums are kept."""

    def __init__(self, fs: Any, sums: dict[str, FileSum]):
        self.fs, self.sums = fs, sums

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        path = os.fspath(path)
        assert self.fs is not None
        with open(path, mode) if isinstance(self.fs, LocalFileSystem) else self.fs.open(path, mode) as stream:
            if mode == "rb":
                yield stream
                return
            summing = _SummingStream(stream)
            yield summing
        self.sums[os.path.basename(path)] = (summing.size, summing.known)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.sums[os.path.basename(new_path)] = self.sums.pop(os.path.basename(path))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class _SummingStream(io.IOBase):
    """Passes on what is written, and sums it up."""

    def __init__(self, stream: Any):
        self.stream, self.size, self.known = stream, 0, 0

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.known, self.size = zlib.crc32(view, self.known), self.size + view.nbytes
        self.stream.write(view)
        return view.nbytes

    def tell(self) -> int:
        return self.size

    def flush(self) -> None:
        if not self.stream.closed:
            self.stream.flush()

    def fileno(self) -> int:
        return int(self.stream.fileno())

    def writable(self) -> bool:
        return True


def reading_streams(place: str | os.PathLike[str]) -> tuple[FileSystem, str]:
    """What a ``FileSystemReader`` needs to read from a path or URL: its streams, and its path there."""
    fs, path = fsspec.core.url_to_fs(os.fspath(place))
    return _Streams(fs, {}), path
