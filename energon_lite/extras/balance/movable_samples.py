"""The samples of a step while they are moved between its micro-batches."""

from __future__ import annotations

from functools import partial

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.batching.rank_columns import UNIT, RankColumns, column_sums, loads_of
from energon_lite.extras.balance.exchange import Sets, best_trade, spread
from energon_lite.order.hashing import mix64_array

__all__ = ["MovableSamples"]

#: Samples of a micro-batch that are looked at in a round of exchanging single ones, and none.
_LOOKED_AT = 13
#: Samples that are considered where something is too full, and for the worst columns.
_IN_NEED, _IN_RELIEF = 24, 16
#: Micro-batches that are tried for one that is too full, or for a column that is the worst.
_PARTNERS = 24
#: A column is even enough at so many thousandths above the mean.
_EVEN = 8
#: The level before, with narrower columns, may become uneven by so many.
_ALLOWED = 2 * _EVEN
#: A column is tried so often; then it is the turn of others, which may be easier to even out.
_PATIENCE = 8
#: What is worth more than any evenness: to be less full; to be full no longer.
_MENDS, _MENDED = 1 << 45, 1 << 61


class MovableSamples:
    """The samples of a step while they are moved between micro-batches.

    Attributes:
        table: the samples of each micro-batch, ``[count, width]``; behind the last one, a number for none.
        filled: how many these are, ``[count]``.
        loads: what each micro-batch costs, ``[rows, count]``.
        pull: of each place (:meth:`RankColumns.pulls`), ``[rows, count]``.
        held: what each micro-batch holds, ``[limits, count]``.
        owner: equal where samples are copies of one, ``[samples]``; None: there are none.
    """

    def __init__(self, shares: Ints, sizes: Ints, limits: Ints, place: Ints, count: int, owner: Ints | None = None):
        self.none, self.count, self.limits = len(place), count, limits
        self.owner = None if owner is None else owner.tolist()
        self.most = [] if owner is None else (-(-np.bincount(owner) // count)).tolist()
        self.columns = RankColumns(shares, count)
        # The number for none has no cost and takes up nothing.
        self.shares, self.sizes = (np.pad(values, ((0, 0), (0, 1))) for values in (shares, sizes))
        self.filled = np.bincount(place, minlength=count)
        self.table = np.full((count, 2 * int(self.filled.max()) + 2), self.none, dtype=np.int64)
        mixed = np.argsort(mix64_array(np.arange(len(place), dtype=np.uint64)), kind="stable")
        order = mixed[np.argsort(place[mixed], kind="stable")]
        inside = np.arange(len(place)) - np.repeat(np.cumsum(self.filled) - self.filled, self.filled)
        self.table[place[order], inside] = order
        self.loads = self.shares[:, self.table].sum(axis=2)
        self.pull = self.columns.pulls(self.loads)
        self.held = self.sizes[:, self.table].sum(axis=2)

    def place(self) -> Ints:
        """The micro-batch of each sample, ``[samples]``."""
        place = np.empty(self.none + 1, dtype=np.int64)
        place[self.table] = np.arange(self.count)[:, None]
        return place[:-1]

    def exchange_singles(self, turn: int) -> None:
        """Exchange a sample, or nothing, for one of another micro-batch, in as many pairs as there are."""
        half = self.count // 2
        if not half:
            return
        order = self._order(turn)
        heavy, light = order[::-1][:half], order[:half]
        mine, yours = self._looked_at(heavy, turn), self._looked_at(light, turn // 3 + 1)
        gain = np.zeros((half, _LOOKED_AT, _LOOKED_AT), dtype=np.int64)
        apart = (self.columns.near[0] - self.columns.near[(heavy - light) % self.count]).T
        for row, weight, pull in zip(self.shares, apart, self.pull[:, heavy] - self.pull[:, light], strict=True):
            moved = row[mine][:, :, None] - row[yours][:, None, :]
            gain += moved * (pull[:, None, None] - weight[:, None, None] * moved)
        allowed = gain > 0
        for row, held, limit in zip(self.sizes, self.held, self.limits.tolist(), strict=True):
            moved = row[mine][:, :, None] - row[yours][:, None, :]
            more = self._overfull(held[heavy, None, None], -moved, limit)
            more += self._overfull(held[light, None, None], moved, limit)
            # What is too full is mended at any price, and nothing is made so.
            allowed = (allowed & (more <= 0)) | (more < 0)
            gain -= more * (UNIT * UNIT // max(1, limit)) * 64
        gain[~allowed] = np.iinfo(np.int64).min
        flat = gain.reshape(half, -1)
        best = flat.argmax(axis=1)
        found = flat[np.arange(half), best]
        for pair in np.argsort(found, kind="stable")[::-1].tolist():
            i, j = divmod(int(best[pair]), _LOOKED_AT)
            if not allowed[pair, i, j]:
                break
            self._swap(int(heavy[pair]), [int(mine[pair, i])], int(light[pair]), [int(yours[pair, j])])

    def trade(self, turn: int, *, pairs: int, considered: int) -> None:
        """Exchange sets of samples between micro-batches whose columns have most of a cost, and those with least."""
        order = np.argsort(self.pull[turn % len(self.pull)], kind="stable")
        heavy, light = order[::-1][:pairs].tolist(), order[:pairs].tolist()
        for number, high in enumerate(heavy):
            low = light[(number + turn) % pairs]
            one, other = (self._sets(number, considered, turn) for number in (high, low))
            self._trade(high, low, one, other)

    def finish(self, tries: int, reserved: Ints) -> None:
        """Exchange sets with micro-batches of the worst columns of each level, as long as the worst become better, and
        those of the level before, with narrower columns, stay as they are.

        Args:
            tries: for each level.
            reserved: the micro-batches of samples that were placed on purpose, -1 for others, ``[samples]``. No column
                need have less than the fullest of these.
        """
        loads = loads_of(self.shares[:, :-1], reserved, self.count)
        largest, before = self.shares.max(axis=1), self.count
        bounds = {
            width: np.maximum(largest, column_sums(loads, width).max(axis=1))
            for width in (self.count, *self.columns.levels)
        }
        for width in self.columns.levels:
            turns = self.count // width
            tired = np.zeros((len(self.shares), width), dtype=np.int64)
            for turn in range(tries if turns > 1 else tries // 4):
                levels = [_above(self.loads, each, bounds[each]) for each in (width, before)]
                above = np.where(tired < _PATIENCE, levels[0] * 1000 // (turns * UNIT), 0)
                row, column = divmod(int(above.argmax()), width)
                if above[row, column] < _EVEN:
                    break
                others = np.argsort(levels[0][row], kind="stable")[:_PARTNERS].tolist()
                self._relieve(column, others, levels, turn)
                tired[row, column] += 1
            before = width

    def _relieve(self, column: int, others: list[int], levels: list[Ints], turn: int) -> None:
        width, narrow = levels[0].shape[1], levels[1].shape[1]
        turns = self.count // width
        for number, other in enumerate(others):
            high, low = (one + width * ((turn + number // size) % turns) for one, size in ((column, 1), (other, turns)))
            room = (self.limits - self.held[:, high], self.limits - self.held[:, low])
            if other == column or min(int(one.min()) for one in room) < 0:
                continue
            one, yours = (self._sets(place, _IN_RELIEF, turn) for place in (high, low))
            here, before = (above[:, [high % above.shape[1], low % above.shape[1]]] for above in levels)
            allowed = self.count // narrow * UNIT * _ALLOWED // 1000
            found = best_trade(one, yours, room, partial(_less_above, here=here, narrow=before, allowed=allowed))
            if found is not None:
                give, take = found.samples(one, yours)
                self._swap(high, give.tolist(), low, take.tolist(), always=True)
                return

    def mend(self) -> bool:
        """Exchange sets of what is too full for sets of what has room, until all fits; whether it does."""
        for high in np.flatnonzero((self.held > self.limits[:, None]).any(axis=0)).tolist():
            over = self.held[:, high] - self.limits
            worst = int((over * UNIT // np.maximum(self.limits, 1)).argmax())
            for turn, low in enumerate(np.argsort(self.held[worst], kind="stable")[:_PARTNERS].tolist()):
                self._trade(high, low, *(self._sets(number, _IN_NEED, turn) for number in (high, low)))
                over = self.held[:, high] - self.limits
                if (over <= 0).all():
                    break
            else:
                return False
        return True

    def _trade(self, high: int, low: int, one: Sets, other: Sets) -> None:
        room = (self.limits - self.held[:, high], self.limits - self.held[:, low])
        if high == low or (room[1] < 0).any():
            return
        pull, apart = self.pull[:, high] - self.pull[:, low], self.columns.apart(high, low)
        worth = partial(_worth, pull=pull[:, None], apart=apart[:, None], over=np.maximum(-room[0], 0)[:, None])
        # What is too full has to become less so.
        found = best_trade(one, other, (np.where(room[0] < 0, -1, room[0]), room[1]), worth)
        if found is not None:
            give, take = found.samples(one, other)
            self._swap(high, give.tolist(), low, take.tolist())

    def _order(self, turn: int) -> Ints:
        """Micro-batches so that first and last, second and last but one ... make pairs worth looking at."""
        kind, number = turn % 3, turn // 3
        if kind == 1:
            return np.argsort(self.held[number % len(self.held)], kind="stable")
        if kind == 0:
            return np.argsort(self.pull[number % len(self.pull)], kind="stable")
        numbers = np.arange(self.count, dtype=np.uint64) + np.uint64(turn * self.count)
        return np.argsort(mix64_array(numbers), kind="stable")

    def _looked_at(self, numbers: Ints, turn: int) -> Ints:
        """Some samples of micro-batches, others each turn, and none at the end: ``[numbers, _LOOKED_AT]``."""
        filled = self.filled[numbers][:, None]
        inside = np.arange(_LOOKED_AT - 1)
        places = np.where(inside < filled, (turn * (_LOOKED_AT - 1) + inside) % np.maximum(filled, 1), filled)
        return self.table[numbers[:, None], np.concatenate([places, filled], axis=1)]

    def _sets(self, number: int, considered: int, turn: int) -> Sets:
        samples = self.table[number, : self.filled[number]]
        samples = samples[spread(self.sizes[0, samples], considered, turn % considered)]
        return Sets.of(samples, size := self.sizes[:, samples], np.concatenate([self.shares[:, samples], size]))

    def _swap(self, high: int, give: list[int], low: int, take: list[int], *, always: bool = False) -> None:
        """Exchange samples of two micro-batches, if it is still of use after others were exchanged."""
        give, take = ([one for one in samples if one != self.none] for samples in (give, take))
        moved = self.shares[:, give].sum(axis=1) - self.shares[:, take].sum(axis=1)
        size = self.sizes[:, give].sum(axis=1) - self.sizes[:, take].sum(axis=1)
        before = self.held[:, [high, low]]
        after = before + np.stack([-size, size], axis=1)
        over = self._overfull(before, after - before, self.limits[:, None])
        pull = self.pull[:, high] - self.pull[:, low] - self.columns.apart(high, low) * moved
        if over.sum() > 0 or (over.sum() == 0 and (over.any() or not (always or int((moved * pull).sum()) > 0))):
            return
        members = [
            [one for one in self.table[number, : self.filled[number]].tolist() if one not in gone] + come
            for number, gone, come in ((high, give, take), (low, take, give))
        ]
        # What is too full is mended at any price.
        if over.sum() == 0 and (self._meet(members[0], take) or self._meet(members[1], give)):
            return
        self.held[:, [high, low]] = after
        self.loads[:, [high, low]] += np.stack([-moved, moved], axis=1)
        self.pull -= ((self.columns.near_to(high) - self.columns.near_to(low)) * moved).T
        for number, kept in zip((high, low), members, strict=True):
            if len(kept) >= self.table.shape[1]:
                self.table = np.pad(self.table, ((0, 0), (0, len(kept))), constant_values=self.none)
            self.table[number] = self.none
            self.table[number, : len(kept)] = kept
            self.filled[number] = len(kept)

    def _meet(self, members: list[int], come: list[int]) -> bool:
        """Whether a micro-batch of these would have more copies of one that has come than it must."""
        if self.owner is None:
            return False
        owners = [self.owner[one] for one in members]
        return any(owners.count(self.owner[one]) > self.most[self.owner[one]] for one in come)

    @staticmethod
    def _overfull(held: Ints, change: Ints, limit: int | Ints) -> Ints:
        """How much more is above the limit after a change."""
        more: Ints = np.maximum(held + change - limit, 0) - np.maximum(held - limit, 0)
        return more


def _worth(moved: Ints, pull: Ints, apart: Ints, over: Ints) -> Ints:
    """How much less even columns are after an exchange; where something is too full, that comes first.

    Args:
        moved: costs, and behind them sizes, ``[rows + limits, exchanges]``.
        pull, apart: of the costs, ``[rows, 1]``.
        over: what is above the limits, ``[limits, 1]``.
    """
    costs, sizes = np.split(moved, [len(pull)])
    worth: Ints = (costs * (apart * costs - pull)).sum(axis=0)
    if not over.any():
        return worth
    left = np.maximum(over - sizes, 0).sum(axis=0)
    return np.where(left > 0, left - _MENDS, worth - _MENDED)


def _above(loads: Ints, width: int, bound: Ints) -> Ints:
    """What columns have above the mean, or above what one of them cannot be without, ``[rows, width]``.

    Args:
        loads: of micro-batches, ``[rows, count]``.
        width: columns of the level.
        bound: of each row.
    """
    turns = loads.shape[1] // width
    above: Ints = column_sums(loads, width) - np.maximum(bound, turns * UNIT)[:, None]
    return above


def _less_above(moved: Ints, here: Ints, narrow: Ints, allowed: int) -> Ints:
    """How much lower the worst of two columns is after an exchange; above 0 where narrower ones become worse.

    Args:
        moved: costs, and behind them sizes, ``[rows + limits, exchanges]``.
        here, narrow: how much of each cost two columns have above their bound, on a level and on the one before:
            ``[rows, 2]``.
        allowed: what narrower columns may have above it.
    """
    costs = moved[: len(here)]
    after, narrow_after = (np.maximum(pair[:, :1] - costs, pair[:, 1:] + costs).max(axis=0) for pair in (here, narrow))
    less: Ints = np.where(narrow_after > max(allowed, int(narrow.max())), 1, after - int(here.max()))
    return less
