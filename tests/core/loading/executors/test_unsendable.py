"""What cannot go to another process, or come from one, is named."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from energon_lite import TaskEncoder, get_savable_loader, get_train_dataset
from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.loading.executors.transport import pack, raise_unpicklable, unsendable
from tests.testing import alone


def _loader(path: Any, encoder: TaskEncoder, method: str = "fork", **arguments: Any) -> Any:
    data = {"batch_size": 2, "task_encoder": encoder, "worker_config": alone(1), **arguments}
    return get_savable_loader(get_train_dataset(path, **data), start_method=method)  # type: ignore[arg-type]


class Lambdas(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        return {"__key__": sample.__key__, "fine": 1, "extra": [{"f": lambda: 0}]}

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [[sample] for sample in samples]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


@pytest.mark.parametrize("arguments", [{}, {"packing_buffer_size": 4}])
def test_a_part_of_a_batch_that_cannot_be_sent(leaf_of: Any, arguments: dict[str, Any]) -> None:
    with _loader(leaf_of(20), Lambdas(), **arguments) as loader, pytest.raises(FatalSampleError) as caught:
        next(iter(loader))
    text = str(caught.value)
    assert "['extra'][0][0]['f'] is the function Lambdas.encode_sample.<locals>.<lambda>" in text
    assert f"{__file__}:" in text and "samples a-" in text and "num_workers=0" in text


class _OnDevice(torch.Tensor):
    """As if it were on a GPU."""

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("cuda:0")


def test_a_tensor_on_a_device_is_not_sent() -> None:
    batch = {"__key__": ["a", "b"], "x": {"y": torch.ones(2).as_subclass(_OnDevice)}, "z": torch.ones(2)}
    with pytest.raises(TypeError, match="a tensor on cuda:0") as caught:
        pack(batch)
    error = unsendable((batch, [], 0, None), caught.value)
    assert "['x']['y'] is a tensor on cuda:0" in str(error) and '.to("cuda")' in str(error)
    assert "samples a, b" in str(error)
    pack({"x": torch.ones(2, device="meta")})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_on_a_real_device_is_not_sent() -> None:
    with pytest.raises(TypeError, match="a tensor on cuda:0"):
        pack({"x": torch.ones(2, device="cuda")})


class Locked(TaskEncoder):
    def __init__(self) -> None:
        self.settings = {"lock": threading.Lock()}


def test_a_part_of_an_encoder_that_cannot_be_pickled(leaf_of: Any) -> None:
    with _loader(leaf_of(20), Locked(), "spawn") as loader, pytest.raises(UsageError) as caught:
        next(iter(loader))
    text = str(caught.value)
    assert "the task encoder Locked cannot be pickled" in text and "start_method='spawn'" in text
    assert "self.settings['lock'] is a _thread.lock" in text and 'start_method="fork"' in text


def test_a_class_inside_of_a_function_cannot_be_pickled() -> None:
    class Inner(TaskEncoder):
        pass

    with pytest.raises(UsageError, match=r"its class .*<locals>\.Inner is made inside of a function"):
        raise_unpicklable(Inner(), "spawn", AttributeError("it"))


def test_another_reason_stays_what_it_is() -> None:
    with pytest.raises(AttributeError, match=r"^it$"):
        raise_unpicklable(TaskEncoder(), "spawn", AttributeError("it"))
