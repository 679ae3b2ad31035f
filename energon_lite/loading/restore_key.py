"""Making a batch, or a sample, again from its restore key."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from energon_lite.errors import SampleError, UsageError
from energon_lite.loading.iterators.chunked_dataset import ChunkedDataset
from energon_lite.loading.iterators.dataset import PlannedDataset
from energon_lite.loading.iterators.savable_dataset import SavableDataset
from energon_lite.loading.iterators.token_dataset import TokenDataset
from energon_lite.loading.makers.chunk_job import START, Place
from energon_lite.loading.makers.chunk_pipeline import ChunkPipeline
from energon_lite.loading.makers.pipeline import Pipeline

__all__ = ["restore_by_key"]


def restore_by_key(key: Sequence[Any], dataset: SavableDataset, pipeline: Pipeline | ChunkPipeline) -> Any:
    """The batch or sample of a key, made in this process.

    Keys are ``("batch", pass, number)``, ``("batch", pass, plan chunk, number in it)``, ``("chunk", pass, number,
    *place)``, ``("sample", leaf, index, epoch, attempt)``, with the number of the result behind it if the hooks yield
    several, and ``("empty",)``.

    Raises:
        UsageError: not a key of such a data set.
        SampleError: the sample (or the batch) cannot be made.
    """
    parts = tuple(key) if isinstance(key, (tuple, list)) else ()
    whole = all(isinstance(part, int) and not isinstance(part, bool) and part >= 0 for part in parts[1:])
    if isinstance(dataset, ChunkedDataset) and isinstance(pipeline, ChunkPipeline):
        match parts:
            case ("chunk", pass_number, number, *place) if whole and 0 <= len(place) - len(Place._fields) <= 1:
                return _batch_of_chunk(pass_number, number, place, dataset, pipeline)
            case ("sample", leaf, index, epoch, 0, *sub) if whole and len(sub) <= 1 and dataset.has(leaf, index):
                return pipeline.restore((leaf, index, epoch), 0, *sub)
            case ("empty",):
                for number in range(dataset.plan.count(0) or 1):
                    for made in pipeline.run(dataset.job(0, number, empty=True)).batch:
                        return made.batch
    elif isinstance(dataset, TokenDataset) and isinstance(pipeline, Pipeline):
        match parts:
            case ("batch", pass_number, chunk, number) if whole:
                return pipeline.run(dataset.job(pass_number, (chunk, number))).batch
            case ("sample", leaf, index, epoch, 0) if whole and dataset.has(leaf, index):
                return pipeline.restore((leaf, index, epoch), 0)
    elif isinstance(dataset, PlannedDataset) and isinstance(pipeline, Pipeline):
        match parts:
            case ("batch", pass_number, number) if whole:
                (job,) = dataset.jobs(pass_number, [number])
                return pipeline.run(job).batch
            case ("sample", leaf, index, epoch, attempt) if whole and dataset.has(leaf, index):
                return pipeline.restore((leaf, index, epoch), attempt)
    raise UsageError(
        f"{key!r} is not a restore key of this loader",
        fix="give the __restore_key__ of a batch or of a sample as it was delivered",
    )


def _batch_of_chunk(
    pass_number: int, number: int, numbers: list[int], dataset: ChunkedDataset, pipeline: ChunkPipeline
) -> Any:
    """The batch that begins at a place of a chunk. One that goes on in another chunk has the way to it in its key."""
    place, stride = Place(*numbers[: len(Place._fields)]), sum(numbers[len(Place._fields) :])
    count = dataset.plan.count(pass_number)
    chunk, first, carried = number, place, None
    while count is None or chunk < count:
        job = dataset.job(pass_number, chunk, first, stride=stride, carried=carried)
        made = next((one for one in pipeline.batches(job) if one.is_batch or one.carried), None)
        if made is None:
            break
        if made.is_batch:
            return made.batch
        chunk, first, carried = chunk + stride, START, made.carried
    raise SampleError(
        f"there is no batch at {tuple(place)} of chunk {number} in pass {pass_number}",
        fix="give the __restore_key__ of a batch as it was delivered, with the hooks that it was made with",
    )
