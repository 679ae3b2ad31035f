"""A rebase with data sets that were made alike: of equal shard names, sizes, counts and keys."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import TaskEncoder, get_savable_loader, get_train_dataset
from energon_lite.errors import StateMismatchError
from energon_lite.extras.blends import rebase_state
from tests.testing import ALONE, examples


def make(path: Any, **arguments: Any) -> Any:
    return get_train_dataset(path, **{"batch_size": 3, **arguments}, worker_config=ALONE)


class Texts(TaskEncoder):
    """Of each sample, its leaf and its text."""

    def batch(self, samples: list[Any]) -> dict[str, Any]:
        return {"shown": [(sample.__restore_key__[1], sample.text) for sample in samples]}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory, write_dataset: Any) -> dict[str, Any]:
    """Data sets of the same shards, keys and sizes; only the texts differ."""
    root = tmp_path_factory.mktemp("twins")

    def shard(tag: str, number: int) -> list[Any]:
        return [(f"{one:02}", {"txt": f"{tag}{one:02}".encode()}) for one in range(8 * number, 8 * number + 8)]

    return {
        tag: write_dataset(root / tag, {f"{number}.tar": shard(tag, number) for number in range(2)}) for tag in "pqrs"
    }


def blend_of(leaves: list[Any]) -> dict[str, Any]:
    entries = [{"path": str(path), "weight": weight} for path, weight in leaves]
    return {"__module__": "megatron.energon", "__class__": "MetadatasetV2", "splits": {"train": {"blend": entries}}}


listings = st.lists(st.tuples(st.sampled_from("pqrs"), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=5)


@settings(max_examples=examples(40))
@given(old=listings, new=listings, steps=st.tuples(st.integers(0, 20), st.integers(10, 20)))
def test_twins_are_not_taken_for_each_other(twins: Any, old: Any, new: Any, steps: tuple[int, int]) -> None:
    """Each leaf that stays goes on with its own data, once an epoch; one that is listed twice has two streams."""
    shown: dict[tuple[str, int], list[str]] = defaultdict(list)
    known: set[tuple[str, int]] = set()
    state: Any = None
    before: Any = None
    for listing, count in zip((old, new), steps, strict=True):
        blend = blend_of([(twins[tag], weight) for tag, weight in listing])
        tags = [tag for tag, _ in listing]
        names = [(tag, tags[:place].count(tag)) for place, tag in enumerate(tags)]
        if before is not None:
            arguments = {"task_encoder": Texts()}
            state, report = rebase_state(state, make(before, **arguments), make(blend, **arguments))
            for name, leaf in zip(names, report.leaves, strict=False):
                assert leaf.name == str(twins[name[0]])
                assert (leaf.change, leaf.shown) == ("stays" if name in known else "new", len(shown[name]))
            assert len(report.leaves) == len({*names, *known})
        loader = get_savable_loader(make(blend, task_encoder=Texts()))
        loader.restore_state_rank(state)
        for _, batch in zip(range(count), loader, strict=False):
            for leaf, text in batch["shown"]:
                assert text[0] == tags[leaf]
                shown[names[leaf]].append(text)
        state, before, known = json.loads(json.dumps(loader.save_state_rank())), blend, set(names)
    for (tag, number), texts in shown.items():
        for first in range(0, len(texts), 16):
            assert len(set(texts[first : first + 16])) == len(texts[first : first + 16])
        if number == 0:  # wherever it stands, and beside whatever else
            alone = get_savable_loader(make(twins[tag], task_encoder=Texts(), batch_size=1))
            assert texts == [one["shown"][0][1] for _, one in zip(texts, alone, strict=False)]


def test_a_twin_in_the_place_of_another_is_another_run(twins: Any, tmp_path: Any) -> None:
    state = get_savable_loader(make(blend_of([(twins["p"], 1.0), (twins["q"], 1.0)]))).save_state_rank()
    with pytest.raises(StateMismatchError, match="data set 1"):
        get_savable_loader(make(blend_of([(twins["p"], 1.0), (twins["r"], 1.0)]))).restore_state_rank(state)
    copy = shutil.copytree(twins["q"], tmp_path / "elsewhere")
    get_savable_loader(make(blend_of([(twins["p"], 1.0), (copy, 1.0)]))).restore_state_rank(state)
