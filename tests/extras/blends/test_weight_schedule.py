"""Weights that change: what is written, and the shares that come of it."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from energon_lite.config.leaf_spec import LeafSpec, Weight
from energon_lite.config.metadataset import _product, load_metadataset
from energon_lite.config.metadataset_document import normalised
from energon_lite.documents import from_plain, load_yaml
from energon_lite.errors import ConfigError
from energon_lite.extras.blends.weight_schedule import (
    Schedule,
    Share,
    read_schedule,
    schedule,
    share_of,
    shared_segments,
    values_at,
)
from tests.core.config.test_wrong_documents import check_wrong_document


def stages(path: Any) -> list[tuple[int, tuple[float, ...], tuple[float, ...] | None]]:
    return shared_segments(load_metadataset(path, split_part="train"))


WRONG = yaml.safe_load((Path(__file__).parent / "wrong_schedules.yaml").read_text())


@pytest.mark.parametrize("name", WRONG)
def test_wrong_schedule(name: str, write: Callable[..., Path]) -> None:
    check_wrong_document("metadatasets", WRONG[name], write)


@pytest.mark.parametrize(
    "text",
    [
        "{0: 0.9, 1_000_000: 0.5}",
        "{0: 0.9, 1e6: 0.5}",
        "{step: {0: 0.9, 1.0e+6: 0.5}}",
        "{'0': 0.9, '1000000': 0.5}",
        "\n  0: 0.9\n  1000000: 0.5\n",
    ],
)
def test_steps_in_all_manners(text: str, write: Callable[..., Path]) -> None:
    node = load_yaml(write(f"weight: {text}\n")).mapping(required={"weight"})["weight"]
    assert read_schedule(node) == Schedule(schedule(((0, 0.9), (1_000_000, 0.5))))


def test_numbers_as_keys_of_a_dict() -> None:
    found = read_schedule(from_plain({"linear": {0: 0.9, 10**6: 0.5, 2e6: 0}}, "<dict>"))
    assert found == Schedule(schedule(((0, 0.9), (1_000_000, 0.5), (2_000_000, 0.0)), linear=True))


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
    path = write(
        "splits:\n  train:\n    blend:\n      - {path: in.yaml, weight: {linear: {0: 1, 500: 1, 900: 5}}}\n"
        "      - {path: sub/photos}\n"
    )
    with pytest.raises(ConfigError, match="two from position 500 to 700") as caught:
        load_metadataset(path, split_part="train")
    assert "in.yaml:1" in str(caught.value) and "let one slope end before the other begins" in (caught.value.fix or "")
    one_after_the_other = path.read_text().replace("500", "700")
    path.write_text(one_after_the_other)
    assert [start for start, _, _ in stages(path)] == [0, 700, 900]


def test_a_position_at_which_nothing_changes_is_none(write: Callable[..., Path]) -> None:
    text = "splits: {{train: {{blend: [{{path: digits, weight: {}}}, {{path: prose, weight: {}}}]}}}}\n"
    unchanged = stages(write(text.format(3, 1)))
    assert unchanged == [(0, (0.75, 0.25), None)]
    for weights in (("{0: 3, 9: 3}", "1"), ("{0: 3, 9: 6}", "{0: 1, 9: 2}"), ("{linear: {0: 3, 9: 3}}", "1")):
        assert stages(write(text.format(*weights))) == unchanged


def test_a_schedule_for_a_single_data_set_means_nothing(write: Callable[..., Path]) -> None:
    assert stages(write("splits: {train: {blend: [{path: digits, weight: {0: 1, 10: 5}}]}}\n")) == [(0, (1.0,), None)]


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
