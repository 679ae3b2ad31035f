"""State of a step's samples while a rebalancing moves them between micro-batches."""

from __future__ import annotations

from functools import partial

import numpy as np

from energon_lite.batching.capacity import Ints
from energon_lite.batching.exchange import Sets, best_trade, spread
from energon_lite.extras.balance.rank_columns import UNIT, RankColumns, column_sums, loads_of
from energon_lite.order.hashing import mix64_array

#: Candidates of a micro-batch in a round of swapping single samples, one of which is "no sample".
_CANDIDATES = 13
#: Samples of a micro-batch that are considered for sets, to repair an overfull micro-batch.
_CONSIDERED_REPAIR = 24
#: The same, to improve the worst columns.
_CONSIDERED_WORST = 16
#: Micro-batches that are tried as partners of an overfull one, or of one in the worst column.
_PARTNERS = 24
#: Excess over the mean, in thousandths, up to which a column counts as balanced.
_EVEN = 8
#: Excess, in thousandths, that columns of the previous, narrower level may get.
_ALLOWED = 2 * _EVEN
#: Attempts on one column before it counts as stalled; then other columns follow, which may be easier to balance.
_ATTEMPTS = 8
#: Value of a swap that leaves a micro-batch less overfull: above every value of balance.
_LESS_OVERFULL = 1 << 45
#: Value of a swap after which a micro-batch is no longer overfull.
_REPAIRED = 1 << 61


class MovableSamples:
    """Assignment of a step's samples to micro-batches, with operations that swap samples.

    Attributes:
        table: the samples of each micro-batch, ``[count, width]``, filled up with the number ``none``.
        filled: number of samples of each micro-batch, ``[count]``.
        loads: cost of each micro-batch, ``[rows, count]``.
        pull: weighted load of the columns of each place (:meth:`RankColumns.pulls`), ``[rows, count]``.
        held: size of each micro-batch, ``[limits, count]``.
        owner: equal for copies of one sample, ``[samples]``; None: there are no copies.
    """

    def __init__(self, shares: Ints, sizes: Ints, limits: Ints, place: Ints, count: int, owner: Ints | None = None):
        self.none = len(place)
        self.count = count
        self.limits = limits
        self.owner = None if owner is None else owner.tolist()
        # Largest number of copies of a sample that one micro-batch may hold.
        self.most = [] if owner is None else (-(-np.bincount(owner) // count)).tolist()
        self.columns = RankColumns(shares, count)
        # The number ``none`` stands for a sample without cost and size.
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
        """Swap single samples, or a sample and "no sample", between disjoint pairs of micro-batches."""
        half = self.count // 2
        if not half:
            return
        order = self._order(turn)
        heavy, light = order[::-1][:half], order[:half]
        mine = self._candidates(heavy, turn)
        yours = self._candidates(light, turn // 3 + 1)
        gain = np.zeros((half, _CANDIDATES, _CANDIDATES), dtype=np.int64)
        apart = (self.columns.near[0] - self.columns.near[(heavy - light) % self.count]).T
        for row, weight, pull in zip(self.shares, apart, self.pull[:, heavy] - self.pull[:, light], strict=True):
            moved = row[mine][:, :, None] - row[yours][:, None, :]
            gain += moved * (pull[:, None, None] - weight[:, None, None] * moved)
        allowed = gain > 0
        for row, held, limit in zip(self.sizes, self.held, self.limits.tolist(), strict=True):
            moved = row[mine][:, :, None] - row[yours][:, None, :]
            more = self._overflow(held[heavy, None, None], -moved, limit)
            more += self._overflow(held[light, None, None], moved, limit)
            # A swap that reduces overflow is always allowed; one that increases it never is.
            allowed = (allowed & (more <= 0)) | (more < 0)
            gain -= more * (UNIT * UNIT // max(1, limit)) * 64
        gain[~allowed] = np.iinfo(np.int64).min
        flat = gain.reshape(half, -1)
        best = flat.argmax(axis=1)
        gains = flat[np.arange(half), best]
        for pair in np.argsort(gains, kind="stable")[::-1].tolist():
            i, j = divmod(int(best[pair]), _CANDIDATES)
            if not allowed[pair, i, j]:
                break
            self._swap(int(heavy[pair]), [int(mine[pair, i])], int(light[pair]), [int(yours[pair, j])])

    def trade(self, turn: int, *, pairs: int, considered: int) -> None:
        """Swap sets of samples between micro-batches whose columns have the highest and the lowest load.

        Args:
            turn: number of the round, which selects the row of costs and the pairs.
            pairs: number of pairs of micro-batches.
            considered: samples of a micro-batch that are considered.
        """
        order = np.argsort(self.pull[turn % len(self.pull)], kind="stable")
        heavy, light = order[::-1][:pairs].tolist(), order[:pairs].tolist()
        for number, high in enumerate(heavy):
            low = light[(number + turn) % pairs]
            mine, yours = (self._sets(number, considered, turn) for number in (high, low))
            self._trade(high, low, mine, yours)

    def finish(self, tries: int, reserved: Ints) -> None:
        """Swap sets with micro-batches of the worst columns of each level, as long as that lowers the worst load.

        Columns of the previous, narrower level may not get worse. All limits have to be kept before, see :meth:`mend`.

        Args:
            tries: number of attempts for each level.
            reserved: the micro-batches of samples with a fixed place, -1 for others, ``[samples]``. The load of the
                fullest column of these is a lower bound for all columns.
        """
        loads = loads_of(self.shares[:, :-1], reserved, self.count)
        largest, before = self.shares.max(axis=1), self.count
        bounds = {
            width: np.maximum(largest, column_sums(loads, width).max(axis=1))
            for width in (self.count, *self.columns.levels)
        }
        for width in self.columns.levels:
            turns = self.count // width
            stalled = np.zeros((len(self.shares), width), dtype=np.int64)
            for turn in range(tries if turns > 1 else tries // 4):
                levels = [_above(self.loads, each_width, bounds[each_width]) for each_width in (width, before)]
                above = np.where(stalled < _ATTEMPTS, levels[0] * 1000 // (turns * UNIT), 0)
                row, column = divmod(int(above.argmax()), width)
                if above[row, column] < _EVEN:
                    break
                others = np.argsort(levels[0][row], kind="stable")[:_PARTNERS].tolist()
                self._improve_column(column, others, levels, turn)
                stalled[row, column] += 1
            before = width

    def _improve_column(self, column: int, others: list[int], levels: list[Ints], turn: int) -> None:
        """Apply the first swap that lowers the load of a column, with the partner columns tried in turn.

        Args:
            column: the column with the highest load.
            others: partner columns, by ascending load.
            levels: excess of the columns on this level and on the previous one, ``[rows, width]`` each.
            turn: number of the attempt, which selects the micro-batches of the columns.
        """
        width, narrow = levels[0].shape[1], levels[1].shape[1]
        turns = self.count // width
        for number, other in enumerate(others):
            high = column + width * ((turn + number) % turns)
            low = other + width * ((turn + number // turns) % turns)
            if other == column:
                continue
            room = (self.limits - self.held[:, high], self.limits - self.held[:, low])
            mine, yours = (self._sets(place, _CONSIDERED_WORST, turn) for place in (high, low))
            here, before = (above[:, [high % above.shape[1], low % above.shape[1]]] for above in levels)
            allowed = self.count // narrow * UNIT * _ALLOWED // 1000
            trade = best_trade(mine, yours, room, partial(_less_above, here=here, narrow=before, allowed=allowed))
            if trade is not None:
                give, take = trade.samples(mine, yours)
                self._swap(high, give.tolist(), low, take.tolist(), always=True)
                return

    def mend(self) -> bool:
        """Swap sets of overfull micro-batches for sets of others, until all limits are kept; False if that fails."""
        for high in np.flatnonzero((self.held > self.limits[:, None]).any(axis=0)).tolist():
            over = self.held[:, high] - self.limits
            worst = int((over * UNIT // np.maximum(self.limits, 1)).argmax())
            for turn, low in enumerate(np.argsort(self.held[worst], kind="stable")[:_PARTNERS].tolist()):
                self._trade(high, low, *(self._sets(number, _CONSIDERED_REPAIR, turn) for number in (high, low)))
                over = self.held[:, high] - self.limits
                if (over <= 0).all():
                    break
            else:
                return False
        return True

    def _trade(self, high: int, low: int, mine: Sets, yours: Sets) -> None:
        """Apply the best swap of sets between two micro-batches, if it improves the balance or repairs an overflow."""
        room = (self.limits - self.held[:, high], self.limits - self.held[:, low])
        if high == low or (room[1] < 0).any():
            return
        pull, apart = self.pull[:, high] - self.pull[:, low], self.columns.apart(high, low)
        worth = partial(_worth, pull=pull[:, None], apart=apart[:, None], over=np.maximum(-room[0], 0)[:, None])
        # An overfull micro-batch has to become less overfull.
        trade = best_trade(mine, yours, (np.where(room[0] < 0, -1, room[0]), room[1]), worth)
        if trade is not None:
            give, take = trade.samples(mine, yours)
            self._swap(high, give.tolist(), low, take.tolist())

    def _order(self, turn: int) -> Ints:
        """Order of the micro-batches in which the first and the last, the second and the last but one are paired."""
        kind, number = turn % 3, turn // 3
        if kind == 1:
            return np.argsort(self.held[number % len(self.held)], kind="stable")
        if kind == 0:
            return np.argsort(self.pull[number % len(self.pull)], kind="stable")
        numbers = np.arange(self.count, dtype=np.uint64) + np.uint64(turn * self.count)
        return np.argsort(mix64_array(numbers), kind="stable")

    def _candidates(self, numbers: Ints, turn: int) -> Ints:
        """Some samples of micro-batches, different ones each turn, and "no sample": ``[numbers, _CANDIDATES]``."""
        filled = self.filled[numbers][:, None]
        inside = np.arange(_CANDIDATES - 1)
        places = np.where(inside < filled, (turn * (_CANDIDATES - 1) + inside) % np.maximum(filled, 1), filled)
        return self.table[numbers[:, None], np.concatenate([places, filled], axis=1)]

    def _sets(self, number: int, considered: int, turn: int) -> Sets:
        samples = self.table[number, : self.filled[number]]
        samples = samples[spread(self.sizes[0, samples], considered, turn % considered)]
        return Sets.of(samples, size := self.sizes[:, samples], np.concatenate([self.shares[:, samples], size]))

    def _swap(self, high: int, give: list[int], low: int, take: list[int], *, always: bool = False) -> None:
        """Swap samples of two micro-batches, if that is still an improvement after earlier swaps of the round.

        Args:
            high, low: the two micro-batches.
            give: samples that ``high`` gives to ``low``.
            take: samples that ``low`` gives to ``high``.
            always: swap without an improvement, too, unless it increases overflow or joins copies.
        """
        give, take = ([sample for sample in samples if sample != self.none] for samples in (give, take))
        moved = self.shares[:, give].sum(axis=1) - self.shares[:, take].sum(axis=1)
        size = self.sizes[:, give].sum(axis=1) - self.sizes[:, take].sum(axis=1)
        before = self.held[:, [high, low]]
        after = before + np.stack([-size, size], axis=1)
        over = self._overflow(before, after - before, self.limits[:, None])
        pull = self.pull[:, high] - self.pull[:, low] - self.columns.apart(high, low) * moved
        if over.sum() > 0 or (over.sum() == 0 and (over.any() or not (always or int((moved * pull).sum()) > 0))):
            return
        members = [
            [sample for sample in self.table[number, : self.filled[number]].tolist() if sample not in gone] + come
            for number, gone, come in ((high, give, take), (low, take, give))
        ]
        # Repair of an overflow takes precedence over the separation of copies.
        if over.sum() == 0 and (self._has_copies(members[0], take) or self._has_copies(members[1], give)):
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

    def _has_copies(self, members: list[int], come: list[int]) -> bool:
        """True if a micro-batch with these members has too many copies of one of the samples that have come."""
        if self.owner is None:
            return False
        owners = [self.owner[sample] for sample in members]
        return any(owners.count(self.owner[sample]) > self.most[self.owner[sample]] for sample in come)

    @staticmethod
    def _overflow(held: Ints, change: Ints, limit: int | Ints) -> Ints:
        """Increase of the overflow above the limit by a change."""
        return np.maximum(held + change - limit, 0) - np.maximum(held - limit, 0)


def _worth(moved: Ints, pull: Ints, apart: Ints, over: Ints) -> Ints:
    """Value of swaps, lower is better: change of the imbalance; repair of an overflow takes precedence.

    Args:
        moved: costs, followed by sizes, ``[rows + limits, swaps]``.
        pull, apart: difference of the weighted loads, and weight of the separate columns, ``[rows, 1]`` both.
        over: overflow of the first micro-batch, ``[limits, 1]``.
    """
    costs, sizes = np.split(moved, [len(pull)])
    worth: Ints = (costs * (apart * costs - pull)).sum(axis=0)
    if not over.any():
        return worth
    left = np.maximum(over - sizes, 0).sum(axis=0)
    return np.where(left > 0, left - _LESS_OVERFULL, worth - _REPAIRED)


def _above(loads: Ints, width: int, bound: Ints) -> Ints:
    """Excess of columns over the mean, or over a lower bound if that is larger, ``[rows, width]``.

    Args:
        loads: costs of micro-batches, ``[rows, count]``.
        width: number of columns of the level.
        bound: lower bound on the largest column of each row, ``[rows]``.
    """
    turns = loads.shape[1] // width
    return column_sums(loads, width) - np.maximum(bound, turns * UNIT)[:, None]


def _less_above(moved: Ints, here: Ints, narrow: Ints, allowed: int) -> Ints:
    """Value of swaps, lower is better: change of the worse column's excess; above 0 if narrower columns get worse.

    Args:
        moved: costs, followed by sizes, ``[rows + limits, swaps]``.
        here, narrow: excess of the two columns, on a level and on the previous one: ``[rows, 2]``.
        allowed: largest accepted excess of narrower columns.
    """
    costs = moved[: len(here)]
    after, narrow_after = (np.maximum(pair[:, :1] - costs, pair[:, 1:] + costs).max(axis=0) for pair in (here, narrow))
    return np.where(narrow_after > max(allowed, int(narrow.max())), 1, after - int(here.max()))
