"""The laws for batches by tokens where lengths are known only when samples are encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from energon_lite import BestFit, Capacity, SkipSample, TaskEncoder, get_train_dataset, stateless
from energon_lite.batching import LengthDifference, TokenSequence
from energon_lite.errors import FatalSampleError, StateMismatchError, UsageError
from tests.core.laws import token_data
from tests.core.laws.token_data import CAPACITY, QUIET, STRATEGIES, length_of, tokens_of
from tests.testing import ALONE, examples, metadataset, take, train_loader, val_loader


def sequence(sample: Any, part: int = 0) -> TokenSequence:
    """Tokens that say which sample, and which of its parts, they are of."""
    index = sample.__restore_key__[2]
    tokens = torch.arange(length_of(index)) + 1000 * (2 * index + part)
    return TokenSequence.derive_from(sample, tokens=tokens, labels=tokens)


class Tokens(token_data.Tokens):
    """Packed batches of sequences; every ``skips``-th sample is skipped."""

    def __init__(self, skips: int = 0):
        super().__init__()
        self.skips = skips

    @stateless
    def encode_sample(self, sample: Any) -> TokenSequence:
        if self.skips and sample.__restore_key__[2] % self.skips == 0:
            raise SkipSample("not this one")
        return sequence(sample)


class Parts(Tokens):
    """Two sequences of each even sample, none of each fifth."""

    @stateless
    def encode_sample(self, sample: Any) -> Iterator[TokenSequence]:  # type: ignore[override]
        index = sample.__restore_key__[2]
        if index % 5:
            yield sequence(sample)
            if index % 2 == 0:
                yield sequence(sample, 1)


def loader_of(path: Any, **more: Any) -> Any:
    arguments: dict[str, Any] = {"batching": BestFit(Capacity(CAPACITY)), "chunk_size": 20, "task_encoder": Tokens()}
    return train_loader(path, batch_size=None, length_column=None, **(arguments | more))


def own_tokens(path: Any, encoder: Tokens, strategy: dict[str, Any] | BestFit, **more: Any) -> tuple[list[Any], Any]:
    """The batches of one pass, and what the loader counted."""
    loader = loader_of(path, batching=strategy, task_encoder=encoder, repeat=False, chunk_remainder=None, **more)
    return list(loader), loader.stats()


@settings(QUIET, max_examples=examples(15))
@given(
    strategy=STRATEGIES, chunk=st.sampled_from([7, 20, 200]), encoder=st.sampled_from([Tokens(), Tokens(4), Parts()])
)
@example({"strategy": "capacity", "capacity": 45, "oversize": "drop"}, 20, Parts())
def test_a_pass_has_everything_once(
    leaf_of: Callable[..., Any], strategy: dict[str, Any], chunk: int, encoder: Tokens
) -> None:
    batches, stats = own_tokens(leaf_of(50), encoder, strategy, chunk_size=chunk)
    found = Counter(token for tokens in tokens_of(batches) for token in tokens)
    parts = {index: [0] for index in range(50)}
    if isinstance(encoder, Parts):
        parts = {index: [0, 1] if index % 2 == 0 else [0] for index in range(50) if index % 5}
    elif encoder.skips:
        parts = {index: [0] for index in range(50) if index % encoder.skips}
    limit = strategy.get("max_length", 60)
    drops = strategy["strategy"] == "capacity"
    whole = [(index, part) for index, of in parts.items() for part in of if length_of(index) <= 45 or not drops]
    expected = [
        1000 * (2 * index + part) + token for index, part in whole for token in range(min(limit, length_of(index)))
    ]
    assert found == Counter(expected)
    assert stats["samples"] == len(whole)
    everything = [(index, part) for index, of in parts.items() for part in of]
    assert stats["dropped"] - (10 if isinstance(encoder, Parts) else 0) == len(everything) - len(whole)
    cuts = {"truncated_samples": 0, "split_samples": 0}
    if strategy["strategy"] == "max_length":
        cuts["truncated_samples"] = sum(length_of(index) > limit for index, _ in everything)
    if strategy.get("oversize") == "split":
        cuts["split_samples"] = sum(length_of(index) > 50 for index, _ in everything)
    if strategy["strategy"] != "concat_split":
        assert stats["planned"] == cuts
    capacity = strategy.get("capacity") or strategy.get("tokens")
    assert capacity is None or strategy["strategy"] == "sorted_window" or all(b.num_tokens <= capacity for b in batches)


def test_the_field_that_has_the_length(leaf_of: Callable[..., Any]) -> None:
    class Weighed(Tokens):
        @stateless
        def encode_sample(self, sample: Any) -> dict[str, Any]:  # type: ignore[override]
            index = sample.__restore_key__[2]
            return {"weight": length_of(index), "short": torch.zeros(index % 3), "tokens": torch.zeros(1)}

        @stateless
        def batch(self, samples: list[Any]) -> Any:
            return samples

        def empty_batch(self, like: Any, rows: int) -> Any:
            return []

    batches, _ = own_tokens(leaf_of(50), Weighed(), BestFit(Capacity(CAPACITY)), length_field="weight")
    assert max(sum(sample["weight"] for sample in batch) for batch in batches) <= CAPACITY
    assert max(len(batch) for batch in batches) > 1 and sum(map(len, batches)) == 50
    batches, _ = own_tokens(leaf_of(50), Weighed(), LengthDifference(4, 0, key="short"), length_field="weight")
    assert all(len({len(sample["short"]) for sample in batch}) == 1 for batch in batches)
    with pytest.raises(FatalSampleError, match=r"(?s)no field 'wait'.*did you mean 'weight'"):
        own_tokens(leaf_of(50), Weighed(), BestFit(Capacity(CAPACITY)), length_field="wait")


def test_a_sample_above_the_capacity_is_an_error_unless_told(leaf_of: Callable[..., Any]) -> None:
    with pytest.raises(FatalSampleError, match="longer than the 50 tokens that fit"):
        own_tokens(leaf_of(50), Tokens(), BestFit(Capacity(50)))


def test_arguments_that_do_not_go_together(leaf_of: Callable[..., Any]) -> None:
    class Groups(Tokens):
        def batch_group_criterion(self, sample: Any) -> tuple[str, int]:
            return "a", 2

    for arguments, words in (
        ({"chunk_remainder": "keep"}, "chunk_remainder='keep' has no effect with batching"),
        ({"task_encoder": Groups()}, "Groups.batch_group_criterion together with batching"),
        ({"length_column": "length", "length_field": "tokens"}, "length_field='tokens' is about encoded samples"),
        ({"batching": None, "length_field": "tokens"}, "length_field='tokens' has no effect without batching"),
        ({"chunk_size": 0}, "chunk_size is 0"),
    ):
        given: Any = {"batching": BestFit(Capacity(99)), "length_column": None} | arguments
        with pytest.raises(UsageError, match=words):
            get_train_dataset(leaf_of(7), worker_config=ALONE, **given)


def test_states_of_other_settings_are_refused(leaf_of: Callable[..., Any]) -> None:
    loader = loader_of(leaf_of(50))
    others: list[tuple[str, Any]] = [("plan_chunk", {"chunk_size": 21}), ("length_field", {"length_field": "tokens"})]
    for name, other in [*others, ("batching", {"batching": BestFit(Capacity(99))})]:
        with pytest.raises(StateMismatchError, match=name):
            loader_of(leaf_of(50), **other).restore_state_rank(loader.save_state_rank())
    assert "batches by best_fit (capacity 100" in str(loader.dataset)


def test_what_cannot_be_cut_is_counted_once_however_often_the_run_is_interrupted(leaf_of: Callable[..., Any]) -> None:
    class Media(Tokens):
        @stateless
        def encode_sample(self, sample: Any) -> TokenSequence:
            made = sequence(sample)
            made.media = {"image": torch.zeros(1)} if len(made.tokens) % 3 == 0 else None
            return made

    def loader() -> Any:
        strategy = {"strategy": "bfd", "capacity": 50, "oversize": "split"}
        return loader_of(leaf_of(50), batching=strategy, task_encoder=Media())

    whole, counted = loader(), Counter[str]()
    steps = [batch.num_tokens for batch in take(whole, 60)]
    state, seen = None, []
    for _ in range(20):
        part = loader().with_restored_state_rank(state)
        seen += [batch.num_tokens for batch in take(part, 3)]
        state = part.save_state_rank()
        counted.update({kind: part.stats()[kind] for kind in ("failed", "samples")})
    assert seen == steps
    assert counted == {kind: whole.stats()[kind] for kind in counted} and counted["failed"] > 0


class Measures(Tokens):
    """Says for itself how long samples are; not for all of them."""

    def sample_length(self, encoded: TokenSequence) -> int:
        index = encoded.__restore_key__[2]
        if index % 5 == 1:
            raise SkipSample("nobody knows")
        if index % 5 == 2:
            raise KeyError("length")
        assert self.rng.random() < 1  # it has randomness of its own, as every hook
        return len(encoded.tokens)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("cut", [0, 1, 5])
def test_a_sample_whose_length_is_not_known_is_skipped_or_fails(leaf_of: Any, workers: int, cut: int) -> None:
    arguments: dict[str, Any] = {"batching": BestFit(Capacity(CAPACITY)), "chunk_size": 20, "length_column": None}
    first, second = (val_loader(leaf_of(50), workers, task_encoder=Measures(), **arguments) for _ in range(2))
    with first, second:
        batches = take(first, cut)
        second.restore_state_rank(first.save_state_rank())
        batches += list(second)
        stats = [one.stats() for one in (first, second)]
    shown = sorted({token // 2000 for tokens in tokens_of(batches) for token in tokens if token >= 0})
    assert shown == [index for index in range(50) if index % 5 not in (1, 2)]
    counts = {kind: sum(one[kind] for one in stats) for kind in ("samples", "skipped", "failed")}
    assert counts == {"samples": 30, "skipped": 10, "failed": 10}
    reasons = {(one["dataset"], one["stage"], one["reason"]) for both in stats for one in both["reasons"]}
    assert reasons == {("a-50[val]", "sample_length", reason) for reason in ("nobody knows", "KeyError: 'length'")}


KEEPING = [
    {"strategy": "best_fit", "capacity": 100},
    {"strategy": "bfd", "capacity": 100},
    {"strategy": "sorted_window", "capacity": 100},
    {"strategy": "capacity", "capacity": 100},
    {"strategy": "fixed", "batch_size": 4, "sort": True},
]


class Shown(TaskEncoder):
    """Of each sample, its address."""

    @stateless
    def encode_sample(self, sample: Any) -> dict[str, Any]:
        return {"__key__": sample.__key__, "address": sample.__restore_key__[1:4]}

    def sample_length(self, encoded: Any) -> int:
        return int(encoded["address"][1]) * 37 % 60 + 1

    @stateless
    def batch(self, samples: list[Any]) -> dict[str, Any]:
        return {"shown": [sample["address"] for sample in samples]}


@pytest.mark.parametrize("strategy", KEEPING, ids=lambda strategy: strategy["strategy"])
def test_one_small_data_set(leaf_of: Callable[..., Any], strategy: dict[str, Any]) -> None:
    # A chunk has whole epochs; those of several lanes take turns.
    arguments: dict[str, Any] = {"batching": strategy, "length_column": None, "lanes": 1}
    with train_loader(leaf_of(50), task_encoder=Shown(), **arguments) as loader:
        batches = [[tuple(address) for address in batch["shown"]] for batch in take(loader, 200)]
    first, epochs = 0, max(epoch for batch in batches for *_, epoch in batch)
    assert epochs >= 3
    for number, batch in enumerate(batches):
        assert len({epoch for *_, epoch in batch}) == 1, "epochs are mixed"
        if batch[0][2] != batches[first][0][2]:
            seen = [address for one in batches[first:number] for address in one]
            assert sorted(seen) == [(0, index, batches[first][0][2]) for index in range(50)]
            first = number


@pytest.mark.usefixtures("known_lengths")
@pytest.mark.parametrize("strategy", KEEPING, ids=lambda strategy: strategy["strategy"])
@pytest.mark.parametrize("repeat", [True, False])
def test_repetitions(leaf_of: Callable[..., Any], strategy: dict[str, Any], repeat: bool) -> None:
    """Ten samples that come four times an epoch, among fifty that come once: together the whole of each epoch."""
    leaves = [{"path": str(leaf_of(50)), "repetitions": 1}, {"path": str(leaf_of(10, "b")), "repetitions": 4}]
    path = metadataset({"blend_epochized": leaves})
    with train_loader(path, task_encoder=Shown(), batching=strategy, repeat=repeat) as loader:
        batches = [[tuple(address) for address in batch["shown"]] for batch in take(loader, 120)]
    samples = [address for batch in batches for address in batch][:90]
    assert sorted(samples) == [(0, index, 0) for index in range(50)] + [
        (1, index, epoch) for index in range(10) for epoch in range(4)
    ]
    for batch in batches:
        assert len({address[:2] for address in batch}) == len(batch)
