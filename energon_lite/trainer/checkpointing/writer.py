"""Writing the tensors of a checkpoint for ``torch.distributed.checkpoint``, and saying so where there is no room."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import pickle
import shutil
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
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
from energon_lite.trainer.checkpointing.files import INDEX, FileSum
from energon_lite.trainer.parallel.neighbours import neighbours

#: Bytes after which the next file is begun. Ranks share the work of checking by files.
FILE_BYTES = 4 << 30
#: Bytes that torch's archive of a tensor takes beside its values, about.
_ARCHIVE_BYTES = 1500
#: There is no room: on the disk, in a quota, or in a file of limited size.
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


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
        with self._writing(INDEX) as file:
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
