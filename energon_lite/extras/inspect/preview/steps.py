"""Samples and batches for pages: a sample as stored and after the hooks, and the batches of any place in the run.

Batches are made from the plan alone, without running the steps before them. If micro-batches have a fixed number of
samples, a place is a *step*, and any step is found directly. If they are planned by tokens, or made by packing hooks,
the number of micro-batches before a place is known only after making them all. In this case, a place is a *chunk* of
the plan, and a micro-batch in it."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from energon_lite.batching.token_plan import PlannedChunk, TokenPlan
from energon_lite.errors import EnergonLiteError, UsageError, counted
from energon_lite.extras.inspect.preview.media import browser_type, part_bytes, part_size
from energon_lite.extras.inspect.preview.shown_run import ShownRun, check_state
from energon_lite.loading.iterators.lane_cursor import LaneCursor
from energon_lite.loading.iterators.lane_dataset import LaneDataset
from energon_lite.loading.iterators.planned_dataset import PlanCursor, PlannedDataset
from energon_lite.loading.makers.batch_runner import BatchRunner, Job
from energon_lite.loading.makers.chunk_job import Made
from energon_lite.loading.makers.hook_errors import failure_of
from energon_lite.loading.makers.outcomes import Address, Failure, Result
from energon_lite.storage.files.shard_store import drop_oldest
from energon_lite.storage.read.sample_reader import SampleReader
from energon_lite.storage.read.webdataset import WebdatasetSource
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.image_decoding import IMAGE_EXTENSIONS

#: Most cached samples: a page requests media one by one, each a part of its sample.
_KEPT = 48
#: The most pixels along a side of a thumbnail, and the most bytes of a part from which one is made.
_SMALL_SIDE = 96
_LARGEST_FOR_SMALL = 16 << 20
#: Most bad samples that are remembered.
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
            owner, most = "the run", counted(len(run.leaves), "data set")
            if 0 <= leaf < len(run.leaves):
                owner, most = run.leaf_name(leaf), counted(len(run.leaves[leaf].source), "sample")
            raise UsageError(
                f"there is no sample {index} of data set {leaf}", fix=f"{owner} has {most}, counted from 0"
            )
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
                if (browser_type(data) or "").startswith("image/"):
                    picture, file = Image.open(io.BytesIO(data)), io.BytesIO()
                    picture.thumbnail((_SMALL_SIDE, _SMALL_SIDE))
                    picture.convert("RGBA").save(file, "png")
                    return file.getvalue()
        except Exception:  # the data set's page shows the error
            pass
        return b""

    def _make(self, leaf: int, index: int, epoch: int) -> ShownSample:
        source = self._run.leaves[leaf].source
        key = shard = unread = ""
        stored = dict[str, Any]()
        try:
            key, shard = source.key(index), source.shard_names[source.locate(index)[0]]
            stored = self._reader(leaf).sample(index).parts
        except Exception as error:  # the page shows any error
            unread = error.what if isinstance(error, EnergonLiteError) else f"{type(error).__name__}: {error}"
        made, failures = self._made((leaf, index, epoch))
        if failures:
            self.bad[leaf, index, epoch] = failures
            drop_oldest(self.bad, _MOST_BAD)
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


#: The most chunks that are planned to reach a step; each takes a moment.
_PLANNED_CHUNKS = 24
#: The most batches shown of a chunk that hooks make.
_MADE = 64


@dataclass(frozen=True)
class Place:
    """A place in the run: a step; or a chunk, and a micro-batch in it.

    Args:
        step: number of the step in its pass; None if ``chunk`` and ``batch`` give the place.
    """

    step: int | None = None
    chunk: int = 0
    batch: int = 0

    def __str__(self) -> str:
        return f"step {self.step:,}" if self.step is not None else f"chunk {self.chunk:,}, micro-batch {self.batch:,}"


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of one rank.

    Args:
        rank: the rank; None if it depends on earlier batches.
        planned: addresses of its samples, followed by ``(start, length, is cut)`` if tokens are planned.
        used: addresses of the samples in the batch, with replacements of failed ones.
        batch: result of the hooks; None if it could not be made.
        failures: lost samples, with reasons.
    """

    rank: int | None
    planned: Sequence[Address]
    used: Sequence[Address] = ()
    batch: Any = None
    failures: Sequence[Failure] = field(default=())


class _Origins:
    """Observer that records the samples of a batch."""

    sees_samples = True

    def begin(self) -> None:
        pass

    def step(self, stage: str, leaf: str, key: str) -> None:
        pass

    def end(self, addresses: Sequence[Address | None]) -> dict[str, Any]:
        return {"addresses": [tuple(address) for address in addresses if address is not None]}


class StepFinder:
    """Finder of the batches at a place, and of its neighbours."""

    def __init__(self, run: ShownRun, makers: SampleMakers):
        self._run = run
        self._makers = makers
        self._dataset = run.dataset
        self._made: tuple[int, Sequence[MicroBatch]] = (-1, ())
        makers.runner.services.observers = (_Origins(),)

    @property
    def by_step(self) -> bool:
        """True if places are steps."""
        return isinstance(self._dataset, PlannedDataset) and not isinstance(self._dataset.plan, TokenPlan)

    @property
    def hooks_decide(self) -> bool:
        """True if the contents of chunks are known only after making them."""
        return isinstance(self._dataset, LaneDataset)

    def start(self) -> Place:
        """Return the place where the run starts: its beginning, or the position of its state."""
        state = self._run.options.state
        if state is None:
            return Place(0) if self.by_step else Place()
        cursor = check_state(self._dataset, state)
        if isinstance(cursor, LaneCursor):
            return Place(None, min((at.chunk for at in cursor.at.values()), default=0))
        return Place(cursor.position // self._run.options.ranks) if self.by_step else Place(None, *cursor.place)

    def at_step(self, step: int) -> Place:
        """Return the place of a step.

        Raises:
            UsageError: the step does not exist, or it takes too long to find.
        """
        if self.by_step:
            self.check(Place(step))
            return Place(step)
        if isinstance(self._dataset, PlannedDataset):
            wanted, chunk = step * self._run.options.ranks, 0
            size = len(self.planned_chunk(0))
            if wanted <= _PLANNED_CHUNKS * max(size, 1):
                place, moved = self._dataset.plan.ahead(0, self._dataset.plan.start, wanted)
                if moved == wanted:
                    return Place(None, *place)
            chunk = wanted // max(size, 1)
            what = "batches are planned by tokens, chunk by chunk, so the chunk of a step is unknown"
            raise UsageError(f"step {step:,}: {what}", fix=f"look at a chunk: this step is near chunk {chunk:,}")
        raise UsageError(
            f"step {step:,}: hooks make the batches of this run, so their number before a step is unknown",
            fix="look at a chunk, or at a batch by its restore key",
        )

    def check(self, place: Place) -> None:
        """Raise an error for a place that does not exist.

        Raises:
            UsageError: the run ends before it.
        """
        plan, number = self._dataset.plan, place.chunk
        if self.by_step != (place.step is not None):
            there = "steps, and no chunks" if self.by_step else "chunks, and steps of unknown number"
            raise UsageError(f"there is no {place}", where=self._run.path, fix=f"this run has {there}")
        if place.step is not None:
            number = place.step * self._run.options.ranks
        count = plan.count(0)
        if number < 0 or (count is not None and number >= count) or not plan.reaches(0, number):
            unit = "micro-batches in a pass" if place.step is not None else "chunks in a pass"
            there = "" if count is None else f"there are {count:,} {unit}"
            raise UsageError(f"there is no {place}", where=self._run.path, fix=there or "give a smaller number")

    def planned_chunk(self, number: int) -> PlannedChunk:
        """Return the plan of a chunk, for batches planned by tokens."""
        return self._dataset.plan.chunks.get(0, number)

    def size(self, place: Place) -> int:
        """Return the number of micro-batches in the chunk of a place; for a step, that of ranks."""
        if place.step is not None:
            return self._run.options.ranks
        return len(self.chunk(place.chunk)) if self.hooks_decide else len(self.planned_chunk(place.chunk))

    def after(self, place: Place) -> Place | None:
        """Return the next place; None at the end of the run."""
        if place.step is None and place.batch + 1 < self.size(place):
            return Place(None, place.chunk, place.batch + 1)
        following = Place(None, place.chunk + 1) if place.step is None else Place(place.step + 1)
        try:
            self.check(following)
        except UsageError:
            return None
        return following

    def before(self, place: Place) -> Place | None:
        """Return the previous place; None for the first."""
        if place.step is not None:
            return Place(place.step - 1) if place.step else None
        if place.batch:
            return Place(None, place.chunk, place.batch - 1)
        if not place.chunk:
            return None
        chunk = Place(None, place.chunk - 1)
        # The previous chunk is not made only to link to its end.
        return chunk if self.hooks_decide else Place(None, chunk.chunk, max(0, self.size(chunk) - 1))

    def planned(self, place: Place) -> list[tuple[int | None, Sequence[Address]]]:
        """Return the ranks and the samples of a place, from the plan alone.

        Raises:
            UsageError: there is no such place.
        """
        if self.hooks_decide:
            return [(batch.rank, batch.used) for batch in self.make(place)]
        return [(rank, job.addresses) for rank, job in self._jobs(place)]

    def make(self, place: Place) -> list[MicroBatch]:
        """Make the micro-batches of a place.

        Raises:
            UsageError: there is no such place.
        """
        if self.hooks_decide:
            self.check(place)
            return [*self.chunk(place.chunk)[place.batch : place.batch + 1]]
        return [self._run_job(rank, job) for rank, job in self._jobs(place)]

    def _jobs(self, place: Place) -> list[tuple[int | None, Job]]:
        self.check(place)
        dataset = self._dataset
        assert isinstance(dataset, PlannedDataset)
        if place.step is None:
            size = self.size(place)
            if place.batch >= size:
                raise UsageError(f"there is no {place}", fix=f"the chunk has {counted(size, 'micro-batch')}")
            return [(None, job) for job in dataset.jobs(0, [(place.chunk, place.batch)])]
        ranks = range(self._run.options.ranks)
        at, moved = dataset.plan.ahead(0, dataset.plan.start, place.step * len(ranks))
        cursor = PlanCursor(at, pass_number=0, position=moved)
        return [*zip(ranks, dataset.jobs(0, [dataset.place(cursor, rank) for rank in ranks]), strict=True)]

    def _run_job(self, rank: int | None, job: Job) -> MicroBatch:
        runner, planned = self._makers.runner, [*job.addresses]
        assert isinstance(runner, BatchRunner)
        with self._run.lock:
            try:
                result = runner.run(job)
            except Exception as error:  # a run would end here; the page says so
                lost = failure_of(error, "batch", "*", counted(len(planned), "sample"))
                return MicroBatch(rank, planned, failures=[lost])
        return MicroBatch(rank, planned, _used(result, planned), result.batch, _lost(result))

    def chunk(self, number: int) -> Sequence[MicroBatch]:
        """Make the first micro-batches of a chunk by the hooks."""
        dataset, runner = self._dataset, self._makers.runner
        assert isinstance(dataset, LaneDataset) and not isinstance(runner, BatchRunner)
        with self._run.lock:
            if self._made[0] == number:
                return self._made[1]
            made: list[MicroBatch] = []
            try:
                for result in runner.batches(dataset.job(0, number)):
                    lost, used = _lost(result), _used(result, ())
                    if result.is_batch:
                        made.append(MicroBatch(None, used, used, result.batch, lost))
                    elif lost:  # after the last batch
                        made.append(MicroBatch(None, (), failures=lost))
                    if len(made) == _MADE:
                        break
            except Exception as error:  # a run would end here; the page says so
                made.append(MicroBatch(None, (), failures=[failure_of(error, "chunk", "*", f"chunk {number}")]))
            self._made = number, made
            return made


def _used(result: Result | Made, planned: Sequence[Address]) -> Sequence[Address]:
    return (result.trace or {}).get("addresses", planned)


def _lost(result: Result | Made) -> list[Failure]:
    return [outcome for outcome in result.outcomes if isinstance(outcome, Failure)]
