"""A task encoder that copies Energon's pipeline to sort a pool by length before the batch: refused, with advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite import (
    ByTokens,
    Capacity,
    Cooker,
    DefaultTaskEncoder,
    Sample,
    SavableDataset,
    WorkerConfig,
    basic_sample_keys,
    edataclass,
    get_savable_loader,
    get_train_dataset,
)
from energon_lite.batching import SortedWindow
from energon_lite.errors import UsageError
from energon_lite.extras.energon import BatchDataset
from tests.testing import ALONE, write_tar

SAMPLES = 64


@edataclass
class Tokens(Sample):
    tokens: torch.Tensor


class Pool(SavableDataset[Sample]):
    """As the frameworks derive it: importable, though nothing here goes through it."""

    def __init__(self, dataset: SavableDataset[Sample], *, pool_size: int, worker_config: WorkerConfig):
        raise AssertionError("not reached")


class Encoder(DefaultTaskEncoder[Sample, Tokens, Tokens, Tokens]):
    padding = 0
    cookers = [Cooker[Sample](lambda sample: Tokens(**basic_sample_keys(sample), tokens=torch.tensor(sample["json"])))]

    def encode_sample(self, sample: Tokens) -> Tokens:
        return sample


class Sorting(Encoder):
    def build_train_datasets(
        self, *, datasets: Any, worker_config: Any, batch_size: Any, **options: Any
    ) -> BatchDataset[Sample]:
        dataset = self.build_encode_sample(datasets[0].dataset.build(), worker_config=worker_config)  # type: ignore[attr-defined]
        pool = Pool(dataset, pool_size=32, worker_config=worker_config)
        return BatchDataset(pool, batch_size, batcher=self.batch, worker_config=worker_config)


@pytest.fixture
def texts(tmp_path: Path, tools: Any) -> Path:
    lengths = (number * 29 % SAMPLES for number in range(SAMPLES))
    samples = [(str(number), {"json": f"[{'7, ' * length}7]".encode()}) for number, length in enumerate(lengths)]
    write_tar(tmp_path / "s.tar", samples)
    tools.lite_prepare(tmp_path, "--split-ratio", "1,0,0")
    tools.write_meta(tmp_path, "dataset.yaml", {"__module__": "megatron.energon", "__class__": "CrudeWebdataset"})
    return tmp_path


def test_the_refusal_names_what_to_use_and_that_is_enough(texts: Path) -> None:
    with pytest.raises(UsageError, match=r"Sorting\.build_train_datasets would not be called") as refused:
        get_train_dataset(texts, batch_size=4, worker_config=ALONE, task_encoder=Sorting())
    fix = str(refused.value.fix)
    assert "batch_group_criterion that returns (class of the length, None)" in fix
    batching = eval(fix.rpartition("batching=")[2], {**globals()})  # the advice, to the letter
    assert batching == ByTokens(SortedWindow(Capacity(12_000, "padded_tokens")), length_column=None)
    loader = get_savable_loader(
        get_train_dataset(texts, batching=batching, worker_config=ALONE, task_encoder=Encoder())
    )
    assert len(next(iter(loader)).tokens) > 4


@pytest.mark.parametrize(
    ("method", "instead"),
    [
        ("build_batch", "encode_batch"),
        ("build_cook_crude_sample", "cookers"),
        ("build_encode_sample", "preencode_sample"),
        ("build_val_datasets", "get_val_dataset"),
    ],
)
def test_each_method_of_the_pipeline_has_its_own_advice(texts: Path, method: str, instead: str) -> None:
    builder = type("Builder", (Encoder,), {method: lambda self, *given, **more: None})
    with pytest.raises(UsageError, match=f"{method} would not be called") as refused:
        get_train_dataset(texts, batch_size=4, worker_config=ALONE, task_encoder=builder())
    assert instead in str(refused.value.fix)
