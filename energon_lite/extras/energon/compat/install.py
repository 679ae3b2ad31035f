"""Import hooks that make ``import megatron.energon``, and everything below it, find energon_lite."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import multiprocessing.spawn
import sys
import threading
import types
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from energon_lite.errors import UsageError
from energon_lite.extras.energon.compat import INTERNAL, MODULES, PACKAGE, PARTLY, VERSION
from energon_lite.extras.energon.compat.names import AHEAD, AHEAD_MODULES, meaning
from energon_lite.loading.executors import executor_handle, worker_process
from energon_lite.trust import trust_by_default

_ROOT = PACKAGE.partition(".")[0]
_PROJECT = "megatron-energon"
_ALL = frozenset(name for names in MODULES.values() for name in names.split()) - {"command"}
_KNOWN = {*MODULES, *PARTLY, *AHEAD_MODULES}


class _Module(types.ModuleType):
    """A module of Energon's, whose names are resolved on access."""

    def __getattr__(self, name: str) -> Any:
        below = self.__name__[len(PACKAGE) + 1 :]
        # Modules of Energon also expose their imports from each other, and user code imports these.
        if name in _names_in(below) or (name in _ALL and not name.startswith("_")):
            value = resolve(name, below)
            setattr(self, name, value)
            return value
        path = f"{below}.{name}" if below else name
        if path in _KNOWN or any(known.startswith(f"{path}.") for known in _KNOWN):
            return importlib.import_module(f"{PACKAGE}.{path}")
        if below in PARTLY and not name.startswith("_"):
            raise ImportError(f"{name} of {self.__name__} is not available in energon_lite: it {_machinery(below)}")
        raise AttributeError(f"module {self.__name__!r} (of energon_lite.extras.energon) has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        # An imported module becomes an attribute of its package, unless the package has an object of this name:
        # `edataclass` is a function, of the module `edataclass`.
        if isinstance(value, types.ModuleType) and name in vars(self).get("__all__", ()):
            value = resolve(name, self.__name__[len(PACKAGE) + 1 :])
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *self.__all__})


def _names_in(below: str) -> list[str]:
    """Return the names of a module: those of Energon 7.4.1, then those of Energon 8."""
    return [name for table in (MODULES, PARTLY, AHEAD_MODULES) for name in table.get(below, "").split()]


def _machinery(below: str) -> str | None:
    """Return the replacement of an internal module of Energon's; None if it is not internal."""
    return next((why for start, why in INTERNAL.items() if below == start or below.startswith(start + ".")), None)


def resolve(name: str, of_module: str = "") -> Any:
    """Return the counterpart of a public name in one of Energon's modules.

    Raises:
        ImportError: there is none; the message gives the reason and the replacement.
    """
    counterpart = AHEAD.get(name) or meaning(name, of_module)
    if counterpart.ours is None:
        raise ImportError(f"{name} of {PACKAGE} is not available in energon_lite: {counterpart.note}")
    module, _, attribute = counterpart.ours.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except AttributeError:
        raise ImportError(f"{name} of {PACKAGE} should be {counterpart.ours}, which does not exist") from None


class _Distribution(importlib.metadata.Distribution):
    """Metadata of Energon for ``importlib.metadata``: programs ask for its version before they choose names."""

    def read_text(self, filename: str) -> str | None:
        return f"Metadata-Version: 2.1\nName: {_PROJECT}\nVersion: {VERSION}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Path:
        return Path(__file__).parent / path


class _Finder(MetaPathFinder, Loader):
    """Finder of Energon's modules, before all other finders."""

    def find_distributions(self, context: Any) -> list[importlib.metadata.Distribution]:
        asked = (context.name or "").replace("_", "-").replace(".", "-").lower()
        return [_Distribution()] if asked == _PROJECT else []

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
            what = f"{fullname} is internal to Energon, and energon_lite has no counterpart: it {instead}"
            raise ModuleNotFoundError(what, name=fullname)
        return None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name, f"The names of {spec.name}, of energon_lite.")
        module.__all__ = _names_in(spec.name[len(PACKAGE) + 1 :])
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has no code to run."""


class _Parent(MetaPathFinder, Loader):
    """Finder of the parent package ``megatron``, if no other part of it (megatron.core) is installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname == _ROOT else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module has no code to run."""


_finder, _parent = _Finder(), _Parent()


def install(*, trust_code: bool = True) -> None:
    """Make ``import megatron.energon``, and everything below it, import energon_lite.

    This applies to this process and to those that it starts by ``multiprocessing``. ``megatron.core`` and other parts
    of
    ``megatron`` are not affected.

    Args:
        trust_code: allow data sets to bring code that is run (user classes and functions in YAML, pickled parts), as
            Energon always does: programs written for it cannot express this. See
            :func:`~energon_lite.trust.trust_by_default`.

    Raises:
        UsageError: Energon itself has been imported already.

    Example:
        >>> import energon_lite.extras.energon
        >>> energon_lite.extras.energon.install()
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
    executor_handle.on_hang = lambda: resolve("WatchdogDataset")._watchdog_trigger()
    worker_process.on_begin = tell_torch
    sys.meta_path.insert(0, _finder)
    sys.meta_path.append(_parent)
    _tell_children()


def uninstall() -> None:
    """Undo :func:`install`: later imports find Energon itself, if it is installed."""
    worker_process.on_begin = None
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
    """Return whether ``megatron.energon`` is energon_lite."""
    return _finder in sys.meta_path


# -- other processes --------------------------------------------------------------------------------------------------


class _Install:
    """Object that installs the names in the process that unpickles it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(install, trust_code=False), ()  # trust is inherited by the environment


def _tell_children() -> None:
    """Install the names in spawned processes, before they import the script; forked ones inherit them."""
    original = multiprocessing.spawn.get_preparation_data
    if getattr(original, "__module__", None) == __name__:
        return

    def get_preparation_data(name: str) -> dict[str, Any]:
        first = {"energon_lite_compat": _Install()} if is_installed() else {}  # unpickled before all others
        return {**first, **original(name)}

    multiprocessing.spawn.get_preparation_data = get_preparation_data


# -- workers ----------------------------------------------------------------------------------------------------------

_thread = threading.local()
_patched = threading.Lock()


def tell_torch(number: int, peers: int, thread: bool) -> None:
    """Provide the result of ``torch.utils.data.get_worker_info``; called in each worker when it begins.

    Programs for Energon rely on it. Without this extra it is None: in a torch worker, ``default_collate`` makes batches
    in ``/dev/shm``, which is small in many containers.

    Args:
        number: number of this worker. It is also the seed, because hooks have generators of their own for each sample.
        peers: number of workers of this rank.
        thread: the worker is this thread. Torch stores one answer for the whole process, so its function is replaced
            by a function that looks up the thread first.
    """
    from torch.utils.data._utils import worker

    info = worker.WorkerInfo(id=number, num_workers=peers, seed=number, dataset=None)  # type: ignore[arg-type]
    if not thread:
        worker._worker_info = info
        return
    _thread.info = info
    with _patched:
        if not hasattr(worker.get_worker_info, "asks_threads"):
            _ask_threads_first(worker)


def _ask_threads_first(worker: Any) -> None:
    import torch.utils.data

    asked = worker.get_worker_info

    def get_worker_info() -> Any:
        return getattr(_thread, "info", None) or asked()

    get_worker_info.__doc__ = asked.__doc__
    get_worker_info.asks_threads = True  # type: ignore[attr-defined]
    worker.get_worker_info = torch.utils.data.get_worker_info = get_worker_info
