"""``energon-lite tokenize``: convert texts, prompts with responses, or conversations to a data set of tokens."""

from __future__ import annotations

import os
from typing import Annotated, Any, Literal

import click

from energon_lite.cli import job_options, progress
from energon_lite.documents import Key, Node, keys_of, load_yaml, local_path, located, read_keys
from energon_lite.errors import UsageError, counted
from energon_lite.trainer.tokenizing.run import Input, TokenizeReport, tokenize_files
from energon_lite.trainer.tokenizing.tasks import TASKS, TOO_LONG, Task

#: Most records left out that are listed.
_SHOWN = 10


@click.command(name="tokenize", context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("files", nargs=-1, type=click.Path(path_type=str))
@click.option("--tokenizer", "-t", required=True, help="Folder (or tokenizer.json) of a Hugging Face tokenizer.")
@click.option("--output", "-o", required=True, help="Folder of the new data set.")
@click.option(
    "--task", "kind", type=click.Choice(TASKS), default="sft", show_default=True, help="Purpose of the records."
)
@click.option(
    "--prompt-field", "prompt", default="prompt", show_default=True, help="sft: field(s) of the prompt: a or a,b."
)
@click.option("--response-field", "response", default="response", show_default=True, help="sft: field of the response.")
@click.option(
    "--messages-field", "messages", help="sft: field with a list of {role, content}, instead of prompt and response."
)
@click.option("--text-field", "text", help="pt: field of the text.  [default: text, or else content]")
@click.option(
    "--text-records",
    type=click.Choice(["file", "line"]),
    default="file",
    show_default=True,
    help="Unit of a text file that is one record.",
)
@click.option("--max-length", type=click.IntRange(min=2), help="Largest number of tokens of an example.")
@click.option(
    "--too-long",
    type=click.Choice(TOO_LONG),
    default="truncate",
    show_default=True,
    help="Treatment of longer examples.",
)
@click.option(
    "--begin-token", "begin", help="Text of the first token of each example; '' for none.  [default: the tokenizer's]"
)
@click.option("--end-token", "end", help="Text of the last token; '' for none.  [default: the tokenizer's]")
@click.option("--metadata", help="JSON or YAML file that lists files with their tasks and fields, instead of FILES.")
@click.option("--split-ratio", default="1,0,0", show_default=True, help="Shares of train, val and test in shards.")
@click.option("--records-per-shard", type=click.IntRange(min=1), default=10_000, show_default=True)
@click.option("--force-overwrite", is_flag=True, help="Replace an existing data set.")
@click.option("--sqlite/--no-sqlite", default=False, help="Write index.sqlite, which only Energon's tools use.")
@job_options("Processes.")
def command(
    files: tuple[str, ...],
    metadata: str | None,
    text_records: str,
    prompt: str,
    num_workers: int | None,
    show_progress: bool,
    **others: Any,
) -> None:
    """Tokenise FILES (JSONL, text, Parquet; also folders and patterns) into a data set that can be loaded.

    A sample has tokens.npy and, for sft, mask.npy: 1 for each token that the loss counts. A run that was killed
    continues when it is started again; the result is the same to the byte. Broken records are left out, counted, and
    listed.

    \b
    Examples:
      energon-lite tokenize chats.jsonl -t models/llama -o data/chats --messages-field messages --max-length 4096
      energon-lite tokenize 'books/**/*.txt' -t models/llama -o data/books --task pt --max-length 8192 --too-long split
    """
    if bool(files) == bool(metadata):
        raise UsageError("either FILES or --metadata must be given", fix="name files, or one file that lists them")
    task = {name: others.pop(name) for name in ("kind", "response", "messages", "text", "max_length", "too_long")}
    if metadata:
        inputs = read_metadata(metadata)
    else:
        prompts = tuple(name.strip() for name in prompt.split(",") if name.strip())
        inputs = [Input(files, Task(prompt=prompts, **task), text_records)]
    with progress(show_progress, "Tokenising", "records") as show:
        report = tokenize_files(inputs, workers=num_workers, progress=show, **others)
    _show(report)


def _show(report: TokenizeReport) -> None:
    counts = report.counts
    click.echo(
        f"{counted(counts.records, 'record')} -> {counted(counts.examples, 'example')} with "
        f"{counted(counts.tokens, 'token')} (longest {counts.longest:,}) in "
        f"{counted(report.shards, 'shard')}: {report.path}"
    )
    if report.made < report.shards:
        click.echo(f"{counted(report.shards - report.made, 'shard')} of them there already.")
    if counts.too_long:
        click.echo(f"{counted(counts.too_long, 'record')} longer than the limit.")
    if counts.left_out:
        click.echo(f"{counted(counts.left_out, 'record')} left out:")
        for path, number, problem in report.problems[:_SHOWN]:
            click.echo(f"  {os.path.relpath(path)}, record {number}: {problem}")
        if counts.left_out > _SHOWN:
            click.echo("  ... (the first ones are listed)")


def read_metadata(path: str) -> list[Input]:
    """Read a file that lists input files, with the task and the fields of each. JSON or YAML::

        inputs:
          - files: [chats/*.jsonl]
            task: sft
            messages: conversations
            max_length: 4096
          - files: books
            task: pt
            too_long: split
            max_length: 8192

    Paths are relative to the file.

    Raises:
        ConfigError: the file is invalid; with the line and the key.
    """
    entries = load_yaml(path).mapping(required={"inputs"})["inputs"]
    inputs = entries.sequence("inputs, each with 'files'")
    if not inputs:
        raise entries.wrong("at least one input")
    return [_input(entry, os.path.dirname(os.path.abspath(path))) for entry in inputs]


def _names(node: Node) -> tuple[str, ...]:
    """Read one name, or a list of names."""
    nodes = [node] if isinstance(node.value, str) else node.sequence("names")
    return tuple(name.string("a name") for name in nodes)


def _input(entry: Node, folder: str) -> Input:
    names = Annotated[tuple[str, ...], _names]
    keys = {**keys_of(Task), "files": Key(names, True), "prompt": Key(names, False)}
    keys |= {"task": keys.pop("kind"), "text_records": Key(Literal["file", "line"], False)}
    values = read_keys(entry, keys)
    patterns, text_records = values.pop("files"), values.pop("text_records", "file")
    with located(entry):
        task = Task(kind=values.pop("task", "sft"), **values)
    files = tuple(os.path.join(folder, os.path.expanduser(local_path(name))) for name in patterns)
    return Input(files, task, text_records)
