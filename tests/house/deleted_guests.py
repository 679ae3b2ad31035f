"""Copies of the package from which guests are deleted: what still imports, each copy in a process of its own.

python tests/house/deleted_guests.py      # the trainer, without each of the extras in turn
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "energon_lite"
#: Program that imports all modules of the packages that are named, and prints the errors. The finder of an editable
#: installation is removed: it would find the rooms that the copy lacks.
_IMPORTER = """
import importlib, json, pkgutil, sys
root, *packages = sys.argv[1:]
sys.path.insert(0, root)
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
errors = []
for package in packages:
    found = importlib.import_module(package)
    names = [package, *(module.name for module in pkgutil.walk_packages(found.__path__, f"{package}."))]
    for name in names:
        try:
            module = importlib.import_module(name)
            for export in getattr(module, "__all__", ()) if name == package else ():
                getattr(module, export)
        except Exception as error:
            errors.append(f"{name}: {type(error).__name__}: {error}")
ours = [module for name, module in sys.modules.items() if name.split(".")[0] == "energon_lite"]
assert all((module.__file__ or root).startswith(root) for module in ours), "modules from elsewhere"
print(json.dumps(errors))
"""


def importable(root: Path, *packages: str) -> list[str]:
    """Import all modules of packages of a copy, and the public names of the packages, in a fresh process.

    Args:
        root: the folder that holds the copy of ``energon_lite``.
        packages: such as ``energon_lite.trainer``, the default.

    Returns:
        One error for each module that cannot be imported, as ``module: error``; third parties that are not installed
        count, too.
    """
    command = [sys.executable, "-P", "-c", _IMPORTER, str(root), *(packages or ("energon_lite.trainer",))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        return [done.stderr.strip().rpartition("\n")[2]]
    errors: list[str] = json.loads(done.stdout.splitlines()[-1])
    return errors


def copy_without(root: Path, *guests: str) -> Path:
    """Copy the package into a folder, leave out guests, such as ``extras/media``, and return the folder."""
    shutil.copytree(PACKAGE, root / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__"))
    for guest in guests:
        shutil.rmtree(root / PACKAGE.name / guest)
    return root


def main() -> None:
    extras = sorted(path.parent.name for path in (PACKAGE / "extras").glob("*/__init__.py"))
    for guest in [*(f"extras/{name}" for name in extras), "extras"]:
        with tempfile.TemporaryDirectory() as folder:
            errors = importable(copy_without(Path(folder), guest))
        print(f"without {guest}: {'all of the trainer imports' if not errors else ''}", *errors, sep="\n    ")


if __name__ == "__main__":
    main()
