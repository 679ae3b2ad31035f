"""Strict configuration: what is read, and what each mistake says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from energon_lite.errors import ConfigError
from energon_lite.trainer.data.loaders import DataConfig, make_task_encoder
from energon_lite.trainer.models.config import ModelConfig, RopeScaling, model_preset
from energon_lite.trainer.training.config import (
    OptimizerConfig,
    TrainerConfig,
    config_from_dict,
    config_to_dict,
    load_config,
)

GOOD = """\
seed: 3
data:
  path: sets/blend.yaml
  max_length: 32
optimizer:
  lr: 1e-3
  betas: [0.9, 0.99]
train: {steps: 7, deterministic: false}
"""


@pytest.fixture
def good(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(GOOD)
    return path


def test_a_file_fills_the_dataclasses(good: Path) -> None:
    config = load_config(good)
    assert config.seed == 3 and config.train.steps == 7 and config.train.deterministic is False
    assert config.data == DataConfig(path=str(good.parent / "sets/blend.yaml"), max_length=32)
    assert config.optimizer == OptimizerConfig(lr=0.001, betas=(0.9, 0.99))
    assert config.model == ModelConfig()


def test_overrides_win(good: Path) -> None:
    overrides = ["train.steps=9", "model.num_kv_heads=2", "data.path=here.yaml", "mesh.tp=2", "optimizer.lr=3e-4"]
    config = load_config(good, overrides)
    assert (config.train.steps, config.model.num_kv_heads, config.mesh.tp) == (9, 2, 2)
    assert (config.data.path, config.optimizer.lr) == ("here.yaml", 3e-4)
    assert config.train.deterministic is False, "the section's other keys stay"


def test_sections_in_sections_and_lists(good: Path) -> None:
    scaling = ["model.rope_scaling.factor=32", "model.rope_scaling.original_length=4096"]
    config = load_config(good, [*scaling, "train.freeze=[vision.*, norm.weight]", "mesh.sequence_parallel=true"])
    assert config.model.rope_scaling == RopeScaling(factor=32.0, original_length=4096)
    assert config.train.freeze == ("vision.*", "norm.weight") and config.mesh.sequence_parallel
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    assert load_config(good, ["model.rope_scaling=null"]).model.rope_scaling is None


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.rope_scaling.factr=2", "did you mean 'factor'"),
        ("model.rope_scaling={low_frequency: 8}", "low_frequency is not below high_frequency"),
        ("model.rope_scaling={factor: 0.5}", "would shrink rows"),
        ("train.freeze=vision.*", "expected a list"),
        ("train.freeze=[1]", "expected text"),
        ("model.recompute=ful", "did you mean 'full'"),
        ("optimizer.schedule=cosin", "did you mean 'cosine'"),
        ("optimizer.decay_share=0", "not a share"),
        ("data.share=send", "use one of: load, broadcast"),
        ("train.peak_tflops=0", "not positive"),
        ("train.nonfinite_limit=0", "nonfinite_limit is below 1"),
        ("train.save_timeout=-1", "save_timeout is negative"),
        ("train.flight_recorder=-1", "flight_recorder is negative"),
        ("model.vocab_multiple=0", "vocab_multiple is below 1"),
        ("train.init_from_ignore=[norm_epz]", "did you mean 'norm_eps'"),
        ("data.skip_steps=[3, 0]", "a step is below 1"),
        ("data.prefetch_factor=0", "prefetch_factor is below 1"),
        ("data.val={'': x}", "a set has no name"),
        ("data.val=x", "expected a mapping"),
        ("data.task_encoder_args=[1]", "expected a mapping"),
        ("train.eval_batches=-1", "eval_batches is negative"),
        ("variant=toy", "there is no variant 'toy'"),
    ],
)
def test_mistakes_in_newer_settings(good: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(good, [override])


def test_reading_a_configuration_imports_nothing(good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (good.parent / "unread.py").write_text("raise RuntimeError('it was imported')\n")
    monkeypatch.syspath_prepend(str(good.parent))
    config = load_config(good, ["data.task_encoder=unread:Encoder", "data.task_encoder_args={stars: 4}"])
    assert config.data.task_encoder == "unread:Encoder" and config.data.task_encoder_args == {"stars": 4}
    with pytest.raises(RuntimeError, match="it was imported"):
        make_task_encoder(config.data, config.model)


def test_a_variant_is_taken_when_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "data: {path: a, val: {one: b, two: s3://c}, max_length: 9}\nmodel: {preset: 160M, dtype: bfloat16}\n"
        "variants:\n  toy:\n    data: {path: d, val: {one: e}}\n    model: {preset: tiny}\n    train: {steps: 3}\n"
        "  wrong: {data: {pth: x}}\n"
    )
    plain, toy = load_config(path), load_config(path, ["train.steps=4", "variant=toy"])
    assert plain.data == DataConfig(
        str(tmp_path / "a"), val={"one": str(tmp_path / "b"), "two": "s3://c"}, max_length=9
    )
    assert toy.data == DataConfig(str(tmp_path / "d"), val={"one": str(tmp_path / "e"), "two": "s3://c"}, max_length=9)
    assert toy.model == model_preset("tiny", dtype="bfloat16") and plain.model == model_preset("160M", dtype="bfloat16")
    assert toy.train.steps == 4, "what is given beside it wins"
    assert config_from_dict(json.loads(json.dumps(config_to_dict(toy)))) == toy
    with pytest.raises(ConfigError, match="did you mean 'toy'"):
        load_config(path, ["variant=toi"])
    with pytest.raises(ConfigError, match=r"run\.yaml:8.*unknown key 'pth'|unknown key 'pth'(.|\n)*run\.yaml:8"):
        load_config(path, ["variant=wrong"])


def test_an_override_can_unset(good: Path) -> None:
    assert load_config(good, ["model.num_kv_heads=null"]).model.num_kv_heads is None


def test_absolute_paths_and_urls_stay(tmp_path: Path) -> None:
    for path in ("/data/blend.yaml", "s3://bucket/blend.yaml"):
        (tmp_path / "run.yaml").write_text(f"data: {{path: '{path}'}}")
        assert load_config(tmp_path / "run.yaml").data.path == path


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data: {path: x}\ntrain:\n  stepz: 5\n", ["run.yaml:3:", "train", "unknown key 'stepz'", "'steps'"]),
        ("data: {path: x}\nopimizer: {}\n", ["unknown key 'opimizer'", "did you mean 'optimizer'?"]),
        ("data: {max_length: 5}\n", ["run.yaml:1:7", "missing key 'path'", "add 'path:' here"]),
        ("seed: 1\n", ["missing key 'data'", "add 'data:' here"]),
        ("", ["missing key 'data'", "add 'data:' here"]),
        ("data: {path: x}\ntrain: {steps: many}\n", ["run.yaml:2:16", "train.steps", "a whole number", "'many'"]),
        ("data: {path: x}\ntrain: {steps: 2.5}\n", ["expected a whole number", "found the number 2.5"]),
        ("data: {path: x}\ntrain: {steps: true}\n", ["expected a whole number", "found the truth value true"]),
        ("data: {path: x}\ntrain: {deterministic: 1}\n", ["expected true or false", "found the number 1"]),
        ("data: {path: 5}\n", ["expected text", "found the number 5"]),
        ("data: {path: x}\noptimizer: {lr: .nan}\n", ["optimizer.lr", "expected a finite number"]),
        ("data: {path: x}\noptimizer: {lr: fast}\n", ["expected a number", "'fast'"]),
        ("data: {path: x}\noptimizer: {betas: [0.9]}\n", ["expected a list of 2", "found a list of 1"]),
        ("data: {path: x}\noptimizer: {betas: [0.9, 1.0]}\n", ["run.yaml:2:20", "optimizer.betas", "[0, 1)"]),
        ("data: {path: x}\nmodel:\n  hidden_size: 65\n", ["run.yaml:3:16", "hidden_size=65", "multiple of 8"]),
        ("data: {path: x}\nmodel: {num_kv_heads: 3}\n", ["cannot share 3 key heads", "divisor of 4"]),
        ("data: {path: x}\nmodel: {dtype: float16}\n", ["unknown dtype 'float16'", "float32, float64"]),
        ("data: {path: x}\nmodel: {image_size: 9}\n", ["9 pixels cannot be cut into patches of 2"]),
        ("data: {path: x}\ntrain: {steps: 0}\n", ["steps is below 1"]),
        ("data: {path: x}\noptimizer: {clip: -1}\n", ["clip is negative"]),
        ("data: {path: x}\ndata: {path: y}\n", ["run.yaml:2:1", "the key 'data' appears twice"]),
        ("data: x\n", ["run.yaml:1:7 at data", "expected a mapping with the keys path", "found text 'x'"]),
        ("- 1\n", ["expected a mapping", "found a list of 1"]),
        ("data: {path: x\n", ["not valid YAML", "run.yaml:2"]),
        ("data: {path: x}\ntrain: {steps: '5'}\n", ["train.steps", "found text '5'", "remove the quotes"]),
        ("data: {path: x}\noptimizer: {lr: '1e-3'}\n", ["optimizer.lr", "remove the quotes"]),
        ("data: {path: x}\ntrain: {freeze: [a, 1]}\n", ["run.yaml:2:21 at train.freeze[1]", "put it into quotes"]),
        ("data: " + "[" * 50_000, ["run.yaml:1:106", "nested too deeply"]),
        ("a0: &a [x]\n" + "".join(f"a{n}: [{'*a, ' * 99}]\n" for n in range(1, 1200)), ["aliases make the document"]),
        ("data: {path: !!python/object:os.system x}\n", ["run.yaml:1:14", "tags that make objects are not allowed"]),
    ],
)
def test_a_mistake_says_where_it_is_and_what_to_do(tmp_path: Path, text: str, words: list[str]) -> None:
    (tmp_path / "run.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "run.yaml")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.steps", ["not of the form section.key=value"]),
        ("=5", ["not of the form section.key=value"]),
        ("train.stepz=5", ["override 'train.stepz=5'", "did you mean 'steps'?"]),
        ("train.steps=few", ["override 'train.steps=few'", "a whole number"]),
        ("seed.more=5", ["'seed' is a value, not a section"]),
        ("train.steps=[", ["not valid YAML"]),
        ("train=5", ["override 'train=5'", "expected a mapping", "found the number 5"]),
    ],
)
def test_a_wrong_override_is_quoted(good: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(good, [override])
    for word in words:
        assert word in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.yaml"):
        load_config(tmp_path / "nothing.yaml")


def test_a_config_can_be_made_in_python() -> None:
    assert TrainerConfig(DataConfig("somewhere")).model.padded_vocab_size == 320
    with pytest.raises(ConfigError, match="max_length is below 1"):
        DataConfig("somewhere", max_length=0)


def test_the_example_is_a_valid_configuration() -> None:
    root = Path(__file__).parents[3]
    for path in sorted((root / "examples/configs").glob("*.yaml")):
        if path.stem != "finetune-chat":  # which takes its shape from a folder that is not here
            load_config(path)


def test_a_preset_is_a_shape_that_other_keys_change(good: Path) -> None:
    config = load_config(good, ["model.preset=1.1B", "model.num_layers=2"])
    assert (config.model.hidden_size, config.model.num_layers, config.model.num_kv_heads) == (2048, 2, 4)
    assert config_from_dict(config_to_dict(config)) == config
    assert model_preset("1.1B", num_layers=2) == config.model
    with pytest.raises(ConfigError, match="no preset '1B'"):
        load_config(good, ["model.preset=1B"])


def test_a_strategy_of_batches_is_a_document(good: Path) -> None:
    config = load_config(good, ["data.batching={strategy: best_fit, capacity: 64}", "data.batching.open_bins=4"])
    assert config.data.batching == {"strategy": "best_fit", "capacity": 64, "open_bins": 4}
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config
    with pytest.raises(ConfigError, match="expected a mapping; found text 'best_fit'"):
        load_config(good, ["data.batching=best_fit"])


@pytest.mark.parametrize("override", ["train.skip_steps=[7, 8]", "optimizer.steps=5"])
def test_a_key_of_another_section_is_told_where_it_belongs(tmp_path: Path, override: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {path: here}\n")
    key = override.partition("=")[0].partition(".")[2]
    with pytest.raises(ConfigError, match=rf"unknown key '{key}'(.|\n)*it is (data|train)\.{key}"):
        load_config(path, [override])


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90.0), ("3h30m", 12_600.0), ("1d2h3m4s", 93_784.0), ("45m", 2700.0), ("null", None)]
)
def test_a_time_limit_in_seconds_or_words(tmp_path: Path, text: str, seconds: float | None) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"data: {{path: here}}\ntrain: {{time_limit: {text}}}\n")
    config = load_config(path)
    assert config.train.time_limit == seconds
    assert config_from_dict(config_to_dict(config)) == config


@pytest.mark.parametrize("text", ["soon", "-5", "0", "0m", "h", "3 h", '""', "[3]"])
def test_no_time_limit_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(f"data: {{path: here}}\ntrain: {{time_limit: {text}}}\n")
    with pytest.raises(ConfigError, match="time_limit"):
        load_config(path)
