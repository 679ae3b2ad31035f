"""Processes that this one starts by ``multiprocessing`` find energon_lite under Energon's name, too."""

from __future__ import annotations

import multiprocessing.spawn
from typing import Any

__all__ = ["tell_children"]

_told = False


class _Install:
    """Installs the names where it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _install_again, ()


def _install_again() -> None:
    from energon_lite.compat.install import install

    install()


def tell_children() -> None:
    """What a spawned process is told before it imports the script has a word for us in it. Those that are forked know."""
    global _told
    if _told:
        return
    _told = True
    original = multiprocessing.spawn.get_preparation_data

    def with_names(name: str) -> dict[str, Any]:
        from energon_lite.compat.install import is_installed

        data: dict[str, Any] = {}
        if is_installed():
            data["energon_lite_compat"] = _Install()  # first: it is unpickled before all others
        data.update(original(name))
        return data

    multiprocessing.spawn.get_preparation_data = with_names
