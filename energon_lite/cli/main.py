"""``energon-lite``: the group of commands.

Commands are imported on use, so that ``--help`` and ``--version`` are fast. Errors of the library are shown as their
message, without a traceback, with exit code 1.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from energon_lite import __version__
from energon_lite.entry_points import Command, commands, load
from energon_lite.errors import EnergonLiteError, UsageError, did_you_mean

#: Work of each command of the core, in the order in which a data set meets them. The module has the command's name.
_WORK = {
    "prepare": "Index a folder of tar shards, divide it into splits, and define its samples.",
    "info": "Show a data set or a blend: samples, effective weights, epochs of each data set.",
    "measure": "Run a task encoder over a data set, and store the length of each sample, or that it is skipped.",
    "checkpoint": "Show saved states of loaders, merge them, divide them among other ranks, or convert them.",
    "init": "Write a small project that runs without changes: data, blend, task encoder, training script.",
}
#: Commands of the core. Those of guests follow: see ``entry_points``.
COMMANDS = {name: Command(f"energon_lite.cli.{name}:command", work, "Commands") for name, work in _WORK.items()}


def all_commands() -> dict[str, Command]:
    """Return the commands of the core and of all guests, by name; without guests' subcommands, ``checkpoint NAME``."""
    added = {name: command for name, command in commands().items() if " " not in name}
    for name in added.keys() & COMMANDS.keys():
        raise UsageError(f"a package adds a command {name!r}, which is one of the core", fix="rename or uninstall it")
    return COMMANDS | added


class _LazyGroup(click.Group):
    """Group that imports a command's module when the command is run, not when it is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(all_commands())

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name.startswith("-"):
            return None  # click reports the unknown option
        known = all_commands()
        if cmd_name not in known:
            hint = did_you_mean(cmd_name, known, f"there are: {', '.join(known)}")
            raise click.UsageError(f"No such command {cmd_name!r}; {hint}", ctx)
        command = load(known[cmd_name].target)
        if not isinstance(command, click.Command):
            what = f"the command {cmd_name!r} is a {type(command).__name__}, not a click.Command"
            raise UsageError(what, where=f"entry {known[cmd_name].target!r}", fix="correct the entry of its package")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for name, command in all_commands().items():
            groups.setdefault(command.group, []).append((name, command.help))
        for group, lines in groups.items():
            with formatter.section(group):
                formatter.write_dl(lines)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        with _errors_as_messages():  # --help lists commands of guests
            return super().make_context(*args, **extra)

    def invoke(self, ctx: click.Context) -> Any:
        with _errors_as_messages():
            return super().invoke(ctx)


@contextmanager
def _errors_as_messages() -> Iterator[None]:
    try:
        yield
    except EnergonLiteError as error:
        raise click.ClickException(str(error)) from None
    except BrokenPipeError:
        raise  # the reader of the output has closed it, such as `head`: click ends silently
    except (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError) as error:
        raise click.ClickException(f"{error.strerror}: {error.filename}") from None
    except OSError as error:
        raise click.ClickException(str(error)) from None


# Commands inherit the settings.
@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(__version__, "--version", "-V", prog_name="energon-lite", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Prepare data sets for energon_lite or Megatron-Energon, and examine data sets, blends and runs."""
    if os.environ.get("NO_COLOR"):  # see no-color.org
        ctx.color = False
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


if __name__ == "__main__":
    main()
