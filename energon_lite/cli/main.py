"""``energon-lite``: the group of commands.

Commands are imported on use, so that ``--help`` and ``--version`` are fast. Errors of the library are shown as their
message, without a traceback, with exit code 1.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from energon_lite import __version__
from energon_lite.errors import EnergonLiteError, did_you_mean

__all__ = ["COMMANDS", "main"]

#: Name of each command, and one line of help. The module of a command has its name, with underscores.
COMMANDS: dict[str, str] = {
    "init": "Write a small project that runs without changes: data, blend, task encoder, training script.",
    "prepare": "Index a folder of tar shards, divide it into splits, and define its samples.",
    "prepare-media": "Store the metadata of images, sounds and videos: sizes, durations, rates.",
    "lint": "Examine all samples of a data set or a blend, and report broken ones.",
    "preview": "Show data in a browser or in the terminal: any step, samples before and after the hooks.",
    "mount": "Mount a data set as a read-only folder of files.",
    "measure": "Run a task encoder over a data set, and store the length of each sample, or that it is skipped.",
    "filter": "Store the samples of a data set that meet a condition, such as tokens <= 4096, under a name.",
    "plan": "Compare strategies of batching (token capacity, packing) on the lengths of a data set.",
    "profile": "Find the largest capacity with which a training step fits into memory.",
    "tune": "Measure the number and kind of workers with which a data set is loaded fastest on this machine.",
    "info": "Show a data set or a blend: samples, effective weights, epochs of each data set.",
    "checkpoint": "Show saved states of loaders, merge them, divide them among other ranks, or rebase them.",
    "convert": "Write a data set in another format: tar, MDS, Parquet, JSONL.",
    "tokenize": "Tokenise JSONL, text or Parquet files into a data set of tokens and loss masks.",
    "convert-weights": "Convert weights from and to Hugging Face, or into one file.",
    "doctor": "Examine this machine, and the ranks of a launch, and report problems with their fixes.",
    "trace": "Show a loader's trace: time by stage, slow samples, occurrences of a sample; export for Perfetto.",
    "audit": "Find when a sample was trained on; compare a run with its plan or with another run.",
    "analyze-debug": "Draw a picture of traces: samples over time.",
    "completion": "Write the completion script of a shell.",
    "layout": "Show the groups of ranks of a training run, and their layers.",
}


class _LazyGroup(click.Group):
    """Group that imports a command's module when the command is run, not when it is listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name.startswith("-"):
            return None  # click reports the unknown option
        if cmd_name not in COMMANDS:
            hint = did_you_mean(cmd_name, COMMANDS, f"there are: {', '.join(COMMANDS)}")
            raise click.UsageError(f"No such command {cmd_name!r}; {hint}", ctx)
        command = import_module(f"energon_lite.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)  # a module of this package
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
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
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


if __name__ == "__main__":
    main()
