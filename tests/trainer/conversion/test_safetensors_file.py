"""What we write, the library reads; what it writes, we read; and what is broken, nobody takes for whole."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from energon_lite.errors import StateError
from energon_lite.trainer.conversion.safetensors_file import SafetensorsFile, write_safetensors
from energon_lite.trainer.parallel.shards import Box

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


def values_of(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(1, torch.Size(shape).numel() + 1).reshape(shape).to(dtype)


TENSORS = st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1, max_size=3).map(
    lambda shapes: {f"t{number}": values_of(*one) for number, one in enumerate(shapes)}
)


@st.composite
def rectangles(draw: st.DrawFn, shape: tuple[int, ...]) -> list[Box]:
    """A shape cut along each dimension at some places; the pieces in any order."""
    cuts = []
    for size in shape:
        inner = draw(st.sets(st.integers(1, size - 1))) if size > 1 else set()
        cuts.append(list(itertools.pairwise([0, *sorted(inner), size])))
    found = [Box(tuple(a for a, _ in part), tuple(b - a for a, b in part)) for part in itertools.product(*cuts)]
    return draw(st.permutations(found))


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))


@given(TENSORS, st.data())
def test_the_library_reads_what_was_written_in_rectangles(
    tmp_path: Path, tensors: dict[str, torch.Tensor], data: st.DataObject
) -> None:
    declared = {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()}
    with write_safetensors(tmp_path / "a", declared, {"format": "pt", "ü": '"'}) as writer:
        for name, tensor in tensors.items():
            for box in data.draw(rectangles(tuple(tensor.shape))):
                writer.put(name, box, tensor[slices(box)])
    found = load_file(tmp_path / "a")
    assert SafetensorsFile(tmp_path / "a").metadata == {"format": "pt", "ü": '"'}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor)


@given(TENSORS, st.data())
def test_rows_of_what_the_library_wrote(tmp_path: Path, tensors: dict[str, torch.Tensor], data: st.DataObject) -> None:
    save_file(tensors, tmp_path / "a")
    file = SafetensorsFile(tmp_path / "a")
    assert file.entries.keys() == tensors.keys()
    for name, tensor in tensors.items():
        rows = tensor.shape[0] if tensor.dim() else 1
        cuts = st.tuples(st.integers(0, rows), st.integers(0, rows))
        start, stop = sorted(data.draw(cuts)) if tensor.dim() else (0, 1)
        wanted = tensor[start:stop] if tensor.dim() else tensor
        assert torch.equal(file.read_rows(name, start, stop), wanted)


def test_a_file_that_lacks_something_is_not_left(tmp_path: Path) -> None:
    with (
        pytest.raises(StateError, match="not written whole, the first is x"),
        write_safetensors(tmp_path / "a", {"x": (torch.float32, (2, 2))}, None) as writer,
    ):
        writer.put("x", Box((0, 0), (1, 2)), torch.ones(1, 2))
    assert list(tmp_path.iterdir()) == []


GAP = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}).encode()
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda content: content[:-1],
    "longer": lambda content: content + b"x",
    "header": lambda content: content[:8] + b"x" + content[9:],
    "gap": lambda _: len(GAP).to_bytes(8, "little") + GAP + bytes(8),
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(8), "y": torch.ones(3)}, path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.raises(StateError, match="not a whole safetensors file"):
        SafetensorsFile(path)
