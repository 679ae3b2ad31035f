"""A sample in words is what Energon makes of it."""

import dataclasses

import numpy as np
import pytest
import torch
from megatron.energon.sample_utils import format_sample_detailed as theirs

from energon_lite.extras.energon.compat.hooks import format_sample_detailed


@dataclasses.dataclass
class Pair:
    n: int
    nested: dict


@pytest.mark.parametrize("indent", ["", "  "])
@pytest.mark.parametrize(
    "sample",
    [
        {"i": -3, "f": 2.5, "b": False, "n": None, "text": "hi", "lines": "a\nb", "many": (1, 2, "x")},
        {"list": [{"k": 1}, {"k": 2}], "pair": Pair(9, {"a": 1}), "bytes": b"abc", "type": object},
        {"t": torch.arange(20.0), "few": torch.tensor([0.0, 2.0]), "none": torch.zeros(0), "matrix": torch.ones(2, 2)},
        {"a": np.array([1, 2, 3]), "long": np.arange(9), "none": np.zeros(0), "words": np.array(["a"])},
        {"text": "x" * 2000, "list": list(range(30)), **{str(number): number for number in range(40)}},
        "text",
        5,
    ],
)
def test_equal_text(sample, indent):
    assert format_sample_detailed(sample, indent) == theirs(sample, indent)
