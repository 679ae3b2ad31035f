"""All laws at once: random pipelines on random ranks and workers, saved and restored at random, against plain code.

The oracle (``oracle.py``, beside this file) says what it draws, and runs any number of pipelines from the command line.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import settings

from energon_lite import Chunks
from tests.core.laws import oracle
from tests.core.laws.naive_hooks import Hooks
from tests.core.laws.naive_steps import Part
from tests.core.laws.naive_wrappers import Epochize, Limit, Node, Repeat, Window
from tests.core.laws.oracle import Difference, Pipeline, outcome_of, run
from tests.core.laws.pipelines import Base, Wrong
from tests.core.laws.sources import SIZES, Source, key, write_data
from tests.testing import examples


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_data(tmp_path_factory.mktemp("data"))


def base_of(root: Path, hooks: Hooks, **arguments: Any) -> Base:
    """Validation on 21 samples."""
    split = {"path": str(root / "e")}
    names = tuple(key("e", index) for index in range(SIZES["e"]))
    return Base(Source({"splits": {"train": split, "val": split}}, (names,), "e", ends=True), hooks, False, arguments)


@pytest.mark.parametrize("portion", range(4))
def test_no_pipeline_differs(root: Path, portion: int) -> None:
    count = examples(25)
    first = portion * count if settings().derandomize else Random().getrandbits(40)
    outcomes: Counter[str] = Counter()
    for seed in range(first, first + count):
        outcome, why = outcome_of(seed, root)
        assert outcome != "DIFFERENT", why
        outcomes[outcome] += 1
    assert outcomes["same"] > count / 2


#: Numbers of batches that content decides.
DECIDING = [Hooks(yields=True, batch_size=4), Hooks(groups=2, batch_size=4), Hooks(packing=3, batch_size=2)]
WRAPPED = {
    "limit of repeat": lambda base: Limit((Repeat((base,), None),), 9),
    "limit": lambda base: Limit((base,), 9),
    "epochs": lambda base: Epochize((base,), 5),
}


@pytest.mark.parametrize("wrapped", WRAPPED)
@pytest.mark.parametrize("hooks", DECIDING, ids=["generator", "groups", "packs"])
def test_wrappers_where_content_decides(root: Path, hooks: Hooks, wrapped: str) -> None:
    more = {"packing_buffer_size": hooks.packing} if hooks.packing else {}
    parts = (Part(1, 0, "main", 7), Part(2, 0, "main", 4))
    run(Pipeline(0, WRAPPED[wrapped](base_of(root, hooks, **more)), parts))


def test_training_that_drops_nothing_is_not_bound_to_its_ranks(root: Path) -> None:
    """Without an end, there is no last step that some ranks have no batch for."""
    more = {"batch_drop_last": True, "chunks": Chunks(7, lanes=12)}
    node = Limit((replace(base_of(root, DECIDING[0], **more), train=True),), 4)
    run(Pipeline(0, node, (Part(1, 0, "main", 2), Part(2, 0, "main", 3))))


class Shifted(Window):
    """Says that it shuffles in windows, and does not."""

    def build(self, config: Any) -> Any:
        return self.only.build(config)


def test_a_difference_is_found(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = base_of(root, Hooks(batch_size=2))
    parts = (Part(2, 0, "main", 3), Part(1, 0, "main", 3))

    def checked(node: Node) -> None:
        run(Pipeline(0, node, parts))

    checked(Window((base,), 4))
    with pytest.raises(Difference, match="instead of"):
        checked(Shifted((base,), 4))
    with pytest.raises(Wrong):
        replace(base, hooks=Hooks(batch_size=2, losses=2), references=[base.reference]).check()
    monkeypatch.setattr(oracle, "delivered", lambda loader, steps: [])
    with pytest.raises(Difference, match="steps instead of"):
        checked(base)
