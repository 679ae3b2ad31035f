"""From the positions of a chunk to what is put together to batches: samples, or packs of them.

Packing works on buffers: ``packing_buffer_size`` samples that came through ``preencode_sample`` (fewer at a chunk's
end). ``select_samples_to_pack`` makes lists of them, the samples of each list go through ``postencode_sample``, and
``pack_selected_samples`` makes one sample of each list. Each buffer is used up before the next one is begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from energon_lite.errors import SampleError
from energon_lite.hooks import HookContext, TaskEncoder, hook_context, hooks_of
from energon_lite.loading.makers.chunk_job import ChunkJob, Item
from energon_lite.loading.makers.chunk_log import ChunkLog, Origins, Reading
from energon_lite.loading.makers.hook_errors import returned_nothing
from energon_lite.loading.makers.pipeline import Address, Failure, Leaf, Pipeline, Rejected, set_restore_key
from energon_lite.worker_config import ErrorHandler

__all__ = ["ChunkSamples", "dropped", "numbered"]

#: Tags that keep the hashes for different purposes apart.
_SAMPLE, _SELECT, _SELECTED, _PACK = 11, 16, 17, 18
#: Samples whose bytes are requested from slow storage at the same time. A chunk may have thousands, and hooks that want
#: few of them: who goes on in its middle needs no more than its buffer.
_FETCHED_TOGETHER = 64


class ChunkSamples(Pipeline):
    """Makes the items of chunks.

    Args:
        leaves, encoder, seed, error_handler: as for :class:`~energon_lite.loading.makers.pipeline.Pipeline`.
        batch_size: samples in a batch; None: as the groups say, or single samples.
        packing_buffer_size: samples in a buffer; None: no packing.
        by_tokens: batches are made by the lengths of all samples of a chunk.
    """

    def __init__(
        self,
        leaves: Sequence[Leaf],
        encoder: TaskEncoder,
        *,
        seed: int,
        batch_size: int | None,
        packing_buffer_size: int | None = None,
        error_handler: ErrorHandler | None = None,
        by_tokens: bool = False,
    ):
        packing, batched = packing_buffer_size is not None, batch_size is not None
        hooks = hooks_of(encoder, packing=packing, batched=batched, by_tokens=by_tokens)
        super().__init__(leaves, encoder, seed=seed, refill=False, batched=hooks.batched, error_handler=error_handler)
        self.hooks = hooks
        self.batch_size = batch_size
        self.packing_buffer_size = packing_buffer_size

    def items(self, job: ChunkJob, log: ChunkLog) -> Iterator[Item]:
        """What is put together to batches, from the job's first batch on (with groups: from the chunk's start)."""
        items = self._samples(job, log)
        if self.packing_buffer_size is not None:
            items = self._packed(items, job, log)
        for item in items:
            if self.hooks.whole_chunks or item.start >= job.first.reading:
                yield item

    def restore(self, address: Address, attempt: int, sub: int = 0) -> Any:
        """The sample at an address, after the sample hooks; the ``sub``-th of those that they yield.

        Raises:
            SampleError: it is skipped or fails, or there are not so many.
        """
        log = ChunkLog((0, 0, 0, 0))
        values = self._sample(address, log)
        if sub < len(values):
            return values[sub]
        failures = [outcome for outcome in log.take() if isinstance(outcome, Failure)]
        what = f"{failures[0].stage}: {failures[0].reason}" if failures else f"the hooks yield only {len(values)}"
        raise SampleError(
            f"the sample cannot be made: {what}",
            where=f"data set {self.leaves[address[0]].name}, {failures[0].key if failures else f'sample {address[1]}'}",
            fix=(failures[0].fix or None) if failures else None,
        )

    def _samples(self, job: ChunkJob, log: ChunkLog) -> Iterator[Item]:
        """Each result of the sample hooks."""
        addresses = job.addresses
        for place, address in enumerate(addresses):
            if place % _FETCHED_TOGETHER == 0:
                self.fetch(addresses[place : place + _FETCHED_TOGETHER])
            unit = job.offset + place
            log.reads(unit)
            values = self._sample(address, log)
            for item, value in enumerate(values):
                after = (unit, item + 1, 0, 0) if item + 1 < len(values) else (unit + 1, 0, 0, 0)
                yield Item(value, (unit, item, 0, 0), after, (address,), item)

    def _sample(self, address: Address, log: ChunkLog) -> list[Any]:
        """What the sample hooks make of the sample at an address: any number of results."""
        leaf_number, index, epoch = address
        leaf = self.leaves[leaf_number]
        key = ("sample", leaf_number, index, epoch, 0)
        sample_index = epoch * len(leaf.source) + index
        context = HookContext(self.seed, _SAMPLE, leaf.key, epoch, index, sample_index=sample_index)
        with hook_context(context, seeds=False):
            try:
                name, value = self._sample_of_source(leaf, index, key)
            except Rejected as rejected:
                log.fail(rejected.failure, (address,))
                return []
            values = [value]
            for hook in self.hooks.sample:
                apply = partial(self.apply, hook, log=log, leaf=leaf.name, name=name, origins=(address,))
                values = [made for value in values for made in apply(value)]
        if self.hooks.generators.intersection(self.hooks.sample):
            for number, value in enumerate(values):
                set_restore_key(value, (*key, number))
        elif not self.hooks.batched:
            for value in values:
                set_restore_key(value, key)
        if values:
            log.fine()
        return values

    def apply(
        self, hook: str, argument: Any, log: ChunkLog, *, leaf: str = "*", name: str, origins: Origins
    ) -> list[Any]:
        """The results of a hook: one, or none if it fails, or as many as it yields.

        Args:
            leaf, name: for the log: where the argument comes from, and what it is called.
            origins: addresses of the samples that the argument stands for.
        """
        function = getattr(self.encoder, hook)
        results: list[Any] = []
        try:
            if hook in self.hooks.generators:
                self._guarded(hook, leaf, name, argument, _drain, function, hook, argument, results)
            else:
                results.append(self._guarded(hook, leaf, name, argument, function, argument))
        except Rejected as rejected:
            if not results:
                log.fail(rejected.failure, origins)
            return results
        if not results:
            log.fail(dropped(hook, "it yielded nothing", leaf=leaf, name=name), origins)
        return results

    # -- packing --------------------------------------------------------------------------------------------------

    def _packed(self, samples: Iterator[Item], job: ChunkJob, log: ChunkLog) -> Iterator[Item]:
        """Each result of packing."""
        start = (0, 0) if self.hooks.whole_chunks else (job.first.unit, job.first.item)
        log.buffer = start
        buffer: list[Item] = []
        for sample in samples:
            if sample.start[:2] < start:
                continue
            buffer.append(sample)
            if len(buffer) == self.packing_buffer_size:
                yield from self._packs(buffer, start, sample.after, job, log)
                start = log.buffer = sample.after[:2]
                buffer = []
        if buffer:  # all that is behind its last sample was lost, and is told with its packs
            yield from self._packs(buffer, start, job.end, job, log)

    def _packs(
        self, buffer: list[Item], start: tuple[int, int], end: Reading, job: ChunkJob, log: ChunkLog
    ) -> Iterator[Item]:
        """The packs of a buffer; those that were delivered are selected again, but not made again."""
        log.at = (*start, 0, 0)
        packs = self._select(buffer, start, job, log)
        known = {id(sample.value): sample for sample in buffer}
        for number, pack in enumerate(packs):
            here = (*start, number)
            if not self.hooks.whole_chunks and (*start, number + 1, 0) <= job.first.reading:
                continue
            log.at = (*here, 0)
            encoded, origins = self._encode_selected(pack, known, here, job, log)
            if not encoded:
                continue
            origin = (self.seed, _PACK, job.pass_number, job.number, *here)
            with hook_context(HookContext(*origin, sample_index=numbered(job.number, start[0] + number)), seeds=False):
                name = f"a pack of {len(encoded)}"
                values = self.apply("pack_selected_samples", encoded, log, name=name, origins=origins)
            following = (*start, number + 1, 0) if number + 1 < len(packs) else (*end[:2], 0, 0)
            for part, value in enumerate(values):
                after = (*here, part + 1) if part + 1 < len(values) else following
                yield Item(value, (*here, part), after, () if part else origins, more_of=origins if part else ())

    def _select(self, buffer: list[Item], start: tuple[int, int], job: ChunkJob, log: ChunkLog) -> list[list[Any]]:
        """What ``select_samples_to_pack`` says, without empty packs; samples left out are counted."""
        origin = (self.seed, _SELECT, job.pass_number, job.number, *start)
        values, name = [sample.value for sample in buffer], f"a buffer of {len(buffer)}"
        try:
            with hook_context(HookContext(*origin, sample_index=numbered(job.number, start[0])), seeds=False):
                packs = self._guarded("select_samples_to_pack", "*", name, values, self._lists_of_selected, values)
        except Rejected as rejected:
            log.fail(rejected.failure, [sample.origins[0] for sample in buffer])
            return []
        left_out = _not_selected(buffer, packs)
        if left_out:
            why = dropped("select_samples_to_pack", "it was not selected", name="a sample")
            log.fail(why, [sample.origins[0] for sample in left_out])
        return packs

    def _lists_of_selected(self, values: list[Any]) -> list[list[Any]]:
        selected = self.encoder.select_samples_to_pack(list(values))
        if selected is None:
            raise returned_nothing("select_samples_to_pack", self.encoder.select_samples_to_pack)
        packs = [list(pack) for pack in selected]
        return [pack for pack in packs if pack]

    def _encode_selected(
        self, pack: list[Any], known: dict[int, Item], here: tuple[int, int, int], job: ChunkJob, log: ChunkLog
    ) -> tuple[list[Any], Origins]:
        """The samples of a pack after ``postencode_sample``, without those that fail; and where they come from."""
        origins = [_origin(value, known.get(id(value))) for value in pack]
        for hook in self.hooks.selected:
            encoded, encoded_origins = list[Any](), list[Address | None]()
            for place, (value, origin) in enumerate(zip(pack, origins, strict=True)):
                context = self._selected_context(known.get(id(value)), here, place, job)
                with hook_context(context, seeds=False):
                    made = self.apply(hook, value, log, name="a sample", origins=(origin,))
                encoded += made
                encoded_origins += [origin] * len(made)
            pack, origins = encoded, encoded_origins
        return pack, origins

    def _selected_context(
        self, sample: Item | None, here: tuple[int, int, int], place: int, job: ChunkJob
    ) -> HookContext:
        """A sample's own randomness; an object that the selection made itself has that of its place."""
        if sample is None or sample.result is None or sample.origins[0] is None:
            of_place = (self.seed, _SELECTED, job.pass_number, job.number, *here, place)
            return HookContext(*of_place, sample_index=numbered(job.number, here[0] + here[2]))
        leaf_number, index, epoch = sample.origins[0]
        leaf = self.leaves[leaf_number]
        of_sample = (self.seed, _SELECTED, leaf.key, epoch, index, sample.result)
        return HookContext(*of_sample, sample_index=epoch * len(leaf.source) + index)


def _not_selected(buffer: list[Item], packs: list[list[Any]]) -> list[Item]:
    """The samples of a buffer that are in no pack. Copies that a selection makes are known by their restore keys."""
    selected = {id(value) for pack in packs for value in pack}
    keys = {key for pack in packs for value in pack if (key := _restore_key(value)) is not None}
    return [sample for sample in buffer if id(sample.value) not in selected and _restore_key(sample.value) not in keys]


def _origin(value: Any, item: Item | None) -> Address | None:
    """The address of a sample that was selected."""
    if item is not None:
        return item.origins[0]
    key = _restore_key(value)
    return tuple(key[1:4]) if key is not None and key[0] == "sample" and len(key) > 3 else None


def _restore_key(value: Any) -> Any:
    key = value.get("__restore_key__") if isinstance(value, dict) else getattr(value, "__restore_key__", None)
    return key if isinstance(key, tuple) else None


def numbered(chunk: int, number: int) -> int:
    """A number for the ``number``-th thing of a chunk that nothing else of its kind has in the pass."""
    return chunk << 20 | number


def dropped(stage: str, reason: str, *, leaf: str = "*", name: str) -> Failure:
    """The outcome of a sample with which nothing is wrong, but which goes nowhere."""
    return Failure(leaf, name, stage, reason, skipped=True, dropped=True)


def _drain(function: Callable[[Any], Iterator[Any]], hook: str, argument: Any, results: list[Any]) -> int:
    for result in function(argument):
        if result is None:
            raise returned_nothing(hook, function, verb="yielded")
        results.append(result)  # kept even if the next one fails
    return len(results)
