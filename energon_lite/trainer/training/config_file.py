"""From a YAML file and ``key=value`` overrides to a :class:`TrainerConfig`, strictly: an unknown key is an error."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from energon_lite.documents import Node, from_plain, load_yaml, parse_yaml, read
from energon_lite.errors import ConfigError
from energon_lite.trainer.checkpointing.checkpoint import read_state
from energon_lite.trainer.checkpointing.weights import find_weights
from energon_lite.trainer.models.config import ModelConfig
from energon_lite.trainer.models.presets import PRESETS
from energon_lite.trainer.training.config import TrainerConfig

#: The preset that is no known shape, but that of the checkpoint a run begins with.
_INIT_FROM = "init_from"
#: How a configuration given as a dict is called in messages.
_DICT_NAME = "<dict>"


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> TrainerConfig:
    """Read a run's configuration.

    ``data.path``, ``data.val_path`` and ``data.tokenizer`` are relative to the file they are written in; ``output``,
    ``train.init_from``, and what an override says, to the working directory.

    Args:
        path: the YAML file.
        overrides: ``section.key=value`` each, the value as YAML; they win over the file.

    Raises:
        ConfigError: not YAML, an unknown or missing key, or a value that cannot be; with file, line and the nearest
            valid key.

    Example:
        >>> config = load_config("run.yaml", ["optimizer.lr=3e-4", "train.steps=10"])
    """
    root = load_yaml(path, may_be_empty=True)
    root.entries()
    data = _section(root, "data")
    for name in ("path", "val_path", "tokenizer"):
        node = data.get(name)
        if node is not None and isinstance(node.value, str) and "://" not in node.value:
            data[name] = replace(node, value=os.path.join(os.path.dirname(path), os.path.expanduser(node.value)))
    for override in overrides:
        _override(root, override)
    return _config(root)


def config_from_dict(values: Mapping[str, Any]) -> TrainerConfig:
    """The same from a plain dict, e.g. one that :func:`config_to_dict` made.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    return _config(from_plain(values, _DICT_NAME))


def model_config_of(values: Mapping[str, Any]) -> ModelConfig:
    """The model's part of what :func:`config_to_dict` made; a checkpoint of weights alone has no other.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    return read(from_plain(values.get("model", {}), _DICT_NAME, "model"), ModelConfig)


def config_to_dict(config: TrainerConfig) -> dict[str, Any]:
    """Plain values, as JSON can hold them."""
    values = from_plain(dataclasses.asdict(config), _DICT_NAME).plain()
    assert isinstance(values, dict)  # as dataclasses become
    return values


def _section(root: Node, name: str) -> dict[str, Node]:
    """The entries of a section, to be changed in place; none if it is not there, or no mapping."""
    section = root.value.get(name)
    return section.value if section is not None and isinstance(section.value, dict) else {}


def _config(root: Node) -> TrainerConfig:
    """The configuration of a document; what ``model.preset`` stands for is below what is given."""
    model = _section(root, "model")
    preset = model.pop("preset", None)
    if preset is not None:
        if preset.value not in (*PRESETS, _INIT_FROM):
            raise preset.error(f"there is no preset {preset.value!r}", found=None, choices=[*PRESETS, _INIT_FROM])
        shape = _shape_of_init_from(root, preset) if preset.value == _INIT_FROM else PRESETS[preset.value]
        for key, node in from_plain(shape, preset.file, "model").value.items():
            model.setdefault(key, replace(node, line=preset.line, column=preset.column))
    return read(root, TrainerConfig)


def _shape_of_init_from(root: Node, preset: Node) -> Mapping[str, Any]:
    """The model's section of the checkpoint that the run begins with."""
    given = _section(root, "train").get("init_from")
    if given is None or not isinstance(given.value, str):
        what = "the model is to be that of train.init_from, and there is none"
        raise preset.error(what, "name a checkpoint, or give the model's own settings", found=None)
    found = find_weights(given.value, whole=False)
    saved: Mapping[str, Any] = read_state(found).get("config", {}).get("model", {})
    if not saved:
        raise preset.error(f"{found} does not say what model it is of", "give the model's own settings", found=None)
    return saved


def _override(root: Node, override: str) -> None:
    """Put one ``a.b=value`` into the tree of nodes."""
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
