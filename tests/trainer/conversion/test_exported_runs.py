"""What a training run leaves, as a folder of Hugging Face: with its tokenizer; and what of it has no place there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from energon_lite.errors import StateError
from energon_lite.trainer import (
    ByteTokenizer,
    adopt_norm,
    config_from_dict,
    config_to_dict,
    generate,
    register_norm,
)
from energon_lite.trainer.checkpointing.checkpoint import save_checkpoint
from energon_lite.trainer.conversion.export import native_to_huggingface
from energon_lite.trainer.conversion.huggingface_folder import byte_tokenizer_files
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer
from tests.testing import examples, output_of

SHAPE = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "ffn_size": 24}


def save_run(tmp_path: Path, *, tokenizer: str | None = None, **model: Any) -> LlamaModel:
    """A checkpoint as the Trainer leaves it, in ``run``."""
    config = config_from_dict({"data": {"path": "texts", "tokenizer": tokenizer}, "model": SHAPE | model})
    mesh = build_mesh()
    made = LlamaModel(config.model, mesh, seed=4)
    state = {"config": config_to_dict(config), "loader": None}
    save_checkpoint(
        tmp_path / "run", 7, made, OverlappedDistributedOptimizer(made, mesh, config.optimizer), mesh, state
    )
    return made


def words(folder: Path) -> str:
    """A tokenizer of words, as the ``tokenizers`` library leaves one: it does not say what transformers shall take."""
    folder.mkdir()
    tokenizer = Tokenizer(WordLevel({"?": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return str(folder)


def export(tmp_path: Path, *options: str) -> str:
    """What the command says."""
    arguments = ["convert-weights", "native-to-hf", str(tmp_path / "run"), str(tmp_path / "out"), *options]
    return output_of(*arguments)


def test_a_run_on_bytes_comes_with_a_tokenizer_that_encodes_equally(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = save_run(tmp_path)
    said = export(tmp_path)
    for name in ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"):
        assert name in said and (tmp_path / "out" / name).is_file()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = tokenizer("A text, für Ähnliches.", return_tensors="pt").input_ids
    assert tokens[0].tolist() == ByteTokenizer().encode("A text, für Ähnliches.")
    with torch.no_grad():
        wanted = ours.all_logits(tokens)
        torch.testing.assert_close(model(tokens).logits, wanted[..., :259], rtol=1e-4, atol=1e-5)
    texts, padded = ["A text", "Another one"], {"return_tensors": "pt", "padding": True, "padding_side": "left"}
    mine = tokenizer([tokenizer.bos_token + text for text in texts], add_special_tokens=False, **padded)
    theirs = model.generate(**mine, max_new_tokens=9, do_sample=False, eos_token_id=[])
    said = generate(ours, [[256, *text.encode()] for text in texts], max_new_tokens=9)
    assert theirs[:, mine.input_ids.shape[1] :].tolist() == said
    assert (model.generation_config.bos_token_id, model.generation_config.eos_token_id) == (256, 257)
    assert (model.config.bos_token_id, model.config.eos_token_id, model.config.pad_token_id) == (256, 257, 258)


@pytest.fixture(scope="module")
def byte_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("bytes")
    for name, content in byte_tokenizer_files().items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "llama", "architectures": ["LlamaForCausalLM"]}')
    return AutoTokenizer.from_pretrained(folder)


@settings(max_examples=examples(200))
@given(text=st.text(st.one_of(st.characters(exclude_categories=["Cs"]), st.sampled_from(list("<s>/pad \n'.,")))))
def test_the_byte_tokenizer_of_transformers_is_ours(byte_tokenizer: Any, text: str) -> None:
    """Also of texts that have the names of special tokens, and of those that others would clean up."""
    ours = ByteTokenizer()
    for given_text in (text, text + "<s>", "</s>" + text):
        tokens = byte_tokenizer(given_text).input_ids
        assert tokens == ours.encode(given_text)
        assert byte_tokenizer.decode(tokens, skip_special_tokens=True) == ours.decode(tokens) == given_text


@pytest.mark.parametrize("as_file", [False, True])
def test_a_run_with_a_tokenizer_comes_with_it(tmp_path: Path, as_file: bool) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    folder = words(tmp_path / "words")
    save_run(tmp_path, tokenizer=folder + "/tokenizer.json" * as_file, vocab_size=101)
    said = export(tmp_path)
    assert "tokenizer.json" in said and "tokenizer_config.json" in said
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [1, *tokenizer("a b c").input_ids, 2] == HuggingFaceTokenizer(folder).encode("a b c") == [1, 3, 4, 0, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "words/tokenizer.json").read_bytes()


def test_a_tokenizer_that_is_gone_is_said_and_another_can_be_named(tmp_path: Path) -> None:
    folder = Path(words(tmp_path / "words"))
    save_run(tmp_path, tokenizer=str(folder), vocab_size=101)
    folder.rename(tmp_path / "moved")
    said = export(tmp_path)
    assert "no tokenizer" in said and "--like" in said
    assert not list((tmp_path / "out").glob("tokenizer*"))
    (tmp_path / "out").rename(tmp_path / "first")
    # A model's folder has a configuration too.
    (tmp_path / "moved/config.json").write_bytes((tmp_path / "first/config.json").read_bytes())
    (tmp_path / "first/model.safetensors").rename(tmp_path / "moved/model.safetensors")
    assert "no tokenizer" not in export(tmp_path, "--like", str(tmp_path / "moved"))
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_a_model_with_images_is_refused_before_all_is_read(tmp_path: Path) -> None:
    save_run(tmp_path, image_size=4)
    spoilt = next((tmp_path / "run").glob("*/__0_0.distcp"))
    content = bytearray(spoilt.read_bytes())
    content[-1] ^= 1
    spoilt.write_bytes(content)
    with pytest.raises(StateError, match="image_size=4") as caught:
        native_to_huggingface(tmp_path / "run", tmp_path / "out")
    assert "to-file" in str(caught.value) and "--text-only" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_language_model_of_a_model_with_images(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    ours = save_run(tmp_path, image_size=4)
    export(tmp_path, "--text-only")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        wanted = ours.all_logits(tokens)
        torch.testing.assert_close(model(tokens).logits, wanted[..., :259], rtol=1e-4, atol=1e-5)


def test_another_norm_is_refused(tmp_path: Path) -> None:
    """Though its tensors have the names and shapes of those of the norm that Llama has."""
    norm = torch.nn.LayerNorm
    register_norm("layer_norm", lambda config, mesh: adopt_norm(norm(config.hidden_size, bias=False), config, mesh))
    save_run(tmp_path, norm="layer_norm")
    with pytest.raises(StateError, match="layer_norm"):
        native_to_huggingface(tmp_path / "run", tmp_path / "out")
