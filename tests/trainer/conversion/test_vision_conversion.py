"""Image encoders and models with images of Hugging Face: the same numbers, and the same bytes after a round trip."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner

from energon_lite.cli.main import main
from energon_lite.errors import ConfigError, StateError, StateMismatchError, UsageError
from energon_lite.trainer.checkpointing.checkpoint import latest_checkpoint, read_state, save_checkpoint
from energon_lite.trainer.checkpointing.weights import load_weights
from energon_lite.trainer.conversion.export import native_to_huggingface
from energon_lite.trainer.conversion.from_huggingface import huggingface_to_native
from energon_lite.trainer.conversion.tensor_names import native_name
from energon_lite.trainer.models.config import ModelConfig, VisionConfig, model_config_of
from energon_lite.trainer.models.interface import MultimodalBatch
from energon_lite.trainer.models.llama import LlamaModel
from energon_lite.trainer.optimizer.config import OptimizerConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.parallel.mesh import build_mesh
from energon_lite.trainer.training.generate import load_model
from tests.trainer.conversion.small_models import SaveModel, change_config, make_model
from tests.trainer.conversion.small_vision_models import IMAGE, SHAPE, make_encoder, make_llava
from tests.trainer.parallel.rank_processes import RunRanks

KINDS = ["siglip", "clip"]
PIXELS = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.6, 0.7]}


def save(model: Any, folder: Path, *, names: str = "", shard: str = "10GB", pixels: bool = True) -> Path:
    """A folder as the Hub has it; ``names``: as another version of transformers wrote them."""
    model.save_pretrained(folder, max_shard_size=shard)
    if pixels:
        (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    if names:
        from safetensors.torch import load_file, save_file

        changes = {
            "4": [("vision_tower.", "vision_tower.vision_model.")],
            "5": [("language_model.lm_head", "lm_head"), ("language_model.model", "model.language_model")]
            + [(part, f"model.{part}") for part in ("vision_tower", "multi_modal_projector")],
            "encoder of 4": [("", "vision_model.")],
        }[names]
        tensors = load_file(folder / "model.safetensors")
        for old, new in changes:
            tensors = {new + name[len(old) :] if name.startswith(old) else name: t for name, t in tensors.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def content(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def evened(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(PIXELS[name], dtype=images.dtype)[:, None, None] for name in ("image_mean", "image_std"))
    return (images - mean) / std


def rows_with_images() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, images, rows and starts: nine tokens for each of three images, between texts."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, 100, (2, 26), generator=generator)
    rows, starts = torch.tensor([0, 0, 1]), torch.tensor([1, 12, 15])
    for row, start in zip(rows.tolist(), starts.tolist(), strict=True):
        tokens[row, start : start + 9] = IMAGE
    return tokens, torch.rand(3, 3, 14, 14, generator=generator), rows, starts


def assert_same_logits(ours: LlamaModel, theirs: Any, *, pixels: bool = True) -> None:
    tokens, images, rows, starts = rows_with_images()
    shown = evened(images) if pixels else (images - 0.5) / 0.5
    with torch.no_grad():
        wanted = theirs(input_ids=tokens, pixel_values=shown).logits
        found = ours.all_logits(tokens, images, rows, starts)
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# -- the encoder -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layer", "size"), [(-1, (14, 14)), (-2, (14, 14)), (-1, (22, 9)), (-3, (5, 30))])
def test_an_encoder_makes_their_hidden_states(kind: str, layer: int, size: tuple[int, int]) -> None:
    theirs = make_encoder(kind)
    vision = VisionConfig(
        kind,
        **{"hidden_size": 24, "num_layers": 3, "num_heads": 4, "ffn_size": 40, "feature_layer": layer},
        norm_eps=theirs.config.layer_norm_eps,
        activation=theirs.config.hidden_act,
        head=kind == "siglip",
    )
    model = LlamaModel(ModelConfig(image_size=14, patch_size=4, vision=vision), build_mesh())
    assert model.vision is not None
    model.vision.load_state_dict(theirs.state_dict())
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        made = theirs((images - 0.5) / 0.5, interpolate_pos_encoding=size != (14, 14), output_hidden_states=True)
        wanted = made.hidden_states[layer][:, int(kind == "clip") :]
        torch.testing.assert_close(model.vision(images), wanted, rtol=1e-4, atol=1e-4)
    assert wanted.std() > 0.1 and wanted.shape[1] == (size[0] // 4) * (size[1] // 4)


@torch.no_grad()
def test_pooling_is_their_head_or_the_mean() -> None:
    theirs = make_encoder("siglip")
    images = torch.rand(2, 3, 14, 14)
    made = theirs((images - 0.5) / 0.5)
    for pooling, wanted in (("attention", made.pooler_output), ("mean", made.last_hidden_state.mean(1))):
        vision = VisionConfig(
            **{"hidden_size": 24, "num_layers": 3, "num_heads": 4, "ffn_size": 40, "head": True},
            feature_layer=None,
            pooling=pooling,
        )
        model = LlamaModel(ModelConfig(image_size=14, patch_size=4, vision=vision), build_mesh())
        assert model.vision is not None and model.config.prefix_length == 1
        model.vision.load_state_dict(theirs.state_dict())
        torch.testing.assert_close(model.vision(images), wanted[:, None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "names"), [("siglip", ""), ("siglip", "encoder of 4"), ("clip", "")])
def test_an_encoder_joins_a_language_model_and_leaves_it_unchanged(
    tmp_path: Path, save_model: SaveModel, kind: str, names: str
) -> None:
    language, encoder = save_model(vocab_size=101), save(make_encoder(kind), tmp_path / "encoder", names=names)
    huggingface_to_native(language, tmp_path / "native", vision=encoder)
    for part, folder in (("vision_only", encoder), ("text_only", language)):
        native_to_huggingface(tmp_path / "native", tmp_path / part, **{part: True})  # type: ignore[arg-type]
        assert content(tmp_path / part) == content(folder)
    config = model_config_of(read_state(latest_checkpoint(tmp_path / "native"))["config"])  # type: ignore[arg-type]
    assert config.vision is not None and config.vision.image_mean == (0.5, 0.4, 0.3)
    assert (config.image_size, config.patch_size, config.vision.kind) == (14, 4, kind)
    # What has not been there begins as new; the rest is theirs.
    model = LlamaModel(config, build_mesh(), seed=3)
    new = model.projector.state_dict() if model.projector is not None else {}
    new = {name: tensor.clone() for name, tensor in new.items()}
    load_weights(tmp_path / "native", model, model.mesh, may_lack=["projector.*"])
    assert model.projector is not None and model.vision is not None
    assert all(torch.equal(tensor, new[name]) for name, tensor in model.projector.state_dict().items())
    theirs = make_encoder(kind).state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.vision.state_dict().items())


def test_the_encoder_of_a_whole_siglip_model(tmp_path: Path, save_model: SaveModel) -> None:
    from transformers import SiglipConfig, SiglipModel

    text = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    whole = SiglipModel(SiglipConfig(vision_config=SHAPE, text_config=text | {"vocab_size": 50}))
    encoder = save(whole, tmp_path / "siglip")
    huggingface_to_native(save_model(vocab_size=101), tmp_path / "native", vision=encoder)
    native_to_huggingface(tmp_path / "native", tmp_path / "back", vision_only=True)
    from transformers import SiglipVisionModel

    back = SiglipVisionModel.from_pretrained(tmp_path / "back")
    images = torch.rand(2, 3, 14, 14)
    with torch.no_grad():
        torch.testing.assert_close(back(images).pooler_output, whole.vision_model(images).pooler_output)


# -- the whole model ---------------------------------------------------------------------------------------------------

MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "siglip llama": ("siglip", "llama", {}, ""),
    "clip llama, names of 4": ("clip", "llama", {}, "4"),
    "clip qwen2, tied": ("clip", "qwen2", {"tie_word_embeddings": True}, ""),
    "siglip mistral, names of 5": ("siglip", "mistral", {"vision_feature_layer": -2}, "5"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_llava_makes_the_same_logits_and_comes_back_unchanged(tmp_path: Path, name: str) -> None:
    kind, language, changes, names = MODELS[name]
    theirs = make_llava(kind, language, **changes)
    folder = save(theirs, tmp_path / "hf", names=names, shard="10GB" if names else "30KB")
    ours = load_model(huggingface_to_native(folder, tmp_path / "native"))
    assert_same_logits(ours, theirs)
    native_to_huggingface(tmp_path / "native", tmp_path / "back")
    assert content(tmp_path / "back") == content(folder)
    native_to_huggingface(tmp_path / "native", tmp_path / "like", like=folder)
    assert content(tmp_path / "like") == content(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_all_gradients_are_theirs(run_ranks: RunRanks, tmp_path: Path, kind: str) -> None:
    folder = save(make_llava(kind), tmp_path / "hf")
    huggingface_to_native(folder, tmp_path / "native", dtype="float64")
    tokens, images, rows, starts = rows_with_images()
    labels = torch.randint(0, 100, tokens.shape, generator=torch.Generator().manual_seed(5))
    mask = (tokens != IMAGE).to(torch.float32)

    def compare(rank: int) -> int:
        batch = MultimodalBatch(
            **{"__key__": "k", "__restore_key__": ()},
            **{"tokens": tokens, "labels": labels, "loss_mask": mask, "image": images},
            **{"image_rows": rows, "image_starts": starts},
        )
        ours = load_model(latest_checkpoint(tmp_path / "native"))  # type: ignore[arg-type]
        loss = ours.loss_sum(batch)
        loss.backward()
        theirs = make_llava(kind).double()
        logits = theirs(input_ids=tokens, pixel_values=evened(images.double())).logits
        wanted = (F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * mask).sum()
        wanted.backward()
        torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
        found = dict(ours.named_parameters())
        learning = {native_name(name): p for name, p in theirs.named_parameters() if p.grad is not None}
        assert {name for name, p in found.items() if p.grad is not None} == learning.keys()
        for name, p in learning.items():
            mine = found[name].grad
            assert mine is not None and p.grad is not None
            # Their norms and angles are in float32 even so. (Biases of keys change nothing: gradients of rounding.)
            most = max(1.0, p.grad.abs().max().item())
            torch.testing.assert_close(mine[: len(p)], p.grad, rtol=1e-4, atol=1e-6 * most)
        return len(learning)

    assert run_ranks(1, compare)[0] > 60


@pytest.mark.parametrize(("world", "sizes", "tp"), [(4, {"tp": 2, "pp": 2}, None), (2, {"tp": 2}, 1)], ids=str)
def test_each_layout_reads_it_and_what_it_saves_is_the_same_model(
    run_ranks: RunRanks, tmp_path: Path, world: int, sizes: dict[str, int], tp: int | None
) -> None:
    import dataclasses

    folder = save(make_llava("siglip", tie_word_embeddings=tp == 1), tmp_path / "hf")
    native = huggingface_to_native(folder, tmp_path / "native", read_bytes=500)

    def load_and_save(rank: int) -> None:
        mesh, config = build_mesh(**sizes), model_config_of(read_state(native)["config"])
        assert config.vision is not None
        config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, tp=tp))
        model = LlamaModel(config, mesh, seed=9)
        load_weights(tmp_path / "native", model, mesh)
        optimizer = OverlappedDistributedOptimizer(model, mesh, OptimizerConfig(bucket_size=700))
        save_checkpoint(tmp_path / "saved", 3, model, optimizer, mesh, read_state(native))

    run_ranks(world, load_and_save)
    native_to_huggingface(tmp_path / "saved", tmp_path / "back", like=folder)
    assert content(tmp_path / "back") == content(folder)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_a_run_has_made(tmp_path: Path, kind: str) -> None:
    from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

    vision = {"kind": kind, "hidden_size": 24, "num_layers": 3, "num_heads": 4, "ffn_size": 40, "feature_layer": -2}
    vision |= {"activation": "gelu", "image_token": IMAGE} | PIXELS
    values = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "qkv_bias": kind == "clip", "ffn_size": 48}
    values |= {"image_size": 14, "patch_size": 4, "vision": vision, "init_std": 0.2}
    state = {"config": {"model": values, "data": {"path": "x", "tokenizer": None}}, "loader": None}
    ours = LlamaModel(model_config_of(state["config"]), build_mesh(), seed=2)  # type: ignore[arg-type]
    save_checkpoint(
        tmp_path / "run", 1, ours, OverlappedDistributedOptimizer(ours, ours.mesh, OptimizerConfig()), ours.mesh, state
    )
    result = CliRunner().invoke(
        main, ["convert-weights", "native-to-hf", str(tmp_path / "run"), str(tmp_path / "out"), "--shard-size", "100KB"]
    )
    assert result.exit_code == 0, result.output
    theirs, told = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    assert_same_logits(ours, theirs.eval())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a").input_ids == [256, 97, 257]
    pictures = (torch.rand(1, 3, 14, 14, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    shown = AutoImageProcessor.from_pretrained(tmp_path / "out")(pictures, return_tensors="pt").pixel_values
    torch.testing.assert_close(shown, evened(pictures / 255), rtol=1e-4, atol=1e-4)
    # And from there, the same model again.
    again = load_model(huggingface_to_native(tmp_path / "out", tmp_path / "again"))
    assert_same_logits(again, theirs)


def test_the_token_of_images_can_be_named(tmp_path: Path, save_model: SaveModel) -> None:
    vision = {"hidden_size": 24, "num_layers": 3, "num_heads": 4, "ffn_size": 40}
    values = {"hidden_size": 32, "num_layers": 1, "num_heads": 4, "image_size": 14, "patch_size": 4, "vision": vision}

    def run(tokenizer: str | None) -> Path:
        state = {"config": {"model": values, "data": {"path": "x", "tokenizer": tokenizer}}}
        model = LlamaModel(model_config_of(state["config"]), build_mesh())
        folder = tmp_path / f"run {tokenizer}"
        save_checkpoint(
            folder, 1, model, OverlappedDistributedOptimizer(model, model.mesh, OptimizerConfig()), model.mesh, state
        )
        return folder

    with pytest.raises(StateError, match=r"(?s)image_token=None.*--image-token"):
        native_to_huggingface(run("gone"), tmp_path / "out")
    with pytest.raises(StateError, match="without a token that is for images alone"):
        native_to_huggingface(run("gone"), tmp_path / "out", image_token=model_config_of({"model": values}).vocab_size)
    assert not (tmp_path / "out").exists()
    native_to_huggingface(run("gone"), tmp_path / "out", image_token=7)
    native_to_huggingface(run(None), tmp_path / "bytes")
    tokens = [json.loads((tmp_path / n / "config.json").read_bytes())["image_token_index"] for n in ("out", "bytes")]
    assert tokens == [7, 258]


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "all layers": ({"vision_feature_layer": [-1, -2]}, "vision_feature_layer"),
    "from the first": ({"vision_feature_layer": 1}, "vision_feature_layer"),
    "the class token too": ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
    "another activation": ({"projector_hidden_act": "silu"}, "projector_hidden_act"),
    "no bias": ({"multimodal_projector_bias": False}, "multimodal_projector_bias"),
    "unknown": ({"image_newline": True}, "image_newline"),
    "another encoder": ({"vision_config": {"model_type": "dinov2"}}, "model_type"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_ours_cannot_do_is_refused_by_name(tmp_path: Path, name: str) -> None:
    changes, key = REFUSED[name]
    folder = save(make_llava("clip"), tmp_path / "hf")
    change_config(folder, **changes)
    with pytest.raises(ConfigError, match=key):
        huggingface_to_native(folder, tmp_path / "native")


def test_tensors_that_do_not_fit_are_named_as_they_are_there(tmp_path: Path, save_model: SaveModel) -> None:
    folder = save(make_llava("siglip"), tmp_path / "hf")
    config = json.loads((folder / "config.json").read_bytes())
    change_config(folder, vision_config=config["vision_config"] | {"num_hidden_layers": 2})
    with pytest.raises(StateMismatchError, match=r"not part of the model: vision_tower\.encoder\.layers\.2"):
        huggingface_to_native(folder, tmp_path / "native")
    change_config(folder, vision_config=config["vision_config"] | {"intermediate_size": 44})
    with pytest.raises(StateMismatchError, match=r"layers\.0\.mlp\.fc1\.\w+ is \[40"):
        huggingface_to_native(folder, tmp_path / "native")
    change_config(folder, vision_config=config["vision_config"])
    with pytest.raises(UsageError, match="has an image encoder already"):
        huggingface_to_native(folder, tmp_path / "native", vision=save(make_encoder("clip"), tmp_path / "clip"))
    huggingface_to_native(save_model(), tmp_path / "language")
    with pytest.raises(StateError, match="no image encoder"):
        native_to_huggingface(tmp_path / "language", tmp_path / "out", vision_only=True)


def test_the_language_model_of_a_llava(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    theirs = make_llava("clip", "qwen2")
    huggingface_to_native(save(theirs, tmp_path / "hf"), tmp_path / "native")
    native_to_huggingface(tmp_path / "native", tmp_path / "out", text_only=True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(model).__name__ == "Qwen2ForCausalLM" and model.config.max_position_embeddings == 64
    tokens = torch.arange(30)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, theirs(input_ids=tokens).logits, rtol=1e-4, atol=1e-4)


def test_names_of_a_language_model_are_as_before() -> None:
    names = dict(make_model().named_parameters())
    assert {native_name(name) for name in names} == {name.removeprefix("model.") for name in names}
