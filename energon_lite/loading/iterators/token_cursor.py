"""Where a run is whose micro-batches are planned by their tokens: a place in a plan chunk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from energon_lite.loading.iterators.cursor import checked, header, ranks_entry, read_ranks
from energon_lite.loading.iterators.identity import Identity
from energon_lite.loading.iterators.plain_state import damaged, is_count
from energon_lite.loading.iterators.rebase_entry import rebase_entry
from energon_lite.order.rebase import Rebase

__all__ = ["TokenCursor", "from_token_state", "to_token_state"]

#: Above these a state is damaged: chunks of a run, micro-batches of a chunk.
_MAX_CHUNK, _MAX_BATCH = 1 << 45, 1 << 40


@dataclass(frozen=True)
class TokenCursor:
    """A place in the run, the same on all ranks.

    Args:
        pass_number: finished passes over a finite stream.
        position: micro-batches of this pass that were delivered, over all ranks.
        loop_start: the position at which the running ``for`` loop began.
        chunk: the plan chunk of the next micro-batch; that behind the last one at the end of a pass.
        batch: its number in the chunk.
        ranks: on so many ranks the pass began, which its limit counts; None: it begins on those there are.
    """

    pass_number: int = 0
    position: int = 0
    loop_start: int = 0
    chunk: int = 0
    batch: int = 0
    ranks: int | None = None

    @property
    def begun(self) -> int:
        """Plan chunks of which something was delivered."""
        return self.chunk + (self.batch > 0)


def to_token_state(
    cursor: TokenCursor, identity: Identity, rebase: Rebase | None = None, *, ranks: int | None = None
) -> dict[str, Any]:
    """The state: plain integers, strings, lists and dicts.

    Args:
        ranks: with a limit: on so many the pass began.
    """
    return {
        **header("tokens", rebase),
        "pass_number": cursor.pass_number,
        "position": cursor.position,
        "loop_start": cursor.loop_start,
        **ranks_entry(ranks),
        "chunk": cursor.chunk,
        "batch": cursor.batch,
        **rebase_entry(rebase),
        "identity": identity.at(cursor.begun).to_plain(),
    }


def from_token_state(state: Any, identity: Identity) -> TokenCursor:
    """The cursor of a saved state.

    Raises:
        StateError, StateMismatchError: see :func:`energon_lite.loading.iterators.cursor.from_state`.
    """
    numbers = checked(state, "tokens")
    for name, most in (("chunk", _MAX_CHUNK), ("batch", _MAX_BATCH)):
        value = state.get(name)
        if not is_count(value, most):
            raise damaged(name, value)
        numbers[name] = value
    cursor = TokenCursor(**numbers, ranks=read_ranks(state))
    identity.at(cursor.begun).check(state.get("identity"))
    return cursor
