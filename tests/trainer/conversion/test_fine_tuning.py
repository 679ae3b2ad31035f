"""A model of Hugging Face, fine-tuned: straight from its folder, on any layout, and back to such a folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from energon_lite.errors import ConfigError
from energon_lite.trainer import (
    OptimizerConfig,
    Trainer,
    config_from_dict,
    generate,
    latest_checkpoint,
    load_config,
    load_model,
    load_tokenizer,
)
from energon_lite.trainer.checkpointing.weights import load_weights
from energon_lite.trainer.conversion.from_huggingface import huggingface_to_native
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training.language_model import load_starting_weights
from examples.toy_data import chat, write_lines, write_model, write_tokenizer
from tests.fork_server import run_program
from tests.testing import invoke
from tests.trainer.conversion.small_models import SCALING, SaveModel, change_config
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize(
    ("world", "sizes", "shape"),
    [
        (1, {}, {"num_key_value_heads": 2}),
        (2, {"tp": 2}, {"num_key_value_heads": 2, "rope_parameters": SCALING}),
        (2, {"pp": 2}, {"tie_word_embeddings": True}),
        (4, {"tp": 2}, {"tie_word_embeddings": True, "vocab_size": 100}),
    ],
    ids=str,
)
def test_each_layout_reads_a_folder_as_it_reads_the_converted_checkpoint(
    run_ranks: RunRanks, save_model: SaveModel, tmp_path: Path, world: int, sizes: dict[str, int], shape: dict[str, Any]
) -> None:
    folder = save_model(shard="20KB", **shape)
    huggingface_to_native(folder, tmp_path / "native")
    config = config_from_dict(
        {
            "data": {"path": "x", "tokenizer": None},
            "model": {"preset": "init_from"},
            "train": {"init_from": str(folder)},
        }
    )

    def wrong(rank: int) -> list[str]:
        mesh, found = build_mesh(**sizes), []
        models = [LlamaModel(config.model, mesh, seed=seed) for seed in (1, 2)]
        load_starting_weights(str(folder), models[0])
        load_weights(tmp_path / "native", models[1], mesh)
        optimizers = [OverlappedDistributedOptimizer(model, mesh, OptimizerConfig(bucket_size=700)) for model in models]
        theirs = dict(models[1].named_parameters())
        found += [name for name, p in models[0].named_parameters() if not torch.equal(p, theirs[name])]
        for one, other in zip(optimizers[0].shards(), optimizers[1].shards(), strict=True):
            found += [one.name for kind, values in one.tensors.items() if not torch.equal(values, other.tensors[kind])]
        return found

    assert run_ranks(world, wrong) == [[]] * world


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


def test_a_folder_of_another_model_is_refused(run_ranks: RunRanks, save_model: SaveModel, tmp_path: Path) -> None:
    folder = save_model()
    write_lines(tmp_path / "chats.jsonl", map(chat, range(4)))
    data = {"path": str(tmp_path / "chats.jsonl"), "tokenizer": None, "workers": 0}
    values = {"data": data, "output": str(tmp_path / "run"), "train": {"init_from": str(folder), "steps": 1}}
    other = config_from_dict(values | {"model": {"hidden_size": 64, "vocab_size": 300}})

    def start(rank: int) -> None:
        with Trainer(other) as trainer:
            trainer.run()

    with pytest.raises(RankFailure, match=r"another model, by .*hidden_size is 32 there, 64 here"):
        run_ranks(1, start)


def test_as_a_new_user_would(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Fine-tune on chats by one command, go on with tp 2, export, and transformers says the same."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    toy = tmp_path / "toy-data"
    toy.mkdir()
    write_lines(toy / "texts.jsonl", ({"text": str(chat(number))} for number in range(50)))
    write_tokenizer(toy / "tokenizer", toy / "texts.jsonl")
    write_model(toy / "llama", toy / "tokenizer")
    for name, numbers in (("chats", range(40)), ("held_out", range(40, 50))):
        write_lines(toy / f"{name}.jsonl", map(chat, numbers))
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

    arguments = ["convert-weights", "native-to-hf", str(run / "checkpoints"), str(tmp_path / "mine")]
    exported = invoke(*arguments)
    assert exported.exit_code == 0, exported.output
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "mine")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "mine")
    question = [{"role": "user", "content": "What is 3 + 4?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = theirs.generate(**prompt, max_new_tokens=12, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    checkpoint = latest_checkpoint(run / "checkpoints")
    assert checkpoint is not None
    ours, own = load_model(checkpoint), load_tokenizer(checkpoint)
    tokens = prompt["input_ids"][0].tolist()
    assert [token for piece, _ in own.chat([*question, {"role": "assistant", "content": ""}]) for token in piece][
        : len(tokens)
    ] == tokens
    (said,) = generate(ours, [tokens], max_new_tokens=12, eos=own.eos)
    assert said == answer.tolist() and len(said) > 2
    assert own.decode(said) == tokenizer.decode(answer, skip_special_tokens=True)
