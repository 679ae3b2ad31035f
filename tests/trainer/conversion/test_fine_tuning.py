"""A model of Hugging Face, fine-tuned straight from its folder, on any layout; and any run, exported to such a one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from energon_lite.errors import ConfigError, StateError
from energon_lite.trainer import (
    ByteTokenizer,
    Trainer,
    adopt_norm,
    find_weights,
    generate,
    load_config,
    load_model,
    load_tokenizer,
    register_norm,
)
from energon_lite.trainer.conversion.export import native_to_huggingface
from energon_lite.trainer.conversion.huggingface_folder import byte_tokenizer_files
from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer
from examples.toy_data import make_toy_data
from tests.fork_server import run_program
from tests.testing import examples, output_of
from tests.trainer.conversion.small_models import SCALING, SaveModel, change_config, save_run, write_words
from tests.trainer.parallel.rank_processes import RunRanks

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_a_folder_gives_shape_and_tokenizer(save_model: SaveModel, tmp_path: Path) -> None:
    folder = save_model(num_key_value_heads=2, rope_parameters=SCALING)

    def config(*overrides: str, preset: str = "init_from") -> Any:
        (tmp_path / "run.yaml").write_text(
            f"data: {{path: x}}\nmodel: {{preset: {preset}}}\ntrain: {{init_from: {folder}}}"
        )
        return load_config(tmp_path / "run.yaml", overrides)

    with pytest.raises(ConfigError, match=r"no tokenizer\.json") as caught:
        config()
    assert "data.tokenizer=null" in str(caught.value)
    shape = config("data.tokenizer=null").model
    assert (shape.hidden_size, shape.kv_heads, shape.vocab_size) == (32, 2, 128) and shape.rope_scaling is not None
    assert config("data.tokenizer=null", "model.norm_eps=1e-3").model.norm_eps == 1e-3
    (folder / "tokenizer.json").write_text("{}")
    assert config().data.tokenizer == str(folder) and config("data.tokenizer=other").data.tokenizer == "other"
    assert config(preset="tiny").data.tokenizer == str(folder), "whoever says what the shape is"
    change_config(folder, dtype="float16")
    with pytest.raises(ConfigError, match="float16"):
        config()
    assert config("model.dtype=bfloat16").model.dtype == "bfloat16"


def test_as_a_new_user_would(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Fine-tune on chats by one command, go on with tp 2, export, and transformers says the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    toy = tmp_path / "toy-data"
    make_toy_data(toy, texts=12, chats=40, pictures=4)
    config = tmp_path / "examples/configs/finetune-chat.yaml"
    config.parent.mkdir(parents=True)
    config.write_bytes((EXAMPLES / "configs/finetune-chat.yaml").read_bytes())
    command = [str(EXAMPLES / "train.py"), str(config), "variant=toy", "train.steps=6"]
    done = run_program(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr

    overrides = ["variant=toy", "train.steps=10", "train.eval_every=10", "mesh.tp=2", "data.workers=0"]
    overrides += [f"output={tmp_path / 'output/toy/chat'}", f"train.init_from={toy / 'llama'}"]

    def go_on(rank: int) -> int:
        with Trainer(load_config(config, overrides)) as trainer:
            return trainer.run()

    assert run_ranks(2, go_on) == [10, 10]
    run = tmp_path / "output/toy/chat"
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(11)), "step 0 is the evaluation at the start"
    assert lines[10]["eval_loss/held_out"] < 0.8 * lines[0]["eval_loss/held_out"]

    output_of("convert-weights", "native-to-hf", run / "checkpoints", tmp_path / "mine")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "mine")
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = theirs.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    checkpoint = find_weights(run / "checkpoints")
    ours, own = load_model(checkpoint), load_tokenizer(checkpoint)
    tokens = prompt["input_ids"][0].tolist()
    pieces = own.chat([*question, {"role": "assistant", "content": ""}])
    assert [token for piece, _ in pieces for token in piece][: len(tokens)] == tokens
    (said,) = generate(ours, [tokens], max_new_tokens=12, eos=own.eos)
    assert said == answer.tolist() and len(said) > 2
    assert own.decode(said) == tokenizer.decode(answer, skip_special_tokens=True)


# -- what a run leaves, as a folder of Hugging Face -------------------------------------------------------------------


def export(tmp_path: Path, *options: object) -> str:
    """What the command says."""
    return output_of("convert-weights", "native-to-hf", tmp_path / "run", tmp_path / "out", *options)


def test_a_run_on_bytes_comes_with_a_tokenizer_that_encodes_equally(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    ours = save_run(tmp_path / "run")
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

    folder = write_words(tmp_path / "words")
    save_run(tmp_path / "run", tokenizer=folder / "tokenizer.json" if as_file else folder, vocab_size=101)
    said = export(tmp_path)
    assert "tokenizer.json" in said and "tokenizer_config.json" in said
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert [1, *tokenizer("a b x").input_ids, 2] == HuggingFaceTokenizer(str(folder)).encode("a b x") == [1, 3, 4, 0, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert GenerationConfig.from_pretrained(tmp_path / "out").eos_token_id == 2
    assert (tmp_path / "out/tokenizer.json").read_bytes() == (tmp_path / "words/tokenizer.json").read_bytes()


def test_a_tokenizer_that_is_gone_is_said_and_another_can_be_named(tmp_path: Path) -> None:
    folder = write_words(tmp_path / "words")
    save_run(tmp_path / "run", tokenizer=folder, vocab_size=101)
    folder.rename(tmp_path / "moved")
    said = export(tmp_path)
    assert "no tokenizer" in said and "--like" in said
    assert not list((tmp_path / "out").glob("tokenizer*"))
    (tmp_path / "out").rename(tmp_path / "first")
    # A model's folder has a configuration too.
    (tmp_path / "moved/config.json").write_bytes((tmp_path / "first/config.json").read_bytes())
    (tmp_path / "first/model.safetensors").rename(tmp_path / "moved/model.safetensors")
    assert "no tokenizer" not in export(tmp_path, "--like", tmp_path / "moved")
    assert (tmp_path / "out/tokenizer.json").is_file()


def test_of_a_model_with_images_only_the_language_model_is_written(tmp_path: Path) -> None:
    """All of it is refused, before all of it is read."""
    from transformers import AutoModelForCausalLM

    ours = save_run(tmp_path / "run", image_size=4)
    export(tmp_path, "--text-only")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        wanted = ours.all_logits(tokens)
        torch.testing.assert_close(model(tokens).logits, wanted[..., :259], rtol=1e-4, atol=1e-5)
    spoilt = next((tmp_path / "run").glob("*/__0_0.distcp"))
    content = bytearray(spoilt.read_bytes())
    content[-1] ^= 1
    spoilt.write_bytes(content)
    with pytest.raises(StateError, match="image_size=4") as caught:
        native_to_huggingface(tmp_path / "run", tmp_path / "all")
    assert "to-file" in str(caught.value) and "--text-only" in str(caught.value)
    assert not (tmp_path / "all").exists()


def test_another_norm_is_refused(tmp_path: Path) -> None:
    """Though its tensors have the names and shapes of those of the norm that Llama has."""
    norm = torch.nn.LayerNorm
    register_norm("layer_norm", lambda config, mesh: adopt_norm(norm(config.hidden_size, bias=False), config, mesh))
    save_run(tmp_path / "run", norm="layer_norm")
    with pytest.raises(StateError, match="layer_norm"):
        native_to_huggingface(tmp_path / "run", tmp_path / "out")
