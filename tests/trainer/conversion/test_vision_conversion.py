"""Image encoders and models with images of Hugging Face: the same numbers, and the same bytes after a round trip."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from energon_lite.errors import ConfigError, StateError, StateMismatchError, UsageError
from energon_lite.trainer import (
    LlamaModel,
    ModelConfig,
    MultimodalBatch,
    VisionConfig,
    build_mesh,
    load_model,
    load_weights,
    read_state,
)
from energon_lite.trainer.conversion import image_config
from energon_lite.trainer.conversion.export import native_to_huggingface
from energon_lite.trainer.conversion.from_huggingface import huggingface_to_native
from energon_lite.trainer.conversion.huggingface_folder import native_name
from energon_lite.trainer.models.config import model_config_of
from tests.testing import output_of
from tests.trainer.conversion.small_models import (
    IMAGE,
    PIXELS,
    VISION,
    SaveModel,
    change_config,
    files_of,
    make_encoder,
    make_llava,
    save_run,
)

KINDS = ["siglip", "clip"]
#: The encoders' shape, in our words.
ENCODER = {"hidden_size": 24, "num_layers": 3, "num_heads": 4, "ffn_size": 40}


def save(model: Any, folder: Path, *, names: str = "", shard: str = "10GB") -> Path:
    """A folder as the Hub has it; ``names``: as another version of transformers wrote them."""
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "preprocessor_config.json").write_text(json.dumps(PIXELS))
    if names:
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


@torch.no_grad()
def assert_same_logits(ours: LlamaModel, theirs: Any) -> None:
    tokens, images, rows, starts = rows_with_images()
    wanted = theirs(input_ids=tokens, pixel_values=evened(images)).logits
    found = ours.all_logits(tokens, images, rows, starts)
    assert wanted.std() > 0.1
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)


# -- the encoder -------------------------------------------------------------------------------------------------------


def encoder_of(theirs: Any, **settings: Any) -> torch.nn.Module:
    """Ours, with the weights of theirs."""
    config = ModelConfig(image_size=14, patch_size=4, vision=VisionConfig(**ENCODER | settings))
    model = LlamaModel(config, build_mesh())
    assert model.vision is not None and config.prefix_length == (1 if "pooling" in settings else 9)
    model.vision.load_state_dict(theirs.state_dict())
    return model.vision


@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("layer", "size"), [(-1, (14, 14)), (-2, (14, 14)), (-1, (22, 9)), (-3, (5, 30))])
def test_an_encoder_makes_their_hidden_states(kind: str, layer: int, size: tuple[int, int]) -> None:
    theirs = make_encoder(kind)
    told = {"norm_eps": theirs.config.layer_norm_eps, "activation": theirs.config.hidden_act}
    ours = encoder_of(theirs, kind=kind, feature_layer=layer, head=kind == "siglip", **told)
    images = torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0))
    made = theirs((images - 0.5) / 0.5, interpolate_pos_encoding=size != (14, 14), output_hidden_states=True)
    wanted = made.hidden_states[layer][:, int(kind == "clip") :]
    torch.testing.assert_close(ours(images), wanted, rtol=1e-4, atol=1e-4)
    assert wanted.std() > 0.1 and wanted.shape[1] == (size[0] // 4) * (size[1] // 4)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_missing_is_as_in_transformers(kind: str) -> None:
    theirs, read = make_encoder(kind).config.__class__().to_dict(), partial(image_config.vision_settings, where="")
    found, siglip = read({"model_type": theirs["model_type"]}), kind == "siglip"
    assert found == read(theirs, ignore=[*theirs]) and found["vision"].head == siglip
    assert found["vision"].image_mean == ((0.5, 0.5, 0.5) if siglip else image_config.CLIP_PIXELS["image_mean"])
    written = image_config.huggingface_vision_config(ModelConfig(**found))
    assert written.pop("architectures") and written.pop("vision_use_head", None) == (True if siglip else None)
    assert written.items() <= theirs.items() and written["patch_size"] == found["patch_size"]
    assert not siglip or found["vision"] == VisionConfig(head=True)
    assert not read({"model_type": theirs["model_type"], "vision_use_head": False})["vision"].head


def test_a_llava_that_says_little_and_what_may_be_ignored_of_it() -> None:
    values, read = {"model_type": "llava", "torch_dtype": "bfloat16"}, image_config.any_model_config
    values |= {"tie_word_embeddings": True}
    found = read({**values, "projector_hidden_act": "silu"}, where="", ignore=["projector_hidden_act"])
    assert found == read(values, where="") and found.vision is not None
    assert (found.dtype, found.tie_embeddings, found.vocab_multiple) == ("bfloat16", True, 64)
    assert (found.vision.kind, found.vision.feature_layer, found.vision.image_token) == ("clip", -2, 32000)


@torch.no_grad()
def test_pooling_is_their_head_or_the_mean() -> None:
    theirs, images = make_encoder("siglip"), torch.rand(2, 3, 14, 14)
    made = theirs((images - 0.5) / 0.5)
    for pooling, wanted in (("attention", made.pooler_output), ("mean", made.last_hidden_state.mean(1))):
        ours = encoder_of(theirs, head=True, feature_layer=None, pooling=pooling)
        torch.testing.assert_close(ours(images), wanted[:, None], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "names"), [("siglip", ""), ("siglip", "encoder of 4"), ("clip", "")])
def test_an_encoder_joins_a_language_model_and_leaves_it_unchanged(
    tmp_path: Path, save_model: SaveModel, kind: str, names: str
) -> None:
    language, encoder = save_model(vocab_size=101), save(make_encoder(kind), tmp_path / "encoder", names=names)
    native = huggingface_to_native(language, tmp_path / "native", vision=encoder)
    for part, folder in (("vision_only", encoder), ("text_only", language)):
        native_to_huggingface(tmp_path / "native", tmp_path / part, **{part: True})  # type: ignore[arg-type]
        assert files_of(tmp_path / part) == files_of(folder)
    config = model_config_of(read_state(native)["config"])
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
    from transformers import SiglipConfig, SiglipModel, SiglipVisionModel

    text = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 1, "num_attention_heads": 4}
    whole = SiglipModel(SiglipConfig(vision_config=VISION, text_config=text | {"vocab_size": 50}))
    encoder = save(whole, tmp_path / "siglip")
    huggingface_to_native(save_model(vocab_size=101), tmp_path / "native", vision=encoder)
    native_to_huggingface(tmp_path / "native", tmp_path / "back", vision_only=True)
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
    assert files_of(tmp_path / "back") == files_of(folder)
    native_to_huggingface(tmp_path / "native", tmp_path / "like", like=folder)
    assert files_of(tmp_path / "like") == files_of(folder)
    native_to_huggingface(tmp_path / "native", tmp_path / "token", image_token=7)
    assert json.loads((tmp_path / "token" / "config.json").read_bytes())["image_token_index"] == 7


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_and_all_gradients_are_theirs(tmp_path: Path, kind: str) -> None:
    folder = save(make_llava(kind), tmp_path / "hf")
    ours = load_model(huggingface_to_native(folder, tmp_path / "native", dtype="float64"))
    tokens, images, rows, starts = rows_with_images()
    labels = torch.randint(0, 100, tokens.shape, generator=torch.Generator().manual_seed(5))
    mask = (tokens != IMAGE).to(torch.float32)
    places = {"image_rows": rows, "image_starts": starts}
    loss = ours.loss_sum(MultimodalBatch(tokens=tokens, labels=labels, loss_mask=mask, image=images, **places))
    loss.backward()
    theirs = make_llava(kind).double()
    logits = theirs(input_ids=tokens, pixel_values=evened(images.double())).logits
    wanted = (F.cross_entropy(logits.transpose(1, 2), labels, reduction="none") * mask).sum()
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    found = {name: p.grad for name, p in ours.named_parameters() if p.grad is not None}
    learning = {native_name(name): p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    assert found.keys() == learning.keys() and len(learning) > 60
    for name, grad in learning.items():
        # Their norms and angles are in float32 even so. (Biases of keys change nothing: gradients of rounding.)
        most = max(1.0, grad.abs().max().item())
        torch.testing.assert_close(found[name][: len(grad)], grad, rtol=1e-4, atol=1e-6 * most)


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_loads_what_a_run_has_made(tmp_path: Path, kind: str) -> None:
    from transformers import AutoImageProcessor, AutoTokenizer, LlavaForConditionalGeneration

    vision = ENCODER | {"kind": kind, "feature_layer": -2, "activation": "gelu", "image_token": IMAGE} | PIXELS
    values = {"hidden_size": 32, "num_heads": 4, "qkv_bias": kind == "clip", "ffn_size": 48, "init_std": 0.2}
    ours = save_run(tmp_path / "run", image_size=14, patch_size=4, vision=vision, **values)
    output_of("convert-weights", "native-to-hf", tmp_path / "run", tmp_path / "out", "--shard-size", "100KB")
    theirs, told = LlavaForConditionalGeneration.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    assert_same_logits(ours, theirs.eval())
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("a").input_ids == [256, 97, 257]
    pictures = (torch.rand(1, 3, 14, 14, generator=torch.Generator().manual_seed(0)) * 255).to(torch.uint8)
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out")
    assert type(processor).__name__.lower().startswith(kind) and processor.resample == 2, "bilinear"
    shown = processor(pictures, return_tensors="pt").pixel_values
    torch.testing.assert_close(shown, evened(pictures / 255), rtol=1e-4, atol=1e-4)
    # And from there, the same model again.
    again = load_model(huggingface_to_native(tmp_path / "out", tmp_path / "again"))
    assert_same_logits(again, theirs)


def test_the_token_of_images_can_be_named(tmp_path: Path) -> None:
    for name, tokenizer in (("gone", "gone"), ("bytes", None)):
        run = save_run(tmp_path / name, tokenizer=tokenizer, image_size=14, patch_size=4, vision=ENCODER)
    with pytest.raises(StateError, match=r"(?s)image_token=None.*--image-token"):
        native_to_huggingface(tmp_path / "gone", tmp_path / "out")
    with pytest.raises(StateError, match="without a token that is for images alone"):
        native_to_huggingface(tmp_path / "gone", tmp_path / "out", image_token=run.config.vocab_size)
    assert not (tmp_path / "out").exists()
    native_to_huggingface(tmp_path / "gone", tmp_path / "out", image_token=7)
    native_to_huggingface(tmp_path / "bytes", tmp_path / "of bytes")
    native_to_huggingface(tmp_path / "bytes", tmp_path / "encoder", vision_only=True)
    assert {*files_of(tmp_path / "encoder")} == {"config.json", "model.safetensors", "preprocessor_config.json"}
    for folder, token in (("out", 7), ("of bytes", 258)):
        assert json.loads((tmp_path / folder / "config.json").read_bytes())["image_token_index"] == token


# -- what is refused ---------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "all layers": ({"vision_feature_layer": [-1, -2]}, "vision_feature_layer"),
    "from the first": ({"vision_feature_layer": 0}, "vision_feature_layer"),
    "the class token too": ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
    "another activation": ({"projector_hidden_act": "silu"}, "projector_hidden_act"),
    "no bias": ({"multimodal_projector_bias": False}, "multimodal_projector_bias"),
    "unknown": ({"image_newline": True}, "image_newline"),
    "another encoder": ({"vision_config": {"model_type": "dinov2"}}, "model_type"),
    "gray images": ({"vision_config": {"num_channels": 1}}, "num_channels"),
    "activation": ({"vision_config": {"hidden_act": "silu"}}, "hidden_act"),
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
