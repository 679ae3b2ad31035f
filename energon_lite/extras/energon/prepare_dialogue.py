"""Dialogue of ``energon-lite prepare``: questions for missing options.

Every question has a default if a sensible guess is possible, and is asked again, with the reason, after an invalid
answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import click

from energon_lite.cli.output import byte_size
from energon_lite.errors import EnergonLiteError, UsageError
from energon_lite.samples import SAMPLE_TYPES
from energon_lite.samples.sample import is_required
from energon_lite.storage.dataset_scan import DatasetScan
from energon_lite.storage.index.nv_meta import meta_path
from energon_lite.storage.prepare_choices import (
    CRUDE,
    SAMPLE_LOADER,
    class_of,
    find_sample_type,
    parse_ratio,
    sample_document,
    sample_fields,
)
from energon_lite.storage.read.webdataset import RawSample
from energon_lite.storage.samples.decoding import SampleDecoder
from energon_lite.storage.samples.field_map import compile_field_map
from energon_lite.storage.samples.image_decoding import IMAGE_EXTENSIONS

T = TypeVar("T")

#: Samples that are shown before the questions.
_SHOWN_SAMPLES = 2
#: Energon's list of sample types, in its order.
_NUMBERED = (
    "CaptioningSample",
    "ImageClassificationSample",
    "ImageSample",
    "InterleavedSample",
    "MultiChoiceVQASample",
    "OCRSample",
    "Sample",
    "SimilarityInterleavedSample",
    "TextSample",
    "VQASample",
    "VidQASample",
    CRUDE,
)
#: Number of part names above which no field map is asked for, as in Energon.
_MANY_PARTS = 10
_TEXT_PARTS = ("txt", "text", "transcript")
_LABEL_PARTS = ("cls", "cls2", "index", "id")
#: Frequent names of a field, as the name of a part or as a key of a JSON part.
_SYNONYMS: dict[str, tuple[str, ...]] = {
    "image": ("image", "img"),
    "caption": ("caption", "text", "txt", "description"),
    "context": ("context", "question", "prompt"),
    "text": ("text", "txt", "content", "caption"),
    "answers": ("answers", "answer"),
    "label": ("label", "class", "cls", "target"),
    "label_name": ("label_name", "class_name", "name"),
    "video": (),
}
#: Parts that a field is made of if no part has its name.
_OTHER_PARTS = {
    **dict.fromkeys(("caption", "text", "context"), _TEXT_PARTS),
    "label": _LABEL_PARTS,
    "video": ("mp4", "webm", "mkv", "mov", "avi"),
}


class QuestionDialogue:
    """Dialogue in the terminal; see :class:`~energon_lite.cli.prepare.PrepareDialogue`."""

    def show_samples(self, scan: DatasetScan) -> None:
        """Write the first samples: their parts, sizes, and previews of their contents."""
        for number, raw in enumerate(scan.read(range(min(_SHOWN_SAMPLES, scan.samples)))):
            click.echo(f"Sample {number}, key {raw.key!r}:")
            for name, data in raw.parts.items():
                preview = _preview(name, data)
                click.echo(f"  {name:<8} {byte_size(len(data)):>10}{preview}")

    def ask_again(self, root: str) -> bool:
        """Ask if a prepared data set is to be prepared again."""
        click.echo(f"{root} has already been prepared; its splits will be replaced.")
        return click.confirm("Prepare it again?")

    def ask_split_ratio(self) -> str:
        """Ask for the shares of train, val and test, as text."""

        def use(answer: str) -> str:
            parse_ratio(answer)
            return answer

        return _ask("Share of shards for train, val, test", use, default="8,1,1")

    def ask_dataset_document(
        self, scan: DatasetScan, sample_type: str | None = None
    ) -> tuple[dict[str, Any] | None, dict[str, str]]:
        """Ask for the sample type, unless it is given, and for the part of each field or a file of code instead.

        Returns:
            The document, None if no file is wanted; and the further files that it needs.
        """
        if sample_type is None and not click.confirm(
            "Create a dataset.yaml, which says how a sample is made of these parts?", default=True
        ):
            return None, {}
        while True:
            chosen = sample_type or _ask_sample_type(scan)
            field_map = None if chosen == CRUDE else _ask_field_map(scan, chosen)
            if field_map is None and chosen != CRUDE:
                return _loader_document(chosen), {SAMPLE_LOADER: _loader_file(scan, chosen)}
            try:
                document = sample_document(scan, sample_type=chosen, field_map=field_map)
            except EnergonLiteError as error:
                click.echo(f"This does not work: {error}\nPlease answer again.")
                continue
            return document, {}

    def begin_loader(self, scan: DatasetScan, sample_type: str) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the document of samples whose fields a file of code defines, and a template of that file."""
        return _loader_document(sample_type), {SAMPLE_LOADER: loader_template(sample_type, scan.parts)}

    def guess_field_map(self, scan: DatasetScan, sample_type: str) -> dict[str, str]:
        """Guess the parts of the required fields of a sample; empty if one of them cannot be guessed."""
        first = scan.read([0])[0]
        required = [field.name for field in sample_fields(sample_type) if is_required(field)]
        guesses = {name: guess for name in required if (guess := guess_access(name, scan.parts, first))}
        return guesses if len(guesses) == len(required) else {}


def _preview(name: str, data: bytes) -> str:
    value = _decoded(name, data)
    if isinstance(value, str):
        return f"  {_shorten(value)!r}"
    if value is None or isinstance(value, bytes):
        return ""
    if isinstance(value, (dict, list, int, float)):
        return "  " + json.dumps(_shorten(value), ensure_ascii=False, default=str)
    return f"  {type(value).__name__}{list(getattr(value, 'shape', []))}"


def _decoded(name: str, data: bytes) -> Any:
    try:
        return SampleDecoder(image_decode=None).decode(name, data)
    except EnergonLiteError:
        return None


def _shorten(value: Any) -> Any:
    """Shorten a nested value to one line."""
    if isinstance(value, dict):
        return {key: _shorten(item) for key, item in list(value.items())[:8]} | (
            {"...": "..."} if len(value) > 8 else {}
        )
    if isinstance(value, list):
        return [_shorten(item) for item in value[:3]] + (["..."] if len(value) > 3 else [])
    if isinstance(value, str) and len(value) > 60:
        return value[:60] + "..."
    return value


def _ask(question: str, use: Callable[[str], T], **options: Any) -> T:
    """Ask until the answer is valid."""
    while True:
        answer = str(click.prompt(question, type=str, **options))
        try:
            return use(answer.strip())
        except EnergonLiteError as error:
            click.echo(f"  {error.what}" + (f" ({error.fix})" if error.fix else ""))


def _loader_file(scan: DatasetScan, sample_type: str) -> str:
    """Make a template of the file of code; an existing file is renamed first, if the user agrees."""
    there = meta_path(scan.root, SAMPLE_LOADER)
    if os.path.exists(there) and click.confirm(f"Replace the {SAMPLE_LOADER} that is there?"):
        os.replace(there, f"{there}.bak")
        click.echo(f"  The old one is now {SAMPLE_LOADER}.bak.")
    return loader_template(sample_type, scan.parts)


def _loader_document(sample_type: str) -> dict[str, Any]:
    """Return the document that leaves the fields to two functions in :data:`SAMPLE_LOADER`."""
    return {
        "sample_type": class_of(sample_type),
        "sample_loader": f"{SAMPLE_LOADER}:sample_loader",
        "part_filter": f"{SAMPLE_LOADER}:part_filter",
    }


def loader_template(sample_type: str, parts: Iterable[str]) -> str:
    """Return the text of :data:`SAMPLE_LOADER`, with a line to complete for each field. The file is code: it runs only
    if the caller gives ``trust_code=True``.

    Args:
        sample_type: name of the sample class.
        parts: names of the parts that samples have.

    Example:
        >>> print(loader_template("TextSample", ["txt"]))
        ...
            return {
                "text": raw["TODO"],  # str, required
            }
    """
    fields = "".join(
        f'        "{field.name}": raw["TODO"],  # {field.type}, '
        f"{'required' if is_required(field) else 'may be left out'}\n"
        for field in sample_fields(sample_type)
    )
    return f'''"""How a {sample_type} is made of the parts of a sample. Replace each TODO."""


def sample_loader(raw):
    """The fields of a sample; raw has its decoded parts by name, and __key__."""
    return {{
{fields}    }}


def part_filter(part):
    """Whether a part is needed: others are neither read nor decoded."""
    return part in {sorted(parts)!r}
'''


def _ask_sample_type(scan: DatasetScan) -> str:
    # Numbers are those of Energon, so that answers for it have the same meaning; types of this library alone are last.
    names = [*_NUMBERED, *(name for name in SAMPLE_TYPES if name not in _NUMBERED)]
    click.echo("Sample types:")
    for number, name in enumerate(names):
        fields = sample_fields(name) if name in SAMPLE_TYPES else ()
        labels = [field.name if is_required(field) else f"[{field.name}]" for field in fields]
        other = "a dict of all parts" if name == CRUDE else "no fields of its own; cannot be chosen"
        click.echo(f"  {number:>2}. {name} ({', '.join(labels) or other})")

    def use(answer: str) -> str:
        name = names[int(answer)] if answer.isdecimal() and int(answer) < len(names) else answer
        if name != CRUDE:
            find_sample_type(name)
        return name

    return _ask("Sample type (number or name)", use, default=_guess_sample_type(scan))


def _guess_sample_type(scan: DatasetScan) -> str:
    image = any(name.lower() in IMAGE_EXTENSIONS for name in scan.parts)
    text = any(name in _TEXT_PARTS for name in scan.parts)
    if image and text:
        return "CaptioningSample"
    if image and any(name in _LABEL_PARTS for name in scan.parts):
        return "ImageClassificationSample"
    if text and len(scan.parts) == 1:
        return "TextSample"
    return CRUDE


def _ask_field_map(scan: DatasetScan, sample_type: str) -> dict[str, str] | None:
    """Ask for the part of each field; None: code is to be used instead."""
    if len(scan.parts) > _MANY_PARTS:
        click.echo(f"With {len(scan.parts)} names of parts, a field map is not asked for: write a {SAMPLE_LOADER}.")
        return None
    if not click.confirm(
        f"Make fields of parts by a field map [y], or by a {SAMPLE_LOADER} of yours [n]?", default=True
    ):
        return None
    click.echo(
        f"Which part becomes which field of {sample_type}? Parts: {', '.join(list(scan.parts)[:20])}\n"
        "  json[text][0] takes a value out of a part, jpg,png takes the first that a sample has, - leaves a field out."
    )
    first = scan.read([0])[0]
    field_map: dict[str, str] = {}
    for field in sample_fields(sample_type):
        required = is_required(field)
        guess = guess_access(field.name, scan.parts, first)
        default = guess if required else "-"  # as in Energon, no answer leaves an optional field out

        def use(answer: str, name: str = field.name, required: bool = required) -> str:
            if answer != "-":
                compile_field_map({name: answer}).check_parts(scan.parts)
            elif required:
                raise UsageError(f"{name} is required")
            return answer

        kind = "required" if required else f"optional, such as {guess}" if guess else "optional"
        field_map[field.name] = _ask(f"  {field.name} ({field.type}, {kind})", use, default=default)
    return {name: access for name, access in field_map.items() if access != "-"}


def guess_access(field: str, parts: Mapping[str, int], first: RawSample) -> str | None:
    """Guess an expression for a field; None without a guess.

    Args:
        field: name of the field.
        parts: part names of the data set.
        first: a sample, whose JSON keys are examined.

    Example:
        >>> guess_access("image", {"png": 3, "json": 3}, first)
        'png'
    """
    images = [name for name in parts if name.rpartition(".")[2].lower() in IMAGE_EXTENSIONS]
    if images and field in ("image", "images"):
        return ",".join(images[:4])
    names = _SYNONYMS.get(field, (field,))
    guesses = [name for name in names if name in parts] + _inside_json(names, first)
    guesses += [name for name in _OTHER_PARTS.get(field, ()) if name in parts]
    return guesses[0] if guesses else None


def _inside_json(names: Sequence[str], first: RawSample) -> list[str]:
    """Expressions for values with one of these names in a JSON part of a sample."""
    parts = [part for part in first.parts if part.rpartition(".")[2] in ("json", "jsn")]
    values = [(part, _decoded(part, first.parts[part])) for part in parts]
    return [f"{part}[{n}]" for part, value in values if isinstance(value, dict) for n in names if n in value]


DIALOGUE = QuestionDialogue()
