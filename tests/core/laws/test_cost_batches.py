"""The laws for steps that are even in all costs: what a step holds, its limits, and the same run on any ranks."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon_lite import BestFit, ByTokens, Capacity, Chunks, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.batching import SortedWindow
from energon_lite.batching.capacity import Ints
from energon_lite.batching.steps import CostColumns, StepBalancer
from energon_lite.batching.strategy import strategy_from_dict
from energon_lite.batching.token_plan import PlannedChunk, TokenPlan
from energon_lite.documents.node import Node
from energon_lite.errors import ConfigError, EnergonLiteError, StateMismatchError, UsageError
from energon_lite.extras.balance.cost_model import CostModel
from energon_lite.loading import token_batching
from energon_lite.order.orders import BlendOrder, ConcatOrder
from energon_lite.order.shuffle import LeafOrder
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.core.laws.pipelines import MODEL
from tests.core.laws.sources import columns, images_of
from tests.core.laws.token_data import CAPACITY, Tokens, tokens_of
from tests.testing import ALONE, examples

NOTHING = CostModel.from_features({})  # for a limit of images alone
PER_STEP = 12


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WebdatasetSource, "column", lambda self, name: columns(len(self))[name])


def plan_of(sizes: list[int], document: dict[str, Any], chunk: int, max_images: int | None, *, even: bool) -> TokenPlan:
    order: Any = ConcatOrder(sizes)
    if len(sizes) > 1:  # small leaves of an endless blend come round several times in a chunk
        order = BlendOrder([LeafOrder(size, key) for key, size in enumerate(sizes)], [1.0] * len(sizes), 0)
    tables = [columns(size) for size in sizes]
    costs = CostColumns(MODEL if even else NOTHING, tables, max_images)
    return TokenPlan(
        order,
        strategy_from_dict(document),
        [table["length"] for table in tables],
        seed=3,
        chunk=chunk,
        step=PER_STEP,
        costs=costs if even or max_images else None,
    )


def pieces(chunk: PlannedChunk, first: int, count: int) -> list[list[Any]]:
    """What micro-batches of a step are made of, evened out or not."""
    if chunk.balancer is None:
        return [chunk.spans(number) for number in range(first, first + count)]
    return [list(one) for one in chunk.step_spans(first, count)]


@settings(deadline=None, max_examples=examples(5), suppress_health_check=[HealthCheck.too_slow])
@given(
    sizes=st.sampled_from([[120], [7, 60], [3, 5, 40]]),
    document=st.sampled_from(
        [
            {"strategy": "best_fit", "capacity": CAPACITY, "open_bins": 3},
            {"strategy": "bfd", "capacity": 50, "oversize": "split"},
            {"strategy": "best_fit", "capacity": 50, "multiple": 4, "oversize": "own_batch"},
            {"strategy": "concat_split", "tokens": 64},
            {"strategy": "sorted_window", "capacity": CAPACITY, "batches": 4},
            {"strategy": "fixed", "batch_size": 3},
        ]
    ),
    chunk=st.sampled_from([40, 100]),
)
def test_a_step_keeps_its_samples_and_nothing_gets_too_full(
    sizes: list[int], document: dict[str, Any], chunk: int
) -> None:
    plain, even = (plan_of(sizes, document, chunk, None, even=one).make(0, 0) for one in (False, True))
    limit = document.get("capacity", document.get("tokens"))
    packed = document["strategy"] not in ("sorted_window", "fixed")
    assert len(plain) == len(even)
    for first in range(0, len(even), PER_STEP):
        before, after = pieces(plain, first, PER_STEP), pieces(even, first, PER_STEP)
        # Of copies of a sample, which epochs they are of may change.
        kept = [Counter((*one[:2], *one[3:5]) for one in itertools.chain(*step)) for step in (before, after)]
        assert kept[0] == kept[1]
        assert pieces(even, first, PER_STEP) == after
        if packed:
            assert all(sum(one[4] for one in batch) <= limit or len(batch) == 1 for batch in after)
        copies = [Counter((one[0], one[1]) for one in {piece[:3] for piece in batch}) for batch in after]
        allowed = [Counter((one[0], one[1]) for one in {piece[:3] for piece in batch}) for batch in before]
        most = max((max(one.values(), default=1) for one in allowed), default=1)
        assert all(number <= most for one in copies for number in one.values())


@settings(deadline=None, max_examples=examples(3))
@given(most=st.integers(1, 9), chunk=st.sampled_from([40, 100]), even=st.booleans())
def test_no_micro_batch_has_too_many_images(most: int, chunk: int, even: bool) -> None:
    plan = plan_of([100], {"strategy": "best_fit", "capacity": CAPACITY}, chunk, most, even=even)
    seen: Counter[int] = Counter()
    for number in range(plan.count(0) or 0):
        planned = plan.make(0, number)
        assert len(planned) % PER_STEP == 0
        for first in range(0, len(planned), PER_STEP):
            for batch in planned.step_spans(first, PER_STEP):
                seen.update(one[1] for one in batch)
                assert sum(one[4] for one in batch) <= CAPACITY
                assert sum(images_of(one[1]) for one in batch) <= most or len(batch) == 1
    assert seen == Counter(range(100))


def dataset_of(path: Any, config: WorkerConfig, **more: Any) -> Any:
    arguments = {"micro_batches_per_step": PER_STEP, "costs": MODEL, **more}
    return get_train_dataset(
        path,
        worker_config=config,
        batch_size=None,
        batching=ByTokens(BestFit(Capacity(CAPACITY)), **arguments),
        chunks=Chunks(60),
        task_encoder=Tokens(),
    )


@pytest.mark.usefixtures("measured")
def test_from_4_to_2_to_3_to_4_ranks(cluster: Any, leaf_of: Callable[..., Any]) -> None:
    def build(config: WorkerConfig) -> Any:
        return dataset_of(leaf_of(120), config, max_images=9)

    with cluster(build, 1, 0) as alone:
        expected = tokens_of(alone.steps(4 * PER_STEP))
    found: list[list[int]] = []
    state = None
    for world in (4, 2, 3, 4):
        with cluster(build, world, 0, state) as ranks:
            found += tokens_of(ranks.steps(PER_STEP // world))
            state = json.loads(json.dumps(ranks.state()))
    assert found == expected


@pytest.mark.usefixtures("measured")
def test_costs_are_part_of_what_a_state_belongs_to(leaf_of: Callable[..., Any], tmp_path: Path) -> None:
    from energon_lite.extras.balance.cost_fit import write_cost_model

    write_cost_model(tmp_path / "costs.json", MODEL)
    state = get_savable_loader(dataset_of(leaf_of(120), ALONE)).state_dict()
    get_savable_loader(dataset_of(leaf_of(120), ALONE, costs=tmp_path / "costs.json")).load_state_dict(state)
    for other in ({"costs": None}, {"costs": CostModel.from_features({"tokens": 1})}, {"max_images": 9}):
        with pytest.raises(StateMismatchError):
            get_savable_loader(dataset_of(leaf_of(120), ALONE, **other)).load_state_dict(state)


class Doubled:
    """A cost model of a guest: tokens alone, in a document without coefficients."""

    needs = ("tokens",)
    within = CostModel.from_features({"tokens": 2 * 10**9})

    def __init__(self, document: Node | None) -> None:
        assert document is None or document.entries()["model"].string() == "doubled"

    def by_feature(self) -> dict[str, int]:
        return {"doubled": 2}

    def balancer(self, sizes: Mapping[str, Ints], max_images: int | None) -> StepBalancer:
        return self.within.balancer(sizes, max_images)


@pytest.mark.usefixtures("measured")
def test_a_document_names_the_cost_model_of_a_guest(
    leaf_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text("model: doubled\n")
    with pytest.raises(ConfigError, match=r"no cost model 'doubled'(?s:.*)costs.yaml:1(?s:.*)transformer"):
        dataset_of(leaf_of(120), ALONE, costs=path)
    monkeypatch.setattr(token_batching, "cost_models", lambda: {"doubled": f"{__name__}:Doubled"})
    by_path, by_object = (dataset_of(leaf_of(120), ALONE, costs=costs) for costs in (path, Doubled(None)))
    assert by_path.identity.settings["costs"] == {"doubled": 2}
    get_savable_loader(by_object).load_state_dict(get_savable_loader(by_path).state_dict())


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("more", [{"costs": "costs.json"}, {"costs": None, "max_images": 3}])
def test_costs_without_the_extra_are_refused(
    leaf_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    from energon_lite.extras.balance.cost_fit import write_cost_model

    monkeypatch.chdir(tmp_path)
    write_cost_model("costs.json", MODEL)
    monkeypatch.setattr(token_batching, "cost_models", dict)
    with pytest.raises(EnergonLiteError, match=r"no cost model(?s:.*)need energon_lite/extras/balance"):
        dataset_of(leaf_of(120), ALONE, **more)


@pytest.mark.usefixtures("measured")
def test_costs_that_even_out_nothing_are_refused(leaf_of: Callable[..., Any]) -> None:
    with pytest.raises(UsageError, match="costs without micro_batches_per_step"):
        dataset_of(leaf_of(120), ALONE, micro_batches_per_step=None)
    with pytest.raises(UsageError, match="max_images without length_column"):
        dataset_of(leaf_of(120), ALONE, micro_batches_per_step=None, costs=None, max_images=3, length_column=None)
    with pytest.raises(UsageError, match="max_images is 0"):
        dataset_of(leaf_of(120), ALONE, max_images=0)
    with pytest.raises(UsageError, match="max_images=3 is a limit of packed micro-batches"):
        get_train_dataset(
            leaf_of(120),
            worker_config=ALONE,
            batch_size=None,
            batching=ByTokens(SortedWindow(Capacity(CAPACITY, "padded_tokens"), 4), max_images=3),
        )
