"""Factories for folders of tars: those that a dataset.yaml names, and base classes for user factories."""

from __future__ import annotations

import itertools
import os
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic

from energon_lite.documents.paths import expand_braces
from energon_lite.errors import UsageError
from energon_lite.extras.energon.factories import DatasetFactory, FactoryLoader, SampleT
from energon_lite.extras.energon.factories.kinds import iter_tar_contents
from energon_lite.samples import SAMPLE_TYPES, CrudeSample, Sample
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import SampleLoader, compile_field_map
from energon_lite.trust import load_function

if TYPE_CHECKING:
    from energon_lite.extras.media import MediaFilterConfig


class WebdatasetPreparator:
    """Functions that prepare folders of tars, without an instance."""

    iter_dataset_content = staticmethod(iter_tar_contents)

    @classmethod
    def prepare_dataset(
        cls,
        parent_path: str | os.PathLike[str],
        paths: Sequence[str],
        *,
        split_parts_ratio: Sequence[tuple[str, float]] | None = None,
        split_parts_patterns: Sequence[tuple[str, str]] | None = None,
        split_config: str = "split.yaml",
        shuffle_seed: int | None = 42,
        progress_fn: Callable[..., Any] | None = None,
        workers: int = 32,
        tar_index_only: bool = False,
        media_filter: MediaFilterConfig | None = None,
        fix_duplicates: bool = False,
        index_sqlite_tmp_path: Path | None = None,
    ) -> set[str]:
        """Write the index of all shards of a folder, as ``energon-lite prepare`` does.

        Args:
            parent_path: the folder.
            paths: shards below it, or brace patterns; other shards in the folder are excluded.
            split_parts_ratio, split_parts_patterns: ``(name, share)`` or ``(name, pattern)`` of each split.
            shuffle_seed: seed by which shards are mixed before they are divided; None: not mixed.
            tar_index_only: write the ``.tar.idx`` files only.
            workers: the most processes.
            media_filter: also extract the metadata of media; see
            :func:`energon_lite.extras.media.MediaFilterConfig.parse`.
            fix_duplicates: if keys collide, rename the members of shards to begin with the name of their shard.
            progress_fn, index_sqlite_tmp_path: accepted and ignored.

        Returns:
            The names of the parts in the samples.
        """
        from energon_lite.extras.energon.unique_keys import make_keys_unique
        from energon_lite.extras.media.media_scan import prepare_media
        from energon_lite.storage.dataset_scan import DatasetScan, find_shards
        from energon_lite.storage.prepare import PrepareOptions, index_again, prepare_folder
        from energon_lite.storage.prepare_choices import Choice

        folder = os.path.abspath(os.path.expanduser(os.fspath(parent_path)))
        if fix_duplicates:
            make_keys_unique(folder, find_shards(folder))
        if tar_index_only:
            return set(index_again(folder, PrepareOptions(workers=workers, sqlite=False)).parts)
        shards = [shard for path in paths for shard in expand_braces(path)]
        others = set(find_shards(folder)) - set(shards)
        exclude = f"^(?:{'|'.join(map(re.escape, sorted(others)))})$"

        def choose(scan: DatasetScan) -> Choice:
            there = set(scan.shard_names)
            return Choice(
                _splits([s for s in shards if s in there], split_parts_ratio, split_parts_patterns, shuffle_seed)
            )

        parts = prepare_folder(folder, choose, PrepareOptions(exclude, force_overwrite=True, workers=workers)).parts
        if media_filter is not None:
            prepare_media(folder, media_filter, workers=workers)
        return set(parts)

    @classmethod
    def add_media_metadata(
        cls,
        parent_path: str | os.PathLike[str],
        *,
        media_filter: MediaFilterConfig,
        workers: int = 32,
        progress_fn: Callable[..., Any] | None = None,
        index_sqlite_tmp_path: Path | None = None,
    ) -> int:
        """Extract the metadata of the media of a prepared folder; return their number.

        Arguments as for :meth:`prepare_dataset`.
        """
        from energon_lite.extras.media.media_scan import prepare_media

        return prepare_media(parent_path, media_filter, workers=workers).found


class BaseWebdatasetFactory(DatasetFactory[SampleT], WebdatasetPreparator, Generic[SampleT]):
    """Factory for a folder of tars whose samples :meth:`load_sample` makes. Arguments as for its base."""

    def load_sample(self, sample: Any) -> Any:
        """Make a sample from its parts.

        Args:
            sample: the bytes of its parts by name, with ``__key__``, ``__shard__``, ``__restore_key__`` and
                ``__sources__``.
        """
        raise NotImplementedError(f"{type(self).__name__} needs a load_sample of its own")

    def sample_loader_of(self, source: AnySource) -> SampleLoader:
        wanted = self.part_filter
        parts = None if wanted is None else frozenset(name for name in source.part_names if wanted(name))
        kind = self.__sample_type__
        return FactoryLoader(
            sample_type=kind if isinstance(kind, type) and issubclass(kind, Sample) else None,
            part_filter=parts,
            subflavors=self.subflavors,
            decoder=None,
            load_sample=self.load_sample,
        )


def _splits(
    shards: Sequence[str],
    ratio: Sequence[tuple[str, float]] | None,
    patterns: Sequence[tuple[str, str]] | None,
    seed: int | None,
) -> dict[str, list[str]]:
    """Return the shards of each split."""
    if patterns is not None:
        by_split: dict[str, list[str]] = {name: [] for name, _ in patterns}
        for name, pattern in patterns:
            wanted = re.compile("|".join(f"(?:{expression})" for expression in expand_braces(pattern)))
            by_split[name] += [shard for shard in shards if wanted.match(shard)]
        return by_split
    if not ratio:
        raise UsageError("prepare_dataset without splits", fix='give split_parts_ratio=[("train", 1.0)]')
    mixed = list(shards)
    if seed is not None:
        random.Random(seed).shuffle(mixed)
    edges = list(itertools.accumulate([0.0, *(share for _, share in ratio)]))
    cuts = [int(edge / edges[-1] * len(mixed)) for edge in edges]
    return {name: mixed[cuts[at] : cuts[at + 1]] for at, (name, _) in enumerate(ratio)}


class DefaultGenericWebdatasetFactory(BaseWebdatasetFactory[SampleT], Generic[SampleT]):
    """Factory for samples of ``__sample_type__``, by a map of parts to fields or by a function.

    Args:
        path: the prepared folder.
        subflavors: labels of all samples.
        field_map: mapping from field to part, as in dataset.yaml.
        sample_loader: function from parts to fields, or ``file.py:function`` in ``.nv-meta``; instead of a field map.
        part_filter: with a sample loader, the parts it needs, as a list, a function, or ``file.py:function``.
        kwargs: arguments of :class:`BaseWebdatasetFactory`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        subflavors: Mapping[str, Any] | None = None,
        field_map: Mapping[str, str] | None = None,
        sample_loader: str | Callable[[dict[str, Any]], dict[str, Any]] | None = None,
        part_filter: str | Sequence[str] | Callable[[str], bool] | None = None,
        **kwargs: Any,
    ):
        if (field_map is None) == (sample_loader is None):
            raise UsageError(
                f"{type(self).__name__} was given {'both a' if field_map else 'neither'} field_map and sample_loader",
                where=os.fspath(path),
                fix="give one of them",
            )
        self.subflavors = dict(subflavors or {})
        super().__init__(path, **kwargs)
        meta = os.path.join(os.fspath(self.path), ".nv-meta")
        self._field_map = None if field_map is None else compile_field_map(dict(field_map))
        if isinstance(sample_loader, str):
            sample_loader = load_function(meta, sample_loader, "sample_loader")
        self._load_fields = sample_loader
        if isinstance(part_filter, str):
            self.part_filter = load_function(meta, part_filter, "part_filter")
        elif callable(part_filter):
            self.part_filter = part_filter
        elif part_filter is not None:
            self.part_filter = frozenset(part_filter).__contains__
        if self._field_map is not None:
            self.part_filter = self._field_map.parts.__contains__

    def load_sample(self, sample: Any) -> Any:
        if self._field_map is not None:
            fields = self._field_map.apply({name: part for name, part in sample.items() if not name.startswith("__")})
        else:
            assert self._load_fields is not None
            fields = self._load_fields(sample)
        base = {"__key__": sample["__key__"], **fields, "__subflavors__": dict(self.subflavors)}
        base |= {"__restore_key__": sample["__restore_key__"], "__sources__": sample["__sources__"]}
        return self.__sample_type__(**base)


class DefaultDecoderWebdatasetFactory(DefaultGenericWebdatasetFactory[SampleT], Generic[SampleT]):
    """Factory for samples of ``__sample_type__`` with decoded parts.

    Args:
        decoder: decoder of parts: a :class:`~energon_lite.storage.SampleDecoder`, or any function of the dict of
        parts; None:
            parts stay bytes.
        auto_decode: False: the same as ``decoder=None``, as in older versions of Energon.
        kwargs: those of its base.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        decoder: SampleDecoder | Callable[[Any], Any] | None = SampleDecoder(),  # noqa: B008  # it is frozen
        auto_decode: bool = True,
        image_decode: str | None = None,
        av_decode: str | None = None,
        video_decode_audio: bool | None = None,
        ignore_decoder_errors: bool = False,
        **kwargs: Any,
    ):
        if isinstance(decoder, SampleDecoder) and image_decode is not None:
            decoder = replace(decoder, image_decode=image_decode)
        self._decoder = decoder if auto_decode else None
        self.image_decode = image_decode or getattr(decoder, "image_decode", "torchrgb")
        super().__init__(path, **kwargs)

    def load_sample(self, sample: Any) -> Any:
        return super().load_sample(self._decoded(sample))

    def _decoded(self, sample: Any) -> Any:
        if isinstance(self._decoder, SampleDecoder):
            decode = self._decoder.decode
            values = {
                name: decode(name, part) if isinstance(part, bytes) and not name.startswith("__") else part
                for name, part in sample.items()
            }
            return CrudeSample(values)
        return sample if self._decoder is None else self._decoder(sample)

    def sample_loader_of(self, source: AnySource) -> SampleLoader:
        loader = super().sample_loader_of(source)
        decoder = self._decoder
        ours = type(self).load_sample in (DefaultDecoderWebdatasetFactory.load_sample, CrudeWebdataset.load_sample)
        if not ours or not (decoder is None or isinstance(decoder, SampleDecoder)):
            return loader
        # No user code is involved, so the standard loader makes the samples directly.
        return SampleLoader(
            sample_type=loader.sample_type,
            field_map=self._field_map,
            part_filter=None if self._field_map is not None else loader.part_filter,
            subflavors=self.subflavors,
            decoder=decoder,
            sample_loader=None if loader.sample_type is None else self._load_fields,
        )


class StandardWebdatasetFactory(DefaultDecoderWebdatasetFactory[SampleT], Generic[SampleT]):
    """Factory for samples of a given type, used by a dataset.yaml without ``__class__``.

    Args:
        sample_type: type of its samples.
        kwargs: those of its base.
    """

    def __init__(self, path: str | os.PathLike[str], *, sample_type: type[Sample], **kwargs: Any):
        if not (isinstance(sample_type, type) and issubclass(sample_type, Sample)):
            raise UsageError(f"sample_type is {sample_type!r}", where=os.fspath(path), fix="derive it from Sample")
        self.__sample_type__ = sample_type  # type: ignore[misc]
        super().__init__(path, **kwargs)


class CrudeWebdataset(DefaultDecoderWebdatasetFactory[CrudeSample]):
    """Factory for crude samples, for cookers.

    Args:
        part_filter: the parts to read; all by default.
        kwargs: those of its base.
    """

    __sample_type__: ClassVar[Any] = CrudeSample

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        subflavors: Mapping[str, Any] | None = None,
        part_filter: str | Sequence[str] | Callable[[str], bool] | None = None,
        **kwargs: Any,
    ):
        if "sample_loader" in kwargs:
            raise UsageError("CrudeWebdataset has no sample_loader", where=os.fspath(path), fix="write a cooker")
        super().__init__(path, subflavors=subflavors, sample_loader=dict, part_filter=part_filter, **kwargs)

    def load_sample(self, sample: Any) -> Any:
        return CrudeSample({**self._decoded(sample), "__subflavors__": dict(self.subflavors)})


class _Typed(DefaultDecoderWebdatasetFactory[Sample]):
    """Base class of factories for samples of ``__sample_type__``."""

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any):
        warnings.warn(
            f"{type(self).__name__} is deprecated: use StandardWebdatasetFactory(sample_type="
            f"{self.__sample_type__.__name__}), in dataset.yaml `sample_type: {self.__sample_type__.__name__}`",
            DeprecationWarning,
            stacklevel=2,
        )
        super().__init__(path, **kwargs)


def _typed(sample_type: type[Sample]) -> type[_Typed]:
    name = sample_type.__name__.replace("Sample", "Webdataset")
    about = {"__sample_type__": sample_type, "__module__": __name__, "__doc__": f"Samples are {sample_type.__name__}."}
    return type(name, (_Typed,), about)


CaptioningWebdataset = _typed(SAMPLE_TYPES["CaptioningSample"])
ImageClassificationWebdataset = _typed(SAMPLE_TYPES["ImageClassificationSample"])
ImageWebdataset = _typed(SAMPLE_TYPES["ImageSample"])
InterleavedWebdataset = _typed(SAMPLE_TYPES["InterleavedSample"])
MultiChoiceVQAWebdataset = _typed(SAMPLE_TYPES["MultiChoiceVQASample"])
OCRWebdataset = _typed(SAMPLE_TYPES["OCRSample"])
SimilarityInterleavedWebdataset = _typed(SAMPLE_TYPES["SimilarityInterleavedSample"])
TextWebdataset = _typed(SAMPLE_TYPES["TextSample"])
VidQAWebdataset = _typed(SAMPLE_TYPES["VidQASample"])
VQAOCRWebdataset = _typed(SAMPLE_TYPES["VQAOCRSample"])
VQAWebdataset = _typed(SAMPLE_TYPES["VQASample"])
