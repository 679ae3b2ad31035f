"""Law 2 under interrupts, where content decides: one at any point loses nothing and repeats nothing."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.loading.iterators import lane_cursor, lane_dataset, lane_iterator, lane_prefetcher
from tests.core.laws.content_encoders import Content
from tests.testing import ALONE, examples

_FILES = {module.__file__ for module in (lane_iterator, lane_prefetcher, lane_dataset, lane_cursor)}


class Interrupts:
    """Raises KeyboardInterrupt between two instructions of the walk, after so many of them, again and again."""

    def __init__(self, gaps: list[int]):
        self._gaps, self._left, self.raised = list(gaps), 0, 0

    def __enter__(self) -> None:
        self._left = self._gaps.pop(0) if self._gaps else 1 << 60
        sys.settrace(self._enter)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _enter(self, frame: Any, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename not in _FILES:
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._at

    def _at(self, frame: Any, event: str, argument: Any) -> Any:
        self._left -= event == "opcode"
        if self._left < 0:
            self.raised += 1
            raise KeyboardInterrupt
        return self._at


CONTENTS = {
    "yields": Content(yields=True, skips=9, batch_size=3),
    "packs": Content(packing=4, batch_size=2, late=True),
    "groups": Content(groups=2, batch_size=2),
    "cut": Content(batch_yields=True, batch_size=2),
}


@pytest.mark.parametrize("content", CONTENTS)
@settings(max_examples=examples(20))
@given(gaps=st.lists(st.integers(0, 300), min_size=8, max_size=30), ends=st.booleans())
def test_an_interrupt_at_any_point_loses_nothing(leaf_of: Any, content: str, gaps: list[int], ends: bool) -> None:
    config, leaf = ALONE, leaf_of(40, "a")

    def walk() -> Any:
        arguments: dict[str, Any] = {"worker_config": config, "chunk_size": 8, "lanes": 3}
        arguments |= CONTENTS[content].arguments()
        dataset = get_val_dataset(leaf, **arguments) if ends else get_train_dataset(leaf, **arguments)
        return get_savable_loader(dataset)._dataset_iterator

    calm, expected, count = walk(), list[Any](), 30
    while len(expected) < count and (result := calm.take()) is not None:
        calm.advance()
        expected.append((result.batch, calm.state()))

    shaken, found, interrupts = walk(), list[Any](), Interrupts(gaps)
    for _ in range(2 * count):
        before, batch = shaken.state()["position"], None
        try:
            with interrupts:
                result = shaken.take()
                if result is None:
                    break
                batch = result.batch
                shaken.advance()
        except KeyboardInterrupt:
            shaken.start_loop()  # as the next `for` does
        if shaken.state()["position"] != before and batch is not None:  # delivered: the place is behind it
            found.append((batch, shaken.state()))
        if len(found) == count:
            break
    assert interrupts.raised >= min(3, len(gaps))
    assert found == expected
