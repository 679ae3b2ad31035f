"""A data set whose micro-batches are planned by the tokens of their samples."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from energon_lite.batching.steps import seat
from energon_lite.batching.strategy import describe
from energon_lite.batching.token_plan import Piece, PlannedChunk, TokenPlan
from energon_lite.errors import UnknownLengthError, UsageError
from energon_lite.loading.iterators.cursor import check_reach
from energon_lite.loading.iterators.dataset import BaseDataset
from energon_lite.loading.iterators.plain_state import damaged
from energon_lite.loading.iterators.plans_ahead import PlansAhead
from energon_lite.loading.iterators.token_cursor import TokenCursor
from energon_lite.loading.makers.pipeline import Job, Pipeline

__all__ = ["TokenDataset"]

#: Chunks of an endless stream without any micro-batch, one after the other, after which there is no hope.
_PATIENCE = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenDataset(BaseDataset):
    """What ``get_train_dataset`` and ``get_val_dataset`` return with ``batching``.

    Args:
        plan: which samples make up which micro-batch.
        drop_last: a pass ends with its last step in which every rank has a micro-batch.
    """

    plan: TokenPlan
    drop_last: bool = False

    @cached_property
    def plans(self) -> PlansAhead[PlannedChunk]:
        """The plan's chunks, by pass and number."""
        return PlansAhead(self.plan.make)

    @cached_property
    def steps(self) -> PlansAhead[list[list[Piece]]]:
        """The micro-batches of steps that are evened out, by pass, chunk, and number of the step in the chunk."""

        def make(pass_number: int, chunk: int, number: int) -> list[list[Piece]]:
            size = self.plan.step or 1
            return self.plans.get(pass_number, chunk).step_pieces(number * size, size)

        return PlansAhead(make)

    def pipeline(self) -> Pipeline:
        """What runs this data set's jobs."""
        return Pipeline(
            self.leaves,
            self.task_encoder,
            seed=self.seed,
            refill=False,
            batched=True,
            error_handler=self.worker_config.global_error_handler,
        )

    @property
    def is_endless(self) -> bool:
        """Whether there is only one pass, which does not end."""
        return self.plan.chunk_count(0) is None

    def check_place(self, cursor: TokenCursor) -> None:
        """Refuse the cursor of a state that has no such place in the plan.

        Raises:
            StateError: the state is damaged.
        """
        check_reach(self.plan.order, cursor.pass_number, cursor.chunk * self.plan.chunk)
        count = self.plan.chunk_count(cursor.pass_number)
        if count is not None and cursor.chunk > count:
            raise damaged("chunk", cursor.chunk)
        # Else one chunk after the other would be planned in search of it.
        has = len(self.plans.get(cursor.pass_number, cursor.chunk)) if cursor.batch and cursor.chunk != count else 0
        if cursor.batch and cursor.batch >= has:
            raise damaged("batch", cursor.batch)

    def place(self, cursor: TokenCursor, ahead: int = 0) -> tuple[int, int] | None:
        """Chunk and number of the micro-batch that is ``ahead`` of a cursor's; None: the pass is over before.

        Raises:
            UsageError: samples are dropped, chunk after chunk, and no micro-batch is left.
        """
        count = self.plan.chunk_count(cursor.pass_number)
        chunk, batch, empty = cursor.chunk, cursor.batch + ahead, 0
        while count is None or chunk < count:
            size = len(self.plans.get(cursor.pass_number, chunk))
            if batch < size:
                return chunk, batch
            chunk, batch, empty = chunk + 1, batch - size, 0 if size else empty + 1
            if empty >= _PATIENCE:
                raise UsageError(
                    f"{empty * self.plan.chunk} samples in a row are above the capacity, and are dropped",
                    fix="raise the capacity, or choose another `oversize`",
                )
        return None

    def place_at(self, near: TokenCursor, position: int) -> tuple[int, int] | None:
        """Chunk and number of the micro-batch at a position of a pass; None: the pass is over before.

        Args:
            near: a cursor in the pass. The chunks between it and the position are planned.
        """
        count = self.plan.chunk_count(near.pass_number)
        if count is not None and near.chunk >= count:
            near = TokenCursor(near.pass_number)  # at the end, positions go on without micro-batches
        if position >= near.position:
            return self.place(near, position - near.position)
        chunk, first = near.chunk, near.position - near.batch
        while position < first:
            chunk -= 1
            first -= len(self.plans.get(near.pass_number, chunk))
        return chunk, position - first

    def step(self, cursor: TokenCursor) -> TokenCursor:
        """The cursor after one more micro-batch on every rank."""
        world = self.worker_config.world_size
        place = self.place(cursor, world) or (self.plan.chunk_count(cursor.pass_number) or 0, 0)
        return replace(cursor, position=cursor.position + world, chunk=place[0], batch=place[1])

    def pass_is_over(self, cursor: TokenCursor) -> bool:
        """Whether no step of the cursor's pass is left."""
        needed = self.worker_config.world_size - 1 if self.drop_last else 0  # micro-batches behind the next one
        stop = self.stop(cursor.ranks)
        if stop is not None and cursor.position + needed >= stop:
            return True
        return self.place(cursor, needed) is None

    def seat(self, cursor: TokenCursor) -> int:
        """Which of the next micro-batches, one for each rank, is this rank's."""
        rank, world, step = self.worker_config.rank, self.worker_config.world_size, self.plan.step
        return rank if step is None else seat(rank, world, cursor.batch % step // world)

    def prepare_step(self, pass_number: int, place: tuple[int, int] | None) -> None:
        """Begin to even out the step behind that of a place, if it is in the same chunk."""
        step = self.plan.step
        if step is not None and place is not None:
            chunk, number = place[0], place[1] // step + 1
            if number * step < len(self.plans.get(pass_number, chunk)):
                self.steps.prepare(pass_number, chunk, number)

    def job(self, pass_number: int, place: tuple[int, int] | None) -> Job:
        """The job that makes a micro-batch; None, or a place that is none, gives an empty batch."""
        count = self.plan.chunk_count(pass_number)
        if place is None:
            place = (count or 0, 0)
        chunk, batch = place
        inside = count is None or chunk < count
        planned = self.plans.get(pass_number, chunk) if inside else None
        pieces: list[Piece] = []
        if planned is not None and batch < len(planned):
            step = self.plan.step
            pieces = planned.pieces(batch) if step is None else self._step_pieces(pass_number, chunk, batch, step)
        return Job(pass_number, (chunk << 40) + batch, pieces, ("batch", pass_number, chunk, batch))

    def _step_pieces(self, pass_number: int, chunk: int, batch: int, step: int) -> list[Piece]:
        return self.steps.get(pass_number, chunk, batch // step)[batch % step]

    def __len__(self) -> int:
        """Micro-batches per rank in one ``for`` loop.

        Raises:
            UnknownLengthError: without ``virtual_epoch_length`` nobody knows before all is planned.
        """
        if self.loop_length:
            return self.loop_length
        raise UnknownLengthError(
            "how many batches there are is not known before all of them are planned",
            fix="give virtual_epoch_length; `energon-lite plan` tells the number of steps",
        )

    def __str__(self) -> str:
        step = self.plan.step
        steps = "" if step is None else f", steps of {step} micro-batches"
        return self.describe(f"batches by {describe(self.plan.strategy)}{steps}")
