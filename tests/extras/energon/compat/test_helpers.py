"""Energon's helper functions for samples, errors and random numbers: as its own, or as they are documented."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import megatron.energon.errors as their_errors
import numpy as np
import pytest
import torch
from megatron.energon.flavors.base_dataset import legacy_handler as their_legacy_handler
from megatron.energon.sample_utils import default_get_batch_keys as their_batch_keys

from energon_lite.extras.energon.compat import hooks
from energon_lite.extras.energon.compat.loaders import SystemRng, WorkerRng
from tests.extras.energon.compat.test_rules import Pair, Size
from tests.testing import ALONE


@pytest.mark.parametrize(
    ("sample", "text"),
    [
        (["abcd", "abcde", 1], "['abcd', 'abcd...']"),
        ((b"abcde", None), "(b'abcd...', None)"),
        ({"a": {"b": {"c": 1}}, 2: [[[]]], "more": 3}, "{a: {b: {...}}, 2: [[...]]}"),
        ((Pair(1, {}), Size(2)), "(Pair(n=1, nested={...}), Size(width=2, height=7))"),
        ([torch.zeros(2, 3), {}], "[Tensor(shape=(2, 3), dtype=torch.float32), {}]"),
        ((10**79, 10**80), f"({10**79}, 1000...)"),
        (Pair, repr(Pair)),
    ],
)  # fmt: skip
def test_a_sample_in_one_line(sample: Any, text: str) -> None:
    assert hooks.format_sample_compact(sample, depth=2, max_items=2, max_str_len=4) == text


@pytest.mark.parametrize("keys", [["a", "b"], ["a", 1]])
@pytest.mark.parametrize("name", ["__key__", "__keys__", "keys", "other"])
def test_keys_of_a_batch(name: str, keys: Any) -> None:
    for batch in ({name: keys}, SimpleNamespace(**{name: keys}), [{name: keys}, {}]):
        assert hooks.default_get_batch_keys(batch) == their_batch_keys(batch)
    assert hooks.default_get_batch_keys([]) is None and hooks.default_get_batch_keys({name: 5}) is None


def test_marks_of_hooks() -> None:
    for value in (True, False):
        marked = SimpleNamespace(__stateless__=value, __cooker_need_cache__=value, __cooker_need_primary__=not value)
        found = hooks.get_stateless(marked), hooks.get_cooker_need_cache(marked), hooks.get_cooker_need_primary(marked)
        assert found == (value, value, not value)
    tolerances = [hooks.get_failure_tolerance(SimpleNamespace(__failure_tolerance__=one), 7) for one in (3, 0)]
    assert tolerances == [3, 0]
    assert (hooks.get_failure_tolerance(test_marks_of_hooks, 7), hooks.get_failure_tolerance(test_marks_of_hooks)) == (
        7,
        0,
    )


def outcomes_of(errors: Any, events: list[Any], tolerance: int, handled: list[Any]) -> list[str]:
    """What comes of each event in an error context; an event is an error, None for success, or "reset"."""

    def handler(error: Exception, sample: Any, sources: Any) -> None:
        handled.append((str(error), sample, sources))

    context, found = errors.ErrorContext("step", handler, tolerance), []
    for event in events:
        try:
            with context.handle_errors({"n": 1}):
                if event == "reset":
                    context.reset()
                elif event is not None:
                    raise event
            found.append("on")
        except errors.FatalSampleError:
            found.append("fatal")
    return found


@pytest.mark.parametrize("tolerance", [0, 1, 3])
def test_failures_in_a_row(tolerance: int) -> None:
    for wrong in ([ValueError("x")] * 2, [None, KeyError("k"), NameError("n")], ["reset"]):
        ours, theirs = [], []
        events = [*wrong, *[ValueError("y")] * 2, None, *wrong, ValueError("z"), ValueError("z")]
        found = outcomes_of(hooks, events, tolerance, ours)
        assert (found, ours) == (outcomes_of(their_errors, events, tolerance, theirs), theirs)
    with pytest.raises(ValueError), hooks.ErrorContext("step", None).handle_errors(1):
        raise ValueError
    with hooks.ErrorContext("step", None, 1).handle_errors(1):
        raise hooks.SkipSample


def test_handlers() -> None:
    seen: list[Any] = []
    for legacy in (hooks.legacy_handler, their_legacy_handler):
        legacy(lambda error, sample: seen.append((error, sample)))(ValueError, 2, None)
        legacy(lambda error, sample, sources: seen.append((error, sample, sources)))(ValueError, 2, [3])
    assert seen[:2] == seen[2:] == [(ValueError, 2), (ValueError, 2, [3])]
    with hooks.handle_restore_errors(lambda *given: seen.append(given[1:]), {"__sources__": (4,)}):
        raise ValueError
    with pytest.raises(MemoryError), hooks.handle_restore_errors(lambda *given: seen.clear(), 1):
        raise MemoryError
    assert seen[4] == ({"__sources__": (4,)}, [4]) and hooks.get_source_info([{}, {}]) is None


def test_random_numbers() -> None:
    one, other = WorkerRng(ALONE), WorkerRng(ALONE)
    state, entries = one.save_state(), list(range(9))
    drawn = [one.choice(entries) for _ in range(99)]
    assert drawn == [other.randbelow(9) for _ in range(99)] and {*drawn} == {*entries}
    assert one.choice(entries, torch.tensor([0.0] * 8 + [2.0])) == 8
    mixed = one.shuffle(entries)
    assert mixed != entries and sorted(mixed) == entries
    popped = one.rand_pop(mixed)
    assert len(mixed) == 8 and sorted([*mixed, popped]) == entries
    one.restore_state(state)
    assert [one.randbelow(9) for _ in range(99)] == drawn

    def numbers() -> list[float]:
        return [torch.rand(()).item(), np.random.rand(), random.random()]

    SystemRng.seed_args(1, "a")
    saved, first = SystemRng.save_state(), numbers()
    SystemRng.seed(seed := SystemRng.get_seed_from_args(1, "a"))
    again = numbers()
    SystemRng.restore_state(saved)
    assert first == again == numbers() and 0 <= seed < 1 << 32 and seed != SystemRng.get_seed_from_args(1, "b")
