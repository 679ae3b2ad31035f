"""Loader that makes a sample of raw parts: it decodes them, maps them to fields, and makes the object."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from energon_lite.errors import DecodeError, FieldAccessError, SampleError
from energon_lite.samples import CrudeSample, Sample
from energon_lite.storage.index.nv_meta import folder_of_shards
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.read.ranges import PartRange
from energon_lite.storage.read.sample_reader import Reader, SampleReader
from energon_lite.storage.read.webdataset import RawSample, WebdatasetSource
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import FieldMap


class Loader(Protocol):
    """Maker of the samples of a leaf; see :class:`SampleLoader`."""

    @property
    def sample_type(self) -> type[Sample] | None: ...

    @property
    def parts(self) -> frozenset[str] | None: ...

    @property
    def subflavors(self) -> Mapping[str, Any]: ...

    def reader(self, source: AnySource) -> Reader:
        """Return the reader of the parts that this loader makes samples of."""

    def load(self, raw: RawSample, restore_key: tuple[Any, ...]) -> Any:
        """Make one sample of its parts."""


@dataclass(frozen=True)
class SampleLoader:
    """Maker of samples from the parts that a source reads.

    Args:
        sample_type: class of the samples; None makes :class:`CrudeSample` of all parts.
        field_map: the part for each field; required with ``sample_type`` unless ``sample_loader`` is given.
        part_filter: the parts of a crude sample, or those that ``sample_loader`` needs; None for all.
        subflavors: each sample gets its own copy.
        decoder: None leaves the parts as bytes.
        sample_loader: the user's own function from a crude sample to fields, used instead of ``field_map``.

    Example:
        >>> loader = SampleLoader(CaptioningSample, compile_field_map({"image": "png", "caption": "txt"}))
        >>> sample = loader.load(SampleReader(source, loader.parts).sample(0), ("sample", 0))
    """

    sample_type: type[Sample] | None = None
    field_map: FieldMap | None = None
    part_filter: frozenset[str] | None = None
    subflavors: Mapping[str, Any] = field(default_factory=dict)
    decoder: SampleDecoder | None = field(default_factory=SampleDecoder)
    sample_loader: Callable[[dict[str, Any]], dict[str, Any]] | None = None

    @property
    def parts(self) -> frozenset[str] | None:
        """Names of the parts to read; None for all."""
        return self.part_filter if self.field_map is None else self.field_map.parts

    def reader(self, source: AnySource) -> SampleReader:
        """Return the reader of the parts that samples are made of."""
        assert isinstance(source, WebdatasetSource)
        streamed = None if self.decoder is None else self.decoder.streamed(source.part_names)
        return SampleReader(source, self.parts, streamed)

    def load(self, raw: RawSample, restore_key: tuple[Any, ...]) -> Sample | CrudeSample:
        """Make one sample.

        Args:
            raw: the sample as the source read it.
            restore_key: becomes ``__restore_key__``.

        Raises:
            DecodeError, FieldAccessError: with part, key and shard.
        """
        try:
            decode = None if self.decoder is None else self.decoder.decode
            decoded: dict[str, Any] = {
                name: decode(name, data) if decode is not None and isinstance(data, (bytes, PartRange)) else data
                for name, data in raw.parts.items()
            }
            base: dict[str, Any] = {
                "__key__": raw.key,
                "__restore_key__": restore_key,
                "__subflavors__": dict(self.subflavors),
                "__sources__": (raw.source,),
            }
            if self.field_map is not None and self.sample_type is not None:
                return self.sample_type(**self.field_map.apply(decoded), **base)
        except (DecodeError, FieldAccessError) as error:
            place = f"sample {raw.key!r} in {folder_of_shards(raw.source.dataset_path)}/{raw.source.shard_name}"
            raise type(error)(error.what, where=place, fix=error.fix) from error.__cause__
        crude = CrudeSample(decoded, __shard__=raw.source.shard_name, **base)
        if self.sample_type is None:
            return crude
        if self.sample_loader is None:
            raise SampleError(f"{self.sample_type.__name__} needs a field_map or a sample_loader", where=raw.key)
        # The user's function may rename a sample, but not change its origin.
        own_key = {"__key__": base.pop("__key__")}
        return self.sample_type(**(own_key | self.sample_loader(crude) | base))
