"""From text to batches by tokens: tokenised with lengths, planned by them, loaded, resumed."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import SkipSample, WorkerConfig, get_loader, get_savable_loader, get_train_dataset, get_val_dataset
from energon_lite.batching import PackedBatch, PaddedBatch
from energon_lite.loading.leaves import find_leaves, open_source
from energon_lite.trainer import TokenizedTaskEncoder
from energon_lite.trainer.data.task_encoder import TokenizedSample
from tests.testing import ALONE, output_of, take

CAPACITY = 32


@pytest.fixture(scope="module")
def tokenized(tmp_path_factory: pytest.TempPathFactory, chats: Path, tokenizer_folder: Path) -> Path:
    """The chats, tokenised, in shards of 20."""
    folder = tmp_path_factory.mktemp("tokens")
    words = ["--records-per-shard", 20, "--num-workers", 1, "--split-ratio", "8,1,1"]
    output_of("tokenize", chats, "-t", tokenizer_folder, "-o", folder, *words)
    return folder


def column_of(path: Path, part: str) -> Any:
    """The stored lengths of a split."""
    (spec,) = find_leaves(path, part, "dataset.yaml", "split.yaml", None)
    return open_source(spec).column("length")


def loader_of(path: Path, batching: Any, **more: Any) -> Any:
    arguments = {"worker_config": ALONE, "task_encoder": TokenizedTaskEncoder(), "chunk_size": 50, **more}
    return get_savable_loader(get_train_dataset(path, batch_size=None, batching=batching, **arguments))


def test_the_column_has_the_length_of_each_sample_and_a_plan_reads_it(tokenized: Path) -> None:
    for part in ("train", "val", "test"):
        column = column_of(tokenized, part)[:]
        samples = get_val_dataset(tokenized, split_part=part, batch_size=None, worker_config=ALONE)
        found = [len(sample["tokens.npy"]) for sample in get_loader(samples)]
        assert found == column.tolist() and len(found) > 0
    column = column_of(tokenized, "train")[:]
    said = output_of("plan", tokenized, "--capacity", CAPACITY)
    assert f"{len(column)} samples, {int(column.sum()):,} tokens" in said


def test_packed_batches_from_a_file_of_settings(tokenized: Path, tmp_path: Path) -> None:
    """An epoch of two ranks: every token once, no batch above the capacity, labels and masks as stored."""
    (tmp_path / "batching.yaml").write_text(f"strategy: best_fit\ncapacity: {CAPACITY}\n")
    samples = get_loader(get_val_dataset(tokenized, split_part="train", batch_size=None, worker_config=ALONE))
    stored = {sample["__key__"]: sample for sample in samples}
    seen: list[str] = []
    for rank in range(2):
        config = WorkerConfig(rank=rank, world_size=2, num_workers=0)
        for batch in loader_of(tokenized, tmp_path / "batching.yaml", repeat=False, worker_config=config):
            assert isinstance(batch, PackedBatch) and batch.num_tokens <= CAPACITY
            for key, first, last in zip(batch.__key__, batch.cu_seqlens, batch.cu_seqlens[1:], strict=False):
                tokens, mask = stored[key]["tokens.npy"].tolist(), stored[key]["mask.npy"].tolist()
                assert batch.tokens[0, first:last].tolist() == tokens[:-1]
                assert batch.labels[0, first:last].tolist() == tokens[1:]
                assert batch.loss_mask[0, first:last].tolist() == mask[1:]
            seen += batch.__key__
    assert sorted(seen) == sorted(stored)


def test_padded_batches(tokenized: Path) -> None:
    document = {"strategy": "sorted_window", "capacity": CAPACITY, "batches": 4}
    padded = TokenizedTaskEncoder(packed=False, pad=7, multiple=4)
    batches = take(loader_of(tokenized, document, task_encoder=padded), 9)
    assert all(isinstance(batch, PaddedBatch) and batch.tokens.shape[1] % 4 == 0 for batch in batches)


@pytest.mark.parametrize(
    "document",
    [
        {"strategy": "concat_split", "tokens": 16},
        {"strategy": "best_fit", "capacity": CAPACITY},
        {"strategy": "bfd", "capacity": 10, "oversize": "split"},
        {"strategy": "bfd", "capacity": 12, "oversize": "drop"},
    ],
    ids=lambda document: document["strategy"],
)
def test_the_plan_counts_the_positions_of_rows(tokenized: Path, document: dict[str, Any]) -> None:
    """A sample of n tokens has n - 1 positions with labels: those are planned, and each is in one batch."""
    loader = loader_of(tokenized, document, repeat=False)
    plan = loader.dataset.plan
    chunks = [plan.make(0, number) for number in range(plan.count(0))]
    planned = [int(tokens) for chunk in chunks for tokens in chunk.batches.tokens()]
    assert [batch.num_tokens for batch in loader] == planned
    rows = column_of(tokenized, "train")[:] - 1
    kept = rows[rows <= document["capacity"]] if document.get("oversize") == "drop" else rows
    assert sum(planned) == int(kept.sum())
    stats = loader.stats()
    assert stats["failed"] == stats["skipped"] == 0


def test_rows_that_were_measured_are_planned_as_they_are(tokenized: Path, tmp_path: Path) -> None:
    data = shutil.copytree(tokenized, tmp_path / "data")
    encoder = "energon_lite.trainer.data.task_encoder:TokenizedTaskEncoder"
    output_of("measure", data, "--task-encoder", encoder, "--num-workers", 1)
    assert (column_of(data, "train")[:] == column_of(tokenized, "train")[:] - 1).all()
    loader = loader_of(data, {"strategy": "concat_split", "tokens": 16}, repeat=False)
    assert sum(batch.num_tokens for batch in loader) == int(column_of(data, "train")[:].sum())
    assert loader.stats()["failed"] == 0


def test_a_single_token_is_nothing_to_learn() -> None:
    sample = TokenizedSample(__key__="a", __restore_key__=(), tokens=torch.tensor([5]))
    with pytest.raises(SkipSample, match="fewer than two tokens"):
        TokenizedTaskEncoder().encode_sample(sample)
    encoder, others = TokenizedTaskEncoder(packed=False), ([5, 6], [1, 2, 3, 4])
    rows = [encoder.encode_sample(dataclasses.replace(sample, tokens=torch.tensor(tokens))) for tokens in others]
    assert encoder.batch(rows).tokens.tolist() == [[5, 0, 0], [1, 2, 3]]
