"""Order inside each leaf: position in the leaf's stream -> (sample, epoch).

The stream of a leaf of ``n`` samples consists of its epochs, one after the other, each a permutation of [0, n) under a
key of its own. Two numbers bound the distance on disk of neighbours in the stream: ``max_samples_per_sequence`` keeps
sequences of this number of neighbours together, ``shuffle_buffer_size`` is the window of the stream inside which
sequences are mixed. Both are closed forms: an epoch of ``n`` samples is cut into sequences of ``run`` neighbours, which
are permuted; the result is cut into windows of ``window`` places, and the places inside each window are permuted. All
keys are derived from that of the epoch. If either number is not given (or sequences have one sample), an epoch is one
full permutation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from energon_lite.errors import UsageError
from energon_lite.order.hashing import MASK64, hash_ints, hash_next_array, mix64_array
from energon_lite.order.permutation import (
    MAX_LENGTH,
    cycle_walk,
    permute_array,
    quotient,
    radices,
    round_keys,
    rounds_of_each,
    unpermute_array,
)

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

#: Most leaves with which the cache saves more than it costs in memory and copying.
_MOST_LEAVES = 1 << 14
#: Tag of the keys for the permutation of sequences.
_RUNS = np.uint64(hash_ints(1))
#: Tag of the keys for the permutations inside windows.
_WINDOWS = np.uint64(hash_ints(2))
#: Tag of the hashes that draw with replacement.
_DRAWS = np.uint64(hash_ints(3))


def epoch_keys(leaf_keys: Keys, epoch: Ints) -> Keys:
    """Permutation keys of ``k`` pairs of leaf and epoch, ``[k]`` uint64."""
    return mix64_array(leaf_keys ^ mix64_array(epoch.astype(np.uint64)))


class EpochPermutations:
    """Permutations of each epoch of each leaf, equal to ``permute_array`` with :func:`epoch_keys`.

    A batch of a blend of 1,000 leaves has about one sample of each, so grouping by leaf does not pay. But from batch to
    batch only the place in the epoch changes. The radices of each leaf are computed once, its round keys once for each
    epoch.

    Args:
        lengths: samples in an epoch of each leaf, ``[leaves]``.
        keys: keys of the leaves, ``[leaves]``.
    """

    def __init__(self, lengths: Ints, keys: Keys):
        self._lengths = lengths
        self._leaf_keys = keys
        self._rounds = rounds_of_each(lengths)
        self._kinds = sorted(set(self._rounds.tolist()))
        kept = len(lengths) if len(lengths) <= _MOST_LEAVES else 0
        self._radices = radices(lengths[:kept])
        # Replaced as a whole, never changed in place, so that a concurrent look-up sees a consistent state.
        self._known = (
            np.full(kept, -1, dtype=np.int64),
            np.zeros((max(self._kinds, default=0), kept), dtype=np.uint32),
        )

    def lookup(self, leaf: Ints, epoch: Ints, place: Ints) -> Ints:
        """Index of the sample at ``place`` of ``epoch`` of ``leaf``, for each of ``k`` triples."""
        if len(self._kinds) == 1:
            return self._one_kind(self._kinds[0], leaf, epoch, place)
        out = np.empty_like(place)
        rounds = self._rounds.take(leaf)
        for kind in self._kinds:
            here = np.flatnonzero(rounds == kind)
            out[here] = self._one_kind(kind, leaf[here], epoch[here], place[here])
        return out

    def _one_kind(self, rounds: int, leaf: Ints, epoch: Ints, place: Ints) -> Ints:
        n = self._lengths.take(leaf)
        if not rounds or len(self._lengths) > _MOST_LEAVES:
            return permute_array(place, n, epoch_keys(self._leaf_keys[leaf], epoch))
        return cycle_walk(place, n, self._radices.take(leaf), self._round_keys(rounds, leaf, epoch), 1)

    def _round_keys(self, rounds: int, leaf: Ints, epoch: Ints) -> list[NDArray[np.uint32]]:
        """Round keys, ``[rounds]`` arrays ``[k]``; those of the requested epochs are cached for the next call."""
        known_epoch, known = self._known
        keys = [row.take(leaf) for row in known[:rounds]]
        new = np.flatnonzero(known_epoch.take(leaf) != epoch)
        if new.size:
            leaf, epoch = leaf[new], epoch[new]
            mixed = epoch_keys(self._leaf_keys[leaf], epoch)
            known_epoch, known = known_epoch.copy(), known.copy()
            known_epoch[leaf] = epoch
            # If a leaf occurs with several epochs, one of them was written above; cache the keys of the same one.
            kept = known_epoch[leaf] == epoch
            for round_ in range(rounds):
                keys[round_][new] = fresh = round_keys(mixed, round_)
                known[round_, leaf[kept]] = fresh[kept]
            self._known = known_epoch, known
        return keys


@dataclass(frozen=True)
class LeafOrder:
    """Order of the samples of one leaf.

    Args:
        length: number of samples, at least 1.
        key: 64 bits; each key gives a different order.
        copies: number of epochs that a permutation covers (``shuffle_over_epochs_multiplier``). 1: one epoch. k > 1:
            k epochs mixed together. -1: no permutation, each sample is drawn independently, with replacement. None: no
            shuffling, each epoch is 0, 1, 2, ...
    """

    length: int
    key: int
    copies: int | None = 1

    def __post_init__(self) -> None:
        if not 1 <= self.length <= MAX_LENGTH:
            raise UsageError(f"a leaf of {self.length} samples", fix="a leaf needs at least one sample")
        if self.copies is not None and self.copies != -1 and self.copies < 1:
            raise UsageError(
                f"shuffle_over_epochs_multiplier is {self.copies}",
                fix="give a positive integer, -1 (draw with replacement) or null (do not shuffle)",
            )
        if self.length * max(1, self.copies or 1) > MAX_LENGTH:
            raise UsageError(f"{self.length} samples times {self.copies} epochs do not fit into 62 bits")


class LeafOrders(Sequence[LeafOrder]):
    """Orders of many leaves as arrays; the object of a single leaf is made on access.

    Args:
        lengths: ``[leaves]`` int64.
        keys: ``[leaves]`` uint64.
        copies: ``[leaves]`` int64; 0 for None in a :class:`LeafOrder`.

    Raises:
        UsageError: as :class:`LeafOrder`.
    """

    def __init__(self, lengths: Ints, keys: Keys, copies: Ints):
        self.lengths = lengths
        self.keys = keys
        self.copies = copies
        most = np.maximum(copies, 1)
        wrong = (lengths < 1) | (lengths > MAX_LENGTH // most) | (copies < -1)
        for number in np.flatnonzero(wrong)[:1]:
            self[int(number)]  # raises the error

    @classmethod
    def of(cls, orders: Sequence[LeafOrder]) -> LeafOrders:
        """Convert a sequence of orders."""
        if isinstance(orders, LeafOrders):
            return orders
        lengths = np.array([order.length for order in orders], dtype=np.int64)
        keys = np.array([order.key & MASK64 for order in orders], dtype=np.uint64)
        return cls(lengths, keys, np.array([order.copies or 0 for order in orders], dtype=np.int64))

    @classmethod
    def seeded(cls, lengths: Ints, keys: Keys, copies: Sequence[int | None], seed: int) -> LeafOrders:
        """The orders of leaves with the given keys, in a run with a seed."""
        for multiplier, length in dict(zip(copies, lengths.tolist(), strict=True)).items():
            LeafOrder(length, 0, multiplier)  # raises the error
        counts = np.array([multiplier or 0 for multiplier in copies], dtype=np.int64)
        return cls(lengths, hash_next_array(hash_ints(seed), keys), counts)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, number: int) -> LeafOrder:  # type: ignore[override]
        return LeafOrder(int(self.lengths[number]), int(self.keys[number]), int(self.copies[number]) or None)


class Leaves:
    """Orders of all leaves as arrays, so that positions of many leaves are looked up in one call.

    Args:
        leaves: one order for each leaf.
        run: ``max_samples_per_sequence``: length of the sequences that stay together, or None.
        window: ``shuffle_buffer_size``: length of the windows inside which sequences are mixed, or None.

    Example:
        >>> leaves = Leaves([LeafOrder(length=5, key=1)])
        >>> index, epoch = leaves.lookup(np.zeros(5, dtype=np.int64), np.arange(5))
        >>> sorted(index.tolist()), epoch.tolist()
        ([0, 1, 2, 3, 4], [0, 0, 0, 0, 0])
    """

    def __init__(self, leaves: Sequence[LeafOrder], *, run: int | None = None, window: int | None = None):
        for name, value in (("max_samples_per_sequence", run), ("shuffle_buffer_size", window)):
            if value is not None and value < 0:
                raise UsageError(f"{name} is {value}", fix="give a positive integer, or None for a full permutation")
        self.leaves = orders = LeafOrders.of(leaves)
        self.run = run
        self.window = window
        self._lengths = orders.lengths
        self._keys = orders.keys
        self._copies = orders.copies
        self._only_plain = bool(np.all(self._copies == 1))
        self._cycle_lengths = self._lengths * np.maximum(self._copies, 1)
        self._permutations = EpochPermutations(self._cycle_lengths, self._keys)

    def lookup(self, leaf: Ints, position: Ints) -> tuple[Ints, Ints]:
        """Sample number and epoch at ``position`` of ``leaf``'s stream.

        Args:
            leaf: ``[k]`` leaf of each position.
            position: ``[k]`` position in that leaf's stream, from 0.

        Returns:
            ``(index, epoch)``, each ``[k]`` int64; the pair is unique within a leaf, except when drawing with
            replacement.
        """
        if self._only_plain:
            return self._permuted(leaf, position)
        copies = self._copies[leaf]
        index, epoch = np.empty_like(position), np.empty_like(position)
        for chosen, look_up in (
            (copies == 0, self._in_sequence),
            (copies == -1, self._drawn),
            (copies > 0, self._permuted),
        ):
            if chosen.any():
                index[chosen], epoch[chosen] = look_up(leaf[chosen], position[chosen])
        return index, epoch

    def cycles(self, leaf: Ints, epoch: Ints) -> Ints:
        """Cycle of each of ``k`` samples: the epoch, or the group of epochs that are mixed; 0 if it was drawn."""
        if self._only_plain:
            return epoch
        copies = self._copies[leaf]
        return np.where(copies < 0, 0, epoch // np.maximum(copies, 1))

    def cycle_length(self, leaf: int) -> int | None:
        """Number of samples in a cycle of a leaf; None: they are drawn."""
        return None if self._copies[leaf] < 0 else int(self._cycle_lengths[leaf])

    def places(self, leaf: int, index: int, cycles: Ints) -> Ints:
        """Invert :meth:`lookup`: positions of a sample in the stream of its leaf, in some cycles.

        Args:
            leaf, index: leaf and index of the sample; the leaf is not drawn.
            cycles: ``[k]`` numbers of cycles.

        Returns:
            ``[k, copies]`` int64 positions, unordered.
        """
        order = self.leaves[leaf]
        if order.copies is None:
            return (cycles * order.length + index)[:, None]
        length = order.length * order.copies
        wanted = np.tile(np.arange(order.copies, dtype=np.int64) * order.length + index, len(cycles))
        cycle = np.repeat(cycles, order.copies)
        keys = epoch_keys(np.full(len(cycle), self._keys[leaf]), cycle)
        if self.run is None or self.run <= 1 or self.window is None:
            place = unpermute_array(wanted, length, keys)
        else:
            place = places_in_windows(wanted, np.full(len(cycle), length), keys, self.run, self.window)
        return (cycle * length + place).reshape(len(cycles), order.copies)

    def _in_sequence(self, leaf: Ints, position: Ints) -> tuple[Ints, Ints]:
        length = self._lengths[leaf]
        return position % length, position // length

    def _drawn(self, leaf: Ints, position: Ints) -> tuple[Ints, Ints]:
        length = self._lengths[leaf]
        hashes = mix64_array(self._keys[leaf] ^ _DRAWS ^ mix64_array(position.astype(np.uint64)))
        return (hashes % length.astype(np.uint64)).astype(np.int64), position // length

    def _permuted(self, leaf: Ints, position: Ints) -> tuple[Ints, Ints]:
        cycle_length = self._cycle_lengths.take(leaf)
        cycle = quotient(position, cycle_length)
        place = position - cycle * cycle_length
        if self.run is None or self.run <= 1 or self.window is None:
            place = self._permutations.lookup(leaf, cycle, place)
        else:
            keys = epoch_keys(self._keys[leaf], cycle)
            place = runs_in_windows(place, cycle_length, keys, self.run, self.window)
        if self._only_plain:
            return place, cycle
        length, copies = self._lengths[leaf], self._copies[leaf]
        copy = place // length
        return place - copy * length, cycle * copies + copy


# -- sequences in windows -------------------------------------------------------------------------------------------


def runs_in_windows(place: Ints, n: Ints, keys: Keys, run: int, window: int) -> Ints:
    """Samples at places of epochs, ``[k]`` int64.

    Args:
        place: ``[k]``, from 0 to ``n - 1``.
        n: ``[k]`` samples in the epoch.
        keys: ``[k]`` keys of the epochs.
        run: samples in a sequence that stays together.
        window: places in a window that is mixed.

    Returns:
        ``[k]`` int64 indices of samples.
    """
    if window > 1:
        start, length, window_keys = _window_of(place, n, keys, window)
        place = start + permute_array(place - start, length, window_keys)
    count, run_keys = -(-n // run), mix64_array(keys ^ _RUNS)
    # The last sequence may be shorter, at any slot of the permutation. Places after it are shifted as if it had the
    # full length.
    short, start = (n - 1) % run + 1, unpermute_array(count - 1, count, run_keys) * run
    shifted = np.where(place >= start + short, place + (run - short), place)
    slot = shifted // run
    return permute_array(slot, count, run_keys) * run + shifted - slot * run


def places_in_windows(sample: Ints, n: Ints, keys: Keys, run: int, window: int) -> Ints:
    """Invert :func:`runs_in_windows`: places in the epochs at which samples are.

    Args:
        sample: ``[k]``, from 0 to ``n - 1``.
        n, keys, run, window: see :func:`runs_in_windows`.

    Returns:
        ``[k]`` int64 places.
    """
    count, run_keys = -(-n // run), mix64_array(keys ^ _RUNS)
    number = sample // run
    slot = unpermute_array(number, count, run_keys)
    # After the short sequence, places come earlier by the samples that it lacks.
    is_behind = slot > unpermute_array(count - 1, count, run_keys)
    place = slot * run + (sample - number * run) - np.where(is_behind, run - ((n - 1) % run + 1), 0)
    if window <= 1:
        return place
    start, length, window_keys = _window_of(place, n, keys, window)
    return start + unpermute_array(place - start, length, window_keys)


def _window_of(place: Ints, n: Ints, keys: Keys, window: int) -> tuple[Ints, Ints, Keys]:
    """First place, length and key of the window of each place, ``[k]`` each."""
    number = place // window
    start = number * window
    return start, np.minimum(window, n - start), mix64_array(keys ^ _WINDOWS ^ mix64_array(number.astype(np.uint64)))
