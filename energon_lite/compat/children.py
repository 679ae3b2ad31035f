"""Processes that this one starts by ``multiprocessing`` find energon_lite under Energon's name, too."""

from __future__ import annotations

import multiprocessing.spawn
from typing import Any

__all__ = ["tell_children"]

_told = False


class _Install:
    """Installs the names where it is unpickled."""

    def __init__(self, trust_code: bool):
        self.trust_code = trust_code

    def __reduce__(self) -> tuple[Any, ...]:
        return _install_again, (self.trust_code,)


def _install_again(trust_code: bool) -> None:
    from energon_lite.compat.install import install

    install(trust_code=trust_code)


def tell_children() -> None:
    """What a spawned process is told before it imports the script has a word for us in it. Those that are forked know."""
    global _told
    if _told:
        return
    _told = True
    original = multiprocessing.spawn.get_preparation_data

    def with_names(name: str) -> dict[str, Any]:
        from energon_lite.compat.install import is_installed, trusts_code

        data: dict[str, Any] = {}
        if is_installed():
            data["energon_lite_compat"] = _Install(trusts_code())  # first: it is unpickled before all others
        data.update(original(name))
        return data

    multiprocessing.spawn.get_preparation_data = with_names
