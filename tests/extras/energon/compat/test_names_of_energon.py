"""Every public name of the installed Energon is here, takes what it takes there, or has a line that says why not."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import types
import typing
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import click
import megatron.energon
import pytest
from click.testing import CliRunner

import energon_lite
import energon_lite.extras.energon
from energon_lite.extras.energon.compat import COMMANDS, INTERNAL, MODULES, PACKAGE, PARTLY
from energon_lite.extras.energon.compat.install import resolve
from energon_lite.extras.energon.compat.names import NAMES, meaning
from tests.testing import write_tar

#: So many names may be absent at most.
MOST_ABSENT = 8

#: Keywords of theirs that ours have no use for, and why.
NOT_TAKEN: dict[tuple[str, str], str] = {
    ("FileCacheLazy", "ds"): "a pool makes them: get_lazy(store, name)",
    ("FileCacheLazy", "fname"): "a pool makes them: get_lazy(store, name)",
    ("JsonlFileStore", "sample_filter"): "a line that is asked for by its number is wanted",
    ("JsonlFileStore", "index_cache_size"): "the index is mapped, not cached",
}


def public_names(module: types.ModuleType) -> set[str]:
    """The names that a module offers: its ``__all__``, or what it defines."""
    if hasattr(module, "__all__"):
        return set(module.__all__)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what torch has given up
        return {
            name
            for name, value in vars(module).items()
            if not name.startswith("_")
            and getattr(value, "__module__", None) == module.__name__
            and not isinstance(value, (typing.TypeVar, types.ModuleType))
            and type(value).__name__ not in ("ParamSpec", "NewType")
        }


@cache
def modules_of_energon() -> dict[str, types.ModuleType]:
    """All modules of the installed package that can be imported here, by their names below it."""
    found = {"": megatron.energon}
    for one in pkgutil.walk_packages(megatron.energon.__path__, f"{PACKAGE}."):
        below = one.name[len(PACKAGE) + 1 :]
        try:
            found[below] = importlib.import_module(one.name)
        except ImportError:
            assert below.startswith("transforms") or below.endswith("tar_patcher")  # torchvision, numba
    return found


def is_internal(module: str) -> bool:
    return any(module == start or module.startswith(f"{start}.") for start in INTERNAL) and module not in MODULES


ALL = sorted({name for names in (*MODULES.values(), *PARTLY.values()) for name in names.split()} - {"command"})


def test_all_modules_and_names_are_in_the_table() -> None:
    missing = {}
    for below, module in modules_of_energon().items():
        if is_internal(below):
            continue
        if below in COMMANDS:
            assert hasattr(module, "command")
            continue
        assert below in MODULES, below
        absent = public_names(module) - set(MODULES[below].split())
        if absent:
            missing[below] = sorted(absent)
    assert missing == {}, "\n".join(f"{k}: {v}" for k, v in missing.items())


def test_no_module_is_made_up() -> None:
    for below, names in {**MODULES, **PARTLY}.items():
        if module := modules_of_energon().get(below):
            assert all(hasattr(module, name) for name in names.split()), below
        else:
            assert below.startswith("transforms"), below
    assert set(NAMES) <= {*ALL, *(f"{module}.command" for module in COMMANDS)}


def test_few_are_absent() -> None:
    absent = [name for name in ALL if meaning(name).ours is None]
    assert len(absent) <= MOST_ABSENT
    for name in absent:
        with pytest.raises(ImportError, match="not available in energon_lite"):
            resolve(name)
    assert not set(absent) & set(megatron.energon.__all__)


def of_energon(name: str) -> Any:
    """What Energon has by a name, wherever it is; None: nothing that can be imported here."""
    return next((getattr(one, name) for one in modules_of_energon().values() if name in vars(one)), None)


def test_each_is_here_and_takes_what_it_takes_there() -> None:
    for name in ALL:
        found = meaning(name)
        assert found.verdict == "same" or found.note, f"{name}: say how it is better, or why it is another thing"
        theirs = of_energon(name)
        if found.ours is None or theirs is None:
            continue
        wanted, taken = parameters(theirs), parameters(resolve(name))
        if wanted is None or taken is None or any(one.kind is one.VAR_KEYWORD for one in taken):
            continue
        keywords = {one.name for one in wanted if one.kind in (one.KEYWORD_ONLY, one.POSITIONAL_OR_KEYWORD)}
        not_taken = {key for owner, key in NOT_TAKEN if owner == name}
        assert not keywords - {one.name for one in taken} - not_taken, name
        positional = [one.name for one in wanted if one.kind is one.POSITIONAL_OR_KEYWORD and one.name not in not_taken]
        ours_positional = [one.name for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD]
        if not any(one.kind is one.VAR_POSITIONAL for one in taken):
            assert ours_positional[: len(positional)] == positional, name
        if name != "stateless":  # hooks that do not say are seeded if they draw
            defaults = {one.name: one.default for one in taken}
            plain = [one for one in wanted if type(one.default) in (int, float, str, bool, type(None))]
            assert all(defaults[one.name] == one.default for one in plain if one.name in defaults), name


def test_what_takes_types_there_takes_them_here() -> None:
    for name in ALL:
        theirs: Any = of_energon(name)
        generic = isinstance(theirs, type) and issubclass(theirs, typing.Generic) and theirs.__parameters__  # type: ignore[arg-type]
        if not generic or meaning(name).ours is None:
            continue
        ours, variables = resolve(name), tuple(typing.TypeVar(f"T{at}") for at in range(len(theirs.__parameters__)))
        for kind in (ours, getattr(energon_lite, name, ours)):  # with the import changed, too
            assert typing.get_origin(kind[variables]) is kind

            class Derived(kind[variables], typing.Generic[variables]):  # type: ignore[misc, valid-type]
                """As a program for Energon derives it."""

            assert issubclass(Derived, kind) and typing.get_origin(Derived[variables]) is Derived  # type: ignore[valid-type]


def parameters(value: Any) -> list[inspect.Parameter] | None:
    """What a class or function is called with; None: it is neither, or nobody can say."""
    if not callable(value) or value in (dict, str):
        return None
    if isinstance(value, type) and (issubclass(value, (BaseException, dict)) or inspect.isabstract(value)):
        return None
    try:
        return [one for one in inspect.signature(value).parameters.values() if not one.name.startswith("_")]
    except (TypeError, ValueError):
        return None


def test_all_of_its_top_level_is_ours() -> None:
    for name in set(megatron.energon.__all__) - {"__version__"}:
        assert hasattr(energon_lite.extras.energon, name), name


def test_commands_are_run_by_click(tmp_path: Path, tools: Any) -> None:
    assert all(isinstance(resolve("command", module), click.Command) for module in COMMANDS)
    write_tar(tmp_path / "s.tar", [("a", {"txt": b"words", "png": tools.image_bytes(1, "png")})])
    tools.lite_prepare(tmp_path, "--split-ratio", "1,0,0")
    tools.write_meta(tmp_path, "dataset.yaml", {"__module__": PACKAGE, "__class__": "CrudeWebdataset"})
    run = CliRunner().invoke
    shown = run(resolve("preview_command", "cli.main"), [str(tmp_path), "--split-parts=train"], input="n\n")
    assert shown.exit_code == 0 and "__key__ (<class 'str'>): 'a'" in shown.output
    media = run(resolve("prepare_media_command", "cli.main"), [str(tmp_path), "--media-metadata-by-extension"])
    assert media.exit_code == 0, media.output
    assert str(tmp_path) in run(resolve("main", "cli.main"), ["info", str(tmp_path)]).output
