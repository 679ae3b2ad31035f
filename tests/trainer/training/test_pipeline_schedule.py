"""The order of a stage's passes: complete, free of deadlock, thrifty with memory, and the documented bubble."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from energon_lite.trainer import pipeline_order, pipeline_schedule
from energon_lite.trainer.training.pipeline import Action

sizes = {"stages": st.integers(1, 6), "micro_batches": st.integers(0, 13), "chunks": st.integers(1, 3)}
Messages = dict[tuple[int, int, str], list[tuple[int, int]]]


def play(
    stages: int, micro_batches: int, chunks: int, backward: bool = True, latency: float = 0
) -> tuple[float, Messages]:
    """Run all stages side by side, each pass taking one unit of time; the time it took, and what was sent where.

    A message takes ``latency`` to arrive, and nobody waits for it but the receiver.

    Raises:
        AssertionError: nobody can go on.
    """
    orders = [pipeline_schedule(s, stages, micro_batches, chunks=chunks, backward=backward) for s in range(stages)]
    finished: dict[tuple[bool, int, int], float] = {}
    sent: Messages = {}
    at, free = [0] * stages, [0.0] * stages
    while any(at[stage] < len(orders[stage]) for stage in range(stages)):
        moved = False
        for stage in range(stages):
            while at[stage] < len(orders[stage]):
                action = orders[stage][at[stage]]
                place, last = action.chunk * stages + stage, chunks * stages - 1
                source = place + (1 if action.backward else -1)
                need = (action.backward, source, action.micro_batch)
                arrives: float = 0
                if 0 <= source <= last:
                    if need not in finished:
                        break
                    arrives = finished[need] + latency
                assert not action.backward or (False, place, action.micro_batch) in finished
                end = max(free[stage], arrives) + 1
                finished[action.backward, place, action.micro_batch] = free[stage] = end
                to = place + (-1 if action.backward else 1)
                if 0 <= to <= last:
                    key = (stage, to % stages, "up" if action.backward else "down")
                    sent.setdefault(key, []).append((to, action.micro_batch))
                at[stage], moved = at[stage] + 1, True
        assert moved, f"deadlock at {[str(order[i]) for order, i in zip(orders, at, strict=True) if i < len(order)]}"
    return max(free), sent


@given(**sizes, backward=st.booleans())
def test_each_pass_once_and_nobody_waits_for_ever(stages: int, micro_batches: int, chunks: int, backward: bool) -> None:
    """Between two ranks and in one direction there is one queue, so both sides must agree on its order."""
    _, sent = play(stages, micro_batches, chunks, backward)
    directions = (False, True) if backward else (False,)
    wanted = {Action(c, m, b) for c in range(chunks) for m in range(micro_batches) for b in directions}
    orders = [
        pipeline_schedule(stage, stages, micro_batches, chunks=chunks, backward=backward) for stage in range(stages)
    ]
    assert all(len(order) == len(wanted) and set(order) == wanted for order in orders)
    for (_, receiver, direction), messages in sent.items():
        taken = [
            (action.chunk * stages + receiver, action.micro_batch)
            for action in orders[receiver]
            if action.backward == (direction == "up")
        ]
        assert [message for message in taken if message in messages] == messages


@given(st.integers(1, 6), st.integers(1, 13))
def test_1f1b_holds_no_more_than_the_stages_to_the_end(stages: int, micro_batches: int) -> None:
    for stage in range(stages):
        held = most = 0
        for action in pipeline_schedule(stage, stages, micro_batches):
            held += -1 if action.backward else 1
            most = max(most, held)
        assert most == min(stages - stage, micro_batches)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 3))
def test_the_bubble_is_that_of_the_paper(stages: int, groups: int, chunks: int) -> None:
    """Forward and backward taking equal time: (stages - 1) / chunks micro-batches' worth of waiting."""
    micro_batches = groups * stages
    time, _ = play(stages, micro_batches, chunks)
    assert time == 2 * (micro_batches * chunks + stages - 1)


def test_interleaving_gives_messages_time_to_arrive() -> None:
    """While a message of half a pass is on its way, a stage has something else to do, but for the ends of the step."""
    busy = 2 * 8 * 2
    assert play(4, 8, 2)[0] == busy + 2 * 3
    assert play(4, 8, 2, latency=0.5)[0] == busy + 2 * 3 + 7


def test_two_chunks_by_hand() -> None:
    order = [str(action) for action in pipeline_schedule(1, 2, 2, chunks=2)]
    assert order == ["F0.0", "F1.0", "F0.1", "B0.1", "F1.1", "B1.1", "B0.0", "B1.0"]


@given(st.lists(st.integers(0, 9)))
def test_a_pipeline_begins_and_ends_with_what_is_short(times: list[int]) -> None:
    order = pipeline_order(times)
    assert sorted(order) == list(range(len(times)))
    ordered = [times[number] for number in order]
    peak = ordered.index(max(ordered)) if ordered else 0
    assert ordered[: peak + 1] == sorted(ordered[: peak + 1])
    assert ordered[peak:] == sorted(ordered[peak:], reverse=True)
