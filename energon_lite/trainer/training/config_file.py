"""From a YAML file and ``key=value`` overrides to a :class:`TrainerConfig`, strictly: an unknown key is an error."""

from __future__ import annotations

import dataclasses
import os
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import yaml

from energon_lite.errors import ConfigError
from energon_lite.trainer.checkpointing.checkpoint import read_state
from energon_lite.trainer.checkpointing.weights import find_weights
from energon_lite.trainer.training.config import ModelConfig, TrainerConfig
from energon_lite.trainer.training.presets import PRESETS

T = TypeVar("T")

#: The preset that is no known shape, but that of the checkpoint a run begins with.
_INIT_FROM = "init_from"


@dataclass(frozen=True)
class _Place:
    """Where a value was written."""

    file: str
    line: int | None = None
    column: int | None = None

    def error(self, what: str, at: str, **more: Any) -> ConfigError:
        return ConfigError(what, file=self.file, line=self.line, column=self.column, at=at, **more)


@dataclass(frozen=True)
class _Entry:
    """A value and its place; a mapping's value is a dict of entries."""

    value: Any
    place: _Place


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
    file = os.fspath(path)
    try:
        with open(file, encoding="utf-8") as stream:
            node = yaml.compose(stream, Loader=yaml.SafeLoader)
    except OSError as error:
        raise ConfigError(
            f"cannot read the configuration: {error.strerror}", file=file, fix="check the path"
        ) from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        problem = getattr(error, "problem", None) or str(error)
        raise ConfigError(f"not valid YAML: {problem}", file=file, line=line, column=column) from error
    root = _Entry({}, _Place(file, 1)) if node is None else _entry(node, file)
    if not isinstance(root.value, dict):
        raise root.place.error("the document is not a mapping", "", expected="sections such as data and train")
    _resolve_paths(root, os.path.dirname(file))
    for override in overrides:
        _override(root, override)
    _apply_preset(root)
    return _build(TrainerConfig, root, "")


def config_from_dict(values: Mapping[str, Any]) -> TrainerConfig:
    """The same from a plain dict, e.g. one that :func:`config_to_dict` made.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    root = _entry_of(values)
    _apply_preset(root)
    return _build(TrainerConfig, root, "")


def model_config_of(values: Mapping[str, Any]) -> ModelConfig:
    """The model's part of what :func:`config_to_dict` made; a checkpoint of weights alone has no other.

    Raises:
        ConfigError: as :func:`load_config`.
    """
    return _build(ModelConfig, _entry_of(values.get("model", {})), "model")


def _entry_of(value: Any) -> _Entry:
    value = {str(k): _entry_of(v) for k, v in value.items()} if isinstance(value, Mapping) else value
    return _Entry(value, _Place("<dict>"))


def config_to_dict(config: TrainerConfig) -> dict[str, Any]:
    """Plain values, as JSON can hold them."""
    values = dataclasses.asdict(config)
    values["optimizer"]["betas"] = list(config.optimizer.betas)
    values["train"]["freeze"] = list(config.train.freeze)
    values["train"]["init_from_ignore"] = list(config.train.init_from_ignore)
    values["data"]["skip_steps"] = list(config.data.skip_steps)
    values["train"]["profile"] = None if config.train.profile is None else list(config.train.profile)
    return values


def _entry(node: yaml.Node, file: str) -> _Entry:
    """A YAML node as an entry. Values are read as YAML's own types only."""
    place = _Place(file, node.start_mark.line + 1, node.start_mark.column + 1)
    if not isinstance(node, yaml.MappingNode):
        loader = yaml.SafeLoader("")
        try:
            return _Entry(loader.construct_object(node, deep=True), place)
        except (yaml.YAMLError, ValueError) as error:
            raise place.error(f"cannot read this value: {error}", "") from error
    found: dict[str, _Entry] = {}
    for key_node, value_node in node.value:
        key, key_place = str(key_node.value), _entry(key_node, file).place
        if key in found:
            raise key_place.error(f"{key!r} is given twice", key, fix="keep one of them")
        found[key] = _entry(value_node, file)
    return _Entry(found, place)


def _resolve_paths(root: _Entry, folder: str) -> None:
    data = root.value.get("data")
    if data is None or not isinstance(data.value, dict):
        return
    for name in ("path", "val_path", "tokenizer"):
        entry = data.value.get(name)
        if entry is not None and isinstance(entry.value, str) and "://" not in entry.value:
            data.value[name] = _Entry(os.path.join(folder, os.path.expanduser(entry.value)), entry.place)


def _apply_preset(root: _Entry) -> None:
    """Put the values that ``model.preset`` stands for below those that are given."""
    model = root.value.get("model")
    if model is None or not isinstance(model.value, dict) or "preset" not in model.value:
        return
    preset = model.value.pop("preset")
    if preset.value not in (*PRESETS, _INIT_FROM):
        what, choices = f"there is no preset {preset.value!r}", [*PRESETS, _INIT_FROM]
        raise preset.place.error(what, "model.preset", choices=choices, suggest_for=str(preset.value))
    shape = _shape_of_init_from(root, preset) if preset.value == _INIT_FROM else PRESETS[preset.value]
    for key, value in shape.items():
        model.value.setdefault(key, _Entry(_entry_of(value).value, preset.place))


def _shape_of_init_from(root: _Entry, preset: _Entry) -> Mapping[str, Any]:
    """The model's section of the checkpoint that the run begins with."""
    train = root.value.get("train")
    given = train.value.get("init_from") if train is not None and isinstance(train.value, dict) else None
    if given is None or not isinstance(given.value, str):
        what = "the model is to be that of train.init_from, and there is none"
        raise preset.place.error(what, "model.preset", fix="name a checkpoint, or give the model's own settings")
    found = find_weights(given.value, whole=False)
    saved: Mapping[str, Any] = read_state(found).get("config", {}).get("model", {})
    if not saved:
        what = f"{found} does not say what model it is of"
        raise preset.place.error(what, "model.preset", fix="give the model's own settings")
    return saved


def _override(root: _Entry, override: str) -> None:
    """Put one ``a.b=value`` into the tree of entries."""
    place = _Place(f"override {override!r}")
    path, equals, text = override.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        raise place.error("an override is not of the form section.key=value", "", fix="e.g. train.steps=100")
    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        entry = _Entry(None, place) if node is None else _Entry(_entry(node, place.file).value, place)
    except yaml.YAMLError as error:
        raise place.error("the value is not valid YAML", path, fix="quote it") from error
    target = root
    for key in keys[:-1]:
        target = target.value.setdefault(key, _Entry({}, place))
        if not isinstance(target.value, dict):
            raise place.error(f"{key!r} is a value, not a section", path)
    target.value[keys[-1]] = entry


def _build(cls: type[T], entry: _Entry, at: str) -> T:
    """Make a config dataclass of a mapping."""
    if not isinstance(entry.value, dict):
        raise entry.place.error("this section is not a mapping", at, found=_shown(entry.value))
    types_of = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for key, child in entry.value.items():
        if key not in fields:
            names = list(fields)
            raise child.place.error(f"unknown key {key!r}", _join(at, key), choices=names, suggest_for=key)
    for name, f in fields.items():
        if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING and name not in entry.value:
            raise entry.place.error(f"{name!r} is missing", at, fix=f"add {_join(at, name)}")
    values = {key: _convert(types_of[key], child, _join(at, key)) for key, child in entry.value.items()}
    try:
        return cls(**values)
    except ConfigError as error:
        if error.file is not None or error.at is None:
            raise
        # A check of the dataclass itself, which knows the key but not the line.
        wrong = entry.value.get(error.at.rpartition(".")[2], entry)
        raise wrong.place.error(error.what, error.at, fix=error.fix) from None


def _convert(wanted: Any, entry: _Entry, at: str) -> Any:
    """Check a value against the annotation of its field."""
    value = entry.value
    if dataclasses.is_dataclass(wanted):
        return _build(typing.cast(type, wanted), entry, at)
    if typing.get_origin(wanted) in (types.UnionType, typing.Union):
        if value is None:
            return None
        (wanted,) = (arm for arm in typing.get_args(wanted) if arm is not type(None))
        return _convert(wanted, entry, at)
    if typing.get_origin(wanted) is Mapping:
        if not isinstance(value, dict):
            raise entry.place.error("wrong value", at, expected="keys and values", found=_shown(value))
        return _plain(entry)
    if typing.get_origin(wanted) is tuple:
        arms = typing.get_args(wanted)
        if arms[-1] is Ellipsis:
            if not isinstance(value, (list, tuple)):
                raise entry.place.error("wrong value", at, expected="a list", found=_shown(value))
            arms = arms[:1] * len(value)
        if not isinstance(value, (list, tuple)) or len(value) != len(arms):
            raise entry.place.error("wrong value", at, expected=f"a list of {len(arms)} numbers", found=_shown(value))
        return tuple(_convert(arm, _Entry(item, entry.place), at) for arm, item in zip(arms, value, strict=True))
    if wanted is float:
        number = _number(value)
        if number is not None:
            return number
    elif isinstance(value, wanted) and (wanted is bool or not isinstance(value, bool)):
        return value
    expected = {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}[wanted]
    raise entry.place.error("wrong value", at, expected=expected, found=_shown(value))


def _plain(entry: _Entry) -> Any:
    """A value without places, for somebody else to check."""
    if isinstance(entry.value, dict):
        return {key: _plain(child) for key, child in entry.value.items()}
    return entry.value


def _number(value: Any) -> float | None:
    """A finite number; also ``1e-3``, which YAML 1.1 takes for a text because it has no dot."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if number - number == 0 else None


def _shown(value: Any) -> str:
    return "a mapping" if isinstance(value, dict) else repr(value)


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key
