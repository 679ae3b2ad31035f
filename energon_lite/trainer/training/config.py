"""Configuration of a run: frozen dataclasses, filled from YAML and ``key=value`` overrides; and differences of two."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Annotated, Any, get_type_hints

from energon_lite.documents import Node, from_plain, load_yaml, parse_yaml, read
from energon_lite.errors import ConfigError, UsageError, require, require_at_least, require_choice
from energon_lite.trainer.checkpointing.checkpoint import read_state
from energon_lite.trainer.checkpointing.weights import find_weights
from energon_lite.trainer.conversion.from_huggingface import huggingface_model_config, is_huggingface
from energon_lite.trainer.data.loaders import DataConfig
from energon_lite.trainer.models.config import MODEL_MEANING, PRESETS, ModelConfig
from energon_lite.trainer.models.config import model_config_of as model_config_of
from energon_lite.trainer.optimizer.config import OptimizerConfig


@dataclass(frozen=True)
class MeshConfig:
    """Sizes of the parallel axes; data parallelism takes the ranks they leave. See :func:`build_mesh`.

    Args:
        tp: parts of each weight matrix.
        pp: pipeline stages.
        cp: parts of each row of tokens.
        sequence_parallel: with ``tp``, cut activations between blocks along the sequence.
        virtual: chunks of layers of each pipeline stage.
        order: the axes, the fastest varying first; those of size 1 may be left out.
        timeout: seconds that a collective may take before it is an error; None for torch's default.
        share_images: data-parallel ranks encode each other's images, so that all have equal work; useful if the image
            encoder takes a large part of a step and images differ in size or number.
    """

    tp: int = 1
    pp: int = 1
    cp: int = 1
    sequence_parallel: bool = False
    virtual: int = 1
    order: str = "tp-cp-dp-pp"
    timeout: float | None = None
    share_images: bool = False

    def __post_init__(self) -> None:
        require_at_least(self, "mesh", timeout=1)


def extra(name: str, setting: str) -> Any:
    """Import an extra, a folder of ``energon_lite/extras``, for a setting that needs it.

    Raises:
        UsageError: the extra is missing.
    """
    try:
        return import_module(f"energon_lite.extras.{name}")
    except ModuleNotFoundError:
        fix = f"install energon_lite with energon_lite/extras/{name}"
        raise UsageError(f"{setting} needs the extra {name}", fix=fix) from None


def _seconds(node: Node) -> float:
    """Read a time in seconds: a number, or a text such as ``3h30m``."""
    match = re.fullmatch(r"(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?", str(node.value))
    if not isinstance(node.value, str):
        return node.number()
    if not (match and node.value):
        raise node.wrong("a number of seconds, or a time such as 3h30m")
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


@dataclass(frozen=True)
class TrainConfig:
    """Length of a run, and its checkpoints, evaluations, metrics and diagnostics.

    Args:
        steps: optimizer steps of the whole run, resumed parts included.
        save_every: steps between checkpoints; 0 for one at the end only.
        keep: number of newest checkpoints to keep.
        keep_every: in addition, keep the first checkpoint at or after each multiple of this number of steps; 0 for
            none.
        checkpoints: their folder, or its URL, as ``s3://bucket/run``; None for ``output/checkpoints``.
        time_limit: time after which the run must be over, in seconds or as ``3h30m``; it saves and stops before. None
            for no limit.
        async_save: write checkpoints while training continues; otherwise training waits.
        save_timeout: seconds to wait for a checkpoint that is being written when an error ends the run.
        nonfinite_limit: number of consecutive steps with a NaN or infinite loss or gradient after which the run fails.
        spike_factor: a step whose loss exceeds this factor times the median of the losses before it updates nothing,
            see :class:`SpikeGuard`; 0 to apply every update.
        spike_window: number of losses in that median.
        log_every: steps between progress lines when the output is not a terminal.
        eval_every: steps between evaluations; 0 for none.
        eval_at_start: also evaluate before the first step.
        eval_batches: micro-batches of each validation set, summed over all data-parallel ranks; 0 for all of them.
        init_from: source of a new run's weights: a checkpoint, a folder of checkpoints (the newest is used), or a
            Hugging Face model folder. None for random weights. A run that has a checkpoint of its own resumes from
            that.
        init_from_ignore: model settings, such as ``rope_theta``, that may differ from that checkpoint's.
        freeze: name patterns of parameters that are not trained, such as ``vision.*`` or ``layers.[01].*``.
        tensorboard: also write metrics for TensorBoard, into ``output/tensorboard``.
        wandb: also send metrics to Weights & Biases: the arguments of ``wandb.init``, as ``{project: captions}``; None
            to disable.
        prometheus_port: port of this machine that serves the metrics of the last step to Prometheus; None to disable.
        peak_tflops: peak throughput of a device in TFLOP/s, for ``mfu`` in the metrics; None for the maker's figure.
        profile: first and last step of the window in which Chrome traces are recorded, into ``output/profile``.
        measure_costs: interval in steps at which micro-batch times are measured, for the cost model that later runs
            plan by, see ``MicroBatchTimes`` of the extra ``balance``; 0 to disable.
        memory_snapshot: in that window, also record GPU memory allocations by call stack, for pytorch.org/memory_viz.
        flight_recorder: number of recent collectives that NCCL remembers, and writes into ``output`` when one hangs.
        deterministic: only deterministic kernels, and one thread per process: two runs give the same bits. On a GPU
            this excludes the fastest attention, and fills all new memory. None: true without a GPU, false with one.
    """

    steps: int = 100
    save_every: int = 0
    keep: int = 2
    keep_every: int = 0
    checkpoints: str | None = None
    time_limit: Annotated[float | None, _seconds] = None
    async_save: bool = True
    save_timeout: float = 300.0
    nonfinite_limit: int = 3
    spike_factor: float = 0.0
    spike_window: int = 64
    log_every: int = 10
    eval_every: int = 0
    eval_at_start: bool = False
    eval_batches: int = 0
    init_from: str | None = None
    init_from_ignore: tuple[str, ...] = ()
    freeze: tuple[str, ...] = ()
    tensorboard: bool = False
    wandb: Mapping[str, Any] | None = None
    prometheus_port: int | None = None
    peak_tflops: float | None = None
    profile: tuple[int, int] | None = None
    measure_costs: int = 0
    memory_snapshot: bool = False
    flight_recorder: int = 0
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        window = self.profile is None or 1 <= self.profile[0] <= self.profile[1]
        require(window, "profile is not a window of steps", "train.profile", "give e.g. [5, 6]")
        peak = self.peak_tflops is None or self.peak_tflops > 0
        require(peak, "peak_tflops is not positive", "train.peak_tflops", "leave it out, or give e.g. 989")
        for name in self.init_from_ignore:
            what = f"{name!r} is not a setting that decides what weights mean"
            require_choice(name, MODEL_MEANING, what, "train.init_from_ignore")
        factor = self.spike_factor == 0 or self.spike_factor > 1
        require(factor, "spike_factor is not above 1", "train.spike_factor", "leave it out, or give e.g. 1.5")
        require_at_least(self, "train", steps=1, keep=1, log_every=1, nonfinite_limit=1, spike_window=2)
        require_at_least(self, "train", save_every=0, keep_every=0, eval_every=0, eval_batches=0, save_timeout=0)
        require_at_least(self, "train", flight_recorder=0, measure_costs=0)
        inside = not self.memory_snapshot or self.profile is not None
        require(inside, "memory_snapshot has no window", "train.memory_snapshot", "give train.profile, e.g. [5, 6]")
        limit = self.time_limit is None or self.time_limit > 0
        require(limit, "time_limit is not positive", "train.time_limit", "leave it out, or give e.g. 3h30m")


@dataclass(frozen=True)
class TrainerConfig:
    """Configuration of a whole run. Equal values give equal runs.

    Args:
        data: the training data; the only section without defaults.
        seed: seed of the initial weights and of the order of samples.
        output: folder for metrics and checkpoints, on this machine; :attr:`TrainConfig.checkpoints` may be elsewhere.
    """

    data: DataConfig
    seed: int = 0
    output: str = "output"
    mesh: MeshConfig = field(default_factory=MeshConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        what = f"output is {self.output!r}, and metrics are written to a folder on this machine"
        require("://" not in self.output, what, "output", "give a folder; for checkpoints there: train.checkpoints")
        lr, least = self.optimizer.lr, self.optimizer.min_lr
        what = f"min_lr={least:g} is above lr={lr:g}, so the learning rate would rise to the end"
        falls = least <= lr or self.optimizer.schedule == "constant"
        require(falls, what, "optimizer.min_lr", f"give at most lr, e.g. {lr / 10:g}")


#: Settings that change no step, by section.
HARMLESS = {
    "": "output mesh",
    "data.": "workers path val_path val share prefetch_factor",
    "model.": "recompute recompute_budget compile loss_chunk",
    "train.": "save_every keep keep_every checkpoints time_limit async_save save_timeout log_every eval_every "
    "eval_at_start eval_batches tensorboard wandb prometheus_port peak_tflops init_from init_from_ignore profile "
    "memory_snapshot flight_recorder nonfinite_limit measure_costs",
}


def changes(old: dict[str, Any], new: dict[str, Any], at: str = "") -> Iterator[str]:
    """Yield the differences between two configurations, except settings that change no step."""
    harmless = HARMLESS.get(at, "").split()
    for key in sorted(old.keys() | new.keys()):
        path = f"{at}{key}"
        before = old.get(key)
        now = new.get(key)
        if key in harmless or before == now:
            continue
        if isinstance(before, dict) and isinstance(now, dict):
            yield from changes(before, now, f"{path}.")
        else:
            yield f"{path} was {before!r}, is {now!r}"


#: The preset name that stands for the model of ``train.init_from``.
_INIT_FROM = "init_from"
#: Prefix of an override that selects a variant.
_VARIANT = "variant="
#: File name of a dict configuration in error messages.
_DICT_NAME = "<dict>"


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainerConfig:
    """Read a run's configuration.

    ``data.path``, ``data.val_path``, ``data.val`` and ``data.tokenizer`` are relative to the file they are written in;
    ``output``, ``train.init_from`` and the values of overrides, to the working directory. Without ``data.tokenizer``, a
    run that starts from a Hugging Face folder uses the tokenizer of that folder.

    The section ``variants`` of the file holds named settings, in the same sections as the file. They apply only when
    requested: ``variant=toy``.

    Args:
        path: the YAML file.
        overrides: items ``section.key=value``, the value as YAML; they take precedence over the file and over
            ``variant=name``.

    Raises:
        ConfigError: the file is not YAML, a key is unknown or missing, or a value is invalid; with file, line and the
            nearest valid key.

    Example:
        >>> config = load_config("run.yaml", ["optimizer.lr=3e-4", "train.steps=10"])
    """
    root = load_yaml(path, may_be_empty=True)
    root.entries()
    variants = root.value.pop("variants", Node({}, os.fspath(path), "variants"))
    for override in (text for text in overrides if text.startswith(_VARIANT)):
        name = override.removeprefix(_VARIANT)
        if name not in variants.entries():
            raise variants.error(f"there is no variant {name!r}", found=None, choices=list(variants.value), word=name)
        _merge(root.value, variants.value[name].entries(), wins=True)
    data = _section(root, "data")
    sets = _section(Node(data, root.file, "data"), "val")
    for paths, names in ((data, ("path", "val_path", "tokenizer")), (sets, tuple(sets))):
        for name in names:
            node = paths.get(name)
            if node is not None and isinstance(node.value, str) and "://" not in node.value:
                paths[name] = replace(node, value=os.path.join(os.path.dirname(path), os.path.expanduser(node.value)))
    for override in (text for text in overrides if not text.startswith(_VARIANT)):
        _override(root, override)
    return _config(root)


def config_from_dict(values: Mapping[str, Any]) -> TrainerConfig:
    """Read a run's configuration from a plain dict, e.g. one that :func:`config_to_dict` made.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    return _config(from_plain(values, _DICT_NAME))


def config_to_dict(config: TrainerConfig) -> dict[str, Any]:
    """Return the configuration as plain values that JSON can hold."""
    values = from_plain(dataclasses.asdict(config), _DICT_NAME).plain()
    assert isinstance(values, dict)  # dataclasses become mappings
    return values


def _section(root: Node, name: str) -> dict[str, Node]:
    """Return the entries of a section, to be changed in place; an empty dict if it is absent or no mapping."""
    section = root.value.get(name)
    return section.value if section is not None and isinstance(section.value, dict) else {}


def _config(root: Node) -> TrainerConfig:
    """Return the configuration of a document; given values take precedence over those of ``model.preset``."""
    model = _section(root, "model")
    preset = model.pop("preset", None)
    if preset is not None:
        if preset.value not in (*PRESETS, _INIT_FROM):
            raise preset.error(f"there is no preset {preset.value!r}", found=None, choices=[*PRESETS, _INIT_FROM])
        shape = _shape_of_init_from(root, preset) if preset.value == _INIT_FROM else PRESETS[preset.value]
        shape = from_plain(shape, preset.file, "model").value
        at = {"line": preset.line, "column": preset.column}
        _merge(model, {key: replace(node, **at) for key, node in shape.items()}, wins=False)
    _take_tokenizer(root)
    _check_sections(root)
    return read(root, TrainerConfig)


def _check_sections(root: Node) -> None:
    """Name the right section for a key in the wrong one: ``train.skip_steps`` is ``data.skip_steps``."""
    classes = {name: cls for name, cls in get_type_hints(TrainerConfig).items() if dataclasses.is_dataclass(cls)}
    keys = {name: {field.name for field in dataclasses.fields(cls)} for name, cls in classes.items()}
    for name in keys:
        for key, node in _section(root, name).items():
            owners = [f"{other}.{key}" for other in keys if key in keys[other]]
            if owners and key not in keys[name]:
                raise node.key_error(f"unknown key {key!r}", f"move it: it is {owners[0]}")


def _shape_of_init_from(root: Node, preset: Node) -> Mapping[str, Any]:
    """Return the model section of the checkpoint, or of the Hugging Face folder, that the run starts from."""
    given = _section(root, "train").get("init_from")
    if given is None or not isinstance(given.value, str):
        what = "the model is to be that of train.init_from, and there is none"
        raise preset.error(what, "name a checkpoint, or give the model's own settings", found=None)
    if is_huggingface(given.value):
        dtype = _section(root, "model").get("dtype")
        named = None if dtype is None else str(dtype.value)
        return dataclasses.asdict(huggingface_model_config(given.value, dtype=named))
    checkpoint = find_weights(given.value, whole=False)
    saved: Mapping[str, Any] = read_state(checkpoint).get("config", {}).get("model", {})
    if not saved:
        what = f"{checkpoint} does not say what model it is of"
        raise preset.error(what, "give the model's own settings", found=None)
    return saved


def _take_tokenizer(root: Node) -> None:
    """Take the tokenizer of the Hugging Face folder that a run starts from, if none is named."""
    data, given = _section(root, "data"), _section(root, "train").get("init_from")
    if "tokenizer" in data or given is None or not isinstance(given.value, str) or not is_huggingface(given.value):
        return
    if not os.path.isfile(os.path.join(given.value, "tokenizer.json")):
        fix = "name one: data.tokenizer=folder, or data.tokenizer=null for the bytes of UTF-8"
        raise given.error("the folder has no tokenizer.json", fix, found=None)
    data["tokenizer"] = replace(given, key="tokenizer", path="data.tokenizer")


def _merge(given: dict[str, Node], more: Mapping[str, Node], *, wins: bool) -> None:
    """Add entries to a section, in place, section by section; those of ``more`` replace given ones if it ``wins``."""
    for key, node in more.items():
        if key in given and isinstance(given[key].value, dict) and isinstance(node.value, dict):
            _merge(given[key].value, node.value, wins=wins)
        elif wins or key not in given:
            given[key] = node


def _override(root: Node, override: str) -> None:
    """Insert one ``a.b=value`` into the tree of nodes."""
    name = f"override {override!r}"
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        what = "an override is not of the form section.key=value"
        raise ConfigError(what, file=name, fix="e.g. train.steps=100")
    value = parse_yaml(text.strip() or "null", name).plain()
    target = root
    for key in keys[:-1]:
        target = target.value.setdefault(key, Node({}, name, f"{target.path}.{key}".lstrip("."), key=key))
        if not isinstance(target.value, dict):
            what = f"{key!r} is a value, not a section"
            raise Node(None, name, path).error(what, "name a section, e.g. train.steps=100", found=None)
    target.value[keys[-1]] = replace(from_plain(value, name, path.strip()), key=keys[-1])
