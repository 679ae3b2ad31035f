"""Command ``python -m energon_lite.extras.energon``: run a script, module or code with Energon's names."""

from __future__ import annotations

import builtins
import os
import runpy
import sys
import types
from collections.abc import Sequence

from energon_lite.extras.energon.compat.install import install

_USAGE = """usage: python -m energon_lite.extras.energon [--no-trust-code] script.py [arguments]
       python -m energon_lite.extras.energon [--no-trust-code] -m module [arguments]
       python -m energon_lite.extras.energon [--no-trust-code] -c code [arguments]

Runs it as Python would, but `import megatron.energon` finds energon_lite. Data sets may bring code that is run, as
Energon always lets them, unless --no-trust-code is given."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the script, module or code in the arguments; return the exit code."""
    rest = list(sys.argv[1:] if arguments is None else arguments)
    trust_code = rest[:1] != ["--no-trust-code"]
    rest = rest if trust_code else rest[1:]
    if not rest or rest[0] in ("-h", "--help") or (rest[0] in ("-m", "-c") and len(rest) < 2):
        print(_USAGE, file=sys.stdout if rest[:1] in (["-h"], ["--help"]) else sys.stderr)
        return 0 if rest[:1] in (["-h"], ["--help"]) else 2
    install(trust_code=trust_code)
    if rest[0] == "-m":
        sys.argv = rest[1:]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    elif rest[0] == "-c":
        sys.argv = ["-c", *rest[2:]]
        _run(rest[1], "<string>", None)
    else:
        if not os.path.isfile(rest[0]):
            print(f"there is no such script: {rest[0]}", file=sys.stderr)
            return 2
        sys.argv = rest
        sys.path[0] = os.path.dirname(os.path.abspath(rest[0]))
        with open(rest[0], "rb") as file:
            _run(file.read(), rest[0], os.path.abspath(rest[0]))
    return 0


def _run(source: str | bytes, name: str, file: str | None) -> None:
    """Run source as the main module, which remains in place until the process ends, for threads and children."""
    module = types.ModuleType("__main__")
    module.__dict__["__builtins__"] = builtins  # exec() would put its dict there
    if file is not None:
        module.__file__ = file
    sys.modules["__main__"] = module
    exec(compile(source, name, "exec"), module.__dict__)


if __name__ == "__main__":
    sys.exit(main())
