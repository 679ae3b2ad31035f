"""``energon-lite init``: write a small project that runs without changes."""

from __future__ import annotations

import contextlib
import os
import runpy
import shlex
from collections.abc import Iterator
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import click

from energon_lite.errors import UsageError

#: Suffix of the files in ``project``, which is removed when they are written.
_SUFFIX = ".in"
#: Options for running without further processes and without output: the data is small.
_QUIETLY = {
    "prepare": ["--num-workers", "1", "--no-progress"],
    "measure": ["--num-workers", "0", "--no-progress"],
}


@click.command(name="init")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--data/--no-data", default=True, help="Also make, prepare and measure the data sets.  [default: yes]")
def command(folder: Path, data: bool) -> None:
    """Write a small project into FOLDER: data, a blend, a task encoder, a model, and a training script that resumes.

    It trains a tiny model of images and text, in packed batches, on the CPU, in less than a minute; on one rank or,
    with torchrun, on several. Replace its data, encoder and model with your own, step by step.

    \b
    Example:
      energon-lite init first && cd first && python train.py
    """
    files = _files()
    there = sorted(name for name in [*files, "data"] if (folder / name).exists())
    if there:
        raise UsageError(f"{folder} has {', '.join(there)} already", fix="name a new folder; no file is replaced")
    if data and find_spec("PIL") is None:
        raise UsageError(
            "the pictures of the project need Pillow", fix="pip install 'energon-lite[image]'; or give --no-data"
        )
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    click.echo(f"wrote {', '.join(files)} into {folder}")
    if data:
        with _inside(folder):
            _make_data(files["README.md"])
    begin = "python train.py" if data else "what README.md says"
    click.echo(f"\nNext:\n  cd {folder}\n  {begin}")


def _files() -> dict[str, str]:
    folder = resources.files("energon_lite.cli") / "project"
    names = sorted(file.name for file in folder.iterdir() if file.name.endswith(_SUFFIX))
    return {name.removesuffix(_SUFFIX): (folder / name).read_text() for name in names}


def _make_data(readme: str) -> None:
    """Run the commands in the project's README."""
    from energon_lite.cli.main import main

    for command in _commands(readme):
        click.echo(f"$ {command}")
        program, first, *others = shlex.split(command)
        with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
            if program == "python":
                runpy.run_path(first, run_name="__main__")
            else:
                main.main([first, *others, *_QUIETLY[first]], standalone_mode=False)


def _commands(readme: str) -> list[str]:
    """Commands of the first code block, each joined into one line."""
    block = readme.split("```sh\n")[1].split("```")[0]
    return [" ".join(line.split()) for line in block.replace("\\\n", " ").splitlines()]


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    """Change the current folder inside the block. (contextlib.chdir needs Python 3.11.)"""
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)
