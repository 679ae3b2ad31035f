"""Loader of samples that a data set class of the user's makes of their parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from energon_lite.samples import CrudeSample, Sample
from energon_lite.storage.read.webdataset import RawSample
from energon_lite.storage.samples.sample_loader import SampleLoader

__all__ = ["FactoryLoader"]


@dataclass(frozen=True)
class FactoryLoader(SampleLoader):
    """Loader that passes the parts, as bytes, to a function that makes the sample.

    Args:
        load_sample: ``(parts) -> sample``; the parts include __key__, __shard__, __restore_key__ and __sources__.
    """

    load_sample: Callable[[dict[str, Any]], Any] = dict

    def load(self, raw: RawSample, restore_key: tuple[Any, ...]) -> Sample | CrudeSample:
        base = {
            "__key__": raw.key,
            "__shard__": raw.source.shard_name,
            "__restore_key__": restore_key,
            "__sources__": (raw.source,),
        }
        sample = self.load_sample(CrudeSample(raw.parts, **base))
        own = {"__restore_key__": restore_key, "__sources__": (raw.source,)}
        if isinstance(sample, dict):
            labels = {**(sample.get("__subflavors__") or {}), **self.subflavors}
            return CrudeSample({**base, **sample, **own, "__subflavors__": labels})
        sample.__subflavors__ = {**(getattr(sample, "__subflavors__", None) or {}), **self.subflavors}
        for name, value in own.items():
            setattr(sample, name, value)
        made: Sample = sample
        return made
