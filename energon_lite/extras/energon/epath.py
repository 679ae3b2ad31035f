"""EPath: a local path or a path in a store, with the name and methods of Energon's class, over fsspec."""

from __future__ import annotations

import contextlib
import os
import posixpath
import shutil
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any

from energon_lite.documents.paths import local_path, of_multi_storage
from energon_lite.errors import UsageError

#: Energon's name for the local file system.
DEFAULT_PROFILE_NAME = "default"


class EPath(os.PathLike[str]):
    """A path on this machine, or a URL such as ``s3://bucket/coco`` or ``msc://profile/coco``.

    Local paths are made absolute; ``file://`` is local, and ``dss://name@version/x`` is ``name/version/x`` in the
    folder that ``NVDATASET_CACHE_DIR`` names. ``msc://default/x`` is a local path too, unless a store has that name,
    and ``rclone://`` is an old name of ``msc://``. Pickles hold the text alone. Functions of this library that take a
    path accept it.

    Args:
        initial_path: text, a path, or another EPath.

    Raises:
        UsageError: a ``dss://`` path without a version, or without that folder.

    Example:
        >>> EPath("s3://bucket/coco") / "train/part-000.tar"
        EPath('s3://bucket/coco/train/part-000.tar')
    """

    def __init__(self, initial_path: str | os.PathLike[str]):
        path = initial_path.url if isinstance(initial_path, EPath) else os.fspath(initial_path)
        protocol, found, rest = of_multi_storage(path).partition("://")
        if not found:
            protocol, rest = "", os.path.abspath(os.path.expanduser(protocol))
        elif protocol == "file":
            protocol, rest = "", os.path.abspath(rest)
        if protocol == "dss":
            local_path(f"dss://{rest}")  # for its errors
        self._protocol = protocol
        self._inside = posixpath.normpath("/" + rest.lstrip("/"))

    def __reduce__(self) -> tuple[Any, ...]:
        return EPath, (self.url,)

    # -- parts of the path ------------------------------------------------------------------------------------------

    @property
    def internal_path(self) -> PurePosixPath:
        """The path without protocol, as an absolute path in its store."""
        return PurePosixPath(self._inside)

    @property
    def profile(self) -> str:
        """The protocol, which names the store; ``default`` for this machine."""
        return self._protocol or DEFAULT_PROFILE_NAME

    @property
    def url(self) -> str:
        """The whole path as text; a local path has no protocol."""
        return f"{self._protocol}:/{self._inside}" if self._protocol else self._inside

    @property
    def name(self) -> str:
        """The last component of the path."""
        return posixpath.basename(self._inside)

    @property
    def display_name(self) -> str:
        """The name for display: the last component; for a ``dss://`` path its ``name@version``."""
        return self._inside.split("/")[1] if self._protocol == "dss" else self.name

    @property
    def parent(self) -> EPath:
        """The folder that contains it."""
        return self._at(posixpath.dirname(self._inside))

    def with_suffix(self, suffix: str) -> EPath:
        """Return the same path with another extension."""
        return self._at(str(self.internal_path.with_suffix(suffix)))

    def relative_to(self, other: EPath) -> str:
        """Return the path relative to a folder above it.

        Raises:
            ValueError: ``other`` is not above it, or is in another store.
        """
        if self._protocol != other._protocol:
            raise UsageError(f"{self} and {other} are in different stores", fix="compare paths of one store")
        return str(self.internal_path.relative_to(other.internal_path))

    def __truediv__(self, other: str | os.PathLike[str]) -> EPath:
        text = os.fspath(other)
        if text.startswith("/") or "://" in text:
            return EPath(other)
        return self._at(posixpath.normpath(posixpath.join(self._inside, text)))

    def __fspath__(self) -> str:
        return str(self.local_path()) if self._protocol == "dss" else self.url

    def __str__(self) -> str:
        return self.url

    def __repr__(self) -> str:
        return f"EPath({self.url!r})"

    def __hash__(self) -> int:
        return hash(self.url)

    def __eq__(self, other: object) -> bool:
        # Paths are plain text in this library, such as the dataset_path of a SourceInfo.
        return self.url == (other.url if isinstance(other, EPath) else other)

    def __lt__(self, other: EPath) -> bool:
        return self.url < other.url

    # -- files and folders ------------------------------------------------------------------------------------------

    def is_local(self) -> bool:
        """Return True if the path is on this machine."""
        return self._protocol in ("", "dss")

    def local_path(self) -> Path:
        """Return the path on this machine.

        Raises:
            ValueError: the path is in a store.
        """
        if self._protocol == "dss":
            return Path(local_path(self.url))
        if self._protocol:
            raise UsageError(f"{self} is not local", fix="copy it first, or open it")
        return Path(self._inside)

    def is_file(self) -> bool:
        """Return True if there is a file at the path."""
        return bool(self._fs.isfile(self._key))

    def is_dir(self) -> bool:
        """Return True if there is a folder at the path."""
        return bool(self._fs.isdir(self._key))

    def exists(self) -> bool:
        """Return True if there is a file or folder at the path."""
        return bool(self._fs.exists(self._key))

    def size(self) -> int:
        """Return the size of the file in bytes."""
        return int(self._fs.size(self._key))

    def stat(self) -> dict[str, Any]:
        """Return the store's record of the file, as fsspec gives it."""
        return dict(self._fs.info(self._key))

    def glob(self, pattern: str) -> Iterator[EPath]:
        """Iterate over the files below the path that match a pattern, such as ``**/*.tar``."""
        for key in sorted(self._fs.glob(posixpath.join(self._key, pattern))):
            if self._fs.isfile(key):
                yield self._of_key(key)

    def walk(self) -> Iterator[EPath]:
        """Iterate over all files below the path."""
        for key in sorted(self._fs.find(self._key)):
            yield self._of_key(key)

    # -- reading and writing ------------------------------------------------------------------------------------------

    def open(self, mode: str = "r", block_size: int | None = None) -> IO[Any]:
        """Open the file. When writing, missing folders above it are made."""
        if self.is_local():
            if "r" not in mode:
                self.parent.mkdir(parents=True)
            return self.local_path().open(mode)
        return self._fs.open(self._key, mode, block_size=block_size)

    def read_text(self) -> str:
        """Read the whole file as text."""
        return self.read_bytes().decode()

    def read_bytes(self) -> bytes:
        """Read the whole file."""
        with self.open("rb") as file:
            return bytes(file.read())

    def write_text(self, text: str) -> None:
        """Write a text as the whole file."""
        self.write_bytes(text.encode())

    def write_bytes(self, data: bytes) -> None:
        """Write bytes as the whole file."""
        with self.open("wb") as file:
            file.write(data)

    def mkdir(self, exist_ok: bool = True, parents: bool = False) -> None:
        """Make the folder. Does nothing in stores, which have no folders of their own."""
        if self.is_local():
            self.local_path().mkdir(exist_ok=exist_ok, parents=parents)

    def copy(self, target: EPath) -> None:
        """Copy the file, or all files below the folder, to another place in any store."""
        if self.is_dir():
            for file in self.walk():
                file.copy(target / file.relative_to(self))
            return
        with self.open("rb") as source, target.open("wb") as sink:
            shutil.copyfileobj(source, sink)

    def move(self, target: EPath) -> None:
        """Copy the file, and remove the original."""
        self.copy(target)
        self.unlink()

    def unlink(self) -> None:
        """Remove the file if it exists."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._key)

    # -- the store ----------------------------------------------------------------------------------------------------

    @cached_property
    def _found(self) -> tuple[Any, str]:
        import fsspec

        if self.is_local():
            return fsspec.filesystem("file"), str(self.local_path())
        fs, key = fsspec.core.url_to_fs(self.url)
        return fs, str(key)

    @property
    def _fs(self) -> Any:
        return self._found[0]

    @property
    def _key(self) -> str:
        return self._found[1]

    def _of_key(self, key: str) -> EPath:
        """The path of a key of the store."""
        return self / posixpath.relpath("/" + key.lstrip("/"), "/" + self._key.lstrip("/"))

    def _at(self, inside: str) -> EPath:
        made = EPath(self)
        made._inside = inside
        return made
