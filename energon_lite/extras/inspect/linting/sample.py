"""Linting of single samples: missing parts, parts that cannot be decoded, and errors of the data set or of hooks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from energon_lite.errors import EnergonLiteError, FatalSampleError, SkipSample
from energon_lite.hooks import DefaultTaskEncoder, HookContext, TaskEncoder, hooks_of, returns_its_argument
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.outcomes import Rejected
from energon_lite.loading.makers.sample_maker import SAMPLE, SampleMaker
from energon_lite.storage.read.opened_source import OpenedSource
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import RawSample, WebdatasetSource
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.part_decoder import MediaFile
from energon_lite.storage.samples.sample_loader import SampleLoader

__all__ = ["SampleExaminer"]

#: ``(kind, part, description)`` of a problem.
Fault = tuple[str, str, str]


@dataclass
class SampleExaminer:
    """Examiner of the samples of a leaf.

    Args:
        leaf: the leaf.
        encoder: the user's hooks, which are run as well; None: no hooks are run.
        usual: parts that nearly every sample has; None: not known. A crude sample that has a strict subset of them is
            reported.
        optional: parts that may be missing, or empty.
    """

    leaf: Leaf
    encoder: TaskEncoder | None
    usual: frozenset[str] | None
    optional: frozenset[str]
    skipped: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        loader = self.leaf.loader
        assert isinstance(loader, SampleLoader)
        own = loader.decoder
        #: Each part is decoded once, also for the sample, if the decoder of the data set decodes images.
        self._shares = own is not None and own.image_decode is not None
        decoder = own if own is not None else SampleDecoder()
        self._decoder = decoder if self._shares else replace(decoder, image_decode="torchrgb8")
        self._loader = replace(loader, decoder=None) if self._shares else loader
        encoder = self.encoder or DefaultTaskEncoder()
        self._hooks = hooks_of(encoder, packing=False, batched=False)
        self._maker = SampleMaker([self.leaf], encoder, self._hooks, seed=0)

    @cached_property
    def all_parts(self) -> SampleReader | OpenedSource:
        """Reader of all parts of a sample, including parts that it is not made of."""
        source = self.leaf.source
        if isinstance(source, OpenedSource):
            return source
        assert isinstance(source, WebdatasetSource)  # the data sets of a join are examined one by one
        return SampleReader(source)

    def faults(self, index: int, raw: RawSample, context: HookContext) -> list[Fault]:
        """Return the problems of a sample.

        Args:
            index: its number in the leaf.
            raw: all of its parts.
            context: context of the hooks.

        Raises:
            FatalSampleError: a package is missing, or a hook is broken.
        """
        faults = [*self._missing(raw)]
        decoded: dict[str, Any] = {}
        for name, data in raw.parts.items():
            if isinstance(data, bytes) and not data and name not in self.optional:
                faults.append(("empty part", name, "the part has no bytes"))
            elif fault := self._decode(name, data, decoded):
                faults.append(fault)
        return faults or [*self._made(index, raw, decoded, context)]

    def _missing(self, raw: RawSample) -> Iterator[Fault]:
        there = raw.parts.keys()
        field_map = self._loader.field_map
        if field_map is not None:  # it determines the needed parts exactly
            for name, accesses in field_map.fields:
                parts = list(dict.fromkeys(access.part for access in accesses))
                if there.isdisjoint(parts) and self.optional.isdisjoint(parts):
                    yield "missing part", parts[0], f"field {name!r} has nothing to be made of: no {' or '.join(parts)}"
        elif self.usual is not None and there < self.usual:
            for name in sorted(self.usual - there - self.optional):
                yield "missing part", name, f"it has {', '.join(there) or 'nothing'}, and nearly all others {name} too"

    def _decode(self, name: str, data: Any, decoded: dict[str, Any]) -> Fault | None:
        decoded[name] = data
        wanted = self._loader.parts is None or name in self._loader.parts
        if not isinstance(data, bytes) or (not wanted and self._decoder.refuses(name)):
            return None
        try:
            value = self._decoder.decode(name, data)
            if isinstance(value, MediaFile):
                value.check()
        except FatalSampleError:
            raise
        except EnergonLiteError as error:
            return "decode", name, error.what
        if self._shares:
            decoded[name] = value
        words = _damage(data) if name.rpartition(".")[2].lower() in ("jpg", "jpeg") else ""
        return ("decode", name, f"part {name!r} is damaged inside: {words}") if words else None

    def _made(self, index: int, raw: RawSample, decoded: dict[str, Any], context: HookContext) -> Iterator[Fault]:
        if self.encoder is not None:
            yield from self._hooked(index, raw.key, context)
            return
        parts = self._loader.parts
        wanted = {name: value for name, value in decoded.items() if parts is None or name in parts}
        try:
            self._loader.load(raw._replace(parts=wanted), ("sample", 0, index, 0, 0))
        except FatalSampleError:
            raise
        except SkipSample:
            self.skipped += 1
        except EnergonLiteError as error:
            yield "field_map", "", error.what
        except Exception as error:  # from a sample_loader of the user's, or from the class of the sample
            yield "sample", "", f"{type(error).__name__}: {error}"

    def _hooked(self, index: int, key: str, context: HookContext) -> Iterator[Fault]:
        """Run a sample through the user's hooks in the same way as the loader."""
        context.move(0, SAMPLE, self.leaf.key, 0, index, sample_index=index)
        try:
            ((_, rows, at),) = self._maker.read([(0, index, 0)])
            values = [self._maker.load(rows, at, ("sample", 0, index, 0, 0))[1]]
            for hook in self._hooks.sample:
                if not returns_its_argument(self._maker.encoder, hook):
                    values = [made for value in values for made in self._apply(hook, key, value)]
        except Rejected as rejected:
            if rejected.failure.skipped:
                self.skipped += 1
            else:
                yield rejected.failure.stage, "", rejected.failure.reason

    def _apply(self, hook: str, key: str, value: Any) -> Sequence[Any]:
        function = getattr(self._maker.encoder, hook)
        name = self.leaf.name
        if hook in self._hooks.generators:
            made: list[Any] = self._maker.guarded(hook, name, key, value, lambda sample: [*function(sample)], value)
            return made
        return [self._maker.guarded(hook, name, key, value, function, value)]


def _damage(data: bytes) -> str:
    """Return the error of a strict decoder for a JPEG that a lenient one accepts; empty: no error, or no decoder."""
    try:
        import simplejpeg
    except ImportError:
        return ""
    try:
        simplejpeg.decode_jpeg(data, "GRAY", fastdct=True, min_height=1, min_width=1, strict=True)
    except ValueError as error:
        text = str(error)
        return text if "orrupt" in text or "remature" in text else ""
    return ""
