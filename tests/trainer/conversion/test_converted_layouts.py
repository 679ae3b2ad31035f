"""What was converted is read by every layout of ranks, trained from, and what any layout saved is converted back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from energon_lite.errors import ConfigError, StateMismatchError
from energon_lite.trainer import (
    LlamaModel,
    OptimizerConfig,
    OverlappedDistributedOptimizer,
    Trainer,
    TrainerConfig,
    build_mesh,
    config_from_dict,
    config_to_dict,
    load_config,
    load_weights,
    read_state,
    save_checkpoint,
)
from energon_lite.trainer.conversion.export import native_to_file, native_to_huggingface
from energon_lite.trainer.conversion.from_huggingface import huggingface_to_native
from energon_lite.trainer.conversion.huggingface_folder import native_name
from energon_lite.trainer.models.config import model_config_of
from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer
from energon_lite.trainer.training.language_model import load_starting_weights
from tests.testing import write_dataset
from tests.trainer.conversion.small_models import (
    IMAGE,
    PIXELS,
    SCALING,
    SaveModel,
    files_of,
    make_encoder,
    make_llava,
    make_model,
    write_words,
)
from tests.trainer.parallel.rank_processes import RankFailure, RunRanks
from tests.trainer.parallel.small_runs import CAPTION_YAML, picture

LAYOUTS = [
    (1, {}, {"kind": "llama"}),
    (2, {"tp": 2}, {"kind": "qwen2", "tie_word_embeddings": True}),
    (2, {"pp": 2}, {"kind": "mistral", "head_dim": 12, "tie_word_embeddings": True}),
    (4, {"tp": 2, "pp": 2}, {"kind": "qwen3", "head_dim": 16}),
    (2, {}, {"kind": "llama", "tie_word_embeddings": True}),
    (4, {"tp": 2, "pp": 2}, {"kind": "siglip"}),
    (2, {"tp": 2}, {"kind": "siglip", "tie_word_embeddings": True}),
]
SHAPE = {"num_key_value_heads": 2, "vocab_size": 101}


@pytest.mark.parametrize(("world", "sizes", "model"), LAYOUTS, ids=str)
def test_each_layout_reads_it_and_what_it_saves_is_the_same_model(
    run_ranks: RunRanks, tmp_path: Path, world: int, sizes: dict[str, int], model: dict[str, Any]
) -> None:
    """Whatever way the run computed in; from the folder itself, too. An image encoder is cut, too, or whole."""
    images, folder = model["kind"] == "siglip", tmp_path / "hf"
    wanted = make_llava(**model) if images else make_model(**SHAPE | {"rope_parameters": SCALING} | model)
    wanted.save_pretrained(folder, max_shard_size="20KB")
    if images:
        (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    native = huggingface_to_native(folder, tmp_path / "native", read_bytes=1500)

    def load_and_save(rank: int) -> None:
        mesh, state = build_mesh(**sizes), read_state(native)
        values = state["config"]["model"]
        values |= {"loss_chunk": 7, "attention": "varlen"}
        if images:
            values["vision"]["tp"] = 1 if values["tie_embeddings"] else None
        model = LlamaModel(model_config_of(state["config"]), mesh, seed=9)
        load_weights(tmp_path / "native", model, mesh)
        straight = LlamaModel(model.config, mesh, seed=8)
        load_starting_weights(str(folder), straight)
        assert all(map(torch.equal, straight.parameters(), model.parameters())), "of the folder as it is"
        # Buckets that end inside of rows, so that optimizers' slices do.
        optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig(bucket_size=700))
        save_checkpoint(tmp_path / "saved", 3, model, optimizer, mesh, state)

    run_ranks(world, load_and_save)
    native_to_huggingface(tmp_path / "saved", tmp_path / "back", like=folder)
    assert files_of(tmp_path / "back") == files_of(folder)
    native_to_file(tmp_path / "saved", tmp_path / "all.safetensors", optimizer=True)
    found = load_file(tmp_path / "all.safetensors")
    for name, parameter in wanted.named_parameters():
        ours = native_name(name)
        assert torch.equal(found[ours][: len(parameter)], parameter)
        if not ours.startswith("vision."):  # of which some have no gradients
            assert found[f"optimizer.{ours}.exp_avg"].shape == found[ours].shape


def make_config(tmp_path: Path, init: Path | None, mesh: dict[str, Any], **more: dict[str, Any]) -> TrainerConfig:
    """A run of three steps on the data of the test, of the model of ``init``, or of new weights of the converted one.

    Args:
        more: changes of sections.
    """
    shape = read_state(tmp_path / "native" / "step-00000000")["config"]["model"] if init is None else {}
    values: dict[str, Any] = {
        "data": {"path": str(tmp_path / "data"), "micro_batch_size": 2, "micro_batches_per_step": 4, "workers": 0}
        | {"max_length": 10, "tokenizer": str(tmp_path / "native" / "huggingface")},
        "mesh": mesh,
        "model": shape or {"preset": "init_from"},
        "optimizer": {"lr": 1e-2, "eps": 1e-6},
        "train": {"steps": 3, "save_every": 2, "init_from": None if init is None else str(init)},
    }
    values |= {section: values[section] | changes for section, changes in more.items()}
    return config_from_dict(values | {"output": str(tmp_path / f"run {init is None} {mesh} {more.get('model')}")})


def run(config: TrainerConfig) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Its losses, and its weights at the end."""
    with Trainer(config) as trainer:
        assert trainer.run() == config.train.steps
        trainer.optimizer.wait_parameters()
        weights = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    lines = [json.loads(line) for line in (Path(config.output) / "metrics.jsonl").read_text().splitlines()]
    assert all(0 < line["seconds"] < 1000 and 0 <= line["data_wait"] < 1000 for line in lines)
    return [line["loss"] for line in lines], weights


@pytest.fixture
def native(tmp_path: Path, save_model: SaveModel) -> Path:
    """A converted model with a tokenizer of words, and texts to train on."""
    texts = {
        f"{part}.tar": [(f"{n:02d}", {"txt": " ".join("abcdefgh"[n % 5 :][:5]).encode()}) for n in range(24)]
        for part in ("train", "val")
    }
    write_dataset(tmp_path / "data", texts, splits={"train": ["train.tar"], "val": ["val.tar"]})
    huggingface_to_native(write_words(save_model(**SHAPE)), tmp_path / "native")
    return tmp_path / "native"


@pytest.mark.slow
def test_training_begins_with_it_on_any_layout(run_ranks: RunRanks, tmp_path: Path, native: Path) -> None:
    runs = {}
    for world, mesh in ((1, {}), (2, {"tp": 2}), (2, {"pp": 2}), (2, {"tp": 1})):
        config = make_config(tmp_path, native, mesh)
        runs[str(mesh), world] = run_ranks(world, lambda rank, config=config: run(config)[0])[0]
    first, *others = runs.values()
    for other in others:
        torch.testing.assert_close(other, first, rtol=1e-5, atol=1e-5)
    # The first loss is that of the model it came from, not that of new weights.
    random = run_ranks(1, lambda rank: run(make_config(tmp_path, None, {}))[0])[0]
    assert abs(random[0] - first[0]) > 0.01
    # A run that was begun goes on from its own checkpoint: nothing is left to do.
    again = make_config(tmp_path, native, {})
    assert run_ranks(1, lambda rank: run(again)[0])[0] == first


def test_an_image_prefix_begins_as_new(run_ranks: RunRanks, tmp_path: Path, native: Path) -> None:
    config = make_config(tmp_path, native, {}, model={"image_size": 4})
    wanted = {native_name(name): p for name, p in make_model(**SHAPE).named_parameters()}

    def first_values(rank: int) -> None:
        with Trainer(config) as trainer:
            new = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
            assert trainer.resume() == 0 and torch.are_deterministic_algorithms_enabled()
            for name, p in trainer.model.named_parameters():
                begun = new[name] if name.startswith("vision.") else wanted[name]
                assert torch.equal(p[: len(begun)], begun) and not p[len(begun) :].any()

    run_ranks(1, first_values)


def test_weights_alone_are_no_run_to_go_on_with(run_ranks: RunRanks, tmp_path: Path, native: Path) -> None:
    config = make_config(tmp_path, None, {})
    Path(config.output).mkdir()
    native.rename(Path(config.output) / "checkpoints")
    (tmp_path / "native").symlink_to(Path(config.output) / "checkpoints")
    with pytest.raises(RankFailure, match=r"weights only.*\n.*\n.*train\.init_from"):
        run_ranks(1, lambda rank: run(config))


def test_a_tokenizer_of_a_file(native: Path, run_ranks: RunRanks, tmp_path: Path) -> None:
    tokenizer = HuggingFaceTokenizer(str(native / "huggingface"))
    assert (tokenizer.pad, tokenizer.vocab_size) == (2, 11)
    with pytest.raises(RankFailure, match=r"ConfigError: (.|\n)*the tokenizer has 11 tokens, the model 10"):
        run_ranks(1, lambda rank: Trainer(make_config(tmp_path, None, {}, model={"vocab_size": 10})))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_optimizer_goes_on_from_the_weights(native: Path, run_ranks: RunRanks, tmp_path: Path, dtype: str) -> None:
    def after_one_step(rank: int) -> float:
        with Trainer(make_config(tmp_path, native, {}, model={"dtype": dtype})) as trainer:
            trainer.resume()
            weight = trainer.model.layers["0"].self_attn.q_proj.weight
            before = weight.detach().clone()
            trainer.step(1, iter(trainer.loader))
            trainer.optimizer.wait_parameters()
            return (weight.detach() - before).abs().max().item()

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
    """Those of a checkpoint, and of a folder of Hugging Face."""

    def check(rank: int) -> None:
        for place in (native, tmp_path / "hf"):
            for changes, differences in OTHERS.values():
                with pytest.raises(StateMismatchError) as caught:
                    Trainer(make_config(tmp_path, place, mesh, model=changes))
                text = str(caught.value)
                assert all(difference in text for difference in differences)
                assert text.count(" there, ") == len(differences)
                assert "train.init_from_ignore=[" in text and "model.preset=init_from" in text

    run_ranks(world, check)


def test_another_model_on_purpose(run_ranks: RunRanks, tmp_path: Path, native: Path) -> None:
    """As for longer rows: what is named may differ, and nothing else."""

    def begin(rank: int, ignore: list[str], **changes: Any) -> int:
        train = {"init_from_ignore": ignore}
        with Trainer(make_config(tmp_path, native, {}, train=train, model=changes)) as trainer:
            return trainer.resume()

    assert run_ranks(1, lambda rank: begin(rank, ["rope_theta"], rope_theta=5e5)) == [0]
    with pytest.raises(RankFailure, match="1 setting"):
        run_ranks(1, lambda rank: begin(rank, ["rope_theta"], rope_theta=5e5, norm_eps=1e-3))
    # What is how to compute, and not what, may differ anyway; and so may what says the same in other words.
    same = {"dtype": "bfloat16", "attention": "varlen", "recompute": "full"}
    assert run_ranks(1, lambda rank: begin(rank, [], **same, init_std=0.5)) == [0]


def test_the_shape_of_a_model_comes_from_its_checkpoint(run_ranks: RunRanks, tmp_path: Path, native: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {path: data, tokenizer: native/huggingface, workers: 0}\n"
        f"train: {{steps: 1, init_from: {native}}}\n"
        "model: {preset: init_from, recompute: full}\n"
        f"output: {tmp_path / 'output'}\n"
    )
    config = load_config(path)
    wanted = read_state(native / "step-00000000")["config"]["model"] | {"recompute": "full"}
    assert config_to_dict(config)["model"] == wanted and config.model.norm_eps == 1e-6
    assert len(run_ranks(1, lambda rank: run(config))[0][0]) == 1
    with pytest.raises(ConfigError, match=r"train\.init_from"):
        load_config(path, ["train.init_from=null"])


# -- models with images ------------------------------------------------------------------------------------------------


@pytest.fixture
def pictures(tmp_path: Path) -> None:
    """Images of a size that is not the model's, with captions."""
    write_dataset(tmp_path / "data", {"a.tar": [picture(n) for n in range(16)]}, dataset_yaml=CAPTION_YAML)


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_a_run_begins_with_a_llava_and_leaves_one(run_ranks: RunRanks, tmp_path: Path) -> None:
    """Its encoder frozen; the same on any layout; with a tokenizer of bytes, in which one byte is the image's token."""
    from transformers import LlavaForConditionalGeneration

    folder, theirs = tmp_path / "hf", make_llava("siglip", vocab_size=259)
    theirs.save_pretrained(folder)
    given: dict[str, Any] = {"data": {"tokenizer": None}, "train": {"freeze": ["vision.*"]}}
    alone = make_config(tmp_path, folder, {}, **given)
    first, weights = run_ranks(1, lambda rank: run(alone))[0]
    assert len(first) == 3 and first[-1] < first[0]
    for vision in ({}, {"tp": 1, "recompute": "full"}):  # of which the rest is that of the folder
        mesh = {"tp": 2, "sequence_parallel": True}
        cut = make_config(tmp_path, folder, mesh, model={"vision": vision}, **given)
        losses = run_ranks(2, lambda rank, config=cut: run(config)[0])[0]
        torch.testing.assert_close(losses, first, rtol=1e-4, atol=1e-4)
    native_to_huggingface(f"{alone.output}/checkpoints", tmp_path / "out", like=folder)
    made = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out")
    before, after = theirs.state_dict(), made.state_dict()
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert {name for name in before if ".vision_tower." in name} == same
    assert torch.equal(after["model.multi_modal_projector.linear_1.weight"], weights["projector.linear_1.weight"])
    assert made.config.image_token_index == IMAGE


@pytest.mark.usefixtures("pictures")
def test_a_run_begins_with_a_language_model_and_an_encoder(
    run_ranks: RunRanks, save_model: SaveModel, tmp_path: Path
) -> None:
    """The projector begins as new, and learns alone, as LLaVA's first stage has it."""
    make_encoder("clip").save_pretrained(tmp_path / "clip")
    huggingface_to_native(save_model(vocab_size=259), tmp_path / "native", vision=tmp_path / "clip")
    train = {"freeze": ["vision.*", "layers.*", "embed_tokens.*", "norm.*", "lm_head.*"], "steps": 4}
    runs = []
    for world, mesh in ((1, {}), (2, {"pp": 2})):
        config = make_config(tmp_path, tmp_path / "native", mesh, train=train, data={"tokenizer": None})
        runs += run_ranks(world, lambda rank, config=config: run(config))[:1]
    (losses, weights), (pp, _) = runs
    assert len(losses) == 4 and losses[-1] < losses[0]
    torch.testing.assert_close(pp, losses, rtol=1e-4, atol=1e-4)
    theirs = make_encoder("clip").state_dict()
    assert all(torch.equal(weights[f"vision.{name}"], tensor) for name, tensor in theirs.items())
