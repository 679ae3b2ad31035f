from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from energon_lite import TaskEncoder, TextSample
from energon_lite.errors import FatalSampleError
from energon_lite.loading.makers.sample_length import SampleLength

Pair = namedtuple("Pair", ["tokens", "other"])


@dataclass
class Data:
    input_ids: Any
    labels: Any = None


class Plain:
    def __init__(self, tokens: Any):
        self.tokens = tokens


class Own(TaskEncoder):
    def sample_length(self, encoded: Any) -> Any:
        return encoded["n"] + 1


@pytest.mark.parametrize(
    ("encoded", "length"),
    [
        ({"tokens": torch.zeros(7, 2)}, 7),
        ({"image": torch.zeros(3, 8, 8), "input_ids": np.zeros(5)}, 5),
        ({"text_tokens": b"abcd", "tokens": (1, 2)}, 2),  # tokens goes before text_tokens
        ({"token_ids": []}, 0),
        ({"tokens": 12}, 12),
        ({"tokens": torch.tensor(12)}, 12),
        ({"tokens": np.int32(12)}, 12),
        (Data([1, 2, 3]), 3),
        (Pair([1], None), 1),
        (Plain([1, 2]), 2),
        (torch.zeros(4, 9), 4),
        ([1, 2, 3], 3),
    ],
)
def test_without_a_name(encoded: Any, length: int) -> None:
    assert SampleLength(TaskEncoder())(encoded) == length


def test_a_named_field() -> None:
    sample = {"tokens": [1, 2], "labels": torch.zeros(9), "text": "äöü"}
    assert [SampleLength(TaskEncoder(), name)(sample) for name in ("tokens", "labels", "text")] == [2, 9, 3]
    assert SampleLength(Own(), "tokens")(sample) == 2  # what the user names goes before the method


def test_the_encoder_says_it() -> None:
    length = SampleLength(Own())
    assert length({"n": 4, "tokens": [1]}) == 5 and str(length) == "sample_length"
    with pytest.raises(FatalSampleError, match=r"Own.sample_length returned -1, which is not a length"):
        length({"n": -2})
    with pytest.raises(FatalSampleError, match=r"returned 1.5"):
        length({"n": 0.5})


def test_nothing_fits() -> None:
    sample = TextSample(__key__="k", __restore_key__=(), text="abc")
    with pytest.raises(FatalSampleError) as caught:
        SampleLength(TaskEncoder())(sample)
    message = str(caught.value)
    assert "none of the fields tokens, input_ids, token_ids, text_tokens; it has text (str)" in message
    assert "--length-field" in message and "sample_length(self, encoded)" in message and "__key__" not in message
    with pytest.raises(FatalSampleError, match=r"no field 'txet'[\s\S]*did you mean 'text'"):
        SampleLength(TaskEncoder(), "txet")(sample)
    with pytest.raises(FatalSampleError, match=r"'tokens' of an encoded sample has no length: float"):
        SampleLength(TaskEncoder())({"tokens": 0.5})
    with pytest.raises(FatalSampleError, match="has no length: Tensor of shape"):
        SampleLength(TaskEncoder())({"tokens": torch.tensor(0.5)})
    with pytest.raises(FatalSampleError, match="has no length: bool"):
        SampleLength(TaskEncoder())({"tokens": True})
    with pytest.raises(FatalSampleError, match="it has no fields"):
        SampleLength(TaskEncoder())("text")
