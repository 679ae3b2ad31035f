"""The adapter for torchtitan by itself: what needs nothing but torch. With its Trainer: test_torchtitan_trainer.py."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite import WorkerConfig, get_processing_dataset, get_savable_loader, pack_sequences, pad_sequences
from energon_lite.batching import TokenSequence
from energon_lite.errors import UsageError
from energon_lite.extras.frameworks import torchtitan as adapter
from energon_lite.extras.frameworks.torchtitan import (
    IGNORED,
    LoaderRequest,
    MakeLoader,
    TitanLoader,
    data_loader,
    model_inputs,
)
from tests.extras.frameworks.titan_data import Encoder, train, train_unmeasured, validate
from tests.testing import examples
from tests.trainer.parallel.rank_processes import run_ranks

#: Micro-batches of a step, over all ranks; its divisors are the worlds.
STEP = 24
SEQ_LEN = 48


def loader_of(make: MakeLoader, rank: int = 0, world: int = 1, *, workers: int = 0, **asked: Any) -> TitanLoader:
    config = WorkerConfig(rank=rank, world_size=world, num_workers=workers)
    asked = {"dataset_path": "titan://70", "seq_len": SEQ_LEN} | asked
    return TitanLoader(make, LoaderRequest(worker_config=config, **asked))


def digest(pair: tuple[dict[str, Any], torch.Tensor]) -> str:
    inputs, labels = pair
    tensors = [labels, *(inputs[name] for name in sorted(inputs))]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


def digests(loader: TitanLoader, count: int) -> list[str]:
    return [digest(pair) for pair in islice(loader, count)]


@pytest.fixture(scope="module")
def steps() -> list[set[str]]:
    """What each step consists of. An epoch has some 18 micro-batches, so steps cross its ends."""
    found = digests(loader_of(train), 6 * STEP)
    return [set(found[at : at + STEP]) for at in range(0, len(found), STEP)]


@given(st.lists(st.tuples(st.sampled_from([1, 2, 3, 4, 8]), st.integers(0, 2)), min_size=1, max_size=3))
@settings(deadline=None, max_examples=examples(8))
def test_steps_are_the_same_on_any_sequence_of_worlds(steps: list[set[str]], parts: list[tuple[int, int]]) -> None:
    state: dict[str, str] = {}
    done = 0
    for world, count in parts:
        ranks = [loader_of(train, rank, world) for rank in range(world)]
        for loader in ranks:
            loader.load_state_dict(state)
        iterators = [iter(loader) for loader in ranks]
        for step in steps[done : done + count]:
            assert {digest(next(rank)) for rank in iterators for _ in range(STEP // world)} == step
        states = [loader.state_dict() for loader in ranks]
        assert states == states[:1] * world
        state, done = json.loads(json.dumps(states[0])), done + count


def test_a_checkpoint_has_one_entry_whatever_the_place(tmp_path: Path) -> None:
    whole = digests(loader_of(train), 40)
    for place in (0, 3, 30):  # fresh, in the first epoch, in the second one
        saved = loader_of(train)
        batches = iter(saved)
        assert [digest(next(batches)) for _ in range(place)] == whole[:place]
        folder = tmp_path / str(place)
        dcp.save({"dataloader": saved}, checkpoint_id=folder)
        entries = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
        assert list(entries) == ["dataloader.state"]
        loaded = loader_of(train, 1, 2)
        assert digest(next(iter(loaded))) == whole[1]  # it was somewhere else
        dcp.load({"dataloader": loaded}, checkpoint_id=folder)
        assert digests(loaded, 2) == whole[place + 1 : place + 4 : 2]


def test_lanes_go_from_three_ranks_to_eight(tmp_path: Path) -> None:
    """Where nobody knows lengths, each rank knows its own lanes only, and a checkpoint has those of all."""
    whole = digests(loader_of(train_unmeasured), 4 * STEP)

    def part(rank: int, world: int, peers: int, load: str, save: str) -> list[str]:
        loader = loader_of(train_unmeasured, rank // peers, world)
        if load:
            dcp.load({"dataloader": loader}, checkpoint_id=tmp_path / load)
        batches = iter(loader)
        found = [digest(next(batches)) for _ in range(STEP // world)]
        dcp.save({"dataloader": loader}, checkpoint_id=tmp_path / save)
        return found

    # At last, each data-parallel rank has a tensor-parallel peer, which gets the same batches.
    for step, (world, peers) in enumerate([(2, 1), (3, 1), (8, 1), (2, 2)]):
        names = ("" if not step else f"step-{step - 1}", f"step-{step}")
        found = run_ranks(world * peers, lambda rank, w=world, p=peers, n=names: part(rank, w, p, *n), folder=tmp_path)
        assert found[::peers] == found[peers - 1 :: peers]
        assert {one for rank in found for one in rank} == set(whole[step * STEP : (step + 1) * STEP])


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_validation_shows_each_sample_once_in_as_many_steps_on_all_ranks(
    world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys: list[list[str]] = []

    def noted(batch: Any, seq_len: int | None) -> Any:
        keys.append(list(batch.__key__))
        return model_inputs(batch, seq_len)

    monkeypatch.setattr(adapter, "model_inputs", noted)
    ranks = [list(loader_of(validate, rank, world, dataset_path="titan://50", infinite=False)) for rank in range(world)]
    assert len({len(rank) for rank in ranks}) == 1
    assert sorted(int(key) for batch in keys for key in batch) == list(range(50))
    blanks = [pair for rank in ranks for pair in rank if bool((pair[1] == IGNORED).all())]
    assert len(blanks) == sum(not batch for batch in keys) == -13 % world  # 13 packs
    for inputs, labels in blanks:
        assert {name: list(value.shape) for name, value in inputs.items()} == {"input": [1, 48], "positions": [1, 48]}
        assert labels.shape == (1, SEQ_LEN)


def test_a_pass_ends_or_begins_again() -> None:
    once = [digest(pair) for pair in loader_of(validate, infinite=False)]
    assert digests(loader_of(validate), 2 * len(once) + 1) == [*once, *once, once[0]]
    again = loader_of(validate, infinite=False)
    assert [len(list(again)), len(list(again))] == [len(once)] * 2


def test_data_without_a_batch_does_not_go_round_for_ever() -> None:
    def once(asked: LoaderRequest) -> Any:
        options = {"worker_config": asked.worker_config, "task_encoder": Encoder()}
        return get_savable_loader(get_processing_dataset("titan://3", batch_size=2, **options))  # one pass, and no more

    batches = iter(loader_of(once))
    assert len([next(batches), next(batches)]) == 2
    with pytest.raises(UsageError, match="no batch to begin again with"):
        next(batches)


def test_workers_stop_with_the_loop() -> None:
    def children() -> set[str]:
        return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())

    before = children()
    loader = loader_of(train, workers=2)
    batches: Iterator[Any] = iter(loader)
    next(batches)
    assert len(children() - before) == 2
    del batches  # as their validator does
    assert children() <= before


# -- batches ----------------------------------------------------------------------------------------------------------


def sequence(key: str, tokens: list[int], mask: list[float] | None = None, **media: Any) -> TokenSequence:
    row = torch.tensor(tokens)
    weights = None if mask is None else torch.tensor(mask)
    given = {"tokens": row, "labels": row + 1, "loss_mask": weights, "media": media or None}
    return TokenSequence(__key__=key, __restore_key__=(), **given)


def listed(pair: tuple[dict[str, Any], torch.Tensor]) -> dict[str, Any]:
    return {name: value.tolist() for name, value in (pair[0] | {"labels": pair[1]}).items()}


#: Batches, the length of rows, and what the model gets: packs whose positions begin anew, labels that do not count,
#: padded rows; and of an empty batch a row of which nothing counts, the shortest one if no length is told.
INPUTS = [
    (
        pack_sequences([sequence("a", [5, 6, 7], [0, 1, 1]), sequence("b", [8, 9])], pad=3),
        8,
        {"input": [[5, 6, 7, 8, 9, 0, 0, 0]], "positions": [[0, 1, 2, 0, 1, 0, 1, 2]]}
        | {"labels": [[IGNORED, 7, 8, 9, 10, IGNORED, IGNORED, IGNORED]]},
    ),
    (
        pack_sequences([sequence("a", [5, 6]), sequence("b", [8])], pad=3),
        None,
        {"input": [[5, 6, 8]], "positions": [[0, 1, 0]], "labels": [[6, 7, 9]]},
    ),
    (
        pad_sequences([sequence("a", [5, 6]), sequence("b", [8])], pad=3),
        3,
        {"input": [[5, 6, 0], [8, 3, 0]], "positions": [[0, 1, 0], [0, 1, 0]]}
        | {"labels": [[6, 7, IGNORED], [9, IGNORED, IGNORED]]},
    ),
    *(
        (make([], pad=0), length, {"input": [[0] * n], "positions": [[*range(n)]], "labels": [[IGNORED] * n]})
        for make in (pack_sequences, pad_sequences)
        for length, n in ((2, 2), (None, 1))
    ),
]


@pytest.mark.parametrize(("batch", "length", "inputs"), INPUTS)
def test_inputs_of_packed_padded_and_empty_batches(batch: Any, length: int | None, inputs: dict[str, Any]) -> None:
    assert listed(model_inputs(batch, length)) == inputs


def test_media_are_inputs_by_their_names() -> None:
    one, two = torch.ones(1, 2, 3), 2 * torch.ones(1, 1, 3)
    packed = pack_sequences(
        [sequence("a", [5, 6], pixel_values=one, grid=torch.tensor([[1, 2]])), sequence("b", [7], pixel_values=two)],
        pad=0,
    )
    inputs, _ = model_inputs(packed)
    assert inputs["grid"].tolist() == [[1, 2]]
    assert inputs["pixel_values"].tolist() == [[[1.0] * 3] * 2, [[2.0] * 3, [0.0] * 3]]  # of two patches, and of one


def test_a_dict_of_the_users_own() -> None:
    batch = {
        "__key__": ["a"],
        "input": torch.tensor([[1, 2]]),
        "labels": torch.tensor([[2, 3]]),
        "pixel_values": None,
        "special_tokens": {"image_id": 7},
    }
    inputs, labels = model_inputs(batch, 3)
    assert (inputs["input"].tolist(), labels.tolist()) == ([[1, 2, 0]], [[2, 3, IGNORED]])
    assert sorted(inputs) == ["input", "special_tokens"]
    assert inputs["special_tokens"].to("cpu") == {"image_id": 7}  # their validator moves all inputs
    empty = batch | {"__key__": []}  # as empty_batch leaves rows that are not one for each sample
    assert model_inputs(empty, 2)[1].tolist() == [[IGNORED, IGNORED]]
    assert model_inputs(empty, None)[1].tolist() == [[IGNORED, IGNORED]]  # as long as its rows
    assert model_inputs(empty, 2)[0]["special_tokens"] == {"image_id": 7}


@pytest.mark.parametrize(
    ("batch", "words"),
    [
        (pack_sequences([sequence("a", [5, 6], [0, 0.5])], pad=0), "loss_mask between 0 and 1"),
        (pack_sequences([sequence("a", [5, 6, 7])], pad=0), r"a row of 3 tokens, and training\.seq_len is 2"),
        ({"image": torch.zeros(1)}, "this batch, a dict, has image"),
        ([1, 2], "this batch, a list, has no fields"),
    ],
)
def test_what_is_refused(batch: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        model_inputs(batch, 2)


def test_what_is_no_loader_is_refused() -> None:
    def dataset_of(asked: LoaderRequest) -> Any:
        return train(asked).dataset

    with pytest.raises(UsageError, match=r"dataset_of returned a PlannedDataset[\s\S]*get_savable_loader"):
        loader_of(dataset_of)


def test_without_torchtitan_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", None)
    adapter._component.cache_clear()
    with pytest.raises(UsageError, match=r"energon-lite\[torchtitan\]"):
        data_loader(train)
