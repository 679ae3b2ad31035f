"""Reading of a :class:`TrainerConfig` from YAML and ``key=value`` overrides, and differences of two."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, get_type_hints

from energon_lite.documents import Node, from_plain, load_yaml, parse_yaml, read
from energon_lite.errors import ConfigError
from energon_lite.trainer.checkpointing.checkpoint import read_state
from energon_lite.trainer.checkpointing.weights import find_weights
from energon_lite.trainer.conversion.from_huggingface import huggingface_model_config, is_huggingface
from energon_lite.trainer.models.config import model_config_of as model_config_of
from energon_lite.trainer.models.presets import PRESETS
from energon_lite.trainer.training.config import TrainerConfig

#: Settings that change no step, by section.
HARMLESS = {
    "": "output mesh",
    "data.": "workers path val_path val share prefetch_factor",
    "model.": "recompute recompute_budget compile fuse_projections loss_chunk",
    "train.": "save_every keep keep_every checkpoints time_limit async_save save_timeout log_every eval_every "
    "eval_at_start eval_batches tensorboard wandb prometheus_port peak_tflops init_from init_from_ignore profile "
    "memory_snapshot gc_every flight_recorder nonfinite_limit measure_costs",
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
