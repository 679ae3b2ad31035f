"""The time that a sample takes: exact integers, that add up, whatever their size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.batching.transformer_shape import TransformerShape
from energon_lite.errors import UsageError
from energon_lite.extras.balance.cost_model import CostModel, Quadratic
from tests.testing import examples

SHAPE = TransformerShape(hidden_size=4, num_layers=2, num_heads=2, ffn_size=8, vocab_size=10)


def test_the_terms_of_each_kind_of_work() -> None:
    nano = 10**9
    model = CostModel(
        Quadratic(2 * nano, 3 * nano, 5 * nano),
        encoder=Quadratic(7 * nano, 11 * nano, 13 * nano),
        head=17 * nano,
        columns={"seconds": 19 * nano},
    )
    sizes = {
        "tokens": [10, 0],
        "images": [2, 0],
        "patches": [4 + 9, 0],
        "squared_patches": [16 + 81, 0],
        "loss_tokens": [6, 0],
        "seconds": [1, 0],
    }
    assert model.kinds == ("language", "encoder", "head", "seconds")
    assert model.costs(sizes).T.tolist() == [
        [2 * 100 + 3 * 10 + 5, 7 * 97 + 11 * 13 + 13 * 2, 17 * 6, 19],
        [5, 0, 0, 0],
    ]
    assert model.image_costs([4, 9]).sum() == 7 * 97 + 11 * 13 + 13 * 2


@given(st.integers(0, 10**16), st.integers(0, 1 << 20), st.integers(0, 1 << 20))
@settings(max_examples=examples(200))
def test_costs_are_exact_until_a_sample_would_take_too_long(coefficient: int, small: int, large: int) -> None:
    model, exact = CostModel(Quadratic(a=coefficient)), [coefficient * n**2 // 10**9 for n in (small, large)]
    if max(exact) > 1 << 40:
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
