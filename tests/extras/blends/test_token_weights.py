"""Weights that are shares of tokens: each data set gives its share, exactly, by weights that are known at the start."""

from __future__ import annotations

import json
import shutil
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.config.leaf_spec import LeafSpec, WeightUnit
from energon_lite.config.metadataset import load_metadataset
from energon_lite.errors import ConfigError, DataIndexError, DatasetError
from energon_lite.extras.blends import token_weights
from energon_lite.extras.blends.weight_schedule import Schedule, schedule, share_of, values_at
from energon_lite.loading.metadataset_keys import by_samples
from energon_lite.order.block_counts import BLOCK
from energon_lite.order.orders import BlendOrder
from energon_lite.order.shuffle import LeafOrder, Leaves
from energon_lite.storage.index.columns import write_column
from tests.extras.blends.test_weight_schedule import normal_shares, spec
from tests.testing import ALONE, examples, invoke

#: Leaves of so many samples, with so many tokens each.
LENGTHS = {"a": [4] * 10, "b": [1, 2, 3, 4, 5, 6], "c": [100, 300], "d": [7] * 13}

leaf = st.sampled_from(sorted(LENGTHS))
weights = st.integers(1, 9)
trees: Any = st.recursive(
    leaf,
    lambda inner: st.tuples(
        st.sampled_from(["tokens", "samples"]), st.lists(st.tuples(weights, inner), min_size=1, max_size=3)
    ),
)


@pytest.fixture(scope="session")
def measured(leaf_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("measured")
    for tag, lengths in LENGTHS.items():
        shutil.copytree(leaf_of(len(lengths), tag), root / tag)
        write_column(root / tag, "length", np.array(lengths))
        write_column(root / tag, "images", np.array(lengths) % 3)
    return root


def written(tree: Any, root: Path, folder: Path, number: list[int]) -> str:
    """The path of a tree: that of a leaf, or of a document."""
    if isinstance(tree, str):
        return str(root / tree)
    unit, entries = tree
    blend = [{"path": written(inner, root, folder, number), "weight": weight} for weight, inner in entries]
    number[0] += 1
    path = folder / f"{number[0]}.yaml"
    path.write_text(
        json.dumps({"__class__": "Recipe", "splits": {"train": {"blend_weight_unit": unit, "blend": blend}}})
    )
    return str(path)


def shares_of(tree: Any) -> list[tuple[str, Fraction]]:
    """The share of samples of each leaf, worked out from below."""
    if isinstance(tree, str):
        return [(tree, Fraction(1))]
    unit, entries = tree
    found: list[tuple[str, Fraction]] = []
    for weight, inner in entries:
        leaves = shares_of(inner)
        mean = sum(share * Fraction(sum(LENGTHS[tag]), len(LENGTHS[tag])) for tag, share in leaves)
        found += [(tag, share * weight / (mean if unit == "tokens" else 1)) for tag, share in leaves]
    total = sum(share for _, share in found)
    return [(tag, share / total) for tag, share in found]


class Sized:
    """A source with lengths."""

    def __init__(self, lengths: Any):
        self.lengths = np.array(lengths)

    def __len__(self) -> int:
        return len(self.lengths)

    def column(self, name: str) -> Any:
        if name != "length":
            raise DataIndexError("it has no other")
        return self.lengths


@settings(max_examples=examples(60))
@given(tree=trees.filter(lambda tree: not isinstance(tree, str)))
def test_shares_of_samples_in_any_tree(tree: Any, tmp_path: Path, measured: Path) -> None:
    specs = load_metadataset(written(tree, measured, tmp_path, [0]), split_part="train")
    found = by_samples(specs, [Sized(LENGTHS[Path(spec.path).name]) for spec in specs])
    expected = shares_of(tree)
    assert [Path(spec.path).name for spec in found] == [tag for tag, _ in expected]
    assert [spec.weight for spec in found] == pytest.approx([float(share) for _, share in expected], rel=1e-12)


def document(root: Path, entries: dict[str, Any], unit: str = "tokens") -> dict[str, Any]:
    blend = [{"path": str(root / tag), "weight": weight} for tag, weight in entries.items()]
    return {"splits": {name: {"blend_weight_unit": unit, "blend": blend} for name in ("train", "val")}}


def loader(path: Any, **more: Any) -> Any:
    return get_savable_loader(get_train_dataset(path, batch_size=16, worker_config=ALONE, **more))


def test_tokens_of_a_run(measured: Path) -> None:
    """Means are 4, 3.5 and 200: the samples are far from the weights, the tokens are not."""
    one = loader(document(measured, {"a": 1, "b": 1, "c": 2}))
    tokens: Counter[str] = Counter()
    for _, batch in zip(range(2000), one, strict=False):
        for key in batch.__key__:
            tag, _, number = key.partition("-")
            tokens[tag] += LENGTHS[tag][int(number)]
    total = sum(tokens.values())
    assert [tokens[tag] / total for tag in "abc"] == pytest.approx([0.25, 0.25, 0.5], rel=0.02)
    again = loader(document(measured, {"a": 1, "b": 1, "c": 2}))
    again.restore_state_rank(one.save_state_rank())


def test_steps_along_the_run(measured: Path) -> None:
    weights = {"a": {0: 1, 8192: 0}, "c": {0: 1, 8192: 3}}
    stages = loader(document(measured, weights)).dataset.identity.stages  # type: ignore[attr-defined]
    assert [stage.start for stage in stages] == [0, 8192] and stages[1].weights == (0.0, 1.0)
    assert stages[0].weights == pytest.approx((200 / 204, 4 / 204))


def weighted(shares: Sequence[Any], lengths: Sequence[np.ndarray]) -> list[Any]:
    """Leaves of one blend with weights in tokens, as shares of samples."""
    specs = [
        replace(spec(share), path=str(number), units=(WeightUnit("tokens", 0, number, ""),))
        for number, share in enumerate(shares)
    ]
    return by_samples(specs, [Sized(own) for own in lengths])


@settings(max_examples=examples(30))
@given(
    gaps=st.lists(st.integers(1 << 20, 10**9), min_size=1, max_size=3),
    points=st.lists(st.tuples(*[st.integers(0, 1000)] * 2, st.integers(1, 1000)), min_size=4, max_size=4),
    means=st.tuples(*[st.integers(1, 10**4)] * 3),
    places=st.lists(st.floats(0, 1), min_size=20, max_size=20),
)
def test_slopes_follow_the_weights_in_tokens(
    gaps: list[int], points: list[tuple[int, ...]], means: tuple[int, ...], places: list[float]
) -> None:
    """Shares of samples along a slope of shares of tokens are a curve, which straight pieces follow."""
    knots = [0, *accumulate(gaps)]
    columns = [schedule(list(zip(knots, column, strict=False)), linear=True) for column in zip(*points, strict=True)]
    asked = normal_shares([Schedule(column) for column in columns])
    found = weighted(asked, [np.array([mean]) for mean in means])
    made = [share_of(spec.weight if spec.schedule is None else spec.schedule) for spec in found]
    starts = [segment.start for segment in made[0]]
    for position in [*knots, *(int(place * knots[-1]) for place in places)]:
        wanted = [values_at(share_of(share), position)[1] for share in asked]
        tokens = [values_at(share, position)[1] * mean for share, mean in zip(made, means, strict=True)]
        piece = bisect_right(starts, position)
        is_short = piece < len(starts) and starts[piece] - starts[piece - 1] < 2 * BLOCK and position not in starts
        bound = 1.0 if is_short else 1e-9 if position in knots else 0.0012
        assert max(abs(one / sum(tokens) - share) for one, share in zip(tokens, wanted, strict=True)) <= bound
    assert len(starts) < 200 * len(knots)


@settings(max_examples=examples(3))
@given(seed=st.integers(0, 2**32), position=st.integers(1 << 20, 10**12))
def test_a_thousand_sources_keep_to_their_shares_of_tokens(seed: int, position: int) -> None:
    """At any position, a source is off by two of its mean samples and what its unfinished epoch may be off by, and by
    its share of what the others are."""
    choose, count = np.random.default_rng(seed), 1000
    lengths = [choose.integers(10, 10 ** choose.integers(2, 6), choose.integers(1, 300)) for _ in range(count)]
    weights = 10 ** choose.uniform(-6, 0, count)
    found = weighted(weights.tolist(), lengths)
    orders = [LeafOrder(length=len(own), key=number) for number, own in enumerate(lengths)]
    order = BlendOrder(orders, [spec.weight for spec in found], key=seed)
    tokens, bounds = np.zeros(count), np.zeros(count)
    leaves = Leaves(orders)
    for leaf, shown in enumerate(order.counts_before(position).tolist()):
        own = lengths[leaf]
        epochs, rest = divmod(shown, len(own))
        index, _ = leaves.lookup(np.full(rest, leaf), epochs * len(own) + np.arange(rest))
        tokens[leaf] = epochs * own.sum() + own[index].sum()
        bounds[leaf] = 2 * own.mean() + len(own) * np.ptp(own) / 4
    share = weights / weights.sum()
    assert (np.abs(tokens - share * tokens.sum()) <= bounds + share * bounds.sum()).all()


def test_other_columns_and_what_is_missing(measured: Path, leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    by_images = loader(document(measured, {"a": 1, "b": 1}, "images")).dataset.weights
    assert by_images == pytest.approx((0.5, 0.5))  # one image each, on average
    assert loader(document(measured, {"a": 1, "b": 3}, "samples")).dataset.weights == (0.25, 0.75)
    with pytest.raises(DatasetError, match=r"weight_unit: tokens.*no column 'length'") as caught:
        loader(document(leaf_of(50).parent, {leaf_of(50).name: 1, leaf_of(7).name: 1}))
    assert "energon-lite measure" in str(caught.value)
    with pytest.raises(ConfigError, match="have none"):
        loader(document(measured, {"a": 1, "c": 1}, "zero") | (write_zero(measured) or {}))
    assert (
        len(list(get_savable_loader(get_val_dataset(document(measured, {"a": 1, "b": 3}), worker_config=ALONE)))) == 16
    )
    epochs = {"splits": {"train": {"blend_weight_unit": "tokens", "blend_epochized": [{"path": str(measured / "a")}]}}}
    with pytest.raises(ConfigError, match="belongs to a blend by weight"):
        loader(epochs)
    ours = document(measured, {"a": 1, "b": 1}, "images")["splits"]["train"]
    assert loader({"splits": {"train": ours | {"weight_unit": None}}}).dataset.weights == by_images
    with pytest.raises(ConfigError, match="given twice"):
        loader({"splits": {"train": ours | {"weight_unit": "tokens"}}})
    ours["weight_unit"] = ours.pop("blend_weight_unit")
    assert loader({"splits": {"train": ours}}).dataset.weights == by_images


def write_zero(root: Path) -> None:
    for tag in "ac":
        write_column(root / tag, "zero", np.zeros(len(LENGTHS[tag]), dtype=np.int64))


def test_info_shows_both(measured: Path, tmp_path: Path) -> None:
    (tmp_path / "blend.yaml").write_text(json.dumps(document(measured, {"a": 1, "c": 3})))
    output = invoke("info", tmp_path / "blend.yaml").output
    lines = {line.split()[0].rpartition("/")[2]: line for line in output.splitlines() if "[train]" in line}
    assert "share of tokens" in output
    assert "94.34%" in lines["a"] and "25%" in lines["a"] and "5.66%" in lines["c"] and "75%" in lines["c"]


def test_a_mean_is_that_of_the_samples_that_are_read(measured: Path, tmp_path: Path) -> None:
    path = document(measured, {"a": 1, "b": 1})
    path["splits"]["train"]["blend"][1] |= {"filter": "tokens <= 2"}
    assert loader(path).dataset.weights == pytest.approx((1.5 / 5.5, 4 / 5.5))
    shutil.copytree(measured / "c", tmp_path / "c")
    write_column(tmp_path / "c", "skip", np.array([0, 1]))  # what is skipped is replaced by others
    path["splits"]["train"]["blend"][1] = {"path": str(tmp_path / "c")}
    assert loader(path).dataset.weights == pytest.approx((100 / 104, 4 / 104))


@pytest.mark.parametrize("nested", [False, True])
def test_of_many_leaves_shares_are_the_exact_ones_as_floats(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact fractions have as many digits as all leaves together; so they are rounded, far behind those of a float."""
    leaves = 240
    ways = [
        (WeightUnit("tokens", 0, number // 7, ""), WeightUnit("tokens", 1 + number // 7, number % 7, ""))[: 1 + nested]
        for number in range(leaves)
    ]
    specs = [
        LeafSpec(f"/{number}", "train", weight=(1 + number % 9) / 1200, units=way) for number, way in enumerate(ways)
    ]
    means = {spec.path: Fraction(10_007 * number + 1, 7 + number % 31) for number, spec in enumerate(specs)}
    monkeypatch.setattr(token_weights, "mean_of", lambda spec, source, unit: means[spec.path])
    near = token_weights.by_samples(specs, specs)
    monkeypatch.setattr(token_weights, "_FEW", leaves)
    assert near == token_weights.by_samples(specs, specs)
