"""The laws for steps of micro-batches by tokens that are evened out, in tokens alone or in all costs: what a step has,
its limits, and the same run on any ranks."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from energon_lite import BestFit, ByTokens, Capacity, WorkerConfig, get_savable_loader
from energon_lite.batching import SortedWindow
from energon_lite.batching.capacity import Ints
from energon_lite.batching.steps import CostColumns, StepBalancer
from energon_lite.batching.strategy import strategy_from_dict
from energon_lite.batching.token_plan import PlannedChunk, TokenPlan
from energon_lite.documents.node import Node
from energon_lite.errors import ConfigError, EnergonLiteError, StateMismatchError, TopologyError, UsageError
from energon_lite.extras.balance.cost_model import CostModel
from energon_lite.loading import token_batching
from energon_lite.order.orders import BlendOrder, ConcatOrder
from energon_lite.order.shuffle import LeafOrder
from energon_lite.storage.read.webdataset import WebdatasetSource
from tests.core.laws.conftest import Cluster
from tests.core.laws.kinds import in_step
from tests.core.laws.pipelines import MODEL
from tests.core.laws.sources import columns, images_of
from tests.core.laws.token_data import CAPACITY, QUIET, SEGMENTS, STRATEGIES, dataset_of, sequences, tokens_of
from tests.testing import ALONE, examples, same, take

NOTHING = CostModel.from_features({})  # for a limit of images alone
PER_STEP = 12


pytestmark = pytest.mark.usefixtures("measured")


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """All columns, among them those lengths that all of these laws go by."""
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


def evened(path: Any, config: WorkerConfig = ALONE, **more: Any) -> Any:
    arguments = {"micro_batches_per_step": PER_STEP, "costs": MODEL, **more}
    return dataset_of(path, config, batching=ByTokens(BestFit(Capacity(CAPACITY)), **arguments), chunk_size=60)


def test_from_4_to_2_to_3_to_4_ranks(leaf_of: Callable[..., Any]) -> None:
    build = partial(evened, leaf_of(120), max_images=9)
    with Cluster(build, 1, 0) as alone:
        expected = tokens_of(alone.steps(4 * PER_STEP))
    found: list[list[int]] = []
    state = None
    for world in (4, 2, 3, 4):
        with Cluster(build, world, 0, state) as ranks:
            found += tokens_of(ranks.steps(PER_STEP // world))
            state = json.loads(json.dumps(ranks.state()))
    assert found == expected


def test_costs_are_part_of_what_a_state_belongs_to(leaf_of: Callable[..., Any], tmp_path: Path) -> None:
    from energon_lite.extras.balance.cost_fit import write_cost_model

    write_cost_model(tmp_path / "costs.json", MODEL)
    state = get_savable_loader(evened(leaf_of(120))).state_dict()
    get_savable_loader(evened(leaf_of(120), costs=tmp_path / "costs.json")).load_state_dict(state)
    for other in ({"costs": None}, {"costs": CostModel.from_features({"tokens": 1})}, {"max_images": 9}):
        with pytest.raises(StateMismatchError):
            get_savable_loader(evened(leaf_of(120), **other)).load_state_dict(state)


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


def test_a_document_names_the_cost_model_of_a_guest(
    leaf_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "costs.yaml"
    path.write_text("model: doubled\n")
    with pytest.raises(ConfigError, match=r"no cost model 'doubled'(?s:.*)costs.yaml:1(?s:.*)transformer"):
        evened(leaf_of(120), costs=path)
    monkeypatch.setattr(token_batching, "cost_models", lambda: {"doubled": f"{__name__}:Doubled"})
    by_path, by_object = (evened(leaf_of(120), costs=costs) for costs in (path, Doubled(None)))
    assert by_path.identity.settings["costs"] == {"doubled": 2}
    get_savable_loader(by_object).load_state_dict(get_savable_loader(by_path).state_dict())


@pytest.mark.parametrize("more", [{"costs": "costs.json"}, {"costs": None, "max_images": 3}])
def test_costs_without_the_extra_are_refused(
    leaf_of: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    from energon_lite.extras.balance.cost_fit import write_cost_model

    monkeypatch.chdir(tmp_path)
    write_cost_model("costs.json", MODEL)
    monkeypatch.setattr(token_batching, "cost_models", dict)
    with pytest.raises(EnergonLiteError, match=r"no cost model(?s:.*)need energon_lite/extras/balance"):
        evened(leaf_of(120), **more)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"micro_batches_per_step": None}, "costs without micro_batches_per_step"),
        (
            {"micro_batches_per_step": None, "costs": None, "max_images": 3, "length_column": None},
            "max_images without length_column",
        ),
        ({"max_images": 0}, "max_images is 0"),
    ],
)
def test_costs_that_even_out_nothing_are_refused(leaf_of: Callable[..., Any], more: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        evened(leaf_of(120), **more)
    padded = ByTokens(SortedWindow(Capacity(CAPACITY, "padded_tokens"), 4), max_images=3)
    with pytest.raises(UsageError, match="max_images=3 is a limit of packed micro-batches"):
        dataset_of(leaf_of(120), batching=padded, chunk_size=None)


@settings(QUIET, max_examples=examples(8))
@given(
    strategy=STRATEGIES,
    chunk=st.sampled_from([11, 40, 1000]),
    step=st.sampled_from([1, 2, 6, 12]),
    segments=SEGMENTS,
    data=st.data(),
)
def test_steps_that_are_evened_out_go_on_on_any_ranks(
    leaf_of: Any, strategy: Any, chunk: int, step: int, segments: Any, data: st.DataObject
) -> None:
    """What the ranks of each turn get together does not depend on how many ranks there were before, or are now."""

    build = partial(dataset_of, leaf_of(120), batching=strategy, chunk_size=chunk, micro_batches_per_step=step)
    worlds = [world for world in range(1, step + 1) if step % world == 0]
    chain = [(data.draw(st.sampled_from(worlds)), workers, steps) for _, workers, steps in segments]
    with Cluster(build, 1, 0) as alone:
        expected = tokens_of(alone.steps(sum(world * steps for world, _, steps in chain)))
    state, position = None, 0
    for world, workers, steps in chain:
        with Cluster(build, world, workers, state) as ranks:
            for _ in range(steps):
                turn = tokens_of(ranks.step())
                assert sorted(turn) == sorted(expected[position : position + world])
                position += world
            state = json.loads(json.dumps(ranks.state()))


@QUIET
@given(strategy=STRATEGIES, chunk=st.sampled_from([11, 40, 1000]), world=st.integers(1, 4), turns=st.integers(1, 3))
def test_a_step_that_is_evened_out_keeps_its_samples(
    leaf_of: Callable[..., Any], strategy: dict[str, Any], chunk: int, world: int, turns: int
) -> None:
    """A pass in whole steps: those of the plan, chunk by chunk; as many turns on each rank, everything once."""
    size, more = world * turns, {"batching": strategy, "chunk_size": chunk, "repeat": False}

    build = partial(dataset_of, leaf_of(120), micro_batches_per_step=size, **more)
    with Cluster(build, world, 0) as ranks:
        dealt = in_step(ranks.loaders)
    assert len(dealt) % size == 0
    steps = [dealt[first : first + size] for first in range(0, len(dealt), size)]
    planned: list[list[Any]] = []
    last = None
    for batch in get_savable_loader(dataset_of(leaf_of(120), **more)):
        if batch.__restore_key__[2] != last or len(planned[-1]) == size:
            planned.append([])
        last = batch.__restore_key__[2]
        planned[-1].append(batch)

    def tokens(step: list[Any]) -> list[int]:
        return sorted(token for tokens in sequences(step) for token in tokens)

    assert [tokens(step) for step in steps] == [tokens(step) for step in planned]


def test_the_micro_batches_of_a_step_cost_nearly_the_same(leaf_of: Callable[..., Any]) -> None:
    """Squared lengths of what the ranks of a turn get, mean over largest: evened out, and as planned."""

    def balance(step: int | None) -> float:
        build = partial(dataset_of, leaf_of(120), chunk_size=1000, micro_batches_per_step=step)
        with Cluster(build, 4, 0) as ranks:
            turns = [[batch.cu_seqlens.diff().square().sum().item() for batch in ranks.step()] for _ in range(30)]
        assert step is None or all(turn == sorted(turn, reverse=number % 2 == 0) for number, turn in enumerate(turns))
        return sum(sum(turn) / 4 / max(turn) for turn in turns) / len(turns)

    even, as_planned = balance(8), balance(None)
    assert 1 - even < 0.6 * (1 - as_planned), (even, as_planned)  # three samples to a micro-batch leave little choice


def test_steps_and_ranks_that_do_not_go_together(leaf_of: Callable[..., Any]) -> None:
    path = leaf_of(120)
    with pytest.raises(TopologyError, match="8 micro-batches of a step cannot be shared evenly by 3"):
        dataset_of(path, WorkerConfig(rank=0, world_size=3), micro_batches_per_step=8)
    for step, more, words in (
        (0, {}, "micro_batches_per_step is 0"),
        (3, {"length_column": None}, "micro_batches_per_step=3 needs a column"),
        (3, {"batching": None, "chunk_size": None}, "micro_batches_per_step=3 has no effect without batching"),
    ):
        with pytest.raises(UsageError, match=words):
            dataset_of(path, micro_batches_per_step=step, **more)
    six, twelve = (dataset_of(path, micro_batches_per_step=step) for step in (6, 12))
    with pytest.raises(StateMismatchError, match="micro_batches_per_step"):
        get_savable_loader(twelve).restore_state_rank(get_savable_loader(six).save_state_rank())
    assert "steps of 6 micro-batches" in str(six)


def test_a_micro_batch_of_a_step_again_from_its_key(leaf_of: Callable[..., Any]) -> None:
    loader, other = (get_savable_loader(dataset_of(leaf_of(120), micro_batches_per_step=6)) for _ in range(2))
    batches = take(loader, 40)
    for number in (0, 7, 39):
        assert same(other.restore_sample(batches[number].__restore_key__), batches[number])
