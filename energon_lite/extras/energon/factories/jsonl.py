"""Factories of JSONL files: each line is a crude sample."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from energon_lite.extras.energon.factories.base import DatasetFactory
from energon_lite.extras.energon.factories.contents import iter_jsonl_contents
from energon_lite.samples import CrudeSample
from energon_lite.storage.prepare.prepare import prepare_jsonl
from energon_lite.storage.read.opened_source import AnySource
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.sample_loader import SampleLoader

__all__ = ["CrudeJsonlDatasetFactory", "DefaultCrudeJsonlDatasetFactory"]


class CrudeJsonlDatasetFactory(DatasetFactory[CrudeSample]):
    """Factory for the lines of a JSONL file, as crude samples with a part ``json``. Arguments as for its base.

    Example:
        >>> CrudeJsonlDatasetFactory("chats.jsonl", training=False, worker_config=config).build()
    """

    __sample_type__: ClassVar[Any] = CrudeSample

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any):
        super().__init__(path, **kwargs)

    @staticmethod
    def iter_dataset_content(path: str | os.PathLike[str]) -> Iterator[dict[str, bytes]]:
        """Yield the lines of a file, prepared or not, as bytes under ``json``; blank lines are skipped.

        Raises:
            NotPreparedError: the file does not exist.
        """
        return iter_jsonl_contents(path)

    @classmethod
    def prepare_dataset(cls, path: str | os.PathLike[str]) -> int:
        """Write the index of a file's lines (``.jsonl.idx``), as ``energon-lite prepare`` does.

        Returns:
            The number of samples.

        Raises:
            DatasetError: a line is broken; with its number.
        """
        return len(prepare_jsonl(os.fspath(path)))

    def sample_loader_of(self, source: AnySource) -> SampleLoader:
        return SampleLoader(subflavors=self.subflavors, decoder=SampleDecoder())


class DefaultCrudeJsonlDatasetFactory(CrudeJsonlDatasetFactory):
    """Factory for the lines of a JSONL file, with labels.

    Args:
        subflavors: labels of all samples.
        decoder: accepted for Energon; a line is decoded to an object in any case.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        subflavors: Mapping[str, Any] | None = None,
        decoder: Any = None,
        **kwargs: Any,
    ):
        self.subflavors = dict(subflavors or {})
        super().__init__(path, **kwargs)
