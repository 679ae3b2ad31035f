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
    """The lines of a JSONL file, as crude samples with a part ``json``. Arguments are those of its base.

    Example:
        >>> CrudeJsonlDatasetFactory("chats.jsonl", training=False, worker_config=config).build()
    """

    __sample_type__: ClassVar[Any] = CrudeSample

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any):
        super().__init__(path, **kwargs)

    @staticmethod
    def iter_dataset_content(path: str | os.PathLike[str]) -> Iterator[dict[str, bytes]]:
        """The lines of a file, prepared or not, as bytes under ``json``; blank ones are no samples.

        Raises:
            NotPreparedError: there is no such file.
        """
        return iter_jsonl_contents(path)

    @classmethod
    def prepare_dataset(cls, path: str | os.PathLike[str]) -> int:
        """Find the lines of a file, and write down where they are (``.jsonl.idx``); as ``energon-lite prepare`` does.

        Returns:
            How many samples there are.

        Raises:
            DatasetError: a line is broken; says which.
        """
        return len(prepare_jsonl(os.fspath(path)))

    def sample_loader_of(self, source: AnySource) -> SampleLoader:
        return SampleLoader(subflavors=self.subflavors, decoder=SampleDecoder())


class DefaultCrudeJsonlDatasetFactory(CrudeJsonlDatasetFactory):
    """The same, with labels.

    Args:
        subflavors: labels of all samples.
        decoder: as in Energon; a line is an object, whatever it is.
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
