"""``energon-lite preview``: show data in a browser, in one HTML file, or in the terminal."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import click

from energon_lite.cli import batching_argument, make_task_encoder
from energon_lite.documents.paths import local_path
from energon_lite.errors import ConfigError, EmptyDatasetError, UsageError
from energon_lite.extras.inspect.preview.server import PreviewServer
from energon_lite.extras.inspect.preview.shown_run import RunOptions, ShownRun
from energon_lite.extras.inspect.preview.site import Site, write_page
from energon_lite.extras.inspect.preview.steps import Place
from energon_lite.extras.inspect.preview.terminal import show_place, show_samples
from energon_lite.hooks import TaskEncoder

_PARTS = "train,val,test"
_COUNT = click.IntRange(min=1)
_FROM_0 = click.IntRange(min=0)
#: Largest number of samples with one key that are shown in a file or in a terminal.
_MOST_FOUND = 16


@click.command(name="preview", context_settings={"show_default": True})
@click.argument("path", type=click.Path(path_type=str))
@click.option("--step", type=_FROM_0, help="Show this step, counted from 0 in the run.")
@click.option("--chunk", type=_FROM_0, help="Show this chunk, where batches are made by tokens or by packing.")
@click.option("--key", help="Show the samples with this key, or the sample or batch of a __restore_key__ as JSON.")
@click.option("--leaf", help="Show this data set of a blend: its number, its name or its path.")
@click.option("--html", "file", type=click.Path(dir_okay=False), help="Write one file, with all media in it.")
@click.option("--text", "as_text", is_flag=True, help="In the terminal: write samples one after the other, or --step.")
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port of the local server; 0: any free one.")
@click.option("--task-encoder", metavar="MODULE:CLASS", help="Show the results of its cookers and hooks.")
@click.option("--tokenizer", type=click.Path(), help="Folder or file of a Hugging Face tokenizer, to decode tokens.")
@click.option("--quarantine", type=click.Path(dir_okay=False), help="File of bad samples that a loader has written.")
@click.option("--state", type=click.Path(), help="State of a run (a file or a checkpoint), for settings and position.")
@click.option("--batch-size", type=_COUNT, default=8, help="Samples of a micro-batch.")
@click.option("--packing-buffer-size", type=_COUNT, help="Samples that the packing hooks get at a time.")
@click.option("--batching", help="Batches by tokens: a YAML file, or a strategy such as best_fit:capacity=8192.")
@click.option("--length-column", default="length", help="For --batching: the measured column, or none.")
@click.option("--shuffle-buffer-size", type=_COUNT, help="As in get_train_dataset.")
@click.option("--max-samples-per-sequence", type=_COUNT, help="As in get_train_dataset.")
@click.option("--ranks", type=_COUNT, default=1, help="Data-parallel ranks: a step has a micro-batch for each.")
@click.option("--seed", type=int, default=0, help="Seed of the run: seed_offset of its WorkerConfig.")
@click.option("--split-parts", default=_PARTS, help="The split: the first of these that exists. With --text, all.")
@click.option("--dataset-config", default="dataset.yaml", help="For a folder: the file that defines its samples.")
@click.option("--split-config", default="split.yaml", help="For a folder: the file of its splits.")
@click.option("--trust-code", is_flag=True, help="Allow dataset.yaml to name Python code that is run.")
@click.option("--samples", "-n", type=_COUNT, help="In the terminal: number of samples of each data set.  [default: 3]")
@click.option("--start", type=_FROM_0, help="In the terminal: first sample of each data set.  [default: 0]")
@click.option("--images/--no-images", default=None, help="In the terminal: draw images.  [default: on a terminal]")
def command(path: str, **asked: Any) -> None:
    """Show PATH: a prepared folder, a JSONL file, or a metadataset .yaml.

    Serves a page to this machine until Ctrl-C, and writes its address. The page shows the blend and its shares, the
    batches of any step, each sample as stored and after the task encoder, packs, bad samples, and the next steps.

    With --text, or an option of the terminal (-n, --start, --images), samples are written there, with small pictures.
    Without --step, --chunk, --key or --leaf these are the first ones of each data set; an interactive terminal asks
    after each.

    \b
    Example:
      energon-lite preview blend.yaml --task-encoder train:Captions
      energon-lite preview blend.yaml --step 1000000000 --html step.html
      energon-lite preview data/coco --text -n 1 | less
    """

    path = local_path(path)
    encoder = make_task_encoder(asked["task_encoder"]) if asked["task_encoder"] else None
    in_terminal = asked["as_text"] or any(asked[name] is not None for name in ("samples", "start", "images"))
    chosen = [name for name in ("step", "chunk", "key") if asked[name] is not None]
    if len(chosen) > 1:
        raise UsageError(f"--{chosen[0]} together with --{chosen[1]}", fix="give one of them")
    if in_terminal and asked["file"] is not None:
        raise UsageError("--html together with options of the terminal", fix="leave out one of them")
    if in_terminal and not chosen and asked["leaf"] is None:
        terminal = {"samples": asked.pop("samples") or 3, "start": asked.pop("start") or 0}
        show_samples(path, asked.pop("split_parts"), encoder, **asked, **terminal)
        return
    site = _site(path, encoder, asked)
    leaf = None if asked["leaf"] is None else site.run.find_leaf(asked["leaf"])
    places, samples = _named(site, asked, leaf)
    if in_terminal:
        if leaf is not None and not samples:
            first, count = asked["start"] or 0, asked["samples"] or 3
            samples = [(leaf, index) for index in range(first, min(first + count, len(site.run.leaves[leaf].source)))]
        show_place(site, places, samples, asked["images"])
    elif asked["file"] is not None:
        left_out = write_page(asked["file"], site, places=places, samples=samples, leaf=None if samples else leaf)
        click.echo(f"The page is in {asked['file']}.")
        if left_out:
            click.echo(f"{left_out} pictures, sounds or films are too large for the file, and are left out.", err=True)
    else:
        _serve(site, places, samples, leaf, asked["port"])


def _in_terminal(**asked: Any) -> None:
    assert command.callback is not None
    command.callback(**{**asked, "as_text": asked["file"] is None})


#: The command with --text, like Energon's: programs call it, and the server of a page would never end.
in_terminal = click.Command("preview", params=command.params, callback=_in_terminal, help=command.help)


def _site(path: str, encoder: TaskEncoder | None, asked: Mapping[str, Any]) -> Site:
    """Make the pages of the first split that exists."""
    same = ("dataset_config", "split_config", "trust_code", "batch_size", "packing_buffer_size", "shuffle_buffer_size")
    options = RunOptions(
        **{name: asked[name] for name in (*same, "max_samples_per_sequence", "ranks", "seed")},
        batching=None if asked["batching"] is None else batching_argument(asked["batching"]),
        length_column=None if asked["length_column"] in ("", "none") else asked["length_column"],
    )
    decode = None
    if asked["tokenizer"] is not None:
        from energon_lite.trainer.tokenizing.tokenizer import HuggingFaceTokenizer

        decode = HuggingFaceTokenizer(asked["tokenizer"]).decode
    choices = [replace(options, split_part=part.strip()) for part in asked["split_parts"].split(",")]
    problems = []
    for choice in choices if asked["state"] is None else [options.of_state(asked["state"])]:
        try:
            return Site(ShownRun.open(path, choice, encoder, decode=decode), asked["quarantine"])
        except (ConfigError, EmptyDatasetError) as error:
            problems.append(error)
    raise problems[0]


def _named(site: Site, asked: Mapping[str, Any], leaf: int | None) -> tuple[list[Place], list[tuple[int, int]]]:
    """Return the places and the samples that the options name."""
    finder, key = site.finder, asked["key"]
    if asked["step"] is not None:
        return [finder.at_step(asked["step"])], []
    kind, *numbers = _restore_key(key) or [None]
    if asked["chunk"] is not None:
        place = Place(None, asked["chunk"])
    elif kind is None:
        return [], [] if key is None else site.run.find_key(key, leaf)[:_MOST_FOUND]
    elif kind == "sample":
        return [], [(numbers[0], numbers[1])]
    elif finder.by_step:
        place = Place(numbers[1] // site.run.options.ranks)
    else:  # if hooks decide, the number after the chunk's is a place in the chunk, not of a batch
        place = Place(None, *numbers[1 : 2 if finder.hooks_decide else 3])
    if finder.by_step and place.step is None:
        raise UsageError("--chunk: the batches of this run have no chunks", fix="give --step")
    finder.check(place)
    return [place], []


def _restore_key(text: str | None) -> list[Any]:
    """Parse a restore key from JSON; empty for other texts.

    Raises:
        UsageError: the text has the form of a restore key, but is not one.
    """
    if text is None or not text.lstrip().startswith("["):
        return []
    try:
        value = json.loads(text)
    except ValueError:
        return []
    if (
        not isinstance(value, list)
        or len(value) < 3
        or value[0] not in ("sample", "batch", "chunk")
        or not all(type(number) is int for number in value[1:])
    ):
        raise UsageError(f"{text} is not a restore key", fix="write it as JSON: '[\"sample\", 0, 12, 0, 0]'")
    return value


def _serve(site: Site, places: list[Place], samples: list[tuple[int, int]], leaf: int | None, port: int) -> None:
    with PreviewServer(site, port) as server:
        page: str | None = site.base
        if places:
            page = site.links.place(places[0])
        elif samples:
            page = site.links.sample(*samples[0], 0)
        elif leaf is not None:
            page = site.links.leaf(leaf)
        click.echo(
            f"Open {server.url.removesuffix(site.base)}{page}\nThe page is for this machine only. Ctrl-C ends it."
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            click.echo("")
