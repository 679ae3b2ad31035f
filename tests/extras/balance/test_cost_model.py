"""The time that a sample takes: exact integers, that add up, whatever their size. Coefficients are found again by the
times that they make, noise and all; what cannot be told is refused."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_lite.batching.micro_batches import MicroBatches
from energon_lite.batching.transformer_shape import TransformerShape
from energon_lite.errors import ConfigError, UsageError
from energon_lite.extras.balance.cost_fit import (
    _non_negative,
    fit_costs,
    read_cost_model,
    relative_errors,
    write_cost_model,
)
from energon_lite.extras.balance.cost_model import CostModel, Quadratic, StepCosts
from tests.testing import examples

SHAPE = TransformerShape(hidden_size=4, num_layers=2, num_heads=2, ffn_size=8, vocab_size=10)


def test_the_terms_of_each_kind_of_work() -> None:
    nano = 10**9
    language, encoder = Quadratic(2 * nano, 3 * nano, 5 * nano), Quadratic(7 * nano, 11 * nano, 13 * nano)
    model = CostModel(language, encoder, 17 * nano, columns={"seconds": 19 * nano})
    sizes = {"tokens": 10, "images": 2, "patches": 4 + 9, "squared_patches": 16 + 81, "loss_tokens": 6, "seconds": 1}
    assert model.kinds == ("language", "encoder", "head", "seconds")
    costs = model.costs({name: [size, 0] for name, size in sizes.items()})  # of it, and of an empty one
    assert costs.T.tolist() == [[2 * 100 + 3 * 10 + 5, 7 * 97 + 11 * 13 + 13 * 2, 17 * 6, 19], [5, 0, 0, 0]]
    assert model.image_costs([4, 9]).sum() == 7 * 97 + 11 * 13 + 13 * 2


def test_a_piece_costs_its_share_and_attention_is_that_of_padded_lengths() -> None:
    """Of samples of 4, 1 and 9 tokens: the first whole, two pieces of the last, the second whole."""
    rows = np.array([[10, 7, 100], [0, 5, 32]])
    costs = StepCosts(rows, np.array([4, 1, 9]))
    entries = [np.array(values) for values in ([0, 2, 2, 1], [0, 0, 7, 0], [4, 7, 2, 1], [0, 2, 4])]
    batches = MicroBatches(*entries, packed=True)
    assert costs.of(batches, 4).tolist() == [[16, 64, 16, 16], [10, 77, 22, 7], [0, 24, 7, 5]]
    assert costs.of(batches)[0].tolist() == [16, 49, 4, 1]
    assert costs.of_batches(batches).tolist() == [[11, 3], [16 + 49, 4 + 1], [87, 29], [24, 12]]


@given(st.integers(0, 10**16), st.integers(0, 1 << 20), st.integers(0, 1 << 20))
@example(1, 0, 3 * 10**9)  # 64 bits would not hold its square
@settings(max_examples=examples(200))
def test_costs_are_exact_until_a_sample_would_take_too_long(coefficient: int, small: int, large: int) -> None:
    model, exact = CostModel(Quadratic(a=coefficient)), [coefficient * n**2 // 10**9 for n in (small, large)]
    if max(exact) > 1 << 40 or large > 1 << 31:
        with pytest.raises(UsageError, match="would take"):
            model.costs({"tokens": [small, large]})
    else:
        assert model.costs({"tokens": [small, large]})[0].tolist() == exact


def test_numbers_that_a_model_does_not_need_may_be_missing() -> None:
    model = CostModel(Quadratic(a=1, b=1), encoder=Quadratic(c=1))
    assert model.needs == ("tokens", "images")
    assert model.costs({"tokens": np.array([1]), "images": [0], "other": [5]}).shape == (3, 1)
    with pytest.raises(UsageError, match="needs 'images'"):
        model.costs({"tokens": [1]})
    with pytest.raises(UsageError, match=r"images\[1\] is -1"):
        model.costs({"tokens": [1, 1], "images": [0, -1]})


@pytest.mark.parametrize("wrong", [-1, 0.5, True])
def test_coefficients_are_integers(wrong: int) -> None:
    with pytest.raises(UsageError, match="integer of attoseconds"):
        Quadratic(b=wrong)
    with pytest.raises(UsageError, match="integer of attoseconds"):
        CostModel(Quadratic(), columns={"seconds": wrong})


def test_a_model_and_its_features() -> None:
    model = CostModel(Quadratic(1, 2, 3), Quadratic(4, 5, 6), 7, 8, {"seconds": 9})
    assert CostModel.from_features(model.by_feature()) == model
    assert hash(CostModel.from_features(model.by_feature())) == hash(model)
    with pytest.raises(UsageError, match="argument of its own"):
        CostModel(Quadratic(), columns={"images": 1})


def test_samples_of_a_micro_batch_add_up() -> None:
    nano = 10**9
    model = CostModel(Quadratic(nano, 2 * nano, 3 * nano), Quadratic(4 * nano), 5 * nano, 6 * nano)
    samples = {"tokens": [3, 4], "loss_tokens": [1, 2], "squared_patches": [4, 0]}
    sums = {name: [sum(values)] for name, values in samples.items()}
    found = model.micro_batch_costs({**sums, "squared_tokens": [9 + 16], "segments": [2]})
    assert found.tolist() == [6 + model.costs(samples).sum()]


def test_a_shape_gives_the_operations_of_a_step() -> None:
    weights = 2 * (4 * 4 * 4 + 3 * 4 * 8)
    assert (SHAPE.position_flops, SHAPE.pair_flops, SHAPE.head_flops) == (6 * weights, 12 * 2 * 4, 6 * 4 * 10)
    model = CostModel.of_shape(SHAPE, flops=1.0)
    # Of 3 tokens: three positions with logits, and 1 + 2 + 3 pairs.
    assert model.language.a * 9 + model.language.b * 3 == 10**18 * (3 * (6 * weights + 240) + 6 * 12 * 2 * 4)
    sparse = CostModel.of_shape(SHAPE, flops=1.0, logits_of_loss_only=True)
    assert sparse.head == 240 * 10**18
    assert model.language.b - sparse.language.b == sparse.head


def test_an_encoder_sees_all_its_patches() -> None:
    encoder = TransformerShape(4, 2, 2, 8, gated=False, causal=False, outer_weights=12, once_weights=5)
    model = CostModel.of_shape(SHAPE, encoder, flops=1.0)
    weights = 2 * (4 * 4 * 4 + 2 * 4 * 8) + 12
    assert model.encoder == Quadratic(10**18 * 12 * 2 * 4, 10**18 * 6 * weights, 10**18 * 30)
    frozen = CostModel.of_shape(SHAPE, encoder, flops=1.0, encoder_trained=False)
    assert frozen.encoder.b == pytest.approx(model.encoder.b / 3)
    assert TransformerShape(4, 0, 2, 8, outer_weights=12).position_flops == 72
    with pytest.raises(UsageError, match="layers"):
        TransformerShape(4, -1, 2, 8)


# -- coefficients of measured times -----------------------------------------------------------------------------------


TRUE = CostModel(Quadratic(3 * 10**9, 2 * 10**12, 10**14), Quadratic(5 * 10**9, 10**12, 10**15), 10**11, 4 * 10**15)


def micro_batches(count: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Packed rows of text and images, as sums over their samples."""
    rng = np.random.default_rng(seed)
    found = defaultdict(list)
    for _ in range(count):
        tokens = rng.lognormal(6, 1, rng.integers(1, 12)).astype(int) + 1
        patches = rng.integers(64, 2048, rng.integers(0, 9))
        sums = {
            "squared_tokens": (tokens**2).sum(),
            "tokens": tokens.sum(),
            "segments": len(tokens),
            "squared_patches": (patches**2).sum(),
            "patches": patches.sum(),
            "images": len(patches),
            "loss_tokens": (tokens * rng.random(len(tokens))).sum(),
        }
        for name, value in sums.items():
            found[name].append(int(value))
    return {name: np.array(values) for name, values in found.items()}


def test_times_without_noise_give_the_coefficients_and_a_file_keeps_them(tmp_path) -> None:
    sizes = micro_batches(200)
    fit = fit_costs(sizes, TRUE.micro_batch_costs(sizes) / 1e9)
    for name, value in TRUE.by_feature().items():
        assert fit.model.by_feature()[name] == pytest.approx(value, rel=0.02), name
    assert fit.error < 1e-4 and fit.error_95 < 1e-3
    path = tmp_path / "costs.json"
    write_cost_model(path, fit, {"device": "one of mine"})
    assert read_cost_model(path) == fit.model
    write_cost_model(path, TRUE)
    assert read_cost_model(path) == TRUE


@given(st.integers(0, 1000))
@settings(max_examples=examples(10), deadline=None)
def test_noise_and_a_machine_that_does_else_now_and_then(seed: int) -> None:
    rng, sizes, others = np.random.default_rng(seed), micro_batches(150, seed), micro_batches(100, seed + 1)
    times = TRUE.micro_batch_costs(sizes) / 1e9 * rng.normal(1, 0.04, 150)
    times[rng.integers(0, 150, 7)] *= 5
    fit = fit_costs(sizes, times)
    errors = np.abs(relative_errors(fit.model, others, TRUE.micro_batch_costs(others) / 1e9))
    assert errors.mean() < 0.04
    # What it says of itself counts the noise, and the seven: of each half, by a fit to the other one.
    assert 0.02 < fit.error < 0.15
    found = []
    for half in (0, 1):
        own, other = ({name: values[one::2] for name, values in sizes.items()} for one in (half, 1 - half))
        found += np.abs(relative_errors(fit_costs(other, times[1 - half :: 2]).model, own, times[half::2])).tolist()
    assert (fit.error, fit.error_95) == pytest.approx((np.mean(found), np.quantile(found, 0.95)), rel=1e-4)


@given(st.integers(1, 5), st.integers(6, 20), st.integers(0, 10**6))
@settings(max_examples=examples(100), deadline=None)
def test_the_least_squares_are_the_least_there_are(columns: int, rows: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    table, wanted = rng.normal(size=(rows, columns)), rng.normal(size=rows)
    table[:, 0] *= seed % 3 > 0  # a column of zeros, now and then
    found = _non_negative(table, wanted)
    assert (found >= 0).all()
    # Karush, Kuhn and Tucker: no way down is left.
    gradient = table.T @ (wanted - table @ found)
    assert (gradient <= 1e-7 * rows).all()
    assert np.abs(gradient[found > 0]).max(initial=0) <= 1e-7 * rows


def test_what_comes_together_is_told_apart_by_what_was_expected() -> None:
    sizes = micro_batches(80)
    # Each segment has one image of 100 patches.
    sizes |= {"images": sizes["segments"], "patches": 100 * sizes["segments"]}
    sizes |= {"squared_patches": 10**4 * sizes["segments"]}
    times = TRUE.micro_batch_costs(sizes) / 1e9 * np.random.default_rng(0).normal(1, 0.02, 80)
    expected = CostModel(Quadratic(3, 2000), Quadratic(5, 1000))  # by a shape, in another unit
    fit = fit_costs(sizes, times, expected).model
    assert fit.encoder.b * 100 + fit.encoder.a * 100**2 + fit.encoder.c + fit.language.c == pytest.approx(
        TRUE.encoder.b * 100 + TRUE.encoder.a * 100**2 + TRUE.encoder.c + TRUE.language.c, rel=0.2
    )
    assert fit.encoder.b > 10**11
    # Where the times tell, they decide, whatever was expected.
    sizes = micro_batches(200)
    wrong = CostModel(Quadratic(30, 2000), Quadratic(5, 100_000))
    fit = fit_costs(sizes, TRUE.micro_batch_costs(sizes) / 1e9, wrong).model
    for name in ("tokens", "squared_tokens", "patches", "squared_patches"):
        assert fit.by_feature()[name] == pytest.approx(TRUE.by_feature()[name], rel=0.1), name


def test_numbers_that_are_always_0_have_no_coefficient() -> None:
    sizes = micro_batches(60)
    sizes |= {name: sizes[name] * 0 for name in ("images", "patches", "squared_patches")}
    sizes["seconds"] = np.arange(60)
    fit = fit_costs(sizes, TRUE.micro_batch_costs(sizes) / 1e9 + np.arange(60) * 1e-3)
    assert fit.model.encoder == Quadratic()
    assert fit.model.columns["seconds"] == pytest.approx(10**15, rel=0.01)
    assert "seconds" in fit.model.needs


@pytest.mark.parametrize(
    ("count", "change", "message"),
    [
        (15, 1.0, "15 micro-batches are too few"),
        (40, 0.0, "not a positive number"),
        (40, np.nan, "not a positive number"),
    ],
)
def test_what_cannot_be_fitted(count: int, change: float, message: str) -> None:
    sizes = micro_batches(count)
    with pytest.raises(UsageError, match=message):
        fit_costs(sizes, TRUE.micro_batch_costs(sizes) / 1e9 * change)
    with pytest.raises(UsageError, match="not of the same micro-batches"):
        fit_costs(sizes, np.ones(count + 1))
    fit_costs(micro_batches(16), np.ones(16))  # two for each coefficient


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ("{format: 2, coefficients: {}}", "another format"),
        ("{format: 1, coefficients: {tokens: -1}}", "at least 0"),
        ("{format: 1, coefficients: {tokens: 0.5}}", "integer|whole number"),
        ("{format: 1, unit: seconds, coefficients: {}}", "attoseconds"),
        ("{format: 1}", "coefficients"),
        ("{format: 1, coefficients: {}, other: 1}", "other"),
    ],
)
def test_a_file_that_is_none(tmp_path, document: str, message: str) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text(document)
    with pytest.raises(ConfigError, match=message):
        read_cost_model(path)
