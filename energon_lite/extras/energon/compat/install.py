"""Has ``import megatron.energon``, and everything below it, find energon_lite."""

from __future__ import annotations

import functools
import importlib
import multiprocessing.spawn
import sys
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.energon.compat.ahead import AHEAD, AHEAD_MODULES
from energon_lite.extras.energon.compat.modules import INTERNAL, MODULES, PACKAGE, PARTLY
from energon_lite.extras.energon.compat.names import meaning
from energon_lite.loading.executors import own_watchdog, torch_worker_info
from energon_lite.trust import trust_by_default

__all__ = ["install", "is_installed", "uninstall"]

_ROOT = PACKAGE.partition(".")[0]
_ALL = frozenset(name for names in MODULES.values() for name in names.split()) - {"command"}
_KNOWN = {*MODULES, *PARTLY, *AHEAD_MODULES}


class _Module(types.ModuleType):
    """A module of Energon's: its names are looked up when they are asked for."""

    def __getattr__(self, name: str) -> Any:
        below = self.__name__[len(PACKAGE) + 1 :]
        # Modules of Energon also have what they import from each other, and people import it from there.
        if name in _names_in(below) or (name in _ALL and not name.startswith("_")):
            value = resolve(name, below)
            setattr(self, name, value)
            return value
        path = f"{below}.{name}" if below else name
        if path in _KNOWN or any(known.startswith(f"{path}.") for known in _KNOWN):
            return importlib.import_module(f"{PACKAGE}.{path}")
        if below in PARTLY and not name.startswith("_"):
            raise ImportError(f"{name} of {self.__name__} is not to be had from energon_lite: it {_machinery(below)}")
        raise AttributeError(f"module {self.__name__!r} (of energon_lite.extras.energon) has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        # A module that is imported becomes an attribute of its package, but not where that has something of this name:
        # `edataclass` is a function, of the module `edataclass`.
        if isinstance(value, types.ModuleType) and name in vars(self).get("__all__", ()):
            value = resolve(name, self.__name__[len(PACKAGE) + 1 :])
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


def _names_in(below: str) -> list[str]:
    """The names of a module, those of Energon 8 behind those of 7.4.1."""
    return [name for table in (MODULES, PARTLY, AHEAD_MODULES) for name in table.get(below, "").split()]


def _machinery(below: str) -> str | None:
    """What to use instead of a module that is machinery of Energon's; None: it is not."""
    return next((why for start, why in INTERNAL.items() if below == start or below.startswith(start + ".")), None)


def resolve(name: str, of_module: str = "") -> Any:
    """The object that a public name of Energon's, of one of its modules, is here.

    Raises:
        ImportError: there is none; says why, and what to write instead.
    """
    found = AHEAD.get(name) or meaning(name, of_module)
    if found.ours is None:
        raise ImportError(f"{name} of {PACKAGE} is not to be had from energon_lite: {found.note}")
    module, _, attribute = found.ours.partition(":")
    if attribute == "__version__":
        return energon_version()
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise ImportError(f"{name} of {PACKAGE} should be {found.ours}, which does not exist") from None


def energon_version() -> str:
    """The version whose names these are."""
    return "7.4.1"


class _Finder(MetaPathFinder, Loader):
    """Finds the modules of Energon here, before anybody else does."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PACKAGE and not fullname.startswith(PACKAGE + "."):
            return None
        below = fullname[len(PACKAGE) + 1 :]
        is_package = any(known.startswith(f"{below}." if below else "") and known != below for known in _KNOWN)
        if below in _KNOWN or is_package:
            return ModuleSpec(fullname, self, is_package=is_package, origin="energon_lite.extras.energon")
        instead = _machinery(below)
        if instead is not None:
            what = f"{fullname} is machinery of Energon's, which energon_lite does without: it {instead}"
            raise ModuleNotFoundError(what, name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name, f"The names of {spec.name}, of energon_lite.")
        module.__all__ = _names_in(spec.name[len(PACKAGE) + 1 :])
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to be run."""


class _Parent(MetaPathFinder, Loader):
    """The package around Energon's, where no other part of it (megatron.core) is there."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname == _ROOT else None

    def create_module(self, spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: types.ModuleType) -> None:
        """There is nothing to be run."""


_finder, _parent = _Finder(), _Parent()


def install(*, trust_code: bool = True) -> None:
    """From now on, in this process and in those it starts by ``multiprocessing``, ``import megatron.energon`` and
    everything below it is energon_lite. ``megatron.core`` and other parts of ``megatron`` stay what they are.

    Args:
        trust_code: data sets may bring code that is run (classes and functions of your own in YAML, pickled parts), as
            Energon always lets them: programs that are written for it have no way to say so. See
            :func:`~energon_lite.trust.trust_by_default`.

    Raises:
        UsageError: Energon itself has been imported already.

    Example:
        >>> import energon_lite.extras.energon
        >>> energon_lite.extras.energon.compat.install()
        >>> from megatron.energon import TaskEncoder, get_train_dataset
    """
    if trust_code:
        trust_by_default()
    if is_installed():
        return
    theirs = sys.modules.get(PACKAGE)
    if theirs is not None and not isinstance(theirs, _Module):
        raise UsageError(
            f"{PACKAGE} has been imported already, from {getattr(theirs, '__file__', None)}",
            fix="call energon_lite.extras.energon.install() before anything imports it, or run "
            "python -m energon_lite.extras.energon",
        )
    own_watchdog.on_hang = lambda: resolve("WatchdogDataset")._watchdog_trigger()
    torch_worker_info.is_told = True
    sys.meta_path.insert(0, _finder)
    sys.meta_path.append(_parent)
    _tell_children()


def uninstall() -> None:
    """Imports from now on find Energon itself, if it is there."""
    torch_worker_info.is_told = False
    for finder in (_finder, _parent):
        if finder in sys.meta_path:
            sys.meta_path.remove(finder)
    for name in [name for name, module in sys.modules.items() if isinstance(module, _Module)]:
        del sys.modules[name]
    parent = sys.modules.get(_ROOT)
    if parent is not None:
        vars(parent).pop(PACKAGE.rpartition(".")[2], None)
        if getattr(parent.__spec__, "loader", None) is _parent:
            del sys.modules[_ROOT]


def is_installed() -> bool:
    """Whether ``megatron.energon`` is energon_lite."""
    return _finder in sys.meta_path


# -- other processes --------------------------------------------------------------------------------------------------


class _Install:
    """Installs the names where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(install, trust_code=False), ()  # what it trusts stands in its environment


def _tell_children() -> None:
    """Have what a spawned process is told before it imports the script say it, too; those that are forked know."""
    original = multiprocessing.spawn.get_preparation_data
    if getattr(original, "__module__", None) == __name__:
        return

    def get_preparation_data(name: str) -> dict[str, Any]:
        first = {"energon_lite_compat": _Install()} if is_installed() else {}  # unpickled before all others
        return {**first, **original(name)}

    multiprocessing.spawn.get_preparation_data = get_preparation_data
