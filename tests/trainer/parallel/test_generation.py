"""Generated text is what the model would say if it computed each row anew for each token, on every layout of ranks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import ConfigError, UsageError
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training.generate import Sampling, choose, generate
from tests.testing import examples
from tests.trainer.models.by_documents import BY_DOCUMENTS
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.test_parity import BASE, Layout

TEXT = dataclasses.replace(BASE, image_size=0)
LAYOUTS = [
    Layout(),
    Layout(tp=2),
    Layout(tp=4, sp=True),
    Layout(pp=2),
    Layout(pp=2, virtual=2),
    Layout(tp=2, pp=2, sp=True),
    Layout(dp=2, tp=2),
    Layout(pp=4),
]
PROMPTS = st.lists(st.lists(st.integers(0, TEXT.vocab_size - 1), min_size=1, max_size=9), min_size=1, max_size=4)


@torch.no_grad()
def slowly(model: LlamaModel, prompt: list[int], new: int, *image: torch.Tensor) -> list[int]:
    """The likeliest tokens, all positions computed for each."""
    row = list(prompt)
    for _ in range(new):
        row.append(int(model.all_logits(torch.tensor([row]), *image)[0, -1].argmax()))
    return row[len(prompt) :]


def until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@settings(max_examples=examples(12))
@given(
    prompts=PROMPTS,
    new=st.integers(1, 7),
    eos=st.one_of(st.none(), st.integers(0, TEXT.vocab_size - 1)),
    layout=st.sampled_from(LAYOUTS),
    attention=st.sampled_from(["sdpa", BY_DOCUMENTS]),
    kind=st.sampled_from([{}, {"qk_norm": True, "qkv_bias": True, "head_dim": 6}, {"sliding_window": 3}]),
)
def test_a_cache_changes_no_token(
    run_ranks: RunRanks,
    prompts: list[list[int]],
    new: int,
    eos: int | None,
    layout: Layout,
    attention: str,
    kind: dict[str, Any],
) -> None:
    config = dataclasses.replace(TEXT, attention=attention, **kind)
    alone = LlamaModel(config, build_mesh(), seed=3)
    wanted = [slowly(alone, prompt, new) for prompt in prompts]
    wanted = wanted if eos is None else [until(answer, eos) for answer in wanted]

    def answer(rank: int) -> list[list[int]]:
        return generate(LlamaModel(config, layout.mesh(), seed=3), prompts, max_new_tokens=new, eos=eos)

    for found in run_ranks(layout.world, answer):
        assert found == wanted


@pytest.mark.parametrize("layout", [Layout(), Layout(tp=2, pp=2, sp=True)], ids=str)
def test_images_stand_where_the_prompt_keeps_their_place(run_ranks: RunRanks, layout: Layout) -> None:
    images = torch.rand(2, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    prompts, starts = [[5, 0, 0, 0, 0, 7], [1, 2, 3], [0, 0, 0, 0, 9, 9, 4, 6]], [1, 0]
    rows = torch.tensor([0, 2])
    alone = LlamaModel(BASE, build_mesh(), seed=3)
    wanted = [
        slowly(alone, prompts[0], 5, images[:1], rows[:1] * 0, torch.tensor(starts[:1])),
        slowly(alone, prompts[1], 5),
        slowly(alone, prompts[2], 5, images[1:], rows[:1] * 0, torch.tensor(starts[1:])),
    ]

    def answer(rank: int) -> list[list[int]]:
        model = LlamaModel(BASE, layout.mesh(), seed=3)
        return generate(model, prompts, images, rows, torch.tensor(starts), max_new_tokens=5)

    assert run_ranks(layout.world, answer)[0] == wanted


def test_a_token_costs_one_position_and_rows_that_ended_none() -> None:
    model, computed = LlamaModel(TEXT, build_mesh()), []
    model.layers["0"].register_forward_pre_hook(lambda _, inputs: computed.append(inputs[0].shape[1]))
    generate(model, [[1, 2, 3, 4, 5], [6]], max_new_tokens=4)
    assert computed == [5, 1, 1, 1]
    first = slowly(LlamaModel(TEXT, build_mesh()), [1], 1)[0]
    assert generate(model, [[1]], max_new_tokens=50, eos=first) == [[first]]
    assert computed[4:] == [1]


@given(st.integers(0, 2**31), st.sampled_from([Sampling(0.7, top_k=1), Sampling(3.0, top_p=1e-6), Sampling()]))
def test_narrow_choices_take_the_likeliest(seed: int, sampling: Sampling) -> None:
    logits = torch.randn(5, 11, generator=torch.Generator().manual_seed(seed))
    assert choose(logits, sampling, torch.Generator()).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize(
    ("sampling", "kept"), [(Sampling(2.0), 6), (Sampling(2.0, top_k=3), 3), (Sampling(0.5, top_p=0.9), 2)], ids=str
)
def test_tokens_come_as_often_as_the_model_says(sampling: Sampling, kept: int) -> None:
    logits = torch.tensor([[2.0, 0.0, 1.5, -1.0, 0.5, 0.0]])
    wanted = (logits[0] / sampling.temperature).softmax(-1)
    # The likeliest are tokens 0, 2, 4: with 0.9 of temperature 0.5, the first two.
    wanted[torch.tensor([0, 2, 4, 1, 5, 3])[kept:]] = 0
    wanted /= wanted.sum()
    found = choose(logits.expand(40_000, -1), sampling, torch.Generator().manual_seed(4))
    shares = torch.bincount(found, minlength=6) / len(found)
    torch.testing.assert_close(shares, wanted, atol=0.012, rtol=0)


def test_the_same_seed_says_the_same() -> None:
    model = LlamaModel(TEXT, build_mesh())

    def say(seed: int) -> Any:
        return generate(model, [[1], [2, 3]], max_new_tokens=12, sampling=Sampling(temperature=2.0, seed=seed))

    assert say(1) == say(1) != say(2)


def test_compiled_blocks_are_not_compiled_again() -> None:
    config: ModelConfig = dataclasses.replace(TEXT, compile=True)
    plain, compiled = (LlamaModel(c, build_mesh(), seed=3) for c in (TEXT, config))
    torch._dynamo.utils.counters.clear()
    assert generate(compiled, [[1, 2], [3]], max_new_tokens=5) == generate(plain, [[1, 2], [3]], max_new_tokens=5)
    assert not torch._dynamo.utils.counters["stats"]


def test_what_cannot_be_said_is_refused(run_ranks: RunRanks) -> None:
    model = LlamaModel(TEXT, build_mesh())
    assert generate(model, []) == []
    assert generate(model, [[1]], max_new_tokens=0) == [[]]
    with pytest.raises(UsageError, match="has no token"):
        generate(model, [[1], []])
    for wrong in ({"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            Sampling(**wrong)
    with pytest.raises(RankFailure, match="cp=1"):
        run_ranks(2, lambda rank: generate(LlamaModel(TEXT, build_mesh(cp=2)), [[1]]))
