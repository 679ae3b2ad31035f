"""The journey of a batch to a device."""

from __future__ import annotations

import pytest
import torch

from energon_lite.errors import UsageError
from energon_lite.extras.device.copies import DeviceCopy


def test_on_the_cpu_a_batch_stays_where_it_is() -> None:
    batch = {"x": torch.ones(2), "nested": [torch.zeros(1)]}
    copy = DeviceCopy("cpu")
    assert copy.finish(copy.start(batch)) is batch


def test_a_device_without_streams_gets_a_copy() -> None:
    batch = {"x": torch.ones(2), "name": "a"}
    copy = DeviceCopy("meta")
    moved = copy.finish(copy.start(batch))
    assert moved["x"].device.type == "meta"
    assert moved["name"] == "a"
    assert batch["x"].device.type == "cpu"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot go to the device 'cuda'"):
        DeviceCopy("cuda")


def test_a_name_of_no_device_is_refused() -> None:
    with pytest.raises(UsageError, match="cannot go to the device 'gpu'"):
        DeviceCopy("gpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; pytest -m gpu")
def test_copies_are_right_while_the_device_is_busy() -> None:
    copy = DeviceCopy("cuda")
    busy = torch.randn(4096, 4096, device="cuda")
    for number in range(20):
        underway = copy.start({"x": torch.full((1 << 20,), float(number)), "y": [torch.tensor(number)]})
        busy = busy @ busy * 1e-4
        moved = copy.finish(underway)
        assert moved["x"].is_cuda and moved["x"].eq(number).all()
        assert moved["y"][0].item() == number
