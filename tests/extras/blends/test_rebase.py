"""A run that is carried over to another blend: in each leaf, what came before and what comes after are one stream."""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import TaskEncoder, WorkerConfig, get_savable_loader, get_train_dataset
from energon_lite.errors import StateError, StateMismatchError, UsageError
from energon_lite.extras.balance import CostModel, Quadratic
from energon_lite.extras.blends import rebase_state
from energon_lite.order.orders import Rebase
from tests.testing import ALONE, examples, take

SIZES = {"a": 7, "b": 50, "c": 120, "d": 3, "e": 500}
weights = st.floats(0.05, 5).map(lambda weight: round(weight, 3))


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Some of the leaves with weights, weights that change, or repetitions."""
    tags = draw(st.permutations(sorted(SIZES)))[: draw(st.integers(1, 5))]
    kind = draw(st.sampled_from(["weight", "weight", "schedule", "repetitions"]))
    if kind == "schedule":
        pairs = {tag: {"linear": {0: draw(weights), draw(st.integers(1, 300)): draw(weights)}} for tag in tags}
        return {"weight": pairs}
    least = 0.5 if kind == "repetitions" else 0.0  # an epoch has at least one sample
    return {kind: {tag: max(least, draw(weights)) for tag in tags}}


def document(recipe: dict[str, Any], leaf_of: Callable[..., Any]) -> dict[str, Any]:
    ((kind, leaves),) = recipe.items()
    return blend_of([(leaf_of(SIZES[tag], tag), value) for tag, value in leaves.items()], kind)


def blend_of(leaves: Sequence[tuple[Any, Any]], kind: str = "weight") -> dict[str, Any]:
    blend = [{"path": str(path), kind: value} for path, value in leaves]
    return {"splits": {"train": {"blend_epochized" if kind == "repetitions" else "blend": blend}}}


def make(path: Any, config: WorkerConfig | None = None, **arguments: Any) -> Any:
    return get_train_dataset(path, **{"batch_size": 3, **arguments}, worker_config=config or ALONE)


def resumed(dataset: Any, state: Any) -> Any:
    loader = get_savable_loader(dataset)
    loader.restore_state_rank(state)
    return loader


def by_leaf(batches: list[Any]) -> dict[str, list[str]]:
    """What was shown of each leaf, in order."""
    streams = defaultdict(list)
    for batch in batches:
        for key in batch.__key__:
            streams[key[0]].append(key)
    return streams


def alone(leaf_of: Callable[..., Any], tag: str, count: int, **arguments: Any) -> list[str]:
    """The stream of a leaf in an undisturbed run of its own."""
    loader = get_savable_loader(make(leaf_of(SIZES[tag], tag), **{**arguments, "batch_size": 1}))
    return [key for batch in take(loader, count) for key in batch.__key__]


@settings(max_examples=examples(18))
@given(
    chain=st.lists(
        st.tuples(recipes(), st.integers(1, 4), st.sampled_from([0, 0, 0, 2]), st.integers(0, 40)),
        min_size=2,
        max_size=4,
    ),
    window=st.sampled_from([(None, None), (10, 3)]),
)
def test_each_leafs_stream_goes_on(cluster: Any, leaf_of: Any, chain: Any, window: tuple[Any, Any]) -> None:
    arguments = {"shuffle_buffer_size": window[0], "max_samples_per_sequence": window[1]}
    state: Any = None
    before: Any = None
    shown: dict[str, list[str]] = defaultdict(list)
    for recipe, world, workers, steps in chain:
        path = document(recipe, leaf_of)
        if before is not None:
            state, report = rebase_state(state, make(before, **arguments), make(path, **arguments))
            known = {leaf.name.rpartition("/")[2][0]: leaf for leaf in report.leaves}
            for tag in SIZES:
                if tag in known and known[tag].change == "new":
                    shown[tag] = []  # a leaf that was gone begins anew
                elif tag in known:
                    assert known[tag].shown == len(shown[tag])
        with cluster(lambda config, path=path: make(path, config, **arguments), world, workers, state) as ranks:
            for tag, keys in by_leaf(ranks.steps(steps)).items():
                shown[tag] += keys
            state = json.loads(json.dumps(ranks.state()))
        before = path
        for tag in next(iter(recipe.values())):
            assert shown[tag] == alone(leaf_of, tag, len(shown[tag]), **arguments)


@settings(max_examples=examples(12))
@given(first=recipes(), second=recipes(), cut=st.integers(0, 40), data=st.data())
def test_after_a_rebase_all_laws_hold(
    cluster: Any, leaf_of: Any, first: Any, second: Any, cut: int, data: st.DataObject
) -> None:
    """The run goes on on any ranks, can be saved, its batches can be made again."""
    old, new = document(first, leaf_of), document(second, leaf_of)
    with cluster(lambda config: make(old, config), 2, 0) as ranks:
        ranks.steps(cut)
        state = ranks.state()
    state, _ = rebase_state(state, make(old), make(new))
    assert len(json.dumps(state)) < 4096
    with cluster(lambda config: make(new, config), 1, 0, state) as one:
        expected = one.steps(12)
    parts = data.draw(st.lists(st.tuples(st.integers(1, 3), st.sampled_from([0, 2]), st.just(2)), max_size=2))
    found: list[Any] = []
    for world, workers, steps in parts:
        with cluster(lambda config: make(new, config), world, workers, state) as ranks:
            found += ranks.steps(steps)
            state = json.loads(json.dumps(ranks.state()))
    assert [batch.__key__ for batch in found] == [batch.__key__ for batch in expected[: len(found)]]
    again = resumed(make(new), state)
    for batch in expected[:2]:
        assert again.restore_sample(batch.__restore_key__).__key__ == batch.__key__
    if cut:
        with pytest.raises(UsageError, match="before the blend was changed"):
            again.restore_sample(("batch", 0, 2 * cut - 1))


def test_a_leaf_that_moved_stays(leaf_of: Any, tmp_path: Any) -> None:
    moved = shutil.copytree(leaf_of(50, "b"), tmp_path / "elsewhere")
    old = document({"weight": {"a": 1.0, "b": 1.0}}, leaf_of)
    new = blend_of([(moved, 1.0), (leaf_of(120, "c"), 2.0)])
    loader = get_savable_loader(make(old))
    keys = by_leaf(take(loader, 20))
    state, report = rebase_state(loader.save_state_rank(), make(old), make(new))
    expected = [("stays", len(keys["b"])), ("new", 0), ("goes", len(keys["a"]))]
    assert [(leaf.change, leaf.shown) for leaf in report.leaves] == expected
    text = str(report)
    assert f"elsewhere (was {leaf_of(50, 'b')}): goes on, {len(keys['b'])} samples" in text
    assert "new, starts at zero" in text and "after micro-batch 20" in text
    more = by_leaf(take(resumed(make(new), state), 10))
    assert keys["b"] + more["b"] == alone(leaf_of, "b", len(keys["b"] + more["b"]))


def test_restoring_moves_between_blends_of_one_loader(leaf_of: Any) -> None:
    """A loader with prefetched batches of one history takes a state of another."""
    old, new = document({"weight": {"a": 1.0, "b": 1.0}}, leaf_of), document({"weight": {"b": 1.0, "c": 2.0}}, leaf_of)
    state, _ = rebase_state(get_savable_loader(make(old)).save_state_rank() | {"position": 9}, make(old), make(new))

    def keys(loader: Any, steps: int) -> list[Any]:
        return [batch.__key__ for batch in take(loader, steps)]

    fresh = keys(get_savable_loader(make(new)), 5)
    with get_savable_loader(make(new, WorkerConfig(rank=0, world_size=1, num_workers=2))) as loader:
        assert keys(loader, 5) == fresh
        loader.restore_state_rank(state)
        rebased = keys(loader, 5)
        assert rebased != fresh
        loader.restore_state_rank(None)
        assert keys(loader, 5) == fresh
        loader.restore_state_rank(state)
        assert keys(loader, 5) == rebased
    without = {name: value for name, value in state.items() if name != "rebase"}
    assert keys(resumed(make(new), without), 5) != rebased  # the entry is what makes the difference


def test_damaged_entries(leaf_of: Any) -> None:
    loader = get_savable_loader(make(document({"weight": {"a": 1.0, "b": 1.0}}, leaf_of)))
    state = loader.save_state_rank() | {"position": 9}
    loader.restore_state_rank(state | {"rebase": {"position": 27, "starts": [20, 7]}})
    places = (27, 3), (-1, [0, 0]), (27, [1]), (27, [1, True]), (28, [1, 1]), (27, [27, 1]), (1 << 62, [0, 0])
    for rebase in (5, {}, *({"position": position, "starts": starts} for position, starts in places)):
        with pytest.raises(StateError, match="damaged: rebase is"):
            loader.restore_state_rank(state | {"rebase": rebase})


def test_what_cannot_be_rebased(leaf_of: Any) -> None:
    old = make(document({"weight": {"a": 1.0, "b": 1.0}}, leaf_of))
    state = get_savable_loader(old).save_state_rank()
    path = document({"weight": {"b": 1.0}}, leaf_of)
    with pytest.raises(UsageError, match=r"nothing else.*batch_drop_last: False and True"):
        rebase_state(state, old, make(path, batch_size=4, batch_drop_last=True))
    with pytest.raises(UsageError, match="passes that end"):
        one = make(leaf_of(7, "a"), repeat=False)
        rebase_state(get_savable_loader(one).save_state_rank(), one, make(leaf_of(50, "b"), repeat=False))
    with pytest.raises(StateMismatchError, match="belongs to another run"):
        rebase_state(state, make(path), old)
    with pytest.raises(StateMismatchError, match=r"shuffle_over_epochs of data set .*b-50 was 1, and is 2"):
        rebase_state(state, old, make(path, shuffle_over_epochs_multiplier=2))
    with pytest.raises(StateMismatchError, match="belongs to another run"):  # without a rebase
        resumed(make(path), state)


def test_weights_that_change_keep_their_place_and_may_be_edited_ahead(leaf_of: Any) -> None:
    def stages(last: float) -> dict[str, Any]:
        pairs = {"a": {0: 1.0, 6000: 1.0}, "b": {0: 0.0, 6000: 3.0, 50_000: last}}
        return document({"weight": pairs}, leaf_of)

    old = make(document({"weight": {"a": 1.0, "c": 1.0}}, leaf_of))
    state = get_savable_loader(old).save_state_rank() | {"position": 1000}
    state, _ = rebase_state(state, old, make(stages(1.0)))
    leaves = by_leaf(take(resumed(make(stages(2.0)), state), 1500))  # a stage ahead is another one
    assert len(leaves["b"]) == 0 + (4500 + 3000 - 6000) * 3 // 4  # from position 3000 to 7500, b from 6000 on
    identity: Any = make(stages(1.0)).rebased(Rebase(3000, (0, 0))).identity
    edge = 3000 + (50_000 - 3000) // 4096 * 4096  # the blocks are counted from the rebase on
    marks = [identity.at(position).fingerprint for position in (edge - 3, edge, edge + 3)]
    assert marks[0] == marks[1] != marks[2]


# -- where whole chunks are used up ---------------------------------------------------------------------------------


class Addresses(TaskEncoder):
    """Samples that say which they are; packs of one or two, of which some yield nothing."""

    def encode_sample(self, sample: Any) -> dict[str, Any]:
        return {"__key__": sample.__key__, "address": sample.__restore_key__[1:4]}

    def batch(self, samples: list[Any]) -> dict[str, Any]:
        flat = [one for sample in samples for one in (sample if isinstance(sample, list) else [sample])]
        return {"shown": [(one["__key__"][0], *one["address"][1:]) for one in flat]}


class Packs(Addresses):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[first : first + 1 + first % 2] for first in range(0, len(samples), 2)] + [samples[1::4]]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples


def positions(leaf_of: Callable[..., Any], tag: str) -> dict[tuple[int, int], int]:
    """Where in its leaf's stream a sample is, by index and epoch."""
    rows = make(leaf_of(SIZES[tag], tag)).plan.order.lookup(np.arange(3000)).rows()
    return {row[1:]: place for place, row in enumerate(rows)}


def shown_by(loader: Any, batches: int) -> list[Any]:
    return [one for batch in take(loader, batches) for one in batch["shown"]]


def assert_a_stream(leaf_of: Callable[..., Any], tag: str, shown: list[Any]) -> None:
    """What was shown of a leaf is the beginning of its stream, without gaps and repetitions."""
    stream = sorted(positions(leaf_of, tag)[one[1:]] for one in shown if one[0] == tag)
    assert stream == list(range(len(stream)))


TOKENS: dict[str, Any] = {"batch_size": None, "chunk_size": 20, "batching": {"strategy": "best_fit", "capacity": 120}}
FIXED = {**TOKENS, "batching": {"strategy": "fixed", "batch_size": 5}, "task_encoder": Addresses()}
LANES: dict[str, Any] = {"packing_buffer_size": 8, "chunk_size": 16, "lanes": 6}


@pytest.mark.parametrize(("arguments", "encoder"), [(TOKENS, Addresses), (LANES, Packs)], ids=["tokens", "packs"])
@settings(max_examples=examples(12))
@given(
    blends=st.tuples(recipes(), recipes()),
    worlds=st.tuples(*[st.sampled_from([1, 2, 3])] * 2),
    cut=st.integers(0, 12),
    workers=st.sampled_from([0, 0, 2]),
)
@pytest.mark.usefixtures("known_lengths")
def test_chunks_that_were_begun_are_given_up(
    cluster: Any, leaf_of: Any, arguments: Any, encoder: Any, blends: Any, worlds: Any, cut: int, workers: int
) -> None:
    def build(recipe: dict[str, Any]) -> Callable[..., Any]:
        path = document(recipe, leaf_of)
        return lambda config=None: make(path, config, task_encoder=encoder(), **arguments)

    old, new = map(build, blends)
    with cluster(old, worlds[0], workers) as ranks:
        before = [one for batch in ranks.steps(cut) for one in batch["shown"]]
        states = [loader.save_state_rank() for loader in ranks.loaders]
    state, report = rebase_state(states, old(), new(), give_up=True)
    if report.given_up:
        with pytest.raises(UsageError, match="were not delivered yet"):
            rebase_state(states, old(), new())
    shown = {leaf.name.rpartition("/")[2][0]: leaf.shown for leaf in report.leaves}
    assert sum(shown.values()) == report.first
    where = {tag: positions(leaf_of, tag) for tag in SIZES}
    places = [(tag, where[tag][index, epoch]) for tag, index, epoch in before]
    assert all(place < shown[tag] for tag, place in places)  # so what comes after cannot be one of them
    undelivered = report.first - len(set(places))
    if arguments is TOKENS:
        assert len(set(places)) == len(places) and undelivered == report.given_up
    elif not cut:
        assert report.given_up == report.first == 0
    with cluster(new, worlds[1], workers, state) as ranks:
        after = [one for batch in ranks.steps(12) for one in batch["shown"]]
        assert json.loads(json.dumps(ranks.loaders[0].save_state_rank()))["rebase"] == state["rebase"]
    found = defaultdict(list)
    for tag, index, epoch in after:
        found[tag].append(where[tag][index, epoch])
    for tag, here in found.items():
        assert min(here) >= shown[tag]
        if arguments is TOKENS:  # the first chunk has all from its start on
            assert len(set(here)) == len(here)


def test_a_chunks_end_gives_nothing_up(cluster: Any, leaf_of: Any, known_lengths: None) -> None:
    old = make(document({"weight": {"a": 1.0, "c": 2.0}}, leaf_of), **FIXED)
    new = make(document({"weight": {"c": 1.0, "e": 2.0}}, leaf_of), **FIXED)
    loader = get_savable_loader(old)
    before = shown_by(loader, 8)
    state, report = rebase_state(loader.save_state_rank(), old, new)  # two chunks of 20 samples, four batches each
    assert report.first == 40 and not report.given_up and state["place"] == [2, 0]
    assert_a_stream(leaf_of, "c", before + shown_by(resumed(new, state), 40))


def test_a_run_goes_on_with_other_costs(leaf_of: Any, known_lengths: None) -> None:
    path = document({"weight": {"a": 1.0, "c": 2.0}}, leaf_of)
    old, new = (
        make(path, **FIXED, micro_batches_per_step=2, costs=CostModel(Quadratic(square, 5 * 10**9)))
        for square in (10**9, 10**10)
    )
    loader = get_savable_loader(old)
    before = shown_by(loader, 8)
    with pytest.raises(StateMismatchError, match="costs"):
        resumed(new, loader.save_state_rank())
    state, report = rebase_state(loader.save_state_rank(), old, new)
    assert not report.given_up
    after = shown_by(resumed(new, state), 40)
    for tag in ("a", "c"):
        assert_a_stream(leaf_of, tag, before + after)


# -- data sets that were made alike: of equal shard names, sizes, counts and keys -------------------------------------


class Texts(TaskEncoder):
    """Of each sample, its leaf and its text."""

    def batch(self, samples: list[Any]) -> dict[str, Any]:
        return {"shown": [(sample.__restore_key__[1], sample.text) for sample in samples]}


@pytest.fixture(scope="module")
def twins(tmp_path_factory: pytest.TempPathFactory, write_dataset: Any) -> dict[str, Any]:
    """Data sets of the same shards, keys and sizes; only the texts differ."""
    root, made = tmp_path_factory.mktemp("twins"), {}
    for tag in "pqrs":
        samples = [(f"{number:02}", {"txt": f"{tag}{number:02}".encode()}) for number in range(16)]
        made[tag] = write_dataset(root / tag, {"0.tar": samples[:8], "1.tar": samples[8:]})
    return made


listings = st.lists(st.tuples(st.sampled_from("pqrs"), st.sampled_from([0.5, 1.0, 2.0])), min_size=1, max_size=5)


@settings(max_examples=examples(40))
@given(old=listings, new=listings, steps=st.tuples(st.integers(0, 20), st.integers(10, 20)))
def test_twins_are_not_taken_for_each_other(twins: Any, old: Any, new: Any, steps: tuple[int, int]) -> None:
    """Each leaf that stays goes on with its own data, once an epoch; one that is listed twice has two streams."""
    shown: dict[tuple[str, int], list[str]] = defaultdict(list)
    known: set[tuple[str, int]] = set()
    state: Any = None
    before: Any = None
    for listing, count in zip((old, new), steps, strict=True):
        blend = blend_of([(twins[tag], weight) for tag, weight in listing])
        tags = [tag for tag, _ in listing]
        names = [(tag, tags[:place].count(tag)) for place, tag in enumerate(tags)]
        if before is not None:
            old, new = (make(one, task_encoder=Texts()) for one in (before, blend))
            state, report = rebase_state(state, old, new)
            for name, leaf in zip(names, report.leaves, strict=False):
                assert leaf.name == str(twins[name[0]])
                assert (leaf.change, leaf.shown) == ("stays" if name in known else "new", len(shown[name]))
            assert len(report.leaves) == len({*names, *known})
        loader = resumed(make(blend, task_encoder=Texts()), state)
        for leaf, text in shown_by(loader, count):
            assert text[0] == tags[leaf]
            shown[names[leaf]].append(text)
        state, before, known = json.loads(json.dumps(loader.save_state_rank())), blend, set(names)
    for (tag, number), texts in shown.items():
        for first in range(0, len(texts), 16):
            assert len(set(texts[first : first + 16])) == len(texts[first : first + 16])
        if number == 0:  # wherever it stands, and beside whatever else
            alone = get_savable_loader(make(twins[tag], task_encoder=Texts(), batch_size=1))
            assert texts == [text for _, text in shown_by(alone, len(texts))]


def test_a_twin_in_the_place_of_another_is_another_run(twins: Any, tmp_path: Any) -> None:
    def beside(path: Any) -> Any:
        return get_savable_loader(make(blend_of([(twins["p"], 1.0), (path, 1.0)])))

    state = beside(twins["q"]).save_state_rank()
    with pytest.raises(StateMismatchError, match="data set 1"):
        beside(twins["r"]).restore_state_rank(state)
    beside(shutil.copytree(twins["q"], tmp_path / "elsewhere")).restore_state_rank(state)
