"""Keys in a driver, samples in its workers: plain processes, Ray's actors and verl's data path where these are."""

from __future__ import annotations

import asyncio
import copy
import json
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from energon_lite import get_savable_loader
from energon_lite.errors import SampleError, StateMismatchError, UsageError
from energon_lite.extras.frameworks.ray import SampleKey, SampleKeys, fetch, fetch_batch
from energon_lite.extras.frameworks.verl import AddressDataset
from tests.extras.frameworks import keyed_prompts
from tests.extras.frameworks.keyed_prompts import PROMPTS, digest, drive, write_blend
from tests.testing import take

FORK = multiprocessing.get_context("fork")


@pytest.fixture(scope="module")
def blend(leaf_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_blend(tmp_path_factory.mktemp("keys") / "blend.yaml", leaf_of(30), leaf_of(8, "b"))


def made(keys: list[SampleKey]) -> tuple[str, str, list[str]]:
    """What a worker makes of keys: digests of the samples and of a batch, and the samples' own keys."""
    samples = fetch(keys)
    return digest(samples), digest(fetch_batch(keys)), [sample["__key__"] for sample in samples]


def in_workers(parts: list[list[SampleKey]]) -> list[tuple[str, str, list[str]]]:
    """What processes, each of its own, make of keys that are sent to them."""
    with FORK.Pool(len(parts), maxtasksperchild=1) as workers:
        return workers.map(made, parts, chunksize=1)


def test_keys_are_small_and_in_the_loader_s_order(blend: str) -> None:
    keys = SampleKeys(PROMPTS, blend)
    taken = keys.take(256)
    assert len(pickle.dumps(taken)) <= 24 * 256
    assert len(pickle.dumps(taken[0].address)) < 100
    with get_savable_loader(keyed_prompts.open_prompts(blend)) as loader:
        expected = take(loader, 256)
    assert digest(fetch(taken)) == digest(expected)  # skipped ones are replaced by the same ones
    assert len({sample["__restore_key__"][1] for sample in expected}) == 2
    assert any(sample["__restore_key__"][4] for sample in expected)


def test_every_worker_makes_the_same_tensors(blend: str) -> None:
    keys = SampleKeys(PROMPTS, blend)
    taken = keys.take(12)
    answers = in_workers([taken] * 3)
    assert len(pickle.dumps(taken)) < 100 * 12
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][:2] == (digest(fetch(taken)), digest(fetch_batch(taken)))
    assert fetch_batch(taken)["keys"] == answers[0][2]
    assert digest(fetch_batch(taken[::-1])) != answers[0][1]


def _drive(blend: str, workers: int, folder: Path, *numbers: int) -> None:
    def ask(batch: list[SampleKey]) -> list[list[str]]:
        return [keys for *_, keys in in_workers([batch[number::workers] for number in range(workers)])]

    drive(ask, blend, folder, *numbers)


def test_a_killed_driver_goes_on_exactly_with_other_workers_and_batches(blend: str, tmp_path: Path) -> None:
    first = FORK.Process(target=_drive, args=(blend, 2, tmp_path, 8, 9, 3))
    first.start()
    first.join(60)
    assert first.exitcode == -signal.SIGKILL
    _drive(blend, 3, tmp_path, 6, 3)
    _drive(blend, 1, tmp_path, 5, 2)
    seen = (tmp_path / "seen.txt").read_text().split()
    assert seen == [one["__key__"] for one in fetch(SampleKeys(PROMPTS, blend).take(3 * 8 + 28))]


def test_states_are_those_of_a_loader(blend: str) -> None:
    keys = SampleKeys(PROMPTS, blend)
    keys.take(10)
    loader = get_savable_loader(keyed_prompts.open_prompts(blend)).with_restored_state_rank(keys.state_dict())
    assert next(iter(loader))["__key__"] == keys.take(1)[0].fetch()["__key__"]
    assert loader.state_dict() == keys.state_dict()
    batches = get_savable_loader(keyed_prompts.open_batches(blend))
    next(iter(batches))
    keys.load_state_dict(batches.state_dict())
    assert keys.take(4) == SampleKeys(PROMPTS, blend).take(8)[4:]


@pytest.mark.parametrize("opened", ["open_once", "open_validation"])
def test_finite_data_is_dealt_pass_by_pass(leaf_of: Callable[..., Path], opened: str) -> None:
    def opened_keys() -> SampleKeys:
        return SampleKeys(f"{keyed_prompts.__name__}:{opened}", str(leaf_of(8, "b")))

    keys = opened_keys()
    passes = [[key for batch in keys.batches(3) for key in batch] for _ in range(2)]
    assert [sorted(key.address[1] for key in one) for one in passes] == [list(range(8))] * 2
    assert keys.state_dict()["pass_number"] == 1
    for delivered in range(9):
        keys, again = opened_keys(), opened_keys()
        if delivered:
            keys.take(delivered)
        again.load_state_dict(json.loads(json.dumps(keys.state_dict())))
        rest = [key for batch in again.batches(2) for key in batch]
        assert rest == (passes[0][delivered:] or passes[1])


def test_validation_has_no_replacements(leaf_of: Callable[..., Path]) -> None:
    keys = SampleKeys(f"{keyed_prompts.__name__}:open_validation", str(leaf_of(8, "b")))
    with pytest.raises(SampleError, match="ends with 3"):
        keys.key(3).fetch()
    with pytest.raises(SampleError, match="ends with 3"):
        fetch_batch([keys.key(2), keys.key(3)])
    assert len(fetch_batch([keys.key(2), keys.key(4)])["keys"]) == 2
    with pytest.raises(SampleError, match=r"batch: .*no batch of three"):
        fetch_batch([keys.key(number) for number in (2, 4, 5)])


def test_what_cannot_be_addressed_is_refused(blend: str) -> None:
    for opened in ("open_batches", "open_rank", "open_nothing"):
        with pytest.raises(UsageError, match="single samples"):
            SampleKeys(f"{keyed_prompts.__name__}:{opened}", blend)
    with pytest.raises(UsageError, match="open_prompts"):
        SampleKeys(f"{keyed_prompts.__name__}:open_promts", blend)
    keys = SampleKeys(PROMPTS, blend)
    with pytest.raises(UsageError, match="0 keys"):
        keys.take(0)
    with pytest.raises(UsageError, match="0 data sets"):
        fetch_batch([])
    other = pickle.loads(pickle.dumps(keys.key(0)))
    object.__setattr__(other.data, "fingerprint", "0" * 16)
    with pytest.raises(StateMismatchError, match="other data"):
        other.fetch()
    with pytest.raises(UsageError, match="2 data sets"):
        fetch_batch([keys.key(0), other])


@pytest.mark.slow
def test_ray_s_actors_and_a_killed_driver(blend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray", reason="needs Ray: pip install ray")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as short:  # the names of sockets have to be
        address = ray.init(num_cpus=2, include_dashboard=False, _temp_dir=short, log_to_driver=False).address_info
        try:
            program = [sys.executable, str(Path(__file__).with_name("ray_driver.py"))]
            given = [address["gcs_address"], blend, str(tmp_path)]
            ended = [
                subprocess.run([*program, *given, *map(str, numbers)], timeout=120).returncode
                for numbers in ((2, 8, 9, 3), (3, 6, 3), (1, 5, 2))  # workers, batch, steps, and the step of its death
            ]
        finally:
            ray.shutdown()
    assert ended == [-signal.SIGKILL, 0, 0]
    seen = (tmp_path / "seen.txt").read_text().split()
    assert seen == [one["__key__"] for one in fetch(SampleKeys(PROMPTS, blend).take(3 * 8 + 28))]


# -- samples by address on verl's data path ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def data(blend: str, leaf_of: Callable[..., Path]) -> dict[str, Any]:
    """verl's ``data`` section."""
    return {
        "train_files": blend,
        "val_files": str(leaf_of(8, "b")),
        "shuffle": False,
        "custom_cls": {"path": "pkg://energon_lite.extras.frameworks.verl", "name": "AddressDataset"},
        "energon_lite": {"open": PROMPTS},
    }


def expected(data: dict[str, Any], count: int) -> list[str]:
    keys = SampleKeys(PROMPTS, data["train_files"])
    return [sample["__key__"] for sample in fetch(keys.take(count))]


def keys_of(rows: Any) -> list[str]:
    return [sample["__key__"] for sample in fetch([field.key for field in rows])]


def test_rows_have_verl_s_columns_and_no_pixels(data: dict[str, Any]) -> None:
    dataset = AddressDataset(data["train_files"], config=data)
    assert len(dataset) == 38 and len(AddressDataset(data["train_files"], config=data, max_samples=5)) == 5
    rows = list(DataLoader(dataset, batch_size=None, sampler=range(256)))
    assert len(pickle.dumps(rows)) < 100 * 256 + 2 * sum(len(pickle.dumps(row["dummy_tensor"])) for row in rows)
    assert {row["data_source"] for row in rows} == {"a-30", "openai/gsm8k"}
    assert [row["index"] for row in rows] == list(range(256))
    assert keys_of(row["raw_prompt"] for row in rows) == expected(data, 256)
    arrived = pickle.loads(pickle.dumps(rows))[7]
    (message,) = list(arrived["raw_prompt"])
    assert message["content"][1]["text"] == f"What is {arrived['reward_model']['ground_truth']}?"
    message["content"].clear()  # the caller's own
    images, videos, audios = asyncio.run(AddressDataset.process_multi_modal_info(list(rows[7]["raw_prompt"])))
    assert torch.equal(images[0], rows[7]["raw_prompt"].key.fetch()["pixels"]) and videos is audios is None
    assert arrived["reward_model"].get("style") == "rule" and arrived["reward_model"].get("other", 5) == 5


def test_numpy_takes_a_field_for_one_thing(data: dict[str, Any]) -> None:
    field = AddressDataset(data["train_files"], config=data)[0]["raw_prompt"]
    for array in (np.array([field]), np.array([field] * 3), np.fromiter([field], dtype=object, count=1)):
        assert array.dtype == object and array.ndim == 1 and array[0] is field
    assert copy.deepcopy(field).key == field.key


def test_a_finite_set_has_its_samples_by_number(data: dict[str, Any]) -> None:
    config = data | {"energon_lite": {"open": "tests.extras.frameworks.keyed_prompts:open_once", "columns": ["pixels"]}}
    dataset = AddressDataset([data["val_files"]], config=config)
    rows = [row for batch in DataLoader(dataset, batch_size=3, shuffle=True, collate_fn=list) for row in batch]
    assert sorted(row["index"] for row in rows) == list(range(8))
    by_number = {row["index"]: row["pixels"].fetch() for row in rows}
    assert all(torch.equal(dataset[number]["pixels"].fetch(), pixels) for number, pixels in by_number.items())


def test_what_is_missing_is_said(data: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"data\.energon_lite\.open"):
        AddressDataset(data["train_files"], config={})
    dataset = AddressDataset(data["train_files"], config=data)
    with monkeypatch.context() as in_a_worker, pytest.raises(UsageError, match="dataloader_num_workers"):
        in_a_worker.setattr("torch.utils.data._utils.worker._worker_info", "a worker's")
        dataset[0]
    columns = data["energon_lite"] | {"columns": ["tools"]}
    field = AddressDataset(data["train_files"], config=data | {"energon_lite": columns})[0]["tools"]
    with pytest.raises(UsageError, match="'tools'"):
        list(field)


# -- verl's own ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loader_of(data: dict[str, Any]) -> Callable[[int], Any]:
    """``loader_of(batch_size)``: the training data as verl's trainers make it."""
    pytest.importorskip("verl", reason="needs verl 0.9, and the packages that its data path imports")
    warnings.filterwarnings("ignore", category=UserWarning, module="torchdata")
    from omegaconf import OmegaConf
    from torchdata.stateful_dataloader import StatefulDataLoader
    from verl.trainer.ppo.utils import create_rl_dataset, create_rl_sampler
    from verl.utils.dataset.rl_dataset import collate_fn

    config = OmegaConf.create(data)

    def make(batch_size: int) -> Any:
        dataset = create_rl_dataset(config.train_files, config, None, None, is_train=True)
        sampler = create_rl_sampler(config, dataset)
        options = {"num_workers": 0, "drop_last": True, "collate_fn": collate_fn, "sampler": sampler}
        return StatefulDataLoader(dataset, batch_size, **options)

    return make


@pytest.mark.slow
def test_verl_s_batches_are_small_wherever_they_go(loader_of: Callable[[int], Any], data: dict[str, Any]) -> None:
    from verl import DataProto
    from verl.utils import tensordict_utils

    batch = next(iter(loader_of(32)))
    proto = DataProto.from_single_dict(dict(batch))
    large = DataProto.concat([proto] * 8)
    assert len(pickle.dumps(large.non_tensor_batch)) < 100 * 256
    part = pickle.loads(pickle.dumps(proto.repeat(4, interleave=True).chunk(8)[3]))
    assert keys_of(part.non_tensor_batch["raw_prompt"][::4]) == expected(data, 32)[12:16]
    tensors = tensordict_utils.get_tensordict(dict(batch))
    arrived = pickle.loads(pickle.dumps(tensordict_utils.concat_tensordict([tensors, tensors])))
    assert keys_of(arrived["raw_prompt"][32:]) == expected(data, 32)


@pytest.mark.slow
def test_verl_s_agent_loop_and_reward_get_the_sample(loader_of: Callable[[int], Any]) -> None:
    from omegaconf import OmegaConf
    from verl import DataProto
    from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop
    from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager

    proto = DataProto.from_single_dict(next(iter(loader_of(4))))
    row = pickle.loads(pickle.dumps(proto))[2].non_tensor_batch
    seen: dict[str, Any] = {}

    class Loop(SingleTurnAgentLoop):
        """Its own way to messages and pictures; no model behind it."""

        def __init__(self) -> None:
            self.processor, self.dataset_cls, self.data_config = object(), AddressDataset, None
            self.mm_processor_kwargs: dict[str, Any] = {}

        def _assert_mm_supported(self, has_multi_modal: bool) -> None:
            seen["pictures"] = has_multi_modal

        async def ct_build_initial_tokens(self, messages: Any, **media: Any) -> Any:
            seen.update(media, messages=messages)
            raise StopAsyncIteration

    async def ask() -> None:
        with pytest.raises((StopAsyncIteration, RuntimeError)):
            await Loop().run({}, **row)

    asyncio.run(ask())
    sample = row["raw_prompt"].key.fetch()
    assert seen["pictures"] and digest(seen["messages"]) == digest(sample["raw_prompt"])
    assert torch.equal(seen["images"][0], sample["pixels"])

    def score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        seen.update(source=data_source, answer=ground_truth)
        return 1.0

    class Tokenizer:
        def decode(self, *_: Any, **__: Any) -> str:
            return ""

    tensors = {"responses": torch.zeros(1, 2, dtype=torch.long), "attention_mask": torch.ones(1, 4, dtype=torch.long)}
    answered = DataProto.from_dict(tensors, {name: np.array([value]) for name, value in row.items()})

    async def reward() -> Any:
        return await NaiveRewardManager(OmegaConf.create({}), Tokenizer(), score).run_single(answered)

    assert asyncio.run(reward())["reward_score"] == 1.0
    assert seen["answer"] == sample["reward_model"]["ground_truth"] and seen["source"] in ("a-30", "openai/gsm8k")


@pytest.mark.slow
def test_verl_s_driver_is_killed_and_goes_on(
    loader_of: Callable[[int], Any], data: dict[str, Any], tmp_path: Path
) -> None:
    def drive(size: int, workers: int, steps: int, die_at: int = -1) -> None:
        from verl import DataProto

        loader = loader_of(size)
        if (tmp_path / "data.pt").exists():
            loader.load_state_dict(torch.load(tmp_path / "data.pt", weights_only=False))  # as verl does
        batches = iter(loader)
        for step in range(steps):
            try:
                batch = next(batches)
            except StopIteration:  # so does verl begin an epoch
                batches = iter(loader)
                batch = next(batches)
            chunks = DataProto.from_single_dict(batch).chunk(workers)
            with FORK.Pool(workers) as pool:
                answers = pool.map(keys_of, [list(chunk.non_tensor_batch["raw_prompt"]) for chunk in chunks])
            if step == die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            with open(tmp_path / "seen.txt", "a") as file:
                file.writelines(f"{key}\n" for answer in answers for key in answer)
            torch.save(loader.state_dict(), tmp_path / "new.pt")
            (tmp_path / "new.pt").replace(tmp_path / "data.pt")

    first = FORK.Process(target=drive, args=(8, 2, 9, 3))
    first.start()
    first.join(120)
    assert first.exitcode == -signal.SIGKILL
    drive(6, 3, 3)
    drive(4, 1, 4)  # beyond the end of an epoch
    assert (tmp_path / "seen.txt").read_text().split() == expected(data, 3 * 8 + 3 * 6 + 4 * 4)
