"""Store of encoded samples in a folder: what one process has read, decoded and encoded, others only load.

A sample is stored under its address: the data set, its number, the hooks and their version. If the hooks have drawn
random numbers, or asked for the number of the sample, the address also has the seed and the epoch; other samples are
found in every epoch. Whoever makes a sample first stores it. Writers do not wait for each other: what they write under
an address is equal.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from energon_lite.errors import FatalSampleError, UsageError
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
from energon_lite.storage.files.shard_store import COUNTS
from energon_lite.storage.samples.sample_loader import SampleLoader

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SampleStore:
    """Store of encoded samples: ``get_savable_loader(dataset, sample_store=SampleStore(...))``. It changes no batch.

    Use it where hooks of single samples, decoding included, take longer than reading their results: for the next
    epochs, the next run, and runs with other batch sizes, orders, blends or numbers of ranks. Samples that hooks draw
    random numbers for are found again only by runs with the same seed, in the same epoch.

    Args:
        folder: folder on a local disk, or one that machines share. Any number of processes of one user may use it.
        max_bytes: size of the folder, in bytes. If it is full, samples of other data sets and hooks that were unused
            for longest are removed; samples of this one stay, since each is needed once in an epoch.
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

    def opened(self, leaves: Sequence[Leaf], encoder: TaskEncoder, hooks: Hooks, seed: int) -> OpenedSampleStore | None:
        """Return the store of a data set; None: its samples take no work, or hooks yield any number of them."""
        works = any(not returns_its_argument(encoder, name) for name in hooks.sample)
        works |= any(leaf.cooker is not None or leaf.fields is None or leaf.fields.decodes for leaf in leaves)
        if not works or not hooks.generators.isdisjoint(hooks.sample):
            logger.warning(
                "sample_store has no effect: %s",
                "hooks yield any number of samples" if works else "no hook or decoder makes anything of the samples",
            )
            return None
        code = f"{code_hash(encoder)} {sorted(code_digests(type(encoder)).items())}"
        how = _hash(f"{self.version}\n{code}\n{hooks.sample}\n{[*attributes(encoder, 'self')]}")[:16]
        folder = CheckedFolder(self.folder, self.max_bytes, option="sample_store", kept=how)
        return _Opened(folder, leaves, seed, self.checked)


class _Opened(OpenedSampleStore):
    """Store of one data set.

    Args:
        folder: the folder.
        leaves: the leaves, in the order's numbering.
        seed: seed of the hooks.
        checked: see :class:`SampleStore`.
    """

    def __init__(self, folder: CheckedFolder, leaves: Sequence[Leaf], seed: int, checked: int):
        self._folder = folder
        self._leaves = leaves
        self._seed = seed
        self._checked = checked
        self._found = 0
        self._compared: dict[Address, bytes] = {}  # form of each sample that is made again
        self._keys = dict[int, str]()
        self._told = set[str]()

    def missing(self, addresses: Sequence[Address]) -> Sequence[Address]:
        return [address for address in addresses if not any(map(self._folder.has, self._places(address)))]

    def read(
        self,
        rows: Callable[[Sequence[Address], Sequence[Address]], Iterable[ReadSample]],
        addresses: Sequence[Address],
        wanted: Sequence[Address],
    ) -> Iterable[ReadSample]:
        found = [self._load(address) for address in wanted]
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
            try:
                if not self._folder.write(places[is_random], form):
                    self._tell("sample_store %s is full; further samples are made each time", self._folder.path)
            except OSError as error:
                self._tell("sample_store %s cannot be used (%s); samples are made", self._folder.path, error)

    def _load(self, address: Address) -> StoredSample | None:
        found = self._find(address)
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
        if number not in self._keys:
            leaf = self._leaves[number]
            how = [*attributes((leaf.loader, leaf.cooker), "leaf")]
            text = _hash(f"{leaf.key} {leaf.source.path} {how}")
            self._keys[number] = text if isinstance(leaf.loader, SampleLoader) else ""
        if not (key := self._keys[number]):
            return ()
        keys = f"{index} {key}", f"{index} {epoch} {self._seed} {key}"
        return tuple(self._folder.place(key.encode()) for key in keys)

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
