"""Objects between processes: equal on the other side, tensors without copies in pickles, large ones in memory that both
sides see; and what cannot go there is named."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from energon_lite import TaskEncoder, TextSample
from energon_lite.errors import FatalSampleError, UsageError
from energon_lite.loading.executors.segments import SegmentReader, Segments, SegmentWriter
from energon_lite.loading.executors.transport import pack, raise_unpicklable, send, unsendable
from energon_lite.loading.makers.chunk_job import Carried, Item, Made
from tests.testing import descriptors, received, train_loader


def through_a_pipe(value: Any) -> Any:
    """What the other side of a pipe gets; a thread sends, because a pipe holds little."""
    ours, theirs = multiprocessing.Pipe()
    with ThreadPoolExecutor(1) as pool, ours, theirs:
        sent = pool.submit(send, theirs, pack(value))
        obj = received(ours)
        sent.result()
    return obj


TENSORS: dict[str, torch.Tensor] = {
    "float": torch.randn(3, 4),
    "bfloat16": torch.randn(5).to(torch.bfloat16),
    "bool": torch.tensor([True, False]),
    "int8": torch.arange(7, dtype=torch.int8),
    "complex": torch.randn(2, dtype=torch.complex64),
    "scalar": torch.tensor(3.5, dtype=torch.float64),
    "empty": torch.empty(0, 3, dtype=torch.int32),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "strided": torch.arange(10)[::2],
    "expanded": torch.ones(1).expand(4),
    "needs grad": torch.ones(2, requires_grad=True),
    "conjugated": torch.randn(2, dtype=torch.complex64).conj(),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name: str) -> None:
    tensor = TENSORS[name]
    (again,) = through_a_pipe([tensor])
    assert again.dtype == tensor.dtype and again.shape == tensor.shape
    assert torch.equal(again.to_dense(), tensor.to_dense())
    assert again.requires_grad == tensor.requires_grad


def test_what_arrives_can_be_written_to() -> None:
    again = through_a_pipe({"t": torch.zeros(5), "n": np.zeros(5)})
    again["t"] += 1
    again["n"] += 1
    assert again["t"].sum() == 5 and again["n"].sum() == 5


@given(
    st.recursive(
        st.one_of(st.none(), st.integers(), st.text(), st.binary(max_size=200), st.floats(allow_nan=False)),
        lambda inner: st.one_of(st.lists(inner), st.dictionaries(st.text(), inner), st.tuples(inner, inner)),
    ),
    st.lists(st.integers(0, 300), max_size=5),
)
@example(TextSample(__key__="k", __restore_key__=("sample", 0, 1, 2, 0), text="x"), [2_000_000])
@example([], [number % 7 for number in range(3000)])
def test_any_structure(value: Any, sizes: list[int]) -> None:
    tensors = [torch.arange(size, dtype=torch.int16) for size in sizes]
    again, tensors_again = through_a_pipe((value, tensors))
    assert again == value
    assert all(map(torch.equal, tensors, tensors_again))


def test_the_other_side_is_gone() -> None:
    ours, theirs = multiprocessing.Pipe()
    theirs.close()
    with pytest.raises(OSError):
        send(ours, pack([torch.zeros(1_000_000)]))
    ours, theirs = multiprocessing.Pipe()
    theirs.send_bytes(b"")  # a beginning of nothing
    theirs.close()
    with pytest.raises(EOFError):
        received(ours)


class Pair:
    """Trainer and worker in one process."""

    def __init__(self, count: int = 3):
        if not hasattr(os, "memfd_create"):
            pytest.skip("the system has no such memory")
        segments = Segments(count)
        self.ours, self.theirs = multiprocessing.Pipe()
        self.reader, self.writer = SegmentReader(segments), SegmentWriter(segments)

    def travel(self, value: Any) -> Any:
        self.writer.release(self.reader.take_released())
        send(self.theirs, pack(value), self.writer)
        return received(self.ours, self.reader)


@given(kept=st.lists(st.tuples(st.integers(1, 60_000), st.booleans()), max_size=30))
def test_what_is_kept_is_not_overwritten(kept: list[tuple[int, bool]]) -> None:
    pair = Pair()
    held: list[tuple[int, int, Any]] = []
    for number, (length, keep) in enumerate(kept):
        value = {"x": torch.full((length,), number, dtype=torch.int32), "y": [torch.tensor(number)], "z": b"raw" * 9}
        if len(held) == 3:
            held.pop(0)
        again = pair.travel(value)
        assert again["z"] == value["z"] and (length < 9_000 or again["x"].data_ptr() % 64 == 0)
        if keep:
            held.append((number, length, again["x"]))
        del again
        for mark, size, tensor in held:
            assert tensor.shape == (size,) and bool((tensor == mark).all())


def test_a_view_of_a_view_keeps_its_segment() -> None:
    pair = Pair(1)
    part = pair.travel([torch.arange(50_000)])[0][10:20].view(torch.uint8)
    gc.collect()
    assert pair.reader.take_released() == []
    in_the_pipe, sent = [torch.zeros(9_000, dtype=torch.uint8)], pair.travel  # no free segment: through the pipe
    # A pipe holds little, so the message must be small enough for it, and large enough to want a segment.
    pair.writer.worth = 1
    assert torch.equal(sent(in_the_pipe)[0], in_the_pipe[0])
    assert torch.equal(part.view(torch.int64), torch.arange(10, 20))
    del part
    assert pair.reader.take_released() == [0]


def test_bytes_are_copied_and_the_segment_is_free_at_once() -> None:
    pair = Pair(1)
    for number in range(5):
        data = bytes([number]) * 100_000
        assert pair.travel([data]) == [data]


def test_few_segments_are_used_if_few_are_needed() -> None:
    pair = Pair(6)
    for _ in range(20):
        pair.travel([torch.zeros(100_000)])
    assert sum(size > 0 for size in pair.writer._sizes) == 1


def test_descriptors_are_closed() -> None:
    before = descriptors()
    pair = Pair()
    kept = pair.travel([torch.arange(100_000)])[0]
    pair.reader.close()
    pair.ours.close()
    pair.theirs.close()
    assert len(descriptors() - before) <= 1  # the map of what is kept has one
    assert torch.equal(kept, torch.arange(100_000))
    del kept
    assert not descriptors() - before


_loader = partial(train_loader, batch_size=2, num_workers=1)


class Lambdas(TaskEncoder):
    def encode_sample(self, sample: Any) -> Any:
        return {"__key__": sample.__key__, "fine": 1, "extra": [{"f": lambda: 0}]}

    def select_samples_to_pack(self, samples: list[Any]) -> list[list[Any]]:
        return [[sample] for sample in samples]

    def pack_selected_samples(self, samples: list[Any]) -> Any:
        return samples[0]


@pytest.mark.parametrize("arguments", [{}, {"packing_buffer_size": 4}])
def test_a_part_of_a_batch_that_cannot_be_sent(leaf_of: Any, arguments: dict[str, Any]) -> None:
    with _loader(leaf_of(20), task_encoder=Lambdas(), **arguments) as loader, pytest.raises(FatalSampleError) as caught:
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
    with pytest.raises(NotImplementedError) as refused:
        pack(opaque := {"x": torch.eye(3).to_mkldnn()})
    assert "['x'] is a tensor on cpu, torch._mkldnn" in str(unsendable((opaque, [], 0, None), refused.value))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tensor_on_a_real_device_is_not_sent() -> None:
    with pytest.raises(TypeError, match="a tensor on cuda:0"):
        pack({"x": torch.ones(2, device="cuda")})


class Locked(TaskEncoder):
    def __init__(self) -> None:
        self.settings = {"lock": threading.Lock()}


def test_a_part_of_an_encoder_that_cannot_be_pickled(leaf_of: Any) -> None:
    with (
        _loader(leaf_of(20), task_encoder=Locked(), start_method="spawn") as loader,
        pytest.raises(UsageError) as caught,
    ):
        next(iter(loader))
    text = str(caught.value)
    assert "the task encoder Locked cannot be pickled" in text and "start_method='spawn'" in text
    assert "self.settings['lock'] is a _thread.lock" in text and 'start_method="fork"' in text


class Cyclic(TaskEncoder):
    def __init__(self) -> None:
        self.itself = {"again": self}
        self.lock = threading.Lock()


def test_a_sample_that_is_handed_over_cannot_be_sent() -> None:
    """The message names its field, not the place in the job's result."""
    item = Item({"lock": threading.Lock()}, (0, 0, 0, 0), (1, 0, 0, 0), ())
    made = Made(None, is_batch=False, carried=Carried(None, None, [], [], samples=[item]))
    assert "process: ['lock'] is a _thread.lock" in str(unsendable(([made],), TypeError()))


def test_an_encoder_that_refers_to_itself_cannot_be_pickled() -> None:
    with pytest.raises(UsageError, match=r"the task encoder Cyclic cannot be pickled[\s\S]*self.itself\['again'\]"):
        raise_unpicklable(Cyclic(), "spawn", ValueError())


def test_a_class_inside_of_a_function_cannot_be_pickled() -> None:
    class Inner(TaskEncoder):
        pass

    with pytest.raises(UsageError, match=r"its class .*<locals>\.Inner is made inside of a function"):
        raise_unpicklable(Inner(), "spawn", AttributeError("it"))
    with pytest.raises(AttributeError, match=r"^it$"):  # another reason stays what it is
        raise_unpicklable(TaskEncoder(), "spawn", AttributeError("it"))
