"""Loader of joined samples: each member is loaded by its own data set's rules, then a joiner combines them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass
from typing import Any, ClassVar

from energon_lite.errors import SampleError
from energon_lite.extras.energon.joins.joined_reader import JoinedReader
from energon_lite.extras.energon.joins.joined_source import JoinedSource
from energon_lite.samples import Sample
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.read.webdataset import RawSample
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import FieldMap
from energon_lite.storage.samples.sample_loader import SampleLoader

__all__ = ["JoinedLoader"]


@dataclass(frozen=True)
class JoinedLoader:
    """Maker of joined samples, with the interface of
    :class:`~energon_lite.storage.samples.sample_loader.SampleLoader`.

    Args:
        members: the loader of each data set.
        joiner: a class derived from Sample, whose ``from_joined`` is called, or a function; it gets the samples in
            order, or by name.
        names: names of the data sets; None: they have none.
        subflavors: labels of the join as a whole; each sample has those of its data set.
    """

    members: Sequence[SampleLoader]
    joiner: type[Sample] | Callable[..., Any]
    names: Sequence[str] | None = None
    subflavors: Mapping[str, Any] = field(default_factory=dict)

    #: Attributes of a SampleLoader: a joined sample is made by the joiner alone.
    field_map: ClassVar[FieldMap | None] = None
    sample_loader: ClassVar[None] = None
    decoder: ClassVar[SampleDecoder | None] = None
    parts: ClassVar[frozenset[str] | None] = None

    @property
    def sample_type(self) -> type[Sample] | None:
        """The class of the samples; None: the joiner is a function."""
        return self.joiner if isinstance(self.joiner, type) and issubclass(self.joiner, Sample) else None

    def reader(self, source: AnySource) -> JoinedReader:
        """Return the reader of the parts that samples are made of."""
        assert isinstance(source, JoinedSource)
        both = zip(source.members, self.members, strict=True)
        return JoinedReader(source, [loader.reader(member) for member, loader in both])

    def load(self, raw: RawSample, restore_key: tuple[Any, ...]) -> Any:
        """Make one sample.

        Args:
            raw: the joined sample; its parts are the samples of the data sets, or None.
            restore_key: becomes ``__restore_key__``.

        Raises:
            SampleError: one of the samples failed; or the joiner returned no sample.
        """
        parts: Mapping[str, Any] = raw.parts
        samples = [
            None if part is None else loader.load(part, restore_key)
            for loader, part in zip(self.members, parts.values(), strict=True)
        ]
        kind = self.sample_type
        join: Callable[..., Any] = self.joiner if kind is None else kind.from_joined
        if self.names is None:
            joined = join(*samples)
        else:
            joined = join(**dict(zip(self.names, samples, strict=True)))
        if isinstance(joined, dict) and "__restore_key__" in joined:
            joined["__restore_key__"] = restore_key
        elif is_dataclass(joined) and hasattr(joined, "__restore_key__"):
            object.__setattr__(joined, "__restore_key__", restore_key)
        else:
            raise SampleError(
                f"the joiner returned a {type(joined).__name__}",
                where=raw.key,
                fix="return a Sample, such as Kind.derive_from(first, ...), or a dict with the entries of the first",
            )
        return joined
