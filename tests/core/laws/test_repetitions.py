"""Laws 1, 2 and 4 for ``blend_epochized`` and ``subset``: repetitions are exact over epochs, and subsets partition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import EmptyDatasetError, StateMismatchError, UsageError
from tests.core.laws.conftest import Cluster
from tests.core.laws.kinds import Pipeline, in_step, repeated, training
from tests.testing import examples, metadataset, train_loader, val_loader

#: Mostly no worker processes, because each takes some 20 ms to start.
workers = st.sampled_from([0, 0, 0, 0, 2])
WriteBlend = Callable[[Sequence[tuple[int, float]]], dict[str, Any]]


@pytest.fixture
def write_epochs(leaf_of: Any) -> WriteBlend:
    """A blend_epochized of text leaves (samples, repetitions) as a metadataset dict."""

    def write(leaves: Sequence[tuple[int, float]]) -> dict[str, Any]:
        return metadataset(Pipeline(list(leaves), {}, key="repetitions").document(leaf_of)["splits"]["train"])

    return write


def _texts(batches: list[Any]) -> list[str]:
    return [text for batch in batches for text in batch.text]


def _train(path: Any, batch_size: int = 2, **more: Any) -> Any:
    return train_loader(path, batch_size=batch_size, **more)


def _val(path: Any) -> list[str]:
    return _texts(list(val_loader(path, batch_size=7)))


# -- repetitions ----------------------------------------------------------------------------------------------------


@settings(max_examples=examples(12))
@given(blend=repeated, world=st.integers(1, 8), batch_size=st.integers(1, 9), worker_count=workers)
def test_each_pass_is_an_epoch_exact_with_fractions_and_in_step(
    write_epochs: WriteBlend, blend: Any, world: int, batch_size: int, worker_count: int
) -> None:
    metadataset = write_epochs(blend)
    build = training(metadataset, batch_size=batch_size, repeat=False)
    found: Counter[str] = Counter()
    with Cluster(build, world, worker_count) as ranks:
        for epoch in range(1, 4):
            found.update(_texts(in_step(ranks.loaders)))
            for leaf, (count, repetitions) in enumerate(blend):
                shown = [found[f"{'abcdef'[leaf]}-{i}"] for i in range(count)]
                total = int(epoch * count * Fraction(str(repetitions)))
                assert sum(shown) == total
                assert min(shown) == total // count and max(shown) == -(-total // count)


def test_golden_epochs(write_epochs: WriteBlend) -> None:
    """The whole way from YAML to batches, for ever. If this changes, so must ORDER_VERSION."""
    loader = _train(write_epochs([(3, 1.5), (4, 0.5)]), 10, repeat=False)
    assert [_texts(list(loader)) for _ in range(2)] == [
        ["a-0", "a-2", "b-1", "a-1", "a-2", "b-3"],
        ["a-1", "a-0", "b-2", "a-0", "b-0", "a-2", "a-1"],
    ]


def test_validation_ignores_repetitions(write_epochs: WriteBlend) -> None:
    assert _val(write_epochs([(3, 2), (2, 0.5)])) == ["a-0", "a-1", "a-2", "b-0", "b-1"]


def test_other_repetitions_are_another_run(write_epochs: WriteBlend, write_blend: Any) -> None:
    state = _train(write_epochs([(30, 1), (20, 2)])).save_state_rank()
    with pytest.raises(StateMismatchError, match=r"data set 1 .*\['repetitions', 2.5, 1\]"):
        _train(write_epochs([(30, 1), (20, 2.5)])).restore_state_rank(state)
    with pytest.raises(StateMismatchError, match="blend: 'repetitions' in the state, '\\(not set\\)' here"):
        _train(write_blend([(30, 1), (20, 2)])).restore_state_rank(state)


def test_the_text_of_a_data_set_says_the_repetitions(write_epochs: WriteBlend) -> None:
    dataset = _train(write_epochs([(30, 1.5), (20, 2)])).dataset
    assert len(dataset) == 43  # 85 samples an epoch
    text = str(dataset)
    assert "by repetitions" in text and "30 samples, 1.5 times an epoch" in text


@pytest.mark.parametrize(("blend", "fix"), [([(3, 0.1), (4, 0.1)], "larger"), ([(3, 1e200)], "smaller")])
def test_an_epoch_of_no_size(write_epochs: WriteBlend, blend: Any, fix: str) -> None:
    with pytest.raises(UsageError, match="an epoch of the blend would have") as caught:
        _train(write_epochs(blend))
    assert caught.value.fix == f"write {fix} repetitions"


def test_an_epoch_smaller_than_the_ranks(write_epochs: WriteBlend) -> None:
    with pytest.raises(EmptyDatasetError, match="3 samples for 4 data-parallel ranks"):
        _train(write_epochs([(7, 0.5)]), 1, repeat=False, world_size=4)


# -- subsets --------------------------------------------------------------------------------------------------------


def _with_subset(path: Any, start: Any, stop: Any) -> dict[str, Any]:
    return metadataset({"path": str(path), "subset": {"range": [start, stop]}})


cuts = st.lists(st.integers(1, 9999).map(lambda n: n / 100), min_size=0, max_size=3).map(
    lambda inner: sorted({0.0, 100.0, *inner})
)


@settings(max_examples=examples(25))
@given(count=st.sampled_from([1, 2, 3, 11, 50, 101, 200]), outer=cuts, inner=cuts)
def test_subsets_that_meet_are_disjoint_and_complete(
    leaf_of: Any, tmp_path: Any, count: int, outer: list[float], inner: list[float]
) -> None:
    found: list[str] = []
    for a, b in pairwise(inner):
        (tmp_path / "in.yaml").write_text(yaml.safe_dump(_with_subset(leaf_of(count, "a"), f"{a}%", f"{b}%")))
        for c, d in pairwise(outer):
            try:
                found += _val(_with_subset(tmp_path / "in.yaml", f"{c}%", f"{d}%"))
            except EmptyDatasetError as error:
                assert "is empty" in error.what
    assert found == [f"a-{i}" for i in range(count)]


def test_thirty_and_seventy_percent(leaf_of: Any) -> None:
    leaf = leaf_of(50, "a")
    assert _val(_with_subset(leaf, "0%", "30%")) == [f"a-{i}" for i in range(15)]
    assert _val(_with_subset(leaf, "30%", "100%")) == [f"a-{i}" for i in range(15, 50)]
    assert _val(_with_subset(leaf, 7, 9)) == ["a-7", "a-8"]
    assert _val(_with_subset(leaf, 48, "end")) == ["a-48", "a-49"]


def test_training_on_a_subset_shows_each_of_its_samples_once_an_epoch(leaf_of: Any) -> None:
    metadataset = _with_subset(leaf_of(50, "a"), "10%", "50%")
    build = training(metadataset, batch_size=5)
    with Cluster(build, 2, 2) as ranks:
        texts = _texts(ranks.steps(4))
    for epoch in (texts[:20], texts[20:]):
        assert sorted(epoch) == sorted(f"a-{i}" for i in range(5, 25))
    assert texts[:20] != texts[20:]


def test_two_subsets_of_a_data_set_in_one_blend(leaf_of: Any) -> None:
    entries = [
        {"path": str(leaf_of(10)), "repetitions": repetitions, "subset": {"range": range_}}
        for repetitions, range_ in ((3, ["0%", "20%"]), (1, ["20%", "100%"]))
    ]
    texts = _texts(list(_train(metadataset({"blend_epochized": entries}), 4, repeat=False)))
    assert Counter(texts) == {f"a-{i}": 3 if i < 2 else 1 for i in range(10)}


def test_another_subset_is_another_data_set(leaf_of: Any) -> None:
    def loader(stop: str) -> Any:
        return _train(_with_subset(leaf_of(1000, "a"), "0%", stop))

    state = loader("50%").save_state_rank()
    loader("50.01%").restore_state_rank(state)  # the same 500 samples
    with pytest.raises(StateMismatchError, match="500 in the state, 501 here"):
        loader("50.1%").restore_state_rank(state)


def test_an_empty_subset_names_its_place(leaf_of: Any, tmp_path: Any) -> None:
    leaf = leaf_of(3, "a")
    path = tmp_path / "doc.yaml"
    path.write_text(f"splits:\n  train:\n    path: {leaf}\n    subset: {{range: [0%, 30%]}}\n")
    with pytest.raises(EmptyDatasetError, match=r"subset \(0% to 30%\) of the 3 samples in split 'train'") as caught:
        _train(path)
    assert f"{leaf}, subset at {path}:4" in str(caught.value)
