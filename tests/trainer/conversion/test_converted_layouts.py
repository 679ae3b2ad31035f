"""What was converted is read by every layout of ranks, trained from, and what any layout saved is converted back."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from energon_lite.errors import ConfigError, StateMismatchError
from energon_lite.trainer import (
    TrainConfig,
    Trainer,
    TrainerConfig,
    config_from_dict,
    config_to_dict,
    load_config,
)
from energon_lite.trainer.checkpointing.checkpoint import save_checkpoint
from energon_lite.trainer.checkpointing.weights import load_weights
from energon_lite.trainer.conversion.export import native_to_file, native_to_huggingface
from energon_lite.trainer.conversion.from_huggingface import huggingface_to_native
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer
from energon_lite.trainer.training.config import OptimizerConfig, model_config_of
from tests.trainer.conversion.small_models import SCALING, SaveModel, make_model
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks

WriteDataset = Callable[..., Path]
LAYOUTS = [
    (1, {}, {"kind": "llama"}),
    (2, {"tp": 2}, {"kind": "qwen2", "tie_word_embeddings": True}),
    (2, {"pp": 2}, {"kind": "mistral", "head_dim": 12, "tie_word_embeddings": True}),
    (4, {"tp": 2, "pp": 2}, {"kind": "qwen3", "head_dim": 16}),
    (2, {}, {"kind": "llama", "tie_word_embeddings": True}),
]
SHAPE = {"num_key_value_heads": 2, "vocab_size": 101, "rope_parameters": SCALING}


@pytest.mark.parametrize(("world", "sizes", "model"), LAYOUTS, ids=str)
def test_each_layout_reads_it_and_what_it_saves_is_the_same_model(
    run_ranks: RunRanks, tmp_path: Path, save_model: SaveModel, world: int, sizes: dict[str, int], model: dict[str, Any]
) -> None:
    """Whatever way the run computed in."""
    shape = SHAPE | model
    theirs = save_model(shard="20KB", **shape)
    native = huggingface_to_native(theirs, tmp_path / "native", read_bytes=1500)

    def load_and_save(rank: int) -> None:
        from energon_lite.trainer.checkpointing.checkpoint import read_state

        mesh, state = build_mesh(**sizes), read_state(native)
        state["config"]["model"] |= {"fuse_projections": True, "loss_chunk": 7, "attention": "varlen"}
        model = LlamaModel(model_config_of(state["config"]), mesh, seed=9)
        load_weights(tmp_path / "native", model, mesh)
        # Buckets that end inside of rows, so that optimizers' slices do.
        optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig(bucket_size=700))
        save_checkpoint(tmp_path / "saved", 3, model, optimizer, mesh, state)

    run_ranks(world, load_and_save)
    native_to_huggingface(tmp_path / "saved", tmp_path / "back", like=theirs)
    assert {f.name: f.read_bytes() for f in (tmp_path / "back").iterdir()} == {
        f.name: f.read_bytes() for f in theirs.iterdir()
    }
    native_to_file(tmp_path / "saved", tmp_path / "all.safetensors", optimizer=True)
    found, wanted = load_file(tmp_path / "all.safetensors"), make_model(**shape)
    for name, parameter in wanted.named_parameters():
        ours = name.removeprefix("model.")
        assert torch.equal(found[ours][: len(parameter)], parameter)
        assert found[f"optimizer.{ours}.exp_avg"].shape == found[ours].shape


def make_config(tmp_path: Path, init: Path | None, mesh: dict[str, int], **changes: Any) -> TrainerConfig:
    native = json.loads((tmp_path / "shape.json").read_text())
    return config_from_dict(
        {
            "output": str(tmp_path / f"run {init is None} {mesh} {changes}"),
            "data": {
                "path": str(tmp_path / "texts"),
                "micro_batch_size": 2,
                "micro_batches_per_step": 4,
                "workers": 0,
                "max_length": 10,
                "tokenizer": str(tmp_path / "native" / "huggingface"),
            },
            "mesh": mesh,
            "model": native | changes,
            "optimizer": {"lr": 1e-2, "eps": 1e-6},
            "train": {"steps": 3, "save_every": 2, "init_from": None if init is None else str(init)},
        }
    )


def losses(config: TrainerConfig) -> list[float]:
    with Trainer(config) as trainer:
        assert trainer.run() == config.train.steps
        lines = (Path(config.output) / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line)["loss"] for line in lines]


@pytest.fixture
def native(tmp_path: Path, save_model: SaveModel, write_dataset: WriteDataset) -> Path:
    """A converted model with a tokenizer of words, and texts to train on."""
    words = {word: number for number, word in enumerate(["<s>", "</s>", "?", *"abcdefgh"])}
    tokenizer = Tokenizer(WordLevel(words, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    theirs = save_model(vocab_size=101, num_key_value_heads=2)
    tokenizer.save(str(theirs / "tokenizer.json"))
    (theirs / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    texts = {
        f"{part}.tar": [(f"{n:02d}", {"txt": " ".join("abcdefgh"[n % 5 :][:5]).encode()}) for n in range(24)]
        for part in ("train", "val")
    }
    write_dataset(tmp_path / "texts", texts, splits={"train": ["train.tar"], "val": ["val.tar"]})
    huggingface_to_native(theirs, tmp_path / "native")
    from energon_lite.trainer.checkpointing.checkpoint import read_state

    shape = read_state(tmp_path / "native" / "step-00000000")["config"]["model"]
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    return tmp_path / "native"


@pytest.mark.slow
def test_training_begins_with_it_on_any_layout(run_ranks: RunRanks, tmp_path: Path, native: Path) -> None:
    runs = {}
    for world, mesh in ((1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {"tp": 1})):
        config = make_config(tmp_path, native, mesh)
        runs[str(mesh), world] = run_ranks(world, lambda rank, config=config: losses(config))[0]
    first, *others = runs.values()
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)
    # The first loss is that of the model it came from, not that of new weights.
    random = run_ranks(1, lambda rank: losses(make_config(tmp_path, None, {})))[0]
    assert abs(random[0] - first[0]) > 0.01
    # A run that was begun goes on from its own checkpoint: nothing is left to do.
    again = make_config(tmp_path, native, {})
    assert run_ranks(1, lambda rank: losses(again))[0] == first


def padding(ours: torch.Tensor, theirs: torch.Tensor) -> tuple[int, ...]:
    return (0, 0) * (ours.dim() - 1) + (0, len(ours) - len(theirs))


def test_an_image_prefix_begins_as_new(run_ranks: RunRanks, tmp_path: Path, native: Path) -> None:
    config = make_config(tmp_path, native, {}, image_size=4)

    wanted = {
        name.removeprefix("model."): p
        for name, p in make_model(vocab_size=101, num_key_value_heads=2).named_parameters()
    }

    def first_values(rank: int) -> bool:
        with Trainer(config) as trainer:
            new = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
            assert trainer.resume() == 0
            return all(
                torch.equal(
                    p, new[name] if name.startswith("vision.") else F.pad(wanted[name], padding(p, wanted[name]))
                )
                for name, p in trainer.model.named_parameters()
            )

    assert run_ranks(1, first_values) == [True]


def test_weights_alone_are_no_run_to_go_on_with(run_ranks: RunRanks, tmp_path: Path, native: Path) -> None:
    config = make_config(tmp_path, None, {})
    Path(config.output).mkdir()
    native.rename(Path(config.output) / "checkpoints")
    (tmp_path / "native").symlink_to(Path(config.output) / "checkpoints")
    with pytest.raises(RankFailure, match=r"weights only.*\n.*\n.*train\.init_from"):
        run_ranks(1, lambda rank: losses(config))


def test_a_tokenizer_of_a_file(native: Path, run_ranks: RunRanks, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(str(native / "huggingface"))
    assert tokenizer.encode("a c x") == [0, 3, 5, 2, 1]
    assert (tokenizer.pad, tokenizer.vocab_size) == (1, 11)
    with pytest.raises(RankFailure, match=r"ConfigError: (.|\n)*the tokenizer has 11 tokens, the model 10"):
        run_ranks(1, lambda rank: Trainer(make_config(tmp_path, None, {}, vocab_size=10)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_goes_on_from_the_weights(native: Path, run_ranks: RunRanks, tmp_path: Path, dtype: str) -> None:
    def after_one_step(rank: int) -> float:
        with Trainer(make_config(tmp_path, native, {}, dtype=dtype)) as trainer:
            trainer.resume()
            before = trainer.model.layers["0"].self_attn.q_proj.weight.detach().clone()
            trainer.step(1, iter(trainer.loader))
            trainer.optimizer.wait_parameters()
            after = trainer.model.layers["0"].self_attn.q_proj.weight.detach()
            return (after - before).abs().max().item()

    # A step of AdamW moves no weight by much more than the learning rate.
    changes = run_ranks(2, after_one_step)
    assert all(0 < change < 0.02 for change in changes)


OTHERS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "rope": ({"rope_theta": 500000.0}, ["rope_theta is 10000.0 there, 500000.0 here"]),
    "scaling": ({"rope_scaling": {"factor": 4.0}}, ["rope_scaling is None there, RopeScaling(factor=4.0"]),
    "eps and heads": (
        {"norm_eps": 1e-2, "num_heads": 2},
        ["norm_eps is 1e-06 there, 0.01 here", "num_heads is 4 there, 2 here"],
    ),
    "shape": ({"ffn_size": 24, "num_layers": 4}, ["num_layers is 2 there, 4 here", "ffn_size is 48 there, 24 here"]),
}


@pytest.mark.parametrize(("world", "mesh"), [(1, {}), (2, {"pp": 2})], ids=["alone", "pp 2"])
def test_weights_of_a_model_that_computes_otherwise_are_refused(
    run_ranks: RunRanks, tmp_path: Path, native: Path, world: int, mesh: dict[str, int]
) -> None:
    def check(rank: int) -> None:
        for changes, differences in OTHERS.values():
            with pytest.raises(StateMismatchError) as caught:
                Trainer(make_config(tmp_path, native, mesh, **changes))
            text = str(caught.value)
            assert all(difference in text for difference in differences)
            assert text.count(" there, ") == len(differences)
            assert "train.init_from_ignore=[" in text and "model.preset=init_from" in text

    run_ranks(world, check)


def test_another_model_on_purpose(run_ranks: RunRanks, tmp_path: Path, native: Path) -> None:
    """As for longer rows: what is named may differ, and nothing else."""

    def begin(rank: int, ignore: tuple[str, ...], **changes: Any) -> int:
        config = make_config(tmp_path, native, {}, **changes)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, init_from_ignore=ignore))
        with Trainer(config) as trainer:
            return trainer.resume()

    assert run_ranks(1, lambda rank: begin(rank, ("rope_theta",), rope_theta=5e5)) == [0]
    with pytest.raises(RankFailure, match="1 setting"):
        run_ranks(1, lambda rank: begin(rank, ("rope_theta",), rope_theta=5e5, norm_eps=1e-3))
    # What is how to compute, and not what, may differ anyway; and so may what says the same in other words.
    same = {"dtype": "bfloat16", "attention": "varlen", "recompute": "full", "fuse_projections": True}
    assert run_ranks(1, lambda rank: begin(rank, (), **same, init_std=0.5)) == [0]


def test_a_wish_that_names_no_setting_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'rope_theta'") as caught:
        TrainConfig(init_from_ignore=("rope_teta",))
    assert caught.value.at == "train.init_from_ignore"


def test_the_shape_of_a_model_comes_from_its_checkpoint(run_ranks: RunRanks, tmp_path: Path, native: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {path: texts, tokenizer: native/huggingface, workers: 0}\n"
        f"train: {{steps: 1, init_from: {native}}}\n"
        "model: {preset: init_from, recompute: full}\n"
        f"output: {tmp_path / 'output'}\n"
    )
    config = load_config(path)
    wanted = json.loads((tmp_path / "shape.json").read_text()) | {"recompute": "full"}
    assert config_to_dict(config)["model"] == wanted and config.model.norm_eps == 1e-6
    assert len(run_ranks(1, lambda rank: losses(config))[0]) == 1
    with pytest.raises(ConfigError, match=r"train\.init_from"):
        load_config(path, ["train.init_from=null"])
