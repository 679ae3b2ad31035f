"""Language models of Hugging Face, made ours and theirs again: the same logits and bytes, and faults by name."""

from __future__ import annotations

import itertools
import json
import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from energon_lite.errors import ConfigError, EnergonLiteError, StateError, StateMismatchError, UsageError
from energon_lite.trainer import find_weights, load_model
from energon_lite.trainer.checkpointing import tensors
from energon_lite.trainer.checkpointing.tensors import CheckpointReader
from energon_lite.trainer.conversion.export import native_to_huggingface
from energon_lite.trainer.conversion.from_huggingface import huggingface_to_native
from energon_lite.trainer.conversion.safetensors_file import SafetensorsFile, write_safetensors
from energon_lite.trainer.parallel.shards import Box
from tests.testing import command, output_of, script
from tests.trainer.conversion.small_models import SCALING, SaveModel, change_config, files_of, make_model

CONFIGS: dict[str, dict[str, Any]] = {
    "untied, wide": {"hidden_size": 64, "num_hidden_layers": 3, "rms_norm_eps": 1e-5},
    "Llama 3 scaling": {"rope_parameters": SCALING, "num_key_value_heads": 2},
    "free width of heads": {"head_dim": 12, "num_key_value_heads": 2},
    "Qwen 2.5": {"kind": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True, "max_window_layers": 2},
    "Qwen 2.5 with a window": {
        "kind": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 0,
    },
    "Qwen 3": {"kind": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "Qwen 3, tied": {"kind": "qwen3", "hidden_size": 36, "head_dim": 6, "tie_word_embeddings": True},
    "Mistral": {"kind": "mistral", "num_key_value_heads": 2, "head_dim": 12, "sliding_window": None},
    "Mistral with a window": {"kind": "mistral", "num_key_value_heads": 1, "head_dim": 10, "hidden_size": 42}
    | {"sliding_window": 50},
    "odd vocabulary": {"vocab_size": 101, "tie_word_embeddings": True, "num_key_value_heads": 2},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_and_the_same_files_again(
    tmp_path: Path, save_model: SaveModel, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    changes = CONFIGS[name]
    theirs = save_model(shard="20KB", seed=1, **changes)
    assert len(list(theirs.glob("*.safetensors"))) > 1
    # Boxes smaller than most tensors, so that these are cut; and files of a few of them.
    monkeypatch.setattr(tensors, "FILE_BYTES", 5000)
    place = huggingface_to_native(theirs, tmp_path / "native", read_bytes=1000)
    sizes = [file.stat().st_size for file in Path(place).glob("*.distcp")]
    assert len(sizes) > 5 and max(sizes) < 20_000
    with CheckpointReader(place) as saved:
        assert len(saved.boxes("model.embed_tokens.weight")) > 4
    model, former = load_model(place), make_model(1, **changes)
    tokens = torch.randint(model.config.vocab_size, (3, 50), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = former(tokens).logits
        torch.testing.assert_close(model.all_logits(tokens), wanted, rtol=0, atol=1e-5)
    assert wanted.std() > 0.1 and model.config.vocab_multiple == 64
    native_to_huggingface(tmp_path / "native", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(theirs)
    # If nobody says what it was, transformers reads our words for it; a Mistral without a window is a Llama.
    (tmp_path / "native" / "huggingface" / "config.json").unlink()
    native_to_huggingface(tmp_path / "native", tmp_path / "alone", max_length=64)
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "alone")
    assert type(alone).__name__ == ("LlamaForCausalLM" if name == "Mistral" else type(former).__name__)
    assert alone.config.eos_token_id == former.config.eos_token_id
    with torch.no_grad():
        assert torch.equal(alone(tokens).logits, wanted)


def test_division_into_files_when_asked(
    tmp_path: Path, save_model: SaveModel, caplog: pytest.LogCaptureFixture
) -> None:
    other = save_model("other", shard="30KB")
    huggingface_to_native(save_model(shard="20KB"), tmp_path / "native")
    # As transformers divides it.
    native_to_huggingface(tmp_path / "native", tmp_path / "divided", shard_bytes=30_000)
    assert files_of(tmp_path / "divided") == files_of(other)
    # As another folder is divided, if that has the same tensors.
    native_to_huggingface(tmp_path / "native", tmp_path / "like", like=other)
    assert files_of(tmp_path / "like") == files_of(other)
    former = save_model("former", num_hidden_layers=3, shard="20KB")
    with caplog.at_level(logging.WARNING):
        native_to_huggingface(tmp_path / "native", tmp_path / "back", like=former)
    assert "its division into files is not taken" in caplog.text
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_hidden_layers"] == 2


def test_what_belongs_to_a_model_comes_along(tmp_path: Path, save_model: SaveModel) -> None:
    theirs = save_model()
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "chat_template.jinja"):
        (theirs / name).write_text(name)
    (theirs / "modeling_mine.py").write_text("print(1)")
    huggingface_to_native(theirs, "memory://converted/model")
    native_to_huggingface("memory://converted/model", tmp_path / "back")
    wanted = files_of(theirs)
    del wanted["modeling_mine.py"]  # code stays where it is
    assert files_of(tmp_path / "back") == wanted


def test_other_types(tmp_path: Path, save_model: SaveModel) -> None:
    theirs = save_model()
    huggingface_to_native(theirs, tmp_path / "native", dtype="bfloat16")
    (tmp_path / "back").mkdir()  # an empty folder will do
    native_to_huggingface(tmp_path / "native", tmp_path / "back")
    native_to_huggingface(tmp_path / "native", tmp_path / "wide", dtype="float32")
    first = load_file(theirs / "model.safetensors")
    for folder, dtype in (("back", torch.bfloat16), ("wide", torch.float32)):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert all(torch.equal(found[name], first[name].bfloat16().to(dtype)) for name in first)
        said = json.loads((tmp_path / folder / "config.json").read_text())
        assert said.get("dtype", said.get("torch_dtype")) == str(dtype).removeprefix("torch.")


FILE = "model.safetensors"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})


NORM, DOWN, HEAD = "model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"


def test_a_head_beside_tied_embeddings(tmp_path: Path, save_model: SaveModel) -> None:
    folder = save_model(tie_word_embeddings=True)
    rewrite(folder, lambda tensors: tensors.update({HEAD: tensors["model.embed_tokens.weight"].clone()}))
    huggingface_to_native(folder, tmp_path / "native")
    native_to_huggingface(tmp_path / "native", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(folder)
    rewrite(folder, lambda tensors: tensors[HEAD].add_(1))
    with pytest.raises(StateMismatchError, match="embeddings are tied, but lm_head"):
        huggingface_to_native(folder, tmp_path / "other")


def test_what_can_be_computed_is_left_out(tmp_path: Path, save_model: SaveModel) -> None:
    folder = save_model()
    before = load_file(folder / "model.safetensors")
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    huggingface_to_native(folder, tmp_path / "native")
    native_to_huggingface(tmp_path / "native", tmp_path / "back")
    found = load_file(tmp_path / "back" / "model.safetensors")
    assert found.keys() == before.keys() and all(torch.equal(found[name], before[name]) for name in before)


def test_a_list_of_files_leads_nowhere_else(tmp_path: Path, save_model: SaveModel) -> None:
    huggingface_to_native(save_model(), tmp_path / "native")
    path = tmp_path / "native" / "huggingface" / "energon_lite_files.json"
    path.write_text(path.read_text().replace("model.safetensors", "../model.safetensors"))
    with pytest.raises(StateError, match="files of other folders"):
        native_to_huggingface(tmp_path / "native", tmp_path / "back")


def misplace(folder: Path) -> None:
    """A tensor is not where the index says."""
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"][NORM] = index["weight_map"]["model.embed_tokens.weight"]
    path.write_text(json.dumps(index))


def repeat(folder: Path) -> None:
    """A tensor is in two files."""
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    name, values = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: values}, second)


#: Faults of a folder, and what is said of each.
FAULTS: dict[str, tuple[Callable[[Path], object], type[EnergonLiteError], str]] = {
    "bin": (
        lambda folder: (folder / FILE).rename(folder / "pytorch_model.bin"),
        UsageError,
        r"only pytorch_model\.bin",
    ),
    "nothing": (lambda folder: (folder / FILE).rename(folder / "other"), UsageError, r"neither model\.safetensors nor"),
    "index": (misplace, StateError, f"the index has {NORM} in"),
    "twice": (repeat, StateError, r"it is in model-00001-of-\d+.safetensors and model-00002-of-\d+.safetensors"),
    "config": (lambda folder: (folder / "config.json").write_text("{"), ConfigError, "not valid JSON"),
    "list": (lambda folder: (folder / "config.json").write_text("[]"), ConfigError, "a mapping"),
    "bias": (lambda folder: change_config(folder, attention_bias=True), ConfigError, "attention_bias is set"),
    "missing": (
        lambda folder: rewrite(folder, lambda tensors: [tensors.pop(name) for name in (NORM, DOWN)]),
        StateMismatchError,
        f"2 tensors are missing: {DOWN}, {NORM}",
    ),
    "unknown": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update(extra=torch.ones(2))),
        StateMismatchError,
        "1 tensor is not part of the model: extra",
    ),
    "turned": (
        lambda folder: rewrite(folder, lambda tensors: tensors.update({DOWN: torch.ones(48, 32)})),
        StateMismatchError,
        r"down_proj.weight is \[48, 32\] instead of",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_folder_that_is_no_model(tmp_path: Path, save_model: SaveModel, fault: str) -> None:
    spoil, kind, words = FAULTS[fault]
    folder = save_model(shard="20KB" if fault in ("index", "twice") else "10GB")
    spoil(folder)
    with pytest.raises(kind, match=words):
        huggingface_to_native(folder, tmp_path / "native")
    assert not (tmp_path / "native").exists()


def test_a_conversion_that_fails_leaves_nothing(tmp_path: Path, save_model: SaveModel) -> None:
    gone = mock.patch.object(SafetensorsFile, "read_rows", side_effect=OSError("it is gone"))
    with gone, pytest.raises(OSError, match="it is gone"):
        huggingface_to_native(save_model(), tmp_path / "native")
    assert [path.name for path in (tmp_path / "native").iterdir()] == ["huggingface"]


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, save_model: SaveModel) -> None:
    """One that is whole is found by any name."""
    place = Path(huggingface_to_native(save_model(), tmp_path / "native"))
    assert find_weights(place) == find_weights(f"{tmp_path}/native/") == place
    assert find_weights(place.rename(tmp_path / "best")) == tmp_path / "best"
    file = next((tmp_path / "best").glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    for source, words in (("best", "is damaged"), ("hf", "no finished checkpoint")):
        with pytest.raises(StateError, match=words):
            native_to_huggingface(tmp_path / source, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_commands(tmp_path: Path, save_model: SaveModel) -> None:
    """A folder in use is left alone, and a file too."""
    theirs, native = save_model(vocab_size=101), tmp_path / "native"
    convert = partial(output_of, "convert-weights")
    assert "step-00000000" in convert("hf-to-native", theirs, native, "--vocab-multiple", 1)
    said = convert("native-to-hf", native, tmp_path / "back", "--shard-size", "0.02MB")
    assert "model.safetensors.index.json" in said and "no tokenizer is known" in said
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    convert("to-file", native, tmp_path / "one.safetensors")
    found, model = load_file(tmp_path / "one.safetensors"), load_model(find_weights(native))
    assert json.loads((SafetensorsFile(tmp_path / "one.safetensors").metadata or {})["energon_lite"])["step"] == 0
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], p) for name, p in model.named_parameters())
    for words, said in (
        (["native-to-hf", native, tmp_path / "x", "--shard-size", "5 apples"], "not a number of bytes"),
        (["native-to-hf", native, theirs], "not empty"),
        (["hf-to-native", theirs, native], "there are checkpoints already"),
        (["to-file", native, tmp_path / "one.safetensors"], "a file already"),
        (["hf-to-native", theirs, "s4://bucket/run"], "cannot open it here: Protocol not known: s4"),
    ):
        status, output = command("convert-weights", *words)
        assert status == 1 and said in output


# -- memory: a model passes through that of its largest tensor; tools/bench/conversion_memory.py measures it -----------


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    root = Path(__file__).parents[3]
    monkeypatch.setenv("PYTHONPATH", f"{root}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    return script(root / "tools/bench/conversion_memory.py")


@pytest.mark.slow
def test_there_and_back_in_less_than_two_tensors(tmp_path: Path, bench: ModuleType) -> None:
    largest = bench.write_model(tmp_path / "hf", bench.model_of(2**26, layers=2), shard_bytes=30_000_000)
    # Each tensor in one rectangle, which needs the most.
    assert bench.growth("there-and-back", tmp_path / "hf", tmp_path / "made", 2 * largest) < 2 * largest


@pytest.mark.nightly
def test_a_gigabyte(tmp_path: Path, bench: ModuleType) -> None:
    found = bench.measure(tmp_path, 1.0)
    assert found["model"] > 2**30
    assert all(peak < 2 * found["largest"] for peak in found["peaks"].values()), found


# -- safetensors: what we write, the library reads; what it writes, we read; what is broken, nobody takes for whole ----

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
    "size": lambda _: len(GAP).to_bytes(8, "little") + GAP.replace(b"[4, 8]", b"[0, 8]") + bytes(4),
    "type": lambda _: len(GAP).to_bytes(8, "little") + GAP.replace(b'"F32"', b'"F8" ') + bytes(4),
    "empty": lambda _: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_file_is_refused(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"x": torch.ones(8), "y": torch.ones(3)}, path)
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    words = "x is of type F8" if damage == "type" else "not a whole safetensors file"
    with pytest.raises(EnergonLiteError, match=words):
        SafetensorsFile(path)
