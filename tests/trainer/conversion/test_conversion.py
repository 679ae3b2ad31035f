"""Language models of Hugging Face, made ours and theirs again: the same logits and bytes, and faults by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from energon_lite.cli.main import main
from energon_lite.errors import ConfigError, EnergonLiteError, StateError, StateMismatchError, UsageError
from energon_lite.trainer.checkpointing import tensors
from energon_lite.trainer.checkpointing.checkpoint import latest_checkpoint
from energon_lite.trainer.checkpointing.tensors import CheckpointReader
from energon_lite.trainer.checkpointing.weights import find_weights
from energon_lite.trainer.conversion.export import native_to_file, native_to_huggingface
from energon_lite.trainer.conversion.from_huggingface import huggingface_to_native
from energon_lite.trainer.conversion.language_config import model_config
from energon_lite.trainer.conversion.tensor_names import model_shapes
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training.generate import load_model
from tests.trainer.conversion.small_models import SCALING, SaveModel, change_config, make_model

CONFIGS: dict[str, dict[str, Any]] = {
    "grouped heads": {"num_key_value_heads": 2},
    "one key head": {"num_key_value_heads": 1},
    "tied": {"tie_word_embeddings": True},
    "untied, wide": {"hidden_size": 64, "num_hidden_layers": 3, "rms_norm_eps": 1e-5},
    "Llama 3 scaling": {"rope_parameters": SCALING, "num_key_value_heads": 2},
    "free width of heads": {"head_dim": 12, "num_key_value_heads": 2},
    "Qwen 2.5": {"kind": "qwen2", "num_key_value_heads": 2, "tie_word_embeddings": True, "max_window_layers": 2},
    "Qwen 3": {"kind": "qwen3", "num_key_value_heads": 2, "head_dim": 16},
    "Qwen 3, tied": {"kind": "qwen3", "hidden_size": 36, "head_dim": 6, "tie_word_embeddings": True},
    "Mistral": {"kind": "mistral", "num_key_value_heads": 2, "head_dim": 12, "sliding_window": None},
    "Mistral with a window": {
        "kind": "mistral",
        "num_key_value_heads": 2,
        "head_dim": 10,
        "hidden_size": 42,
        "sliding_window": 50,
    },
    "odd vocabulary": {"vocab_size": 101, "tie_word_embeddings": True, "num_key_value_heads": 2},
}


def our_logits(model: LlamaModel, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.all_logits(tokens)


def files_of(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_and_the_same_files_again(tmp_path: Path, save_model: SaveModel, name: str) -> None:
    changes = CONFIGS[name]
    theirs = save_model(shard="20KB", seed=1, **changes)
    assert len(list(theirs.glob("*.safetensors"))) > 1
    # Boxes smaller than most tensors, so that these are cut.
    huggingface_to_native(theirs, tmp_path / "native", read_bytes=1000)
    model = load_model(latest_checkpoint(tmp_path / "native") or "")
    tokens = torch.randint(model.config.vocab_size, (3, 50), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        wanted = make_model(1, **changes)(tokens).logits
    assert wanted.std() > 0.1
    torch.testing.assert_close(our_logits(model, tokens), wanted, rtol=0, atol=1e-5)
    native_to_huggingface(tmp_path / "native", tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(theirs)


def test_table_of_shapes_is_the_models(save_model: SaveModel) -> None:
    for changes in CONFIGS.values():
        values = make_model(**changes).config.to_dict() | {"architectures": None, "dtype": "float32"}
        config = model_config(values, where="", vocab_multiple=48)
        model = LlamaModel(config, build_mesh())
        assert {name: tuple(p.shape) for name, p in model.named_parameters()} == model_shapes(config, padded=True)


def test_division_into_files_when_asked(tmp_path: Path, save_model: SaveModel) -> None:
    theirs, other = save_model(), save_model("other", shard="30KB")
    huggingface_to_native(theirs, tmp_path / "native")
    # As transformers divides it.
    native_to_huggingface(tmp_path / "native", tmp_path / "divided", shard_bytes=30_000)
    assert files_of(tmp_path / "divided") == files_of(other)
    # As another folder is divided.
    native_to_huggingface(tmp_path / "native", tmp_path / "like", like=other)
    assert files_of(tmp_path / "like") == files_of(other)


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
    native_to_huggingface(tmp_path / "native", tmp_path / "back")
    native_to_huggingface(tmp_path / "native", tmp_path / "wide", dtype="float32")
    first = load_file(theirs / "model.safetensors")
    for folder, dtype in (("back", torch.bfloat16), ("wide", torch.float32)):
        found = load_file(tmp_path / folder / "model.safetensors")
        assert all(torch.equal(found[name], first[name].bfloat16().to(dtype)) for name in first)
        said = json.loads((tmp_path / folder / "config.json").read_text())
        assert said.get("dtype", said.get("torch_dtype")) == str(dtype).removeprefix("torch.")


#: Kinds of models, and what they become if nobody says what they were.
ALONE: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"rope_parameters": SCALING}, "LlamaForCausalLM"),
    ("qwen2", {}, "Qwen2ForCausalLM"),
    ("qwen2", {"use_sliding_window": True, "sliding_window": 20, "max_window_layers": 0}, "Qwen2ForCausalLM"),
    ("qwen3", {"head_dim": 12, "tie_word_embeddings": True}, "Qwen3ForCausalLM"),
    ("mistral", {"sliding_window": 20}, "MistralForCausalLM"),
    ("mistral", {"sliding_window": None, "head_dim": 12}, "LlamaForCausalLM"),
]


@pytest.mark.parametrize(("kind", "changes", "becomes"), ALONE, ids=str)
def test_another_library_reads_a_configuration_of_ours(
    tmp_path: Path, save_model: SaveModel, kind: str, changes: dict[str, Any], becomes: str
) -> None:
    from transformers import AutoModelForCausalLM

    theirs = save_model(kind=kind, num_key_value_heads=2, **changes)
    huggingface_to_native(theirs, tmp_path / "native")
    (tmp_path / "native" / "huggingface" / "config.json").unlink()
    native_to_huggingface(tmp_path / "native", tmp_path / "back", max_length=64)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    assert type(model).__name__ == becomes
    tokens = torch.arange(50)[None]
    with torch.no_grad():
        wanted = make_model(kind=kind, num_key_value_heads=2, **changes)(tokens).logits
        assert torch.equal(model(tokens).logits, wanted)


def test_one_file(tmp_path: Path, save_model: SaveModel) -> None:
    place = huggingface_to_native(save_model(vocab_size=101), tmp_path / "native", read_bytes=500)
    native_to_file(place, tmp_path / "one.safetensors")
    found, model = load_file(tmp_path / "one.safetensors"), load_model(place)
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all(torch.equal(found[name], p) for name, p in model.named_parameters())
    with pytest.raises(UsageError, match="a file already"):
        native_to_file(place, tmp_path / "one.safetensors")


def test_files_of_a_checkpoint_end_at_a_size(
    tmp_path: Path, save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensors, "FILE_BYTES", 9000)
    place = huggingface_to_native(save_model(), tmp_path / "native", read_bytes=4096)
    sizes = [file.stat().st_size for file in Path(place).glob("*.distcp")]
    assert len(sizes) > 5 and max(sizes) < 20_000
    native_to_huggingface(place, tmp_path / "back")
    assert files_of(tmp_path / "back") == files_of(tmp_path / "hf")
    with CheckpointReader(place) as saved:
        assert len(saved.boxes("model.embed_tokens.weight")) == 4


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


NORM, DOWN, HEAD = "model.norm.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors: [tensors.pop(name) for name in (NORM, DOWN)], f"2 tensors are missing: {DOWN}, {NORM}"),
        (lambda tensors: tensors.update(extra=torch.ones(2)), "1 tensor is not part of the model: extra"),
        (lambda tensors: tensors.update({DOWN: torch.ones(48, 32)}), r"down_proj.weight is \[48, 32\] instead of"),
    ],
)
def test_other_tensors_are_named(tmp_path: Path, save_model: SaveModel, change: Any, words: str) -> None:
    folder = save_model()
    rewrite(folder, change)
    with pytest.raises(StateMismatchError, match=words):
        huggingface_to_native(folder, tmp_path / "native")
    assert not (tmp_path / "native").exists()


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


def test_a_tensor_in_two_files(tmp_path: Path, save_model: SaveModel) -> None:
    folder = save_model(shard="20KB")
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    name, values = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: values}, second)
    with pytest.raises(StateError, match=f"it is in {first.name} and {second.name}"):
        huggingface_to_native(folder, tmp_path / "native")


def test_a_list_of_files_leads_nowhere_else(tmp_path: Path, save_model: SaveModel) -> None:
    huggingface_to_native(save_model(), tmp_path / "native")
    path = tmp_path / "native" / "huggingface" / "energon_lite_files.json"
    path.write_text(path.read_text().replace("model.safetensors", "../model.safetensors"))
    with pytest.raises(StateError, match="files of other folders"):
        native_to_huggingface(tmp_path / "native", tmp_path / "back")


@pytest.mark.parametrize("fault", ["bin", "nothing", "index", "config", "bias"])
def test_a_folder_that_is_no_model(tmp_path: Path, save_model: SaveModel, fault: str) -> None:
    folder = save_model(shard="20KB" if fault == "index" else "1GB")
    kind: type[EnergonLiteError]
    if fault in ("bin", "nothing"):
        (folder / "model.safetensors").rename(folder / ("pytorch_model.bin" if fault == "bin" else "other"))
        kind, words = UsageError, "only pytorch_model.bin" if fault == "bin" else "neither model.safetensors nor"
    elif fault == "index":
        path = folder / "model.safetensors.index.json"
        index = json.loads(path.read_text())
        index["weight_map"][NORM] = index["weight_map"]["model.embed_tokens.weight"]
        path.write_text(json.dumps(index))
        kind, words = StateError, f"the index has {NORM} in"
    elif fault == "config":
        (folder / "config.json").write_text("{")
        kind, words = ConfigError, "not valid JSON"
    else:
        change_config(folder, attention_bias=True)
        kind, words = ConfigError, "attention_bias is set"
    with pytest.raises(kind, match=words):
        huggingface_to_native(folder, tmp_path / "native")


def test_a_damaged_checkpoint_is_refused(tmp_path: Path, save_model: SaveModel) -> None:
    place = huggingface_to_native(save_model(), tmp_path / "native")
    file = next(Path(place).glob("*.distcp"))
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(StateError, match="is damaged"):
        native_to_huggingface(tmp_path / "native", tmp_path / "back")
    with pytest.raises(StateError, match="no finished checkpoint"):
        native_to_huggingface(tmp_path / "hf", tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_a_checkpoint_is_found_by_any_name(tmp_path: Path, save_model: SaveModel) -> None:
    place = Path(huggingface_to_native(save_model(), tmp_path / "native"))
    assert find_weights(place) == find_weights(f"{tmp_path}/native/") == place
    assert find_weights(place.rename(tmp_path / "best")) == tmp_path / "best"


def test_a_folder_in_use_is_left_alone(tmp_path: Path, save_model: SaveModel) -> None:
    theirs = save_model()
    place = huggingface_to_native(theirs, tmp_path / "native")
    with pytest.raises(UsageError, match="there are checkpoints already"):
        huggingface_to_native(theirs, tmp_path / "native")
    with pytest.raises(UsageError, match="not empty"):
        native_to_huggingface(place, theirs)


def test_a_former_model_with_other_tensors(
    tmp_path: Path, save_model: SaveModel, caplog: pytest.LogCaptureFixture
) -> None:
    other = save_model("other", num_hidden_layers=3, shard="20KB")
    place = huggingface_to_native(save_model(), tmp_path / "native")
    with caplog.at_level(logging.WARNING):
        native_to_huggingface(place, tmp_path / "back", like=other)
    assert "its division into files is not taken" in caplog.text
    assert json.loads((tmp_path / "back" / "config.json").read_text())["num_hidden_layers"] == 2


def test_commands(tmp_path: Path, save_model: SaveModel) -> None:
    theirs, run = save_model(), CliRunner()

    def convert(*words: object) -> str:
        result = run.invoke(main, ["convert-weights", *map(str, words)])
        assert result.exit_code == 0, result.output
        return result.output

    assert "step-00000000" in convert("hf-to-native", theirs, tmp_path / "native", "--vocab-multiple", "1")
    convert("native-to-hf", tmp_path / "native", tmp_path / "back", "--shard-size", "0.02MB")
    assert len(list((tmp_path / "back").glob("*.safetensors"))) > 2
    convert("to-file", tmp_path / "native", tmp_path / "one.safetensors")
    for words in (["native-to-hf", str(tmp_path / "native"), str(tmp_path / "x"), "--shard-size", "5 apples"],):
        result = run.invoke(main, ["convert-weights", *words])
        assert result.exit_code == 1 and "not a number of bytes" in result.output
    result = run.invoke(main, ["convert-weights", "native-to-hf", str(tmp_path / "native"), str(theirs)])
    assert result.exit_code == 1 and "not empty" in result.output
