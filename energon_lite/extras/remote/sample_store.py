"""Store of encoded samples in a folder or bucket: what one process has read, decoded and encoded, others only load.

A sample is stored under its address: the data set, its number, the hooks and their version. If the hooks have drawn
random numbers, or asked for the number of the sample, the address also has the seed and the epoch; other samples are
found in every epoch. Whoever makes a sample first stores it. Writers do not wait for each other: what they write under
an address is equal.

A full store keeps what the run needs next. Its order is a function of positions, so the coming positions are looked up,
as many as four passes over the data have, and sorted by sample. The position of a sample that is used now is found by
the inverse permutation of its epoch, and, in a blend, by search: the number of samples of a leaf before a position is
known, and grows with the position.
"""

from __future__ import annotations

import hashlib
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from energon_lite.documents.paths import is_url
from energon_lite.errors import DatasetError, FatalSampleError, UsageError
from energon_lite.extras.remote.checked_bucket import CheckedBucket
from energon_lite.extras.remote.checked_folder import CheckedFolder
from energon_lite.extras.wire import pack, unpack
from energon_lite.hooks import (
    HookContext,
    Hooks,
    TaskEncoder,
    attributes,
    code_digests,
    code_hash,
    returns_its_argument,
)
from energon_lite.loading.makers.leaf import Leaf
from energon_lite.loading.makers.observers import OpenedSampleStore, ReadSample, StoredSample
from energon_lite.loading.makers.outcomes import Address, set_restore_key, where_of
from energon_lite.order.orders import BlendOrder, ConcatOrder, EpochBlendOrder, Order, position_of
from energon_lite.storage.files.shard_store import COUNTS
from energon_lite.storage.samples.field_map import SampleLoader

logger = logging.getLogger(__name__)

Ints = NDArray[np.int64]

#: Most positions that are looked up at once.
_SPAN = 1 << 22
#: Most positions before the current one that other workers may not have reached, and their part of the data.
_BEHIND, _PART = 1 << 12, 64
#: Name of a sample: its leaf and index; epoch and seed if its hooks draw. Files of killed writers have other names.
_NAME = re.compile(r"([0-9a-f]{24})-([0-9a-f]{1,15})(?:-([0-9a-f]{1,15})-([0-9a-f]{8}))?")


@dataclass(frozen=True)
class SampleStore:
    """Store of encoded samples: ``get_savable_loader(dataset, sample_store=SampleStore(...))``. It changes no batch.

    Use it where hooks of single samples, decoding included, take longer than reading their results: for the next
    epochs, the next run, and runs with other batch sizes, orders, blends or numbers of ranks. Samples that hooks draw
    random numbers for are found again only by runs with the same seed, in the same epoch. Global generators belong to
    the whole process: if another thread of a worker draws from one while a hook runs, the hook counts as random.

    Args:
        folder: folder on a local disk, or one that machines share; or a URL in a bucket. Any number of processes of one
            user may use it. Who can write to a bucket can change samples.
        max_bytes: size of all samples, in bytes. If it is reached, samples of other data sets and hooks are removed,
            and then those of this one that the run needs last: what it needs next stays. Writers to a bucket may exceed
            it for a while.
        version: a text to be changed whenever the hooks give other samples. Changes in the encoder's attributes, in its
            module, and in your modules that it uses are noticed; changes in files that hooks read are not.
        checked: of so many samples that are found, one is made again and compared; 0: none.

    Raises:
        UsageError: the folder cannot be used, or a number is negative.

    Example:
        >>> store = SampleStore("/scratch/samples", max_bytes=1 << 40, version="336 pixels")
        >>> loader = get_savable_loader(dataset, sample_store=store)
    """

    folder: str
    max_bytes: int
    version: str = ""
    checked: int = 1000

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.checked < 0:
            wrong = "max_bytes" if self.max_bytes < 1 else "checked"
            raise UsageError(f"{wrong} is {getattr(self, wrong)}", fix="give a positive number (checked=0: no checks)")

    def opened(
        self, leaves: Sequence[Leaf], encoder: TaskEncoder, hooks: Hooks, seed: int, order: Order
    ) -> OpenedSampleStore | None:
        """Return the store of a data set; None: its samples take no work, or hooks yield any number of them."""
        works = any(not returns_its_argument(encoder, name) for name in hooks.sample)
        for leaf in leaves:
            fields = leaf.fields
            works |= leaf.cooker is not None or fields is None or any(decode for decode, _ in fields.steps.values())
        if not works or not hooks.generators.isdisjoint(hooks.sample):
            logger.warning(
                "sample_store has no effect: %s",
                "hooks yield any number of samples" if works else "no hook or decoder makes anything of the samples",
            )
            return None
        code = f"{code_hash(encoder)} {sorted(code_digests(type(encoder)).items())}"
        how = _hash(f"{self.version}\n{code}\n{hooks.sample}\n{[*attributes(encoder, 'self')]}")[:16]
        return _Opened(self, how, leaves, seed, order)


class _Opened(OpenedSampleStore):
    """Store of one data set.

    Args:
        store: the store.
        how: name of a folder for the samples of these hooks.
        leaves: the leaves, in the order's numbering.
        seed: seed of the hooks.
        order: order of the run.
    """

    def __init__(self, store: SampleStore, how: str, leaves: Sequence[Leaf], seed: int, order: Order):
        kind = CheckedBucket if is_url(store.folder) else CheckedFolder
        options: dict[str, Any] = {"option": "sample_store", "kept": how, "distances": self._distances}
        self._folder = kind(store.folder, store.max_bytes, **options)
        self._leaves = leaves
        self._seed = _hash(str(seed))[:8]
        self._uses = ComingUses(order, [leaf.length for leaf in leaves])
        self._ahead: dict[Address, memoryview | None] = {}
        self._checked = store.checked
        self._found = 0
        self._compared: dict[Address, bytes] = {}  # form of each sample that is made again
        self._keys = dict[int, str]()
        self._told = set[str]()

    def missing(self, addresses: Sequence[Address]) -> Sequence[Address]:
        if isinstance(self._folder, CheckedBucket):  # a question whether there is a sample takes as long as the sample
            self._ahead = dict(zip(addresses, self._folder.each(self._find, addresses), strict=True))
            return [address for address, found in self._ahead.items() if found is None]
        return [address for address in addresses if not any(map(self._folder.has, self._places(address)))]

    def read(
        self,
        rows: Callable[[Sequence[Address], Sequence[Address]], Iterable[ReadSample]],
        addresses: Sequence[Address],
        wanted: Sequence[Address],
    ) -> Iterable[ReadSample]:
        asked = [address for address in wanted if address not in self._ahead]
        forms = dict(zip(asked, self._folder.each(self._find, asked), strict=True)) | self._ahead
        found = [self._load(address, forms[address]) for address in wanted]
        places = [place for place, stored in enumerate(found) if stored is None]
        made = iter(rows([addresses[place] for place in places], [wanted[place] for place in places]) if places else ())
        of_each = zip(addresses, found, wanted, strict=True)
        return (next(made) if stored is None else (address, stored, at) for address, stored, (_, at, *_) in of_each)

    def add(self, address: Address, sample: Any, key: tuple[Any, ...], context: HookContext) -> None:
        form = self._form(address, sample, key) if (places := self._places(address)) else None
        before = self._compared.pop(address, None)
        if form is None:
            return
        if before is not None and before != form:
            leaf, index = self._leaves[address[0]], address[1]
            raise FatalSampleError(
                "the store has another sample than the hooks make now: they changed, or are random in a way of their "
                "own, so earlier batches of this run may be wrong",
                where=f"{where_of(leaf.name, leaf.source.key(index))}, in {self._folder.path}",
                fix="give SampleStore another version=, and begin again; let hooks draw from self.rng",
            )
        if before is None and context.asked != "batch":
            is_random = bool(context.asked) or context.has_drawn()

            def distance() -> float:
                own = self._uses.after(*address[:3])
                return math.inf if is_random else own

            try:
                if not self._folder.write(places[is_random], form, distance):
                    self._tell("sample_store %s is full; what is needed last is made each time", self._folder.path)
            except (DatasetError, OSError) as error:
                self._tell("sample_store %s cannot be used (%s); samples are made", self._folder.path, error)

    def _load(self, address: Address, found: memoryview | None) -> StoredSample | None:
        if found is None:
            return None
        self._found += 1
        if self._checked and self._found % self._checked == 0:
            self._compared[address[:3]] = bytes(found)
            return None
        try:
            # A copy, because hooks may write into the tensors of a sample.
            value = unpack(memoryview(np.frombuffer(found, dtype=np.uint8).copy()))  # type: ignore[arg-type]
        except Exception as error:  # written by another version, or of a class that is gone
            self._tell("sample_store %s: a sample cannot be read (%s); it is made", self._folder.path, error)
            return None
        COUNTS.stored_samples += 1
        return StoredSample(value)

    def _find(self, address: Address) -> memoryview | None:
        found = map(self._folder.find, self._places(address))
        return next((form for form in found if form is not None), None)

    def _places(self, address: Address) -> tuple[str, ...]:
        """Return the file of a sample if its hooks draw no random numbers, and the one if they do."""
        number, index, epoch = address[:3]
        if not (key := self._key(number)):
            return ()
        names = f"{key}-{index:x}", f"{key}-{index:x}-{epoch:x}-{self._seed}"
        return tuple(self._folder.file(f"{index % 256:02x}", name) for name in names)

    def _key(self, number: int) -> str:
        """Return the name of a leaf in those of its samples; "": they are not stored."""
        if number not in self._keys:
            leaf = self._leaves[number]
            how = [*attributes((leaf.loader, leaf.cooker), "leaf")]
            text = _hash(f"{leaf.key} {leaf.source.path} {how}")[:24]
            self._keys[number] = text if isinstance(leaf.loader, SampleLoader) else ""
        return self._keys[number]

    def _distances(self, paths: Sequence[str]) -> list[float]:
        """Return the distances of the next uses of stored samples; infinity: this run does not use them again."""
        numbers = {self._key(number): number for number in range(len(self._leaves))}
        names = [_NAME.fullmatch(path.rsplit("/", 1)[-1]) for path in paths]
        rows = [name.groups("") if name else ("", "0", "", "") for name in names]
        leaf = np.array([numbers.get(key, -1) for key, *_ in rows], dtype=np.int64)
        index = np.array([int(index, 16) for _, index, *_ in rows], dtype=np.int64)
        epoch = np.array([int(epoch, 16) if epoch else -1 for *_, epoch, _ in rows], dtype=np.int64)
        is_other = (leaf < 0) | np.array([seed not in ("", self._seed) for *_, seed in rows], dtype=bool)
        return np.where(is_other, math.inf, self._uses.of(leaf, index, epoch)).tolist()

    def _form(self, address: Address, sample: Any, key: tuple[Any, ...]) -> bytes | None:
        """Return the bytes of a sample without its restore key; None: it has no plain form, or an own restore key."""
        name = "__restore_key__"
        if (sample.get(name, key) if isinstance(sample, dict) else getattr(sample, name, key)) != key:
            return None
        try:
            set_restore_key(sample, ())
            return b"".join(pack(sample))
        except TypeError as error:
            self._tell("sample_store: samples of %s are not stored: %s", self._leaves[address[0]].name, error)
            return None
        finally:
            set_restore_key(sample, key)

    def _tell(self, text: str, *values: object) -> None:
        """Log a text once."""
        if text not in self._told:
            self._told.add(text)
            logger.warning(text, *values)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()


class _Window(NamedTuple):
    """Uses of samples at consecutive positions.

    Attributes:
        first: the first position.
        uses: number of the sample times the span, plus the place of its use in the window; sorted.
        epochs: epoch at each place.
    """

    first: int
    uses: Ints
    epochs: Ints


class ComingUses:
    """Distances, in positions of an order, to the next uses of samples.

    Args:
        order: the order of the run.
        lengths: samples of each leaf.

    Attributes:
        now: position of the last sample that was asked for with :meth:`after`.

    Example:
        >>> uses = ComingUses(BlendOrder([LeafOrder(3, key=1, copies=None)], [1.0], key=0), [3])
        >>> uses.after(0, 2, 5), uses.of(np.zeros(3, int), np.arange(3), np.full(3, -1)).tolist()
        (3.0, [1.0, 2.0, 0.0])
    """

    def __init__(self, order: Order, lengths: Sequence[int]):
        self._order = order
        self._starts = np.cumsum([0, *lengths])
        total = int(self._starts[-1])
        self._behind = min(_BEHIND, total // _PART)
        self._span = min(_SPAN, 4 * total + 2 * self._behind)
        self._window: _Window | None = None
        self.now = 0

    def after(self, leaf: int, index: int, epoch: int) -> float:
        """Return the distance from a use of a sample to its next one; infinity: it is further away than is known."""
        start = (int(self._starts[leaf]) + index) * self._span
        for is_new in (False, True):
            if is_new and not self._look(leaf, index, epoch):
                break
            if self._window is None:
                continue
            first, uses, epochs = self._window
            places = uses[slice(*np.searchsorted(uses, [start, start + self._span]))] - start
            same = np.flatnonzero(epochs[places] == epoch)
            if len(same) and (is_new or places[same[0]] <= self._span // 2):
                here, *coming = places[same[0] :].tolist()
                self.now = first + here
                return float(coming[0] - here) if coming else math.inf
        return math.inf

    def of(self, leaf: Ints, index: Ints, epoch: Ints) -> NDArray[np.float64]:
        """Return the distances from the current position to the next uses of samples, ``[k]``.

        Args:
            leaf, index: the samples, ``[k]``.
            epoch: ``[k]``; -1: in any epoch.
        """
        if self._window is None:
            return np.full(len(leaf), math.inf)
        first, uses, epochs = self._window
        now = self.now - first
        start = (self._starts[leaf] + index) * self._span
        at = np.searchsorted(uses, start + max(0, now - self._behind)).clip(max=len(uses) - 1)
        place = uses[at] - start
        is_used = (place >= 0) & (place < self._span)
        is_used &= (epoch < 0) | (epochs[place.clip(0, self._span - 1)] == epoch)
        return np.where(is_used, place - now, math.inf)

    def _look(self, leaf: int, index: int, epoch: int) -> bool:
        """Look up the positions around a use of a sample; return False if it has none that is known."""
        order = self._order
        if isinstance(order, ConcatOrder):  # the next pass is the same one
            first = order.position(leaf, index)
            positions = np.arange(first, first + self._span) % order.bounds(0)[1]
        elif isinstance(order, (BlendOrder, EpochBlendOrder)):
            first = max(_position(order, leaf, index, epoch) - self._behind, _first(order))
            positions = np.arange(first, first + self._span)
        else:
            return False
        found = order.lookup(positions)
        uses = (self._starts[found.leaf] + found.index) * self._span + np.arange(self._span)
        uses.sort()
        self._window = _Window(first, uses, found.epoch)
        return True


def _first(order: BlendOrder | EpochBlendOrder) -> int:
    return 0 if order.rebase is None else order.rebase.position


def _position(order: BlendOrder | EpochBlendOrder, leaf: int, index: int, epoch: int) -> int:
    """Return the position of a sample in an epoch of its leaf; if it is drawn, that of the epoch's begin."""
    leaves = order.leaves
    copies = leaves.leaves[leaf].copies
    if copies == -1:
        place = epoch * leaves.leaves[leaf].length
    else:
        places = leaves.places(leaf, index, np.array([epoch // (copies or 1)])).ravel()
        _, epochs = leaves.lookup(np.full(len(places), leaf), places)
        place = int(places[epochs == epoch][0])
    begun = 0 if order.rebase is None else order.rebase.starts[leaf]
    place = max(0, place - begun)
    return _first(order) + (place if order.blend is None else position_of(order.blend, leaf, place))
