"""Weights that change, or are shares of tokens: what is written, and the shares of samples that come of it."""

from __future__ import annotations

import json
import shutil
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.config.leaf_spec import LeafSpec, Weight, WeightUnit
from energon_lite.config.metadataset import _product, load_metadataset
from energon_lite.config.metadataset_document import normalised
from energon_lite.documents import from_plain, load_yaml
from energon_lite.errors import ConfigError, DataIndexError, DatasetError
from energon_lite.extras.blends import token_weights
from energon_lite.extras.blends.weight_schedule import (
    Schedule,
    Share,
    read_schedule,
    schedule,
    share_of,
    shared_segments,
    values_at,
)
from energon_lite.loading.metadataset_keys import by_samples
from energon_lite.order.block_counts import BLOCK
from energon_lite.storage.index.columns import write_column
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.core.config.test_wrong_documents import check_wrong_document
from tests.testing import examples, invoke, metadataset, train_loader, val_loader


def stages(path: Any) -> list[tuple[int, tuple[float, ...], tuple[float, ...] | None]]:
    return shared_segments(load_metadataset(path, split_part="train"))


WRONG = yaml.safe_load((Path(__file__).parent / "wrong_schedules.yaml").read_text())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_schedule(name: str, write: Callable[..., Path]) -> None:
    check_wrong_document("metadatasets", WRONG[name], write)


MANNERS = ["{0: 0.9, 1_000_000: 0.5}", "{0: 0.9, 1e6: 0.5}", "{step: {0: 0.9, 1.0e+6: 0.5}}"]
MANNERS += ["{'0': 0.9, '1000000': 0.5}", "\n  0: 0.9\n  1000000: 0.5\n"]


@pytest.mark.parametrize("text", MANNERS)
def test_steps_in_all_manners(text: str, write: Callable[..., Path]) -> None:
    node = load_yaml(write(f"weight: {text}\n")).mapping(required={"weight"})["weight"]
    assert read_schedule(node) == Schedule(schedule(((0, 0.9), (1_000_000, 0.5))))


def test_numbers_as_keys_of_a_dict() -> None:
    found = read_schedule(from_plain({"linear": {0: 0.9, 10**6: 0.5, 2e6: 0}}, "<dict>"))
    assert found == Schedule(schedule(((0, 0.9), (1_000_000, 0.5), (2_000_000, 0.0)), linear=True))


def test_one_position_is_a_weight_that_does_not_change() -> None:
    assert read_schedule(from_plain({"linear": {0: 2.5}}, "<dict>")) == 2.5


def test_the_weight_at_a_position() -> None:
    step, linear = (schedule(((0, 4.0), (10, 2.0), (20, 3.0)), kind) for kind in (False, True))
    assert [values_at(step, p) for p in (0, 5, 10, 15, 20, 99)] == [(4, 4), (4, 4), (4, 2), (2, 2), (2, 3), (3, 3)]
    assert [values_at(linear, p)[1] for p in (0, 5, 10, 15, 20, 99)] == [4, 3, 2, 2.5, 3, 3]
    assert all(before == after for before, after in (values_at(linear, p) for p in range(30)))


def test_nested_blends_multiply(write: Callable[..., Path]) -> None:
    """A step in the inner document cuts the slope of the outer one; each has its own positions."""
    write("splits: {train: {blend: [{path: digits, weight: {0: 1, 500: 3}}, {path: prose}]}}\n", "in.yaml")
    outer = (
        "[{path: in.yaml, weight: {linear: {0: 1, 1000: 0}}}, {path: sub/photos, weight: {linear: {0: 0, 1000: 1}}}]"
    )
    assert stages(write(f"splits: {{train: {{blend: {outer}}}}}\n")) == [
        (0, (0.5, 0.5, 0.0), (0.25, 0.25, 0.5)),
        (500, (0.375, 0.125, 0.5), (0.0, 0.0, 1.0)),
        (1000, (0.0, 0.0, 1.0), None),
    ]


def test_two_slopes_at_once_are_refused(write: Callable[..., Path]) -> None:
    write("splits: {train: {blend: [{path: digits}, {path: prose, weight: {linear: {0: 1, 700: 3}}}]}}\n", "in.yaml")
    slope = "{path: in.yaml, weight: {linear: {0: 1, 500: 1, 900: 5}}}"
    path = write(f"splits:\n  train:\n    blend:\n      - {slope}\n      - {{path: sub/photos}}\n")
    with pytest.raises(ConfigError, match="two from position 500 to 700") as caught:
        load_metadataset(path, split_part="train")
    assert "in.yaml:1" in str(caught.value) and "let one slope end before the other begins" in (caught.value.fix or "")
    path.write_text(path.read_text().replace("500", "700"))  # one after the other
    assert [start for start, _, _ in stages(path)] == [0, 700, 900]


def test_a_position_at_which_nothing_changes_is_none(write: Callable[..., Path]) -> None:
    text = "splits: {{train: {{blend: [{{path: digits, weight: {}}}, {{path: prose, weight: {}}}]}}}}\n"
    unchanged = stages(write(text.format(3, 1)))
    assert unchanged == [(0, (0.75, 0.25), None)]
    for weights in (("{0: 3, 9: 3}", "1"), ("{0: 3, 9: 6}", "{0: 1, 9: 2}"), ("{linear: {0: 3, 9: 3}}", "1")):
        assert stages(write(text.format(*weights))) == unchanged
    alone = "splits: {train: {blend: [{path: digits, weight: {0: 1, 10: 5}}]}}\n"  # of a single data set
    assert stages(write(alone)) == [(0, (1.0,), None)]


BLEND = from_plain({"blend": []}, "<dict>")
weights = st.one_of(
    st.floats(0.1, 10),
    st.builds(
        lambda first, rest, linear: Schedule(schedule(((0, first), *sorted(rest.items())), linear)),
        st.floats(0.1, 10),
        st.dictionaries(st.integers(1, 50), st.floats(0, 10), min_size=1, max_size=4),
        st.booleans(),
    ),
)


def at(weight: Weight, position: int) -> Fraction:
    """By the definition."""
    share: Share = share_of(weight)
    for segment, following in zip(share, [*share[1:], None], strict=True):
        if following is None:
            return Fraction(segment.first)
        if segment.start <= position < following.start:
            ratio = Fraction(position - segment.start, following.start - segment.start)
            return Fraction(segment.first) + (Fraction(segment.last) - Fraction(segment.first)) * ratio
    raise AssertionError


def spec(share: Weight) -> LeafSpec:
    if isinstance(share, Schedule):
        return LeafSpec("a", "train", weight=share.start, schedule=share)
    return LeafSpec("a", "train", weight=share)  # type: ignore[arg-type]


def normal_shares(weights: list[Any]) -> list[Weight]:
    changing = next((weight for weight in weights if isinstance(weight, Schedule)), None)
    return [*normalised(weights)] if changing is None else changing.shares(weights, BLEND)


@given(outer=st.lists(weights, min_size=1, max_size=3), inner=st.lists(weights, min_size=1, max_size=3))
def test_products_and_cuts_are_the_functions_they_stand_for(outer: list[Any], inner: list[Any]) -> None:
    above, below = normal_shares([*outer, 1.0]), normal_shares([*inner, 1.0])
    try:
        shares = [*(_product(above[0], share, BLEND) for share in below), *above[1:]]
    except ConfigError:
        assert isinstance(above[0], Schedule) and all(isinstance(share, Schedule) for share in below)
        return
    segments = shared_segments([spec(share) for share in shares])
    for position in range(52):
        expected = [at(above[0], position) * at(share, position) for share in below]
        expected += [at(share, position) for share in above[1:]]
        number = max(n for n, (start, _, _) in enumerate(segments) if start <= position)
        start, first, last = segments[number]
        found = [Fraction(value) for value in first]
        if last is not None:
            ratio = Fraction(position - start, segments[number + 1][0] - start)
            found = [a + (Fraction(b) - a) * ratio for a, b in zip(found, last, strict=True)]
        assert all(abs(one - other) < 1e-12 for one, other in zip(found, expected, strict=True))
        assert abs(sum(found) - 1) < 1e-12


# -- shares of tokens: each data set gives its share, exactly, by weights that are known at the start -----------------


#: Leaves of so many samples, with so many tokens each.
LENGTHS = {"a": [4] * 10, "b": [1, 2, 3, 4, 5, 6], "c": [100, 300], "d": [7] * 13}

leaf = st.sampled_from(sorted(LENGTHS))
trees: Any = st.recursive(
    leaf,
    lambda inner: st.tuples(
        st.sampled_from(["tokens", "samples"]), st.lists(st.tuples(st.integers(1, 9), inner), min_size=1, max_size=3)
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
    splits = {"train": {"blend_weight_unit": unit, "blend": blend}}
    path.write_text(json.dumps({"__class__": "Recipe", "splits": splits}))
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
    return metadataset({"blend_weight_unit": unit, "blend": blend})


def loader(path: Any, **more: Any) -> Any:
    return train_loader(path, batch_size=16, **more)


def test_steps_along_the_run(measured: Path) -> None:
    weights = {"a": {0: 1, 8192: 0}, "c": {0: 1, 8192: 3}}
    stages = loader(document(measured, weights)).dataset.identity.stages  # type: ignore[attr-defined]
    assert [stage.start for stage in stages] == [0, 8192] and stages[1].weights == (0.0, 1.0)
    assert stages[0].weights == pytest.approx((200 / 204, 4 / 204))


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
    units = [(WeightUnit("tokens", 0, number, ""),) for number in range(len(asked))]
    specs = [replace(spec(share), path=str(n), units=units[n]) for n, share in enumerate(asked)]
    found = by_samples(specs, [Sized([mean]) for mean in means])
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


def test_other_columns_and_what_is_missing(measured: Path, leaf_of: Callable[..., Path], tmp_path: Path) -> None:
    by_images = loader(document(measured, {"a": 1, "b": 1}, "images")).dataset.weights
    assert by_images == pytest.approx((0.5, 0.5))  # one image each, on average
    assert loader(document(measured, {"a": 1, "b": 3}, "samples")).dataset.weights == (0.25, 0.75)
    with pytest.raises(DatasetError, match=r"weight_unit: tokens.*no column 'length'") as caught:
        loader(document(leaf_of(50).parent, {leaf_of(50).name: 1, leaf_of(7).name: 1}))
    assert "energon-lite measure" in str(caught.value)
    for tag in "ac":
        write_column(measured / tag, "zero", np.zeros(len(LENGTHS[tag]), dtype=np.int64))
    with pytest.raises(ConfigError, match="have none"):
        loader(document(measured, {"a": 1, "c": 1}, "zero"))
    assert len(list(val_loader(document(measured, {"a": 1, "b": 3})))) == 16
    epochs = {"blend_weight_unit": "tokens", "blend_epochized": [{"path": str(measured / "a")}]}
    with pytest.raises(ConfigError, match="belongs to a blend by weight"):
        loader({"splits": {"train": epochs}})
    ours = document(measured, {"a": 1, "b": 1}, "images")["splits"]["train"]
    assert loader({"splits": {"train": ours | {"weight_unit": None}}}).dataset.weights == by_images
    with pytest.raises(ConfigError, match="given twice"):
        loader({"splits": {"train": ours | {"weight_unit": "tokens"}}})
    ours["weight_unit"] = ours.pop("blend_weight_unit")
    assert loader({"splits": {"train": ours}}).dataset.weights == by_images


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
    for name, values in (("length", [0.5, 3.5]), ("skip", [1, 0])):
        write_column(tmp_path / "c", f"mine.{name}", np.array(values))
    assert token_weights.mean_of(spec(1.0), WebdatasetSource.open(tmp_path / "c"), "mine.length") == 3.5


@pytest.mark.parametrize("nested", [False, True])
def test_of_many_leaves_shares_are_the_exact_ones_as_floats(nested: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact fractions have as many digits as all leaves together; so they are rounded, far behind those of a float."""
    leaves = 240
    specs, means = [], {}
    for number in range(leaves):
        way = WeightUnit("tokens", 0, number // 7, ""), WeightUnit("tokens", 1 + number // 7, number % 7, "")
        specs.append(LeafSpec(f"/{number}", "train", weight=(1 + number % 9) / 1200, units=way[: 1 + nested]))
        means[f"/{number}"] = Fraction(10_007 * number + 1, 7 + number % 31)
    monkeypatch.setattr(token_weights, "mean_of", lambda spec, source, unit: means[spec.path])
    near = token_weights.by_samples(specs, specs)
    monkeypatch.setattr(token_weights, "_rounded", Fraction)
    assert near == token_weights.by_samples(specs, specs)
