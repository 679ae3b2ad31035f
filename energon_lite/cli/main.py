"""``energon-lite``: the group of commands.

Commands are imported when they are called, so that ``--help`` and ``--version`` answer at once. Errors that the library
raises on purpose are shown as their message, without a traceback, and end with exit code 1.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import click

from energon_lite import __version__
from energon_lite.errors import EnergonLiteError, did_you_mean

__all__ = ["COMMANDS", "main"]

#: Name of a command, and one line of help. Its module, in this package, has its name, with underscores.
COMMANDS: dict[str, str] = {
    "init": "Write a small project that runs as it is: data, blend, task encoder, training script.",
    "prepare": "Index a folder of tar shards, divide it into splits, say what a sample is.",
    "prepare-media": "Store what pictures, sounds and films say about themselves: sizes, durations, rates.",
    "lint": "Examine all samples of a data set or a blend: which are broken, and how.",
    "preview": "A page to look at data: any step, samples before and after the hooks; or in the terminal.",
    "mount": "Mount a data set as a read-only folder of files.",
    "measure": "Run a task encoder over a data set; store how long each sample is, or that it is skipped.",
    "filter": "Store which samples of a data set meet a condition, such as tokens <= 4096, under a name.",
    "plan": "Compare strategies of batching (token capacity, packing) on the lengths of a data set.",
    "profile": "Find the largest capacity with which a training step fits into memory.",
    "tune": "Measure how many workers, and which, a data set is loaded fastest with on this machine.",
    "info": "Show a data set or a blend: samples, effective weights, how often each sample comes.",
    "checkpoint": "Look at saved states of loaders, merge them, divide them among other ranks, rebase them.",
    "convert": "Write a data set in another format: tar, MDS, Parquet, JSONL.",
    "tokenize": "Tokenise JSONL, text or Parquet files into a data set of tokens and loss masks.",
    "convert-weights": "Convert weights from and to Hugging Face, or into one file.",
    "doctor": "Examine this machine, and the ranks of a launch: what is wrong, and what to do.",
    "trace": "Show a loader's trace: time by stage, slow samples, when a sample was seen; for Perfetto too.",
    "audit": "Was this sample trained on, and when? Had a run the samples that were planned, or those of another run?",
    "analyze-debug": "Draw a picture of traces: which sample was seen when.",
    "completion": "Write the completion script of a shell.",
    "layout": "Show which ranks of a training run form which groups, and which layers they have.",
}


class _LazyGroup(click.Group):
    """A group that imports a command's module when the command is needed, not for listing it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name.startswith("-"):
            return None  # click says what is wrong with such an option
        if cmd_name not in COMMANDS:
            hint = did_you_mean(cmd_name, COMMANDS, f"there are: {', '.join(COMMANDS)}")
            raise click.UsageError(f"No such command {cmd_name!r}; {hint}", ctx)
        command = import_module(f"energon_lite.cli.{cmd_name.replace('-', '_')}").command
        assert isinstance(command, click.Command)  # ours, not the user's doing
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
            raise  # who read the output has enough, as `head`: click ends without a word
        except (PermissionError, FileNotFoundError, FileExistsError, NotADirectoryError) as error:
            raise click.ClickException(f"{error.strerror}: {error.filename}") from None
        except OSError as error:
            raise click.ClickException(str(error)) from None


# Commands inherit the settings.
@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True)
@click.version_option(__version__, "--version", "-V", prog_name="energon-lite", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Prepare data sets for loading with energon_lite or Megatron-Energon, and look at blends of them."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


if __name__ == "__main__":
    main()
