"""Walking through micro-batches that are planned by their tokens, plan chunk after plan chunk."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Sequence

from energon_lite.batching.oversize import Counts
from energon_lite.loading.executors.executor import Executor
from energon_lite.loading.iterators.iterator import PlanIterator, State, no_such_step
from energon_lite.loading.iterators.rebase_entry import check_rebase
from energon_lite.loading.iterators.token_cursor import TokenCursor, from_token_state, to_token_state
from energon_lite.loading.iterators.token_dataset import TokenDataset
from energon_lite.loading.makers.pipeline import Address, Job

__all__ = ["TokenIterator"]

logger = logging.getLogger(__name__)


class TokenIterator(PlanIterator[TokenCursor]):
    """The way of one rank through the plan.

    Args:
        dataset: what is planned.
        executor: makes the executor, at the first batch.
        ahead: jobs submitted before their turn.
        skip: ``(pass, step)`` of steps that are passed over.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        executor: Callable[[], Executor],
        *,
        ahead: int,
        skip: Collection[tuple[int, int]] = (),
    ):
        super().__init__(TokenCursor(), dataset.worker_config, executor, ahead=ahead, skip=skip)
        self.dataset: TokenDataset = dataset
        self._unchanged = dataset
        self._counted = (0, 0)  # a pass, and the first of its chunks whose plan is not in `counts`
        self.counts = Counts()

    def state(self, cursor: TokenCursor | None = None) -> State:
        cursor = cursor or self.cursor
        ranks = self.dataset.limit_ranks(cursor.ranks)
        return to_token_state(cursor, self.dataset.identity, self.dataset.rebase, ranks=ranks)

    def restore(self, state: State | None) -> None:
        dataset = self._unchanged.at(state)
        cursor = TokenCursor() if state is None else from_token_state(state, dataset.identity)
        position = cursor.chunk * dataset.plan.chunk
        check_rebase(dataset.rebase, leaves=len(dataset.leaves), position=position, ends=not dataset.is_endless)
        dataset.check_place(cursor)
        self._go_to(dataset, cursor)
        self._counted = (self.cursor.pass_number, self.cursor.chunk)

    def addresses_at(self, pass_number: int | None, step: int, ranks: Sequence[int]) -> list[Sequence[Address]]:
        cursor, dataset = self.cursor, self.dataset
        number = cursor.pass_number if pass_number is None else pass_number
        near = cursor if number == cursor.pass_number else TokenCursor(number)
        first = step * self._world + near.position % self._world
        if min(number, step) < 0 or (dataset.is_endless and number > 0) or dataset.place_at(near, first) is None:
            raise no_such_step(number, step)
        places = [dataset.place_at(near, first + rank) for rank in ranks]
        return [dataset.job(number, place).addresses for place in places]

    def _jobs_from(self, cursor: TokenCursor) -> Iterator[Job]:
        while not self.dataset.pass_is_over(cursor):
            seat, stop = self.dataset.seat(cursor), self.dataset.stop(cursor.ranks)
            inside = stop is None or cursor.position + seat < stop
            place = self.dataset.place(cursor, seat) if inside else None
            yield self.dataset.job(cursor.pass_number, place)
            self.dataset.prepare_step(cursor.pass_number, place)
            cursor = self._behind_skipped(self.dataset.step(cursor))

    def _begin_step(self) -> None:
        """Count what the plan left out in the chunks that this step reaches, each once; have the next one planned."""
        pass_number = self.cursor.pass_number
        count = self.dataset.plan.chunk_count(pass_number)
        last = self.dataset.place(self.cursor, self._world - 1)
        stop = last[0] + 1 if last is not None else count or 0
        first = self._counted[1] if self._counted[0] == pass_number else 0
        for number in range(first, stop):
            found = self.dataset.plans.get(pass_number, number).batches.counts
            if found != Counts() and self.counts == Counts():
                logger.warning("some samples do not fit into a batch: %s", found)
            self.counts += found
        if stop > first and (count is None or stop < count):
            self.dataset.plans.prepare(pass_number, stop)
        self._counted = (pass_number, max(first, stop))
