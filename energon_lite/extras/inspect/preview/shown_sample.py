"""A sample as it is stored, and as the hooks make it; or what went wrong, and where."""

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
from energon_lite.loading.makers.chunk_pipeline import ChunkPipeline
from energon_lite.loading.makers.hook_errors import failure_of
from energon_lite.loading.makers.outcomes import Failure, Rejected
from energon_lite.loading.makers.pipeline import Pipeline
from energon_lite.storage.read.range_stream import PartRange
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.decoding import IMAGE_EXTENSIONS, SampleDecoder

__all__ = ["HIDDEN", "SampleMakers", "ShownSample", "fields_of", "follow", "part_bytes", "part_size"]

#: Fields that every sample has, and that say nothing about what is in it.
HIDDEN = frozenset({"__restore_key__", "__sources__", "__shard__", "__key__", "__tags__"})
#: Samples that are kept: media of a page are asked for one by one, and each is a part of its sample.
_KEPT = 48
#: A small picture has no more pixels along a side, and none is made of a part with more bytes.
_SMALL_SIDE, _LARGEST_FOR_SMALL = 96, 16 << 20
#: Bad samples that are remembered.
_MOST_BAD = 500


@dataclass(frozen=True)
class ShownSample:
    """One sample.

    Args:
        leaf, index, epoch: its address.
        key: its name.
        shard: name of its shard.
        stored: its parts by name: bytes, a part that was not read yet, or the value that a source of the user's gives.
        unread: why the parts could not be read; empty: they could.
        made: what the sample hooks make of it; usually one value, several if they yield several, none if it is lost.
        failures: why it is lost.
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
    """Makes samples for pages, with the hooks as the loader calls them; keeps the last ones."""

    def __init__(self, run: ShownRun):
        self._run = run
        self.pipeline: Pipeline | ChunkPipeline = run.dataset.pipeline()
        self.pipeline.samples.worker_config = run.dataset.worker_config
        self._reader = lru_cache(64)(self._new_reader)
        self._kept = lru_cache(_KEPT)(self._make)
        self._small = lru_cache(256)(self._make_small)
        #: What was lost so far, by address.
        self.bad: dict[tuple[int, int, int], Sequence[Failure]] = {}

    def sample(self, leaf: int, index: int, epoch: int) -> ShownSample:
        """The sample at an address.

        Raises:
            UsageError: there is none.
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
        """A PNG of the first picture in the first sample of a data set, made small; no hook is run. Empty: there is
        none, or it cannot be read, or Pillow is not installed."""
        with self._run.lock:
            return self._small(leaf)

    def _make_small(self, leaf: int) -> bytes:
        names = getattr(self._run.leaves[leaf].source, "part_names", ())
        if not any(name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS for name in names):
            return b""  # nothing is read for that
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
        except Exception:  # the page of the data set shows what is wrong with it
            pass
        return b""

    def _make(self, leaf: int, index: int, epoch: int) -> ShownSample:
        source = self._run.leaves[leaf].source
        key, shard, stored, unread = "", "", dict[str, Any](), ""
        try:
            key, shard = source.key(index), source.shard_names[source.locate(index)[0]]
            stored = self._reader(leaf).sample(index).parts
        except Exception as error:  # it is shown, whatever it is
            unread = _message(error)
        made, failures = self._made((leaf, index, epoch))
        if failures:
            self.bad[leaf, index, epoch] = failures
            while len(self.bad) > _MOST_BAD:
                del self.bad[next(iter(self.bad))]
        return ShownSample(leaf, index, epoch, key, shard, stored, unread, made, failures)

    def _made(self, address: tuple[int, int, int]) -> tuple[Sequence[Any], Sequence[Failure]]:
        """What the sample hooks make of a sample, and what went wrong."""
        try:
            if isinstance(self.pipeline, ChunkPipeline):
                return self.pipeline.results(address)
            with self.pipeline.samples.context() as context:
                made = self.pipeline.samples.one(address, context)
        except Exception as error:  # also what would end a run
            return (), (failure_of(error, "hooks", self._run.leaves[address[0]].name, f"sample {address[1]}"),)
        return ((), (made.failure,)) if type(made) is Rejected else ((made,), ())

    def _new_reader(self, leaf: int) -> Any:
        """Reads all parts of samples, also those that the hooks do not want; large media only as far as they are
        wanted."""
        source = self._run.leaves[leaf].source
        if isinstance(source, WebdatasetSource):
            return SampleReader(source, None, SampleDecoder().streamed(source.part_names))
        return self._run.leaves[leaf].reader


def _message(error: Exception) -> str:
    return error.what if isinstance(error, EnergonLiteError) else f"{type(error).__name__}: {error}"


def fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The fields of a sample or a batch that say what is in it, whatever kind of object it is."""
    if isinstance(value, Mapping):
        pairs: Any = value.items()
    elif dataclasses.is_dataclass(value):
        pairs = ((one.name, getattr(value, one.name, None)) for one in dataclasses.fields(value))
    elif hasattr(value, "_asdict"):
        pairs = value._asdict().items()
    else:
        pairs = [("value", value)]
    return ((str(name), item) for name, item in pairs if str(name) not in HIDDEN)


def follow(value: Any, path: Sequence[str]) -> Any:
    """What is at a path of names and numbers inside of a sample.

    Raises:
        LookupError: nothing is. Names that are no fields, such as methods, are nothing.
    """
    for step in path:
        if isinstance(value, (torch.Tensor, list, tuple)) and not hasattr(value, "_asdict"):
            if not step.isdecimal() or int(step) >= len(value):
                raise LookupError(step)
            value = value[int(step)]
            continue
        found = dict(fields_of(value))
        value = found[step]
    return value


def part_size(part: Any) -> int | None:
    """Bytes of a stored part; None: it is a value."""
    if isinstance(part, PartRange):
        return part.size
    return len(part) if isinstance(part, (bytes, bytearray, memoryview)) else None


def part_bytes(part: Any, start: int, size: int) -> bytes:
    """Some bytes of a stored part."""
    if isinstance(part, PartRange):
        return bytes(part.read(start, max(0, min(size, part.size - start))))
    return bytes(part[start : start + size])
