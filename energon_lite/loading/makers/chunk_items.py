"""Items of a chunk, the units that are put together to batches: samples, or packs of samples.

Packing works on buffers: ``packing_buffer_size`` samples that came through ``preencode_sample`` (fewer at a chunk's
end). ``select_samples_to_pack`` makes lists of them, the samples of each list go through ``postencode_sample``, and
``pack_selected_samples`` makes one sample of each list. Each buffer is used up before the next one is begun, except for
samples that the selection pushes back: the next buffer begins with them. If these are the last samples that were read,
the start of the next buffer is an ordinary place, and at the chunk's end they are handed over to a later chunk, which
then begins there. Otherwise the buffers form one unit for places, and the packs of all of them are numbered through. A
run that is resumed inside such a unit repeats the selections, but not the packs.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from energon_lite.errors import FatalSampleError, field_of
from energon_lite.hooks import Hooks, PackedSamplesOutput, place_of
from energon_lite.loading.makers.chunk_job import Item, Origins, Reading
from energon_lite.loading.makers.chunk_run import ChunkRun, dropped
from energon_lite.loading.makers.columns import Rows
from energon_lite.loading.makers.hook_errors import returned_nothing
from energon_lite.loading.makers.job_runner import SAMPLE
from energon_lite.loading.makers.leaf import SampleNames
from energon_lite.loading.makers.observers import StoredSample
from energon_lite.loading.makers.outcomes import Address, Failure, Rejected, set_restore_key
from energon_lite.loading.makers.sample_length import PackSelection
from energon_lite.order.hashing import HashDomain

#: Randomness of ``select_samples_to_pack``.
_SELECT = HashDomain.SELECT_HOOK.value
#: Randomness of ``postencode_sample``.
_SELECTED = HashDomain.POSTENCODE_HOOK.value
#: Randomness of ``pack_selected_samples``.
_PACK = HashDomain.PACK_HOOK.value
#: Largest number of samples in one read. A chunk may have thousands of samples and hooks may want few of them: a run
#: that is resumed in its middle needs no more than its buffer.
_READ_TOGETHER = 64
#: Types that are iterable, but stand for one sample, not for several.
_NO_PACK = (str, bytes, dict)
#: Placeholder for the address of a sample that is counted with another part of it.
_COUNTED: Address = (-1, -1, -1)


class _Again(tuple[int, ...]):
    """Address of a sample that is counted with an earlier pack of its buffer."""


@dataclass(frozen=True)
class ChunkItems:
    """Maker of the items of chunks.

    Args:
        hooks: the hooks that are in use.
        buffer_size: samples in a buffer of packing; None: no packing.
        selection: replacement for the encoder's ``select_samples_to_pack``; None: the encoder has its own.
    """

    hooks: Hooks
    buffer_size: int | None
    selection: PackSelection | None = None

    def of(self, run: ChunkRun) -> Iterator[Item]:
        """Yield the items of a chunk, from the job's first batch on (with groups: from the chunk's start)."""
        items = self._samples(run) if self.buffer_size is None else self._packed(run)
        for item in items:
            if self.hooks.whole_chunks or item.start >= run.job.first.reading:
                yield item

    def results(self, address: Address, run: ChunkRun) -> tuple[list[Any], list[Failure]]:
        """Return all results of the sample hooks for an address, and the failures."""
        ((_, rows, at),) = run.runner.read([address])
        values = self._values(address, rows, at, run)
        return values, [outcome for outcome in run.take() if isinstance(outcome, Failure)]

    def _samples(self, run: ChunkRun) -> Iterator[Item]:
        """Yield each result of the sample hooks, beginning with those that were handed over."""
        yield from run.job.carried_samples
        read = run.runner.read(run.job.addresses, together=_READ_TOGETHER)
        for unit, (address, rows, at) in enumerate(read, run.job.offset):
            run.reads(unit)
            values = self._values(address, rows, at, run)
            for item, value in enumerate(values):
                after = (unit, item + 1, 0, 0) if item + 1 < len(values) else (unit + 1, 0, 0, 0)
                yield Item(value, (unit, item, 0, 0), after, (address,), item)

    def _values(self, address: Address, rows: Rows | StoredSample, at: int, run: ChunkRun) -> list[Any]:
        """Return the results of the sample hooks for an address: any number of them."""
        key = ("sample", *address, 0)
        with run.context:
            if self.hooks.generators.isdisjoint(self.hooks.sample):
                made = next(run.runner.made(((address, rows, at),), run.context))
                values = [] if type(made) is Rejected else [made]
                if type(made) is Rejected:
                    run.fail(made.failure, (address,))
            else:
                values = self._yielded(address, rows, at, key, run)
        if values:
            run.reset()
        return values

    def _yielded(
        self, address: Address, rows: Rows | StoredSample, at: int, key: tuple[Any, ...], run: ChunkRun
    ) -> list[Any]:
        assert isinstance(rows, Rows)  # nothing is stored of hooks that yield any number of samples
        run.of_sample(SAMPLE, address)
        try:
            name, value = run.runner.load(rows, at, key)
        except Rejected as rejected:
            run.fail(rejected.failure, (address,))
            return []
        values = [value]
        for hook in self.hooks.sample:
            values = [
                made
                for value in values
                for made in run.apply(hook, value, leaf=rows.leaf.name, name=name, origins=(address,))
            ]
        for number, value in enumerate(values):
            set_restore_key(value, (*key, number))
        return values

    # -- packing --------------------------------------------------------------------------------------------------

    def _packed(self, run: ChunkRun) -> Iterator[Item]:
        """Yield each result of packing."""
        job = run.job
        start = (0, 0) if self.hooks.whole_chunks else (job.first.unit, job.first.item)
        run.buffer = start
        run.packs = 0
        yield from self._packs_of_buffers(run, start)
        run.filled(run.selects())  # outcomes of samples that were read for no buffer

    def _packs_of_buffers(self, run: ChunkRun, start: tuple[int, int]) -> Iterator[Item]:
        """Yield the packs of one buffer after the other; the first buffer begins at ``start``."""
        job = run.job
        turn = 0
        buffer: list[Item] = []
        fresh = 0  # samples at the buffer's end that were read one after the other
        is_over = False  # the buffer ends with the chunk's last sample
        goes_on = job.pushback and job.hands_over
        for sample in self._samples(run):
            if sample.start[:2] < start:
                continue
            buffer.append(sample)
            fresh = fresh + 1
            is_over = False
            if len(buffer) == self.buffer_size:
                is_over = goes_on and sample.after[:2] >= job.end[:2]
                buffer = yield from self._packs(buffer, start, turn, sample.after, run, fresh, is_last=is_over)
                if len(buffer) == self.buffer_size:
                    raise FatalSampleError(
                        f"select_samples_to_pack pushed back {len(buffer)} samples, as many as a buffer has",
                        fix="make at least one pack of a full buffer, or give a larger packing_buffer_size",
                    )
                turn += 1
                fresh = len(buffer) if run.is_end else 0
                if run.is_end and not is_over:
                    start = run.buffer = buffer[0].start[:2] if buffer else sample.after[:2]
                    run.packs = turn = 0
        if goes_on and buffer:
            few = self.selection is not None and 2 * len(buffer) < (self.buffer_size or 0)
            few = few or (job.fills_buffers and run.is_end)
            if not is_over and not few:
                buffer = yield from self._packs(buffer, start, turn, job.end, run, fresh, is_last=True)
                turn += 1
                is_over = True
            if few or run.is_end:
                run.left = buffer
                return
        while buffer:  # samples after its last one were all lost; they are reported with its packs
            before = len(buffer)
            buffer = yield from self._packs(buffer, start, turn, job.end, run)
            turn += 1
            if len(buffer) >= before:
                why = dropped("select_samples_to_pack", "it was pushed back at the end of a chunk", name="a sample")
                run.at = (*start, run.packs, 0)
                run.fail(why, _addresses(buffer))
                return

    def _packs(
        self,
        buffer: list[Item],
        start: tuple[int, int],
        turn: int,
        end: Reading,
        run: ChunkRun,
        fresh: int = 0,
        *,
        is_last: bool = False,
    ) -> Generator[Item, None, list[Item]]:
        """Yield the packs of a buffer. Delivered packs are selected again, but not made again. Return the samples that
        are pushed back, and store in the run whether these are the last samples that were read.

        Args:
            start: place of the buffer, or of the first buffer of the unit that pushed samples back.
            turn: number of the buffer in this unit.
            end: place after its last sample.
            fresh: samples at its end that were read one after the other.
            is_last: the last buffer of the chunk: samples that it pushes back are handed over, if they were read last.
        """
        first = run.packs
        place = run.selects()
        run.at = (*start, first, 0)
        packs, items, pushed_back = self._select(buffer, start, turn, run)
        run.is_end = not pushed_back or (run.job.pushback and _is_end(buffer, pushed_back, fresh))
        restarts = run.is_end and bool(pushed_back) and not is_last
        end = pushed_back[0].start if restarts else end
        run.filled(place, end if restarts else None)
        run.packs = first + len(packs)
        seen: set[Any] = set()
        for number, (pack, own) in enumerate(zip(packs, items, strict=True), first):
            here = (*start, number)
            origins = _origins(pack, own, seen)
            if not self.hooks.whole_chunks and (*start, number + 1, 0) <= run.job.first.reading:
                continue
            run.at = (*here, 0)
            encoded, origins = self._encode_selected(pack, own, origins, here, run)
            if not encoded:
                continue
            again = [tuple(origin) for origin in origins if type(origin) is _Again]
            origins = [origin for origin in origins if origin is not _COUNTED and type(origin) is not _Again]
            with run.of_chunk(_PACK, *here, number=start[0] + number):
                values = run.apply("pack_selected_samples", encoded, name=f"a pack of {len(encoded)}", origins=origins)
            is_inside = number + 1 < run.packs or (pushed_back and not restarts)
            following = (*start, number + 1, 0) if is_inside else (*end[:2], 0, 0)
            for part, value in enumerate(values):
                after = (*here, part + 1) if part + 1 < len(values) else following
                yield Item(
                    value, (*here, part), after, () if part else origins, None, [*origins, *again] if part else again
                )
        return pushed_back

    def _select(
        self, buffer: list[Item], start: tuple[int, int], turn: int, run: ChunkRun
    ) -> tuple[list[list[Any]], list[list[Item | None]], list[Item]]:
        """Return the packs of the selection, without empty ones, their items, and the samples that it pushes back.
        Samples that are left out are counted."""
        values = [sample.value for sample in buffer]
        name = SampleNames(f"a buffer of {len(buffer)}", _addresses(buffer), run.runner.leaves)
        try:
            with run.of_chunk(_SELECT, *start, *([turn] if turn else []), number=start[0]):
                packs, pushback = run.runner.guarded(
                    "select_samples_to_pack", "*", name, values, self._selected, buffer, values, run
                )
        except Rejected as rejected:
            run.fail(rejected.failure, _addresses(buffer))
            return [], [], []
        items = _items_of(buffer, packs, pushback)
        left_out = _not_selected(buffer, [*packs, pushback], items)
        if left_out:
            why = dropped("select_samples_to_pack", "it was not selected", name="a sample")
            run.fail(why, _addresses(left_out))
        return packs, items[:-1], _pushed_back(buffer, packs, pushback, items)

    def _selected(self, buffer: list[Item], values: list[Any], run: ChunkRun) -> tuple[list[list[Any]], list[Any]]:
        """Call the selection; return its packs and the values that it pushes back."""
        if self.selection is not None:
            full = self.selection(values, _addresses(buffer))
            return list(map(list, full.packs)), list(full.pushback)
        select = run.runner.encoder.select_samples_to_pack
        selected = select(list(values))
        if selected is None:
            raise returned_nothing("select_samples_to_pack", select)
        if not isinstance(selected, PackedSamplesOutput):
            selected = PackedSamplesOutput(selected)
        packs = [list(pack) for pack in _checked_packs(selected.packs, values, select)]
        return [pack for pack in packs if pack], list(selected.pushback)

    def _encode_selected(
        self, pack: list[Any], items: list[Item | None], origins: Origins, here: tuple[int, int, int], run: ChunkRun
    ) -> tuple[list[Any], Origins]:
        """Return the samples of a pack after ``postencode_sample``, without failures, and their addresses."""
        for hook in self.hooks.selected:
            encoded = list[Any]()
            encoded_origins = list[Address | None]()
            for place, (value, origin, item) in enumerate(zip(pack, origins, items, strict=True)):
                # A sample has its own randomness; an object that the selection made has that of its place.
                if item is None or item.result is None or item.origins[0] in (None, _COUNTED):
                    context = run.of_chunk(_SELECTED, *here, place, number=here[0] + here[2])
                else:
                    context = run.of_sample(_SELECTED, item.origins[0], item.result)
                with context:
                    failing = None if origin is _COUNTED else origin
                    made = run.apply(hook, value, name="a sample", origins=(failing,))
                encoded += made
                encoded_origins += [origin] * len(made)
            pack = encoded
            origins = encoded_origins
        return pack, origins


def _checked_packs(packs: Any, values: list[Any], select: Callable[..., Any]) -> list[Any]:
    """Return the packs of a selection; raise if it has samples, or their numbers, in place of lists of samples."""
    kinds = set(map(type, values))
    if not isinstance(packs, Iterable) or isinstance(packs, _NO_PACK):
        returned = f"a {type(packs).__name__}"
    else:
        packs = list(packs)
        if any(
            (type(pack) in kinds and not isinstance(pack, (list, tuple))) or isinstance(pack, _NO_PACK)
            for pack in packs
        ):
            returned = "a list of samples"
        elif int not in kinds and any(
            type(entry) is int for pack in packs for entry in (pack if isinstance(pack, (list, tuple)) else [pack])
        ):
            returned = "numbers"
        else:
            return packs
    raise FatalSampleError(
        f"select_samples_to_pack returned {returned}, and not a list of lists of samples",
        where=place_of(select),
        fix="return a list of packs, each a list of the samples themselves: [[samples[0], samples[2]], [samples[1]]]",
    )


def _items_of(buffer: list[Item], packs: list[list[Any]], pushback: list[Any]) -> list[list[Item | None]]:
    """Return the item of each value in packs, and in the pushback; None: an object that the selection made. If one
    object, such as a small number, is the value of several samples, packs get the first of these samples, in order, and
    the pushback gets the last ones."""
    left: dict[int, list[Item | None]] = {}
    for sample in buffer:
        left.setdefault(id(sample.value), []).append(sample)

    def take(value: Any, place: int) -> Item | None:
        items = left.get(id(value), [None])
        return items.pop(place) if len(items) > 1 else items[0]

    back = [take(value, -1) for value in reversed(pushback)]
    return [*([take(value, 0) for value in pack] for pack in packs), back[::-1]]


def _pushed_back(
    buffer: list[Item], packs: list[list[Any]], pushback: list[Any], items: list[list[Item | None]]
) -> list[Item]:
    """Return the samples of the next buffer. A sample that is also in a pack, in part, is counted with that pack."""
    by_key = {key: sample for sample in buffer if (key := _restore_key(sample.value)) is not None}
    packed, packed_keys = _marks(packs, items[:-1])
    next_samples = []
    for value, own in zip(pushback, items[-1], strict=True):
        key = _restore_key(value)
        item = own or by_key.get(key) or buffer[-1]
        is_new = own is None and key not in by_key
        again = is_new or id(item) in packed or key in packed_keys
        next_samples.append(replace(item, value=value, origins=(_COUNTED,) if again else item.origins))
    return next_samples


def _is_end(buffer: list[Item], pushed_back: list[Item], fresh: int) -> bool:
    """Return whether the pushed back samples are the last of a buffer, in order, so that a place describes them."""
    count = len(pushed_back)
    if count > fresh:
        return False
    pairs = zip(buffer[-count:], pushed_back, strict=True)
    return all(sample.value is back.value and sample.origins == back.origins for sample, back in pairs)


def _addresses(samples: list[Item]) -> Origins:
    """Return the addresses of samples, as far as they are known."""
    return [None if sample.origins[0] is _COUNTED else sample.origins[0] for sample in samples]


def _not_selected(buffer: list[Item], packs: list[list[Any]], items: list[list[Item | None]]) -> list[Item]:
    """Return the samples that are in no pack. Copies that a selection makes are identified by their restore keys."""
    selected, keys = _marks(packs, items)
    return [sample for sample in buffer if id(sample) not in selected and _restore_key(sample.value) not in keys]


def _marks(packs: list[list[Any]], items: list[list[Item | None]]) -> tuple[set[int], set[Any]]:
    """Return the ids of the items in packs, and the restore keys of other values, as far as they have any."""
    pairs = [pair for pack, own in zip(packs, items, strict=True) for pair in zip(pack, own, strict=True)]
    others = (_restore_key(value) for value, item in pairs if item is None)
    return {id(item) for _, item in pairs if item is not None}, {key for key in others if key is not None}


def _origins(pack: list[Any], items: list[Item | None], seen: set[Any]) -> Origins:
    """Return the addresses of the samples of a pack, as far as they are known. ``seen`` has the samples of the packs
    before; those of this pack are added."""
    origins: list[Address | None] = []
    for value, item in zip(pack, items, strict=True):
        key = _restore_key(value) or ()
        if item is not None:
            origin, result = item.origins[0], item.result
        else:
            origin, result = tuple(key[1:4]) if key[:1] == ("sample",) and len(key) > 3 else None, (*key[5:], 0)[0]
        is_again = origin is not None and origin is not _COUNTED and (origin, result) in seen
        seen.add((origin, result))
        origins.append(_Again(origin) if origin is not None and is_again else origin)
    return origins


def _restore_key(value: Any) -> Any:
    key = field_of(value, "__restore_key__")
    return key if isinstance(key, tuple) and key else None
