"""Laws of the hook that runs where batches are moved to: its numbers belong to the samples, no state knows of it."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from energon_lite import SavableDataLoader, TaskEncoder, WorkerConfig, stateless
from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.extras.device.copies import DeviceCopy, DevicePrefetcher, device_hook
from energon_lite.extras.device.pinned import PinnedSegments
from energon_lite.hooks import AugmentTaskEncoder, check_hooks
from tests.extras.device.fake_device import FakeEngine, FakeMemory
from tests.testing import ALONE, alone, examples, take, train_loader
from tests.trainer.parallel.rank_processes import RunRanks


class Draws(TaskEncoder):
    """Draws from everything on the device; in the workers, too, from the same generators."""

    def encode_batch(self, batch: Any) -> Any:
        return {"text": list(batch.text), "drawn": float(torch.rand(()))}

    def encode_on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
        numbers = [random.random(), float(np.random.rand()), float(torch.rand(())), float(self.rng.random())]
        return {**batch, "numbers": numbers}


class Packs(Draws):
    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [samples[:3], samples[3:5], samples[5:]]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return type(samples[0]).derive_from(samples[0], text=" ".join(sample.text for sample in samples))


KINDS = ["train", "packed"]


def _loader(path: Any, kind: str = "train", config: WorkerConfig = ALONE, **options: Any) -> SavableDataLoader:
    own: dict[str, Any] = {"task_encoder": Draws(), "max_samples_per_sequence": None, "shuffle_buffer_size": 8}
    own |= {"task_encoder": Packs(), "packing_buffer_size": 6} if kind == "packed" else {}
    return train_loader(path, batch_size=3, worker_config=config, **own | options)


def _batches(path: Any, count: int, *how: Any, **options: Any) -> list[Any]:
    """Batches of a loader with a device."""
    with _loader(path, *how, **options).to("cpu") as loader:
        return take(loader, count)


def _by_text(batches: list[Any]) -> dict[Any, Any]:
    return {tuple(batch["text"]): (batch["drawn"], *batch["numbers"]) for batch in batches}


@settings(max_examples=examples(30))
@given(kind=st.sampled_from(KINDS), workers=st.sampled_from([0, 0, 2]), world=st.integers(1, 3))
def test_numbers_are_equal_on_any_workers_and_ranks(leaf_of: Any, kind: str, workers: int, world: int) -> None:
    expected = _by_text(_batches(leaf_of(30), 36, kind))
    assert len(set(expected.values())) == len(expected), "each batch has its own"
    assert all(len({*numbers}) == 5 for numbers in expected.values()), "and so has each generator"
    found: dict[Any, Any] = {}
    for rank in range(world):
        found |= _by_text(_batches(leaf_of(30), 9, kind, WorkerConfig(rank, world, workers)))
    common = found.keys() & expected.keys()
    assert len(common) == 9 * world or (kind == "packed" and len(common) >= 6)
    assert all(found[text] == expected[text] for text in common)


@settings(max_examples=examples(30))
@given(kind=st.sampled_from(KINDS), cuts=st.lists(st.integers(0, 7), min_size=1, max_size=4), data=st.data())
def test_a_run_that_was_cut_has_the_same_numbers(leaf_of: Any, kind: str, cuts: list[int], data: st.DataObject) -> None:
    expected, state, found = _batches(leaf_of(30), sum(cuts), kind), None, list[Any]()
    for cut in cuts:
        with _loader(leaf_of(30), kind, alone(data.draw(st.sampled_from([0, 0, 1])))).to("cpu") as loader:
            loader.restore_state_rank(state)
            found += take(loader, cut)
            state = loader.save_state_rank()
    assert found == expected


def test_batches_and_states_are_those_without_it(leaf_of: Any) -> None:
    with _loader(leaf_of(30)).to("cpu") as loader, _loader(leaf_of(30)) as plain:
        for one, other in zip(take(loader, 12), take(plain, 12), strict=True):
            assert "numbers" not in other, "without a device, nobody calls it"
            assert {name: one[name] for name in other} == other
            assert loader.stats()["batches"] == 12 or loader.save_state_rank() == plain.save_state_rank()
        assert loader.save_state_rank() == plain.save_state_rank()


def test_the_trainers_generators_are_left_alone(leaf_of: Any) -> None:
    drawn = []
    for path in ("cpu", None):
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        with _loader(leaf_of(30)) as loader:
            take(loader.to("cpu") if path else loader, 3)
        drawn.append((random.random(), np.random.rand(), torch.rand(()).item()))
    assert drawn[0] == drawn[1]


def test_a_device_with_a_generator_of_its_own_has_it_seeded_and_restored(leaf_of: Any) -> None:
    class OnDevice(Draws):
        @stateless
        def encode_on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
            return {**batch, "numbers": torch.rand(3, generator=generator).tolist()}

    class Unseeded(OnDevice):
        @stateless(restore_seeds=False)
        def encode_on_device(self, batch: dict[str, Any]) -> dict[str, Any]:
            return super().encode_on_device(batch)

    generator = torch.Generator()

    def numbers(encoder: TaskEncoder) -> list[Any]:
        engine = FakeEngine(FakeMemory())
        with _loader(leaf_of(30), task_encoder=encoder) as loader:
            hook = device_hook(loader._runner, generator)
            loader._path = DevicePrefetcher(DeviceCopy("cuda:0", engine, PinnedSegments()), loader._path, hook=hook)
            return [batch["numbers"] for batch in take(loader, 5)]

    generator.manual_seed(5)
    first = numbers(OnDevice())
    after = torch.rand(2, generator=generator).tolist()
    assert after == torch.rand(2, generator=torch.Generator().manual_seed(5)).tolist()
    assert first == numbers(OnDevice()) and len({*map(tuple, first)}) == 5
    assert numbers(Unseeded()) != numbers(Unseeded())


@pytest.mark.parametrize("overlaps", [False, True])
def test_a_batch_that_the_hook_fails_for_is_not_delivered(leaf_of: Any, overlaps: bool) -> None:
    calls = itertools.count()

    class Fails(Draws):
        def encode_on_device(self, batch: Any) -> Any:
            if next(calls) == 3:
                raise ValueError("not this one")
            return super().encode_on_device(batch)

    expected = _batches(leaf_of(30), 8)
    with _loader(leaf_of(30), task_encoder=Fails()) as loader:
        engine = FakeEngine(FakeMemory()) if overlaps else None
        loader._path = DevicePrefetcher(
            DeviceCopy("cpu", engine, PinnedSegments()), loader._path, hook=device_hook(loader._runner, None)
        )
        found = []
        with pytest.raises(ValueError, match="not this one") as failure:
            for batch in loader:
                found.append(batch)
        assert "encode_on_device" in "".join(getattr(failure.value, "__notes__", ()))
        assert found == expected[:3] and loader.save_state_rank()["position"] == 3
        assert found + take(loader, 5) == expected


@pytest.mark.parametrize(
    "made, said", [(lambda batch: None, "returned None"), (lambda batch: (one for one in batch), "not a generator")]
)
def test_what_no_hook_may_return(leaf_of: Any, made: Any, said: str) -> None:
    class Wrong(Draws):
        def encode_on_device(self, batch: Any) -> Any:
            return made(batch)

    with pytest.raises(FatalSampleError, match=said):
        _batches(leaf_of(30), 1, task_encoder=Wrong())


def test_it_is_looked_at_like_the_others() -> None:
    def encoder(**members: Any) -> TaskEncoder:
        made: TaskEncoder = type("Own", (TaskEncoder,), members)()
        return made

    with pytest.raises(UsageError, match=r"Own\.encode_on_device is called with"):
        check_hooks(encoder(encode_on_device=lambda self: 0))
    with pytest.raises(UsageError, match="did you mean 'encode_on_device'"):
        check_hooks(encoder(encode_no_device=lambda self, batch: 0))


def test_an_encoder_around_another_one_has_its_hook(leaf_of: Any) -> None:
    assert _batches(leaf_of(30), 4, task_encoder=AugmentTaskEncoder(Draws())) == _batches(leaf_of(30), 4)


class Named(Draws):
    class Decoder:
        def opened(self, device: torch.device) -> str:
            return f"the decoder of {device}"

    device_decoder = Decoder()


def test_the_decoder_is_recorded_in_states(leaf_of: Any, caplog: pytest.LogCaptureFixture) -> None:
    with _loader(leaf_of(30), task_encoder=Named()).to("cpu") as loader, _loader(leaf_of(30)).to("cpu") as plain:
        take(loader, 2)
        state = loader.save_state_rank()
        assert state is not None and state["device_decoder"] == "the decoder of cpu"
        with _loader(leaf_of(30), task_encoder=Named()).to("cpu") as again:
            again.restore_state_rank(state)
            expected = take(again, 1)
        assert "decoded" not in caplog.text
        plain.restore_state_rank(state)
        assert take(plain, 1) == expected
        assert caplog.text.count("images were decoded by the decoder of cpu") == 1


def test_peers_that_get_a_batch_of_another_rank_draw_the_same_numbers(leaf_of: Any, run_ranks: RunRanks) -> None:
    leaf = leaf_of(30)

    def rank_main(rank: int) -> Any:
        found = []
        for kind in KINDS:
            mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
            config = WorkerConfig.from_mesh(mesh, num_workers=0, share="broadcast")
            found += _batches(leaf, 4, kind, config, repeat=kind == "train")
        return found

    first, second = run_ranks(2, rank_main)
    assert first == second and len(first) >= 6
    assert len({tuple(batch["numbers"]) for batch in first}) == len(first)


def test_on_a_device_without_streams(leaf_of: Any) -> None:
    with _loader(leaf_of(30)).to("meta") as loader:
        assert "numbers" in next(iter(loader))
