"""A file system for fsspec as HDFS gateways and object stores are: no rename, no folder without files, files whole or
not there. What it holds is on the local disk, so that forked ranks see each other's files."""

from __future__ import annotations

import io
import os
import shutil
from pathlib import Path
from typing import Any

import fsspec


class _Upload(io.BytesIO):
    """Appears in the store when it is closed, and not before."""

    def __init__(self, path: Path):
        super().__init__()
        self.path = path

    def close(self) -> None:
        if not self.closed:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            hidden = self.path.with_name(f".upload-{os.getpid()}-{self.path.name}")
            hidden.write_bytes(self.getvalue())
            hidden.replace(self.path)
        super().close()

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.close()


class CopyingStore(fsspec.AbstractFileSystem):
    """``copying:///folder/file``."""

    protocol = "copying"
    root_marker = "/"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("copying://").strip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        here = Path(self._strip_protocol(path))
        if not here.exists():
            raise FileNotFoundError(path)
        found = [here] if here.is_file() else [entry for entry in here.iterdir() if not self._hidden(entry)]
        entries = [
            {"name": str(entry), "size": entry.stat().st_size, "type": "directory" if entry.is_dir() else "file"}
            for entry in found
        ]
        return entries if detail else [entry["name"] for entry in entries]

    def _hidden(self, entry: Path) -> bool:
        """An upload that was never closed, or a folder that holds nothing else."""
        return entry.name.startswith(".upload-") or (entry.is_dir() and all(map(self._hidden, entry.iterdir())))

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        here = Path(self._strip_protocol(path))
        if not here.exists() or self._hidden(here):
            raise FileNotFoundError(path)
        kind = "directory" if here.is_dir() else "file"
        return {"name": str(here), "size": here.stat().st_size, "type": kind}

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        here = Path(self._strip_protocol(path))
        return here.open("rb") if mode == "rb" else _Upload(here)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        with _Upload(Path(self._strip_protocol(path2))) as stream:
            stream.write(Path(self._strip_protocol(path1)).read_bytes())

    def rm_file(self, path: str) -> None:
        here = Path(self._strip_protocol(path))
        shutil.rmtree(here) if here.is_dir() else here.unlink()

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Folders are but prefixes."""

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Likewise."""


fsspec.register_implementation(CopyingStore.protocol, CopyingStore, clobber=True)
