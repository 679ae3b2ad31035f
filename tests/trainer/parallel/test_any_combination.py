"""Any features of the model on any layout of ranks: the run is that of one plain process."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from energon_lite.trainer.models.config import RopeScaling
from tests.testing import examples
from tests.trainer.parallel.rank_processes import RunRanks
from tests.trainer.parallel.test_parity import (
    ALL_KINDS,
    BASE,
    LAST,
    Layout,
    assert_same,
    make_steps,
    plain_run_in_child,
    train_on,
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    """Any layout of at most eight ranks, rather the smaller ones."""
    sizes = {"tp": 1, "cp": 1, "dp": 1, "pp": 1}
    for _ in range(draw(st.integers(1, 3))):
        axis = draw(st.sampled_from(sorted(sizes)))
        sizes[axis] = min(sizes[axis] * 2, 4)
    if draw(st.integers(0, 9)) == 0 and math.prod(sizes.values()) == 2:
        sizes["pp"] = 3
    virtual = draw(st.sampled_from([1, 2])) if sizes["pp"] == 2 else 1
    return Layout(**sizes, sp=draw(st.booleans()), virtual=virtual)


#: What sets one kind of language model apart from another.
KIND: dict[str, st.SearchStrategy[Any]] = {
    "num_kv_heads": st.sampled_from([4, 8]),
    "head_dim": st.sampled_from([None, 6]),
    "qkv_bias": st.booleans(),
    "qk_norm": st.booleans(),
    "sliding_window": st.sampled_from([None, None, 3, 30]),
}


@pytest.mark.slow
@settings(
    max_examples=examples(6),
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # an example takes a second; shrinking one would take minutes
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    layout=layouts(),
    kinds=st.lists(st.sampled_from(ALL_KINDS), min_size=1, max_size=8),
    tied=st.booleans(),
    kind=st.fixed_dictionaries(KIND),
    scaled=st.booleans(),
    recompute=st.sampled_from(["none", "selective", "full"]),
    frozen=st.sets(st.sampled_from(["embed_tokens.weight", "layers.1.mlp.up_proj.weight", "norm.weight"])),
    fused=st.booleans(),
    attention=st.sampled_from(["sdpa", "varlen"]),
    loss_chunk=st.sampled_from([0, 0, 1, 5, 1000]),
    optimizer=st.sampled_from(["last", "every"]),
    bucket_size=st.sampled_from([1, 400, 1500, None]),
    seed=st.integers(0, 1000),
)
def test_features_in_any_combination(
    run_ranks: RunRanks,
    layout: Layout,
    kinds: list[str],
    tied: bool,
    kind: dict[str, Any],
    scaled: bool,
    recompute: str,
    frozen: set[str],
    fused: bool,
    attention: str,
    loss_chunk: int,
    optimizer: str,
    bucket_size: int | None,
    seed: int,
) -> None:
    scaling = RopeScaling(4.0, 0.1, 1.5, 6) if scaled else None
    config = dataclasses.replace(
        BASE,
        tie_embeddings=tied,
        **kind,
        rope_scaling=scaling,
        recompute=recompute,
        fuse_projections=fused,
        attention=attention,
        loss_chunk=loss_chunk,
    )
    fixed = tuple(sorted(frozen))
    steps = make_steps(tuple(kinds), seed)[:2]
    given = dataclasses.replace(LAST, reduce=optimizer, bucket_size=bucket_size)
    runs = run_ranks(layout.world, lambda rank: train_on(config, steps, layout, fixed, given))
    assert_same(runs, plain_run_in_child(run_ranks, config, runs[0].start, steps, fixed), 1e-12)
