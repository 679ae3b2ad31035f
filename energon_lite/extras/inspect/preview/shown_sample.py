"""Samples for pages, as stored and after the hooks, with their failures."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from energon_lite.errors import EnergonLiteError, UsageError, counted
from energon_lite.extras.inspect.preview.browser_bytes import browser_type, kind_of_type
from energon_lite.extras.inspect.preview.shown_run import ShownRun
from energon_lite.loading.makers.hook_errors import failure_of
from energon_lite.loading.makers.outcomes import Failure
from energon_lite.storage.read.range_stream import PartRange
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.decoding import IMAGE_EXTENSIONS, SampleDecoder

__all__ = ["HIDDEN", "SampleMakers", "ShownSample", "fields_of", "follow", "part_bytes", "part_size"]

#: Fields that every sample has, and that say nothing about its contents.
HIDDEN = frozenset({"__restore_key__", "__sources__", "__shard__", "__key__", "__tags__"})
#: Number of cached samples: a page requests media one by one, each a part of its sample.
_KEPT = 48
#: The most pixels along a side of a thumbnail, and the most bytes of a part from which one is made.
_SMALL_SIDE = 96
_LARGEST_FOR_SMALL = 16 << 20
#: Number of bad samples that are remembered.
_MOST_BAD = 500


@dataclass(frozen=True)
class ShownSample:
    """A sample as shown on a page.

    Args:
        leaf, index, epoch: its address.
        key: its key.
        shard: name of its shard.
        stored: its parts by name: bytes, a part not read yet, or a value from a source of the user's.
        unread: reason why the parts could not be read; empty if they could.
        made: results of the sample hooks: usually one value, several if they yield several, none if the sample is lost.
        failures: reasons for the loss.
    """

    leaf: int
    index: int
    epoch: int
    key: str
    shard: str
    stored: Mapping[str, Any]
    unread: str = ""
    made: Sequence[Any] = ()
    failures: Sequence[Failure] = field(default=())


class SampleMakers:
    """Maker of samples for pages, with the hooks as the loader calls them, and a cache."""

    def __init__(self, run: ShownRun):
        self._run = run
        self.runner = run.dataset.runner()
        self.runner.services.worker_config = run.dataset.worker_config
        self._reader = lru_cache(64)(self._new_reader)
        self._kept = lru_cache(_KEPT)(self._make)
        self._small = lru_cache(256)(self._make_small)
        #: Failures so far, by address.
        self.bad: dict[tuple[int, int, int], Sequence[Failure]] = {}

    def sample(self, leaf: int, index: int, epoch: int) -> ShownSample:
        """Return the sample at an address.

        Raises:
            UsageError: the address does not exist.
        """
        run = self._run
        if not (run.dataset.has(leaf, index) and epoch >= 0):
            most = counted(len(run.leaves), "data set")
            if 0 <= leaf < len(run.leaves):
                most = f"{counted(len(run.leaves[leaf].source), 'sample')} in {run.leaf_name(leaf)}"
            raise UsageError(f"there is no sample {index} of data set {leaf}", fix=f"there are {most}, counted from 0")
        with run.lock:
            return self._kept(leaf, index, epoch)

    def small_picture(self, leaf: int) -> bytes:
        """Return a PNG thumbnail of the first image in a data set's first sample, without running hooks.

        The bytes are empty if there is no image, it cannot be read, or Pillow is not installed.
        """
        with self._run.lock:
            return self._small(leaf)

    def _make_small(self, leaf: int) -> bytes:
        names = getattr(self._run.leaves[leaf].source, "part_names", ())
        if not any(name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS for name in names):
            return b""  # without reading a sample
        try:
            from PIL import Image

            for part in self._reader(leaf).sample(0).parts.values():
                size = part_size(part) or 0
                data = part_bytes(part, 0, size) if 0 < size <= _LARGEST_FOR_SMALL else b""
                if kind_of_type(browser_type(data)) == "image":
                    picture, file = Image.open(io.BytesIO(data)), io.BytesIO()
                    picture.thumbnail((_SMALL_SIDE, _SMALL_SIDE))
                    picture.convert("RGBA").save(file, "png")
                    return file.getvalue()
        except Exception:  # the data set's page shows the error
            pass
        return b""

    def _make(self, leaf: int, index: int, epoch: int) -> ShownSample:
        source = self._run.leaves[leaf].source
        key = ""
        shard = ""
        stored = dict[str, Any]()
        unread = ""
        try:
            key, shard = source.key(index), source.shard_names[source.locate(index)[0]]
            stored = self._reader(leaf).sample(index).parts
        except Exception as error:  # the page shows any error
            unread = _message(error)
        made, failures = self._made((leaf, index, epoch))
        if failures:
            self.bad[leaf, index, epoch] = failures
            while len(self.bad) > _MOST_BAD:
                del self.bad[next(iter(self.bad))]
        return ShownSample(leaf, index, epoch, key, shard, stored, unread, made, failures)

    def _made(self, address: tuple[int, int, int]) -> tuple[Sequence[Any], Sequence[Failure]]:
        """Run the sample hooks; return their results and the failures."""
        try:
            return self.runner.results(address)
        except Exception as error:  # including errors that would end a run
            return (), (failure_of(error, "hooks", self._run.leaves[address[0]].name, f"sample {address[1]}"),)

    def _new_reader(self, leaf: int) -> Any:
        """Make a reader of all parts of samples, also of those that hooks ignore.

        Large media are read only as far as needed.
        """
        source = self._run.leaves[leaf].source
        if isinstance(source, WebdatasetSource):
            return SampleReader(source, None, SampleDecoder().streamed(source.part_names))
        return self._run.leaves[leaf].reader


def _message(error: Exception) -> str:
    return error.what if isinstance(error, EnergonLiteError) else f"{type(error).__name__}: {error}"


def fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a sample or a batch that show its contents, for any kind of object."""
    if isinstance(value, Mapping):
        pairs: Any = value.items()
    elif dataclasses.is_dataclass(value):
        pairs = ((entry.name, getattr(value, entry.name, None)) for entry in dataclasses.fields(value))
    elif hasattr(value, "_asdict"):
        pairs = value._asdict().items()
    else:
        pairs = [("value", value)]
    return ((str(name), item) for name, item in pairs if str(name) not in HIDDEN)


def follow(value: Any, path: Sequence[str]) -> Any:
    """Return the value at a path of names and numbers inside a sample.

    Raises:
        LookupError: the path does not exist; names of methods do not count.
    """
    for step in path:
        if isinstance(value, (torch.Tensor, list, tuple)) and not hasattr(value, "_asdict"):
            if not step.isdecimal() or int(step) >= len(value):
                raise LookupError(step)
            value = value[int(step)]
            continue
        fields = dict(fields_of(value))
        value = fields[step]
    return value


def part_size(part: Any) -> int | None:
    """Return the number of bytes of a stored part; None if it is a value."""
    if isinstance(part, PartRange):
        return part.size
    return len(part) if isinstance(part, (bytes, bytearray, memoryview)) else None


def part_bytes(part: Any, start: int, size: int) -> bytes:
    """Return some bytes of a stored part."""
    if isinstance(part, PartRange):
        return bytes(part.read(start, max(0, min(size, part.size - start))))
    return bytes(part[start : start + size])
