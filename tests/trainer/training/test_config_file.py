"""Strict configuration: what is read, and what each mistake says."""

from __future__ import annotations

import json
from operator import attrgetter
from pathlib import Path

import pytest

from energon_lite.errors import ConfigError
from energon_lite.trainer import (
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    RopeScaling,
    config_from_dict,
    config_to_dict,
    load_config,
    make_task_encoder,
    model_preset,
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
    assert config.model == ModelConfig() and config.model.padded_vocab_size == 320


def test_a_run_that_says_nothing_else_has_these_numbers() -> None:
    config = config_from_dict({"data": {"path": "x"}})
    settings = {**vars(config.data), **vars(config.mesh), **vars(config.model), **vars(config.optimizer)}
    found = {name: value for name, value in (settings | vars(config.train)).items() if type(value) is int and value}
    data = {"micro_batch_size": 8, "micro_batches_per_step": 4, "workers": 1, "max_length": 64}
    model = {"hidden_size": 96, "num_layers": 3, "num_heads": 4, "ffn_size": 256, "vocab_size": 259}
    model |= {"vocab_multiple": 64, "patch_size": 2, "warmup": 10, "tp": 1, "pp": 1, "cp": 1, "virtual": 1}
    train = {"steps": 100, "keep": 2, "nonfinite_limit": 3, "spike_window": 64, "log_every": 10}
    assert found == data | model | train and config.seed == 0


#: The least that is allowed, for some the most.
LEAST = """
    train.steps=1 train.keep=1 train.log_every=1 train.nonfinite_limit=1 train.spike_window=2 train.profile=[1,1]
    train.peak_tflops=0.5 data.skip_steps=[1] data.prefetch_factor=1 data.micro_batch_size=1
    data.micro_batches_per_step=1 data.max_length=1 model.hidden_size=1 model.num_layers=1 model.num_heads=1
    model.head_dim=2 model.ffn_size=1 model.vocab_size=1 model.image_size=1 model.patch_size=1 model.sliding_window=1
    model.vision.hidden_size=1 model.vision.num_layers=1 model.vision.num_heads=1 model.vision.ffn_size=1
    model.vision.image_token=0 optimizer.bucket_size=1 optimizer.decay_share=1 optimizer.scale_rule=sqrt
    optimizer.reference_tokens=1 optimizer.groups=[{"match":"a","weight_decay":0,"lr_scale":0}]
"""
#: Overrides, and settings of the configuration that they make.
OVERRIDES: list[tuple[list[str], dict[str, object]]] = [
    (
        ["train.steps=9", "model.num_kv_heads=2", "data.path=here.yaml", "mesh.tp=2", "optimizer.lr=3e-4"],
        {"train.steps": 9, "model.num_kv_heads": 2, "data.path": "here.yaml", "mesh.tp": 2, "optimizer.lr": 3e-4}
        | {"train.deterministic": False},  # the section's other keys stay
    ),
    (
        ["model.rope_scaling.factor=32", "model.rope_scaling.original_length=4096"],
        {"model.rope_scaling": RopeScaling(factor=32.0, original_length=4096)},
    ),
    (
        ["train.freeze=[vision.*, norm.weight]", "mesh.sequence_parallel=true"],
        {"train.freeze": ("vision.*", "norm.weight"), "mesh.sequence_parallel": True},
    ),
    (["model.rope_scaling=null", "model.num_kv_heads=null"], {"model": ModelConfig()}),
    (
        ["model.preset=1.1B", "model.num_layers=2"],
        {"model.hidden_size": 2048, "model.num_kv_heads": 4, "model": model_preset("1.1B", num_layers=2)},
    ),
    (
        ["data.batching={strategy: best_fit, capacity: 64}", "data.batching.open_bins=4"],
        {"data.batching": {"strategy": "best_fit", "capacity": 64, "open_bins": 4}},
    ),
    (LEAST.split(), {"train.keep": 1, "model.vision.image_token": 0, "optimizer.decay_share": 1.0}),
    (["train.time_limit=90"], {"train.time_limit": 90.0}),
    (["train.time_limit=3h30m"], {"train.time_limit": 12_600.0}),
    (["train.time_limit=1d2h3m4s"], {"train.time_limit": 93_784.0}),
    (["train.time_limit=45m"], {"train.time_limit": 2700.0}),
    (["train.time_limit=null"], {"train.time_limit": None}),
]


@pytest.mark.parametrize(("overrides", "settings"), OVERRIDES)
def test_overrides_win(good: Path, overrides: list[str], settings: dict[str, object]) -> None:
    config = load_config(good, overrides)
    assert {name: attrgetter(name)(config) for name in settings} == settings
    assert config_from_dict(json.loads(json.dumps(config_to_dict(config)))) == config


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
    sets = {"one": str(tmp_path / "b"), "two": "s3://c"}
    assert plain.data == DataConfig(str(tmp_path / "a"), val=sets, max_length=9)
    assert toy.data == DataConfig(str(tmp_path / "d"), val=sets | {"one": str(tmp_path / "e")}, max_length=9)
    assert toy.model == model_preset("tiny", dtype="bfloat16") and plain.model == model_preset("160M", dtype="bfloat16")
    assert toy.train.steps == 4, "what is given beside it wins"
    assert config_from_dict(json.loads(json.dumps(config_to_dict(toy)))) == toy
    with pytest.raises(ConfigError, match="did you mean 'toy'"):
        load_config(path, ["variant=toi"])
    with pytest.raises(ConfigError, match=r"run\.yaml:8.*unknown key 'pth'|unknown key 'pth'(.|\n)*run\.yaml:8"):
        load_config(path, ["variant=wrong"])


#: Files that are refused, and what is said of each. What kinds of values say is in the tests of ``documents``.
WRONG_FILES = [
    ("data: {path: x}\ntrain:\n  stepz: 5\n", ["run.yaml:3:", "train", "unknown key 'stepz'", "'steps'"]),
    ("data: {path: x}\nopimizer: {}\n", ["unknown key 'opimizer'", "did you mean 'optimizer'?"]),
    ("data: {max_length: 5}\n", ["run.yaml:1:7", "missing key 'path'", "add 'path:' here"]),
    ("seed: 1\n", ["missing key 'data'", "add 'data:' here"]),
    ("", ["missing key 'data'", "add 'data:' here"]),
    ("data: {path: x}\ntrain: {steps: many}\n", ["run.yaml:2:16", "train.steps", "a whole number", "'many'"]),
    ("data: {path: x}\noptimizer: {betas: [0.9, 1.0]}\n", ["run.yaml:2:20", "optimizer.betas", "[0, 1)"]),
    ("data: {path: x}\nmodel:\n  hidden_size: 65\n", ["run.yaml:3:16", "hidden_size=65", "multiple of 8"]),
    ("data: x\n", ["run.yaml:1:7 at data", "expected a mapping with the keys path", "found text 'x'"]),
    ("- 1\n", ["expected a mapping", "found a list of 1"]),
    ("data: {path: x\n", ["not valid YAML", "run.yaml:2"]),
]


@pytest.mark.parametrize(("text", "words"), WRONG_FILES)
def test_a_mistake_says_where_it_is_and_what_to_do(good: Path, text: str, words: list[str]) -> None:
    good.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(good)
    assert [word for word in words if word not in str(caught.value)] == []


#: Overrides that are refused, and what is said of each.
WRONG_OVERRIDES = [
    ("train.steps", ["not of the form section.key=value"]),
    ("=5", ["not of the form section.key=value"]),
    ("train.stepz=5", ["override 'train.stepz=5'", "did you mean 'steps'?"]),
    ("train.steps=few", ["override 'train.steps=few'", "a whole number"]),
    ("seed.more=5", ["'seed' is a value, not a section"]),
    ("train.steps=[", ["not valid YAML"]),
    ("train=5", ["override 'train=5'", "expected a mapping", "found the number 5"]),
    ("train.skip_steps=[7, 8]", ["unknown key 'skip_steps'", "it is data.skip_steps"]),
    ("optimizer.steps=5", ["unknown key 'steps'", "it is train.steps"]),
    ("variant=toy", ["there is no variant 'toy'"]),
    ("model.preset=qwen3-8B", ["no preset 'qwen3-8B'", "did you mean 'qwen-3-8B'"]),
    ("model.num_kv_heads=3", ["cannot share 3 key heads", "divisor of 4"]),
    ("model.dtype=float16", ["unknown dtype 'float16'", "float32, float64"]),
    ("model.image_size=9", ["9 pixels cannot be cut into patches of 2"]),
    ("model.head_dim=7", ["at model.head_dim", "a width of 7"]),
    ("model.head_dim=0", ["at model.head_dim", "a width of 0"]),
    ("model={hidden_size: 10, num_heads: 4}", ["at model.hidden_size", "or give head_dim"]),
    ("model.sliding_window=0", ["at model.sliding_window", "below 1"]),
    ("model.vocab_multiple=0", ["vocab_multiple is below 1"]),
    ("model.rope_theta=0", ["rope_theta is below 1"]),
    ("model.norm_eps=-1.0", ["norm_eps is negative"]),
    ("model.init_std=-1.0", ["init_std is negative"]),
    ("model.recompute=ful", ["did you mean 'full'"]),
    ("model.recompute_budget=0.5", ["not a share that a compiler can obey"]),
    ("model={recompute_budget: 1.5, compile: true}", ["not a share that a compiler can obey"]),
    ("model.rope_scaling.factr=2", ["did you mean 'factor'"]),
    ("model.rope_scaling={low_frequency: 8}", ["low_frequency is not below high_frequency"]),
    ("model.rope_scaling={kind: yarn, low_frequency: 40.0}", ["low_frequency is not below"]),
    ("model.rope_scaling={factor: 0.5}", ["would shrink rows"]),
    ("model.rope_scaling={kind: ntk}", ["unknown kind 'ntk'"]),
    ("model.rope_scaling={original_length: 0}", ["original_length is below 1"]),
    ("model.rope_scaling={attention_factor: 1.2}", ["attention_factor=1.2 with kind=llama3"]),
    ("model.rope_scaling={kind: yarn, attention_factor: 0.0}", ["attention_factor=0.0"]),
    ("optimizer.clip=-1", ["clip is negative"]),
    ("optimizer.eps=0", ["eps is not positive"]),
    *((f"optimizer.momentum={number}", [f"momentum of {number}.0 is not in [0, 1)"]) for number in (-1, 1)),
    ("optimizer.min_lr=0.01", ["at optimizer.min_lr", "min_lr=0.01 is above lr=0.001", "e.g. 0.0001"]),
    ("mesh.timeout=0", ["timeout is below 1"]),
    ("optimizer.schedule=cosin", ["did you mean 'cosine'"]),
    ("optimizer.decay_share=0", ["not a share"]),
    ("optimizer.bucket_size=0", ["bucket_size is below 1"]),
    ("optimizer.scale_rule=sqrt", ["scale_rule needs reference_tokens"]),
    ("optimizer.groups=[{match: a, weight_decay: -0.1}]", ["weight_decay is negative"]),
    ("optimizer.groups=[{match: a, lr_scale: -0.1}]", ["lr_scale is negative"]),
    ("optimizer.groups=[{match: a, algorithm: sgd}]", ["a group's algorithm is 'sgd'"]),
    ("optimizer.groups=[{match: a, algorithm: muon}]", ["algorithms of their own under muon only"]),
    ("optimizer={algorithm: muon, muon_scale: big}", ["unknown muon_scale"]),
    ("model.num_layers=0", ["num_layers is below 1"]),
    ("model={image_size: 8, vision: {num_layers: 0}}", ["num_layers is below 1"]),
    ("model={image_size: 8, vision: {activation: relu}}", ["unknown activation 'relu'"]),
    ("model={image_size: 8, vision: {num_heads: 7}}", ["cannot be cut into 7 heads"]),
    ("model={image_size: 8, vision: {feature_layer: -13}}", ["there is no block -13 of 12"]),
    ("model={image_size: 8, vision: {kind: clip, head: true}}", ["CLIP has no pooling head"]),
    ("model={image_size: 8, vision: {pooling: attention, head: true}}", ["done by the head"]),
    ("model={image_size: 8, vision: {norm_eps: -1.0}}", ["norm_eps is negative", "model.vision"]),
    ("model={image_size: 8, vision: {tp: 2}}", ["tp=2"]),
    ("model={image_size: 8, vision: {image_std: [1.0, 0.0, 1.0]}}", ["a deviation is not above 0"]),
    ("model={image_size: 8, patch_size: 9, vision: {}}", ["9 pixels do not fit into an image of 8"]),
    ("output=s3://x", ["metrics are written to a folder", "train.checkpoints"]),
    ("data.max_images=3", ["without batching"]),
    *((f"train.profile={window}", ["not a window of steps"]) for window in ([0, 1], [4, 3])),
    ("data.share=send", ["use one of: load, broadcast"]),
    ("data.max_length=0", ["max_length is below 1"]),
    ("data.skip_steps=[3, 0]", ["a step is below 1"]),
    ("data.prefetch_factor=0", ["prefetch_factor is below 1"]),
    ("data.batching=best_fit", ["expected a mapping; found text 'best_fit'"]),
    ("data.val={'': x}", ["a set has no name"]),
    ("data.val=x", ["expected a mapping"]),
    ("data.task_encoder_args=[1]", ["expected a mapping"]),
    ("train.steps=0", ["steps is below 1"]),
    ("train.freeze=vision.*", ["expected a list"]),
    ("train.freeze=[1]", ["expected text"]),
    ("train.peak_tflops=0", ["not positive"]),
    ("train.nonfinite_limit=0", ["nonfinite_limit is below 1"]),
    ("train.spike_factor=1", ["spike_factor is"]),
    ("train.spike_window=1", ["spike_window is"]),
    ("train.save_timeout=-1", ["save_timeout is negative"]),
    ("train.flight_recorder=-1", ["flight_recorder is negative"]),
    ("train.memory_snapshot=true", ["memory_snapshot has no window"]),
    ("train.init_from_ignore=[norm_epz]", ["at train.init_from_ignore", "did you mean 'norm_eps'"]),
    ("train.eval_batches=-1", ["eval_batches is negative"]),
    *((f"train.time_limit={text}", ["time_limit"]) for text in ("soon", "-5", "0", "0m", "h", "3 h", '""', "[3]")),
]


@pytest.mark.parametrize(("override", "words"), WRONG_OVERRIDES)
def test_a_wrong_override_is_quoted(good: Path, override: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(good, [override])
    assert [word for word in words if word not in str(caught.value)] == []


def test_the_example_is_a_valid_configuration() -> None:
    root = Path(__file__).parents[3]
    for path in sorted((root / "examples/configs").glob("*.yaml")):
        if path.stem != "finetune-chat":  # which takes its shape from a folder that is not here
            load_config(path)
