"""``energon-lite preview``: show data in a browser, in one HTML file, or in the terminal."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import click
import numpy as np
import torch

from energon_lite.cli import batching_argument, make_task_encoder
from energon_lite.config.leaf_spec import LeafSpec
from energon_lite.config.metadataset import is_metadataset
from energon_lite.documents.paths import local_path
from energon_lite.errors import ConfigError, EmptyDatasetError, UsageError, counted
from energon_lite.extras.inspect.preview.media import HIDDEN, fields_of, pixels_of
from energon_lite.extras.inspect.preview.server import PreviewServer
from energon_lite.extras.inspect.preview.shown_run import RunOptions, ShownRun
from energon_lite.extras.inspect.preview.site import Site, write_page
from energon_lite.extras.inspect.preview.steps import Place, ShownSample
from energon_lite.extras.inspect.preview.value_view import short_text, tensor_words
from energon_lite.hooks import DefaultTaskEncoder, HookContext, TaskEncoder, hooks_of
from energon_lite.loading.leaves import find_leaves, open_source, open_whole
from energon_lite.loading.makers.job_runner import JobRunner
from energon_lite.loading.makers.outcomes import Failure, Rejected
from energon_lite.storage.index.nv_meta import is_jsonl

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


# -- the terminal ---------------------------------------------------------------------------------------------------

#: Fields of every sample that do not describe its contents. The key is shown, as by Energon's command.
_HIDDEN = HIDDEN - {"__key__"} | {"__subflavors__"}
#: Most characters of a text that are shown.
_LONGEST_TEXT = 400
#: Most items of a collection that are shown.
_MOST_VALUES = 8
#: Largest depth of nesting to which collections are shown.
_DEEPEST = 4


def sample_lines(sample: Any, *, width: int, colours: bool) -> Iterator[str]:
    """Yield the lines of a sample: one for each field, followed by a picture if it is an image.

    Args:
        sample: an object with fields, or a dict of parts.
        width: width of the terminal, in characters.
        colours: draw pictures; False: images are only described.
    """
    for name, value in fields_of(sample, _HIDDEN):
        if value is not None:
            yield from _lines(name, value, "  ", width, colours, 0)


def _lines(name: str, value: Any, indent: str, width: int, colours: bool, depth: int) -> Iterator[str]:
    is_list = isinstance(value, (list, tuple))
    items = [*value.items()] if isinstance(value, Mapping) else [*enumerate(value if is_list else ())]
    if depth >= _DEEPEST or not any(_is_large(item) for _, item in items):
        kind = "" if depth else f" ({type(value)})"
        yield f"{indent}{name}{kind}: {_words(value)}"
    else:
        kind = "" if isinstance(value, Mapping) else f" ({type(value).__name__} of {len(value)})"
        yield f"{indent}{name}:{kind}"
        for key, item in items[:_MOST_VALUES]:
            yield from _lines(str(key), item, indent + "  ", width, colours, depth + 1)
        if len(items) > _MOST_VALUES:
            yield f"{indent}  ... and {len(items) - _MOST_VALUES} more"
    if colours and (pixels := pixels_of(value)) is not None:
        columns = max(8, min(width - len(indent) - 2, 64))
        pixels = np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3]
        yield from (f"{indent}  {line}" for line in picture_lines(pixels, columns))


def _is_large(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, bytes, Mapping, list, tuple)) or hasattr(value, "getbands")


def _words(value: Any) -> str:
    if isinstance(value, (torch.Tensor, np.ndarray)):
        return tensor_words(value)
    if isinstance(value, (bytes, bytearray)):
        return f"{counted(len(value), 'byte')} {bytes(value[:16])!r}" + ("..." if len(value) > 16 else "")
    if hasattr(value, "getbands"):
        return f"image {value.size[0]}x{value.size[1]} {value.mode}"
    return short_text(repr(value), _LONGEST_TEXT)


def picture_lines(pixels: np.ndarray[Any, Any], columns: int) -> Iterator[str]:
    """Draw an image as lines of half blocks in 24-bit colours: each character is two pixels, one above the other.

    Args:
        pixels: uint8 ``[height, width, 3]``.
        columns: largest number of characters in a line.
    """
    height, width, _ = pixels.shape
    across = min(columns, width)
    down = max(2, round(height * across / width) // 2 * 2)
    rows = (np.arange(down) + 0.5) * height // down
    small = pixels[rows.astype(int)][:, ((np.arange(across) + 0.5) * width // across).astype(int)]
    for top, bottom in zip(small[::2].tolist(), small[1::2].tolist(), strict=True):
        cells = (
            f"\x1b[38;2;{r};{g};{b}m\x1b[48;2;{x};{y};{z}m▀" for (r, g, b), (x, y, z) in zip(top, bottom, strict=True)
        )
        yield "".join(cells) + "\x1b[0m"


def show_samples(path: str, split_parts: str, encoder: TaskEncoder | None, **asked: Any) -> None:
    """Write the first samples of each data set; an interactive terminal asks after each, and images are drawn.

    Args:
        path: a folder, a JSONL file or a metadataset.
        split_parts: the splits, with commas.
        asked: the options of the command.
    """
    interactive = sys.stdin.isatty() and sys.stdout.isatty()
    used = encoder or DefaultTaskEncoder()
    for spec in _specs(path, split_parts, asked["dataset_config"], asked["split_config"]):
        where = f"{spec.path} [{spec.split_part}]"
        try:
            source = open_source(spec)
        except EmptyDatasetError:
            click.echo(f"{where}: empty, skipped")
            continue
        click.echo(f"{where}: {counted(len(source), 'sample')}")
        leaf = open_whole(spec if encoder else replace(spec, aux={}), used, asked["trust_code"], source)
        runner = JobRunner([leaf], used, hooks_of(used, packing=False, batched=False), seed=0)
        stop = len(source) if interactive else min(len(source), asked["start"] + asked["samples"])
        for number in range(asked["start"], stop):
            with HookContext() as context:
                sample = runner.one((0, number, 0), context)
            kind = "" if sample is None else f", {type(sample).__name__}"
            click.echo(f"Sample {number}, key {source.key(number)!r}{kind}")
            _write(sample.failure if isinstance(sample, Rejected) else sample, asked["images"])
            if interactive and not click.confirm("Go on?", default=True):
                return


def show_place(site: Site, places: list[Place], samples: list[tuple[int, int]], images: bool | None) -> None:
    """Write the samples of steps, or single samples, after the hooks."""
    run = site.run
    for place in places:
        for micro_batch in site.finder.make(place):
            rank = "" if micro_batch.rank is None or run.options.ranks == 1 else f", rank {micro_batch.rank}"
            click.echo(f"{str(place).capitalize()}{rank}: {counted(len(micro_batch.planned), 'sample')}")
            for address in micro_batch.planned:
                _show(site, site.makers.sample(*address[:3]), images)
    for leaf, index in samples:
        _show(site, site.makers.sample(leaf, index, 0), images)


def _show(site: Site, shown: ShownSample, images: bool | None) -> None:
    where = f"{site.run.leaf_name(shown.leaf)}, number {shown.index:,}, epoch {shown.epoch:,}"
    click.echo(f"Sample {shown.key!r} ({where})")
    for value in (*shown.failures, *shown.made):
        _write(value, images)


def _write(sample: Any, images: bool | None) -> None:
    if isinstance(sample, Failure):
        click.echo(f"  {sample.stage}: {sample.reason}")
        return
    draws = sys.stdout.isatty() if images is None else images
    for line in sample_lines(sample, width=shutil.get_terminal_size().columns, colours=draws):
        click.echo(line, color=draws)


def _specs(path: str, split_parts: str, dataset_config: str, split_config: str) -> Iterator[LeafSpec]:
    """Yield the data sets of the existing splits."""
    problems = []
    parts = [part.strip() for part in split_parts.split(",")][: 1 if is_jsonl(path) else None]  # a file has no splits
    for part in parts:
        try:
            specs = find_leaves(path, part, dataset_config, split_config, None)
            if not is_metadataset(path):
                open_source(specs[0])
        except (ConfigError, EmptyDatasetError) as error:
            problems.append(error)
            continue
        yield from specs
    if len(problems) == len(parts):
        raise problems[-1]
