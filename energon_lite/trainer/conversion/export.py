"""Export of a checkpoint of any layout: to one safetensors file, or, all of it or a part, to a Hugging Face folder."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mode
from typing import Any

import torch

from energon_lite.errors import EnergonLiteError, StateError, UsageError
from energon_lite.trainer.checkpointing.checkpoint import read_state
from energon_lite.trainer.checkpointing.tensors import CheckpointReader, read_content
from energon_lite.trainer.checkpointing.weights import find_weights
from energon_lite.trainer.conversion.huggingface_folder import (
    COMPANION,
    COMPUTED,
    CONFIG,
    DIVISION,
    EMBEDDING,
    GENERATION,
    HEAD,
    INDEX,
    VISION,
    WEIGHTS,
    Division,
    HuggingFaceFolder,
    WeightFile,
    check_tensors,
    companions_of,
    divide,
    division_of,
    has_tokenizer,
    index_json,
    model_shapes,
    native_name,
    run_tokenizer_files,
    their_names,
)
from energon_lite.trainer.conversion.image_config import (
    MODEL_TYPE,
    PREPROCESSOR,
    check_is_llava,
    encoder_config,
    llava_config,
    preprocessor_json,
)
from energon_lite.trainer.conversion.language_config import architecture_for, huggingface_config
from energon_lite.trainer.conversion.safetensors_file import TensorType, write_safetensors
from energon_lite.trainer.models.config import DTYPES, ModelConfig, model_config_of
from energon_lite.trainer.parallel.shards import Box
from energon_lite.trainer.tokenizing.tokenizer import ByteTokenizer


@dataclass(frozen=True)
class TargetTensor(TensorType):
    """A tensor of an output file, and the source of its values.

    Args:
        dtype, shape: those in the file; further rows of the source are padding, and left out.
        source: name of the tensor in the checkpoint.
    """

    source: str


def write_files(saved: CheckpointReader, folder: Path, division: Division, targets: Mapping[str, TargetTensor]) -> None:
    """Write each file of a division, with one rectangle in memory at a time."""
    for file, (names, metadata) in division.items():
        tensors = {name: (targets[name].dtype, targets[name].shape) for name in names}
        with write_safetensors(folder / file, tensors, metadata) as writer:
            for name in names:
                target = targets[name]
                for box in saved.boxes(target.source):
                    if (kept := _without_padding(box, target.shape)) is not None:
                        values = saved.read(target.source, box)
                        writer.put(name, kept, values[: kept.sizes[0]] if kept.sizes else values)
                        del values  # free it before the next one is read


def model_config_at(place: str | os.PathLike[str]) -> ModelConfig:
    """Return the configuration of a checkpoint's model.

    Raises:
        StateError: the checkpoint has none.
    """
    state = read_state(place)
    if "config" not in state:
        raise StateError("the checkpoint does not say what model it is of", where=place, fix="use one of the Trainer's")
    return model_config_of(state["config"])


def _without_padding(box: Box, shape: tuple[int, ...]) -> Box | None:
    """Return the part of a rectangle inside a shape with fewer rows; None if it is empty."""
    if not shape:
        return box
    rows = min(box.sizes[0], shape[0] - box.offsets[0])
    return Box(box.offsets, (rows, *box.sizes[1:])) if rows > 0 else None


def native_to_file(source: str | os.PathLike[str], target: str | os.PathLike[str], *, optimizer: bool = False) -> Path:
    """Write the weights of a checkpoint of any layout to one safetensors file, by the names of the parameters.

    Args:
        source: a checkpoint, or a folder of checkpoints, of which the newest is used.
        target: path of the file, on a local disk; it must not exist.
        optimizer: also write the optimizer's state, as ``optimizer.<parameter>.exp_avg``.

    Returns:
        The file. The text ``energon_lite`` of its header is JSON with ``step`` and the ``model``'s configuration.

    Raises:
        StateError: there is no complete checkpoint.
        UsageError: the file exists already.

    Example:
        >>> native_to_file("output/run/checkpoints", "weights.safetensors")
    """
    place, path = find_weights(source), Path(target)
    if path.exists():
        raise UsageError("there is a file already", where=path, fix="remove it, or give another name")
    path.parent.mkdir(parents=True, exist_ok=True)
    with CheckpointReader(place) as saved:
        about = {"step": read_content(saved, place)["step"], "model": dataclasses.asdict(model_config_at(place))}
        kinds = ("model.", "optimizer.") if optimizer else ("model.",)
        names = [name for name in saved.shapes if name.startswith(kinds)]
        targets = {n.removeprefix("model."): TargetTensor(saved.dtype(n), saved.shapes[n], n) for n in names}
        (file,) = divide(targets, sum(target.nbytes for target in targets.values())).values()
        metadata = {"format": "pt", "energon_lite": json.dumps(about)}
        write_files(saved, path.parent, {path.name: file._replace(metadata=metadata)}, targets)
    return path


@dataclasses.dataclass(frozen=True)
class ExportedPart:
    """A part of a model that is exported, or all of it.

    Args:
        kind: ``language``, ``vision`` or ``llava``.
        config: configuration of the model; for a language model, without images.
    """

    kind: str
    config: ModelConfig

    def has(self, name: str) -> bool:
        """Return whether a weight, by our name, belongs to the part."""
        part = name.split(".")[0]
        return {"language": part not in ("vision", "projector"), "vision": part == "vision"}.get(self.kind, True)

    def shapes(self, *, padded: bool = False) -> dict[str, tuple[int, ...]]:
        """Return the shapes of its weights by our names."""
        return {name: shape for name, shape in model_shapes(self.config, padded=padded).items() if self.has(name)}

    def values(
        self, stored: torch.dtype, base: Mapping[str, Any] | None, *, where: str, max_length: int | None
    ) -> dict[str, Any]:
        """Return its ``config.json``; arguments as for :func:`huggingface_config`."""
        if self.kind == "vision":
            return encoder_config(self.config, stored, base, where=where)
        if self.kind == MODEL_TYPE:
            return llava_config(self.config, stored, base, where=where, max_length=max_length)
        if base is not None and base.get("model_type") == MODEL_TYPE:
            # The section of a part omits defaults; everything else follows from our configuration.
            max_length = max_length or (base.get("text_config") or {}).get("max_position_embeddings")
            base = None
        return huggingface_config(self.config, stored, base, where=where, max_length=max_length)


def exported_part(
    config: ModelConfig, *, text_only: bool = False, vision_only: bool = False, where: str | None = None
) -> ExportedPart:
    """Select the part of a model to export.

    Raises:
        StateError: Hugging Face has no such model, or the model has no image encoder.
    """
    if vision_only:
        if config.vision is None:
            fix = "export all of it" if not config.image_size else "write a file of our names with to-file"
            raise StateError("the model has no image encoder that Hugging Face knows", where=where, fix=fix)
        return ExportedPart("vision", config)
    images = config.image_size > 0 and not text_only
    if images:
        check_is_llava(config, where=where)
    language = dataclasses.replace(config, image_size=0, vision=None)
    architecture_for(language, where=where)
    return ExportedPart(MODEL_TYPE, config) if images else ExportedPart("language", language)


#: The largest file of weights in bytes, as in transformers.
SHARD_BYTES = 50 * 10**9

logger = logging.getLogger(__name__)


def native_to_huggingface(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    like: str | os.PathLike[str] | None = None,
    shard_bytes: int | None = None,
    dtype: str | None = None,
    max_length: int | None = None,
    text_only: bool = False,
    vision_only: bool = False,
    image_token: int | None = None,
) -> Path:
    """Convert a checkpoint to a folder for ``AutoModelForCausalLM.from_pretrained``.

    A model with images is for ``LlavaForConditionalGeneration``. The conversion needs the memory of a part of a tensor.
    Without a former model's tokenizer, that of the run is included, for ``AutoTokenizer.from_pretrained``.

    Args:
        source: a checkpoint, or a folder of checkpoints, of which the newest is used.
        target: a new or empty folder, on a local disk.
        like: a model's folder whose tokenizer, configuration and division into files are used; None for those kept next
            to a converted checkpoint.
        shard_bytes: the largest file in bytes; None for the division of the former model, or 50 GB.
        dtype: type of the weights, by name; None for their own.
        max_length: ``max_position_embeddings``; None for that of the former model.
        text_only: write only the language model of a model with images.
        vision_only: write only the image encoder, for ``SiglipVisionModel`` or ``CLIPVisionModel``.
        image_token: the token that stands for images only; None for ``model.vision.image_token``, or for the padding
            token in a run on bytes.

    Returns:
        The folder.

    Raises:
        StateError: there is no complete checkpoint, or Hugging Face has no such model.
        StateMismatchError: tensors are missing, unexpected, or of another shape.
        UsageError: the folder is not empty.

    Example:
        >>> native_to_huggingface("output/run/checkpoints", "models/mine", like="models/llama-3-8b")
    """
    named = find_weights(source, whole=False)
    config, data = model_config_at(named), read_state(named)["config"].get("data")
    if config.vision is not None:
        on_bytes = data is not None and data.get("tokenizer") is None
        token = config.vision.image_token if image_token is None else image_token
        token = ByteTokenizer.pad if token is None and on_bytes else token
        config = dataclasses.replace(config, vision=dataclasses.replace(config.vision, image_token=token))
    # Checked before the whole checkpoint is read.
    part = exported_part(config, text_only=text_only, vision_only=vision_only, where=str(named))
    place = find_weights(named)
    folder = Path(target)
    if folder.exists() and any(folder.iterdir()):
        raise UsageError("the folder is not empty", where=folder, fix="give another one, or remove what is in it")
    folder.mkdir(parents=True, exist_ok=True)
    kept = f"{os.fspath(place).rstrip('/').rpartition('/')[0] or '.'}/{COMPANION}"
    former = os.fspath(like or (f"{kept}/{VISION}" if part.kind == "vision" else kept))
    others = companions_of(former)
    base = json.loads(others[CONFIG]) if CONFIG in others else None
    if not has_tokenizer(others) and not vision_only:
        others = _tokenizer_of_run(data) | others
    if part.kind != "language":
        others = {PREPROCESSOR: preprocessor_json(config)} | others
    with CheckpointReader(place) as saved:
        shapes = {n.removeprefix("model."): saved.shapes[n] for n in saved.shapes if n.startswith("model.")}
        shapes = {name: shape for name, shape in shapes.items() if part.has(name)}
        check_tensors(shapes, part.shapes(padded=True), str(place))
        files = _former_files(others, like, former)
        targets = _targets(saved, part, dtype, [name for file in files.values() for name in file.tensors])
        stored = mode(tensor.dtype for tensor in targets.values())
        values = part.values(stored, base, where=f"{former}/{CONFIG}", max_length=max_length)
        if base is None and GENERATION in others:
            generation = json.loads(others[GENERATION])
            values |= {
                key: generation[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in generation
            }
        division = files if shard_bytes is None else {}
        if {name for file in division.values() for name in file.tensors} != targets.keys():
            if division:
                logger.warning("%s has other tensors: its division into files is not taken", former)
            division = divide(targets, shard_bytes or SHARD_BYTES)
        write_files(saved, folder, division, targets)
    _write_texts(folder, values, others, division, targets)
    logger.info("%d tensors of %s are in %s", len(targets), place, folder)
    return folder


def _tokenizer_of_run(data: Mapping[str, Any] | None) -> dict[str, bytes]:
    """Return the tokenizer files of a run, by its data section; empty if it was no run, or they no longer exist."""
    try:
        return {} if data is None else run_tokenizer_files(data)
    except EnergonLiteError as error:
        logger.warning("the tokenizer of the run is not written: %s", error)
        return {}


def _targets(
    saved: CheckpointReader, part: ExportedPart, dtype: str | None, former: Collection[str]
) -> dict[str, TargetTensor]:
    """Return the tensors of the exported model by Hugging Face's names, in the order of the model.

    Args:
        former: names in the former model; if that had the same tensors, they keep these names.
    """
    shapes, here = part.shapes(), {native_name(name) for name in former}
    same = here - {HEAD} == shapes.keys() - {HEAD}
    names = their_names(shapes, former if same else (), llava=part.kind == MODEL_TYPE)
    targets = {}
    for name, shape in shapes.items():
        stored = DTYPES[dtype] if dtype else saved.dtype(f"model.{name}")
        targets[names[name]] = TargetTensor(stored, shape, f"model.{name}")
    if same and HEAD in here and HEAD not in shapes:  # a copy in addition to tied embeddings
        targets[next(name for name in former if native_name(name) == HEAD)] = targets[names[EMBEDDING]]
    return targets


def _former_files(others: Mapping[str, bytes], like: str | os.PathLike[str] | None, where: str) -> Division:
    """Return the former model's division into files; empty if there was no such model."""
    if like is not None and DIVISION not in others:
        former = HuggingFaceFolder(like).division
    elif DIVISION in others:
        former = division_of(others[DIVISION], where)
    else:
        return {}
    return {
        file: WeightFile(tuple(name for name in names if not name.endswith(COMPUTED)), metadata)
        for file, (names, metadata) in former.items()
    }


def _write_texts(
    folder: Path,
    values: Mapping[str, Any],
    others: dict[str, bytes],
    division: Division,
    targets: Mapping[str, TargetTensor],
) -> None:
    """Write all files other than weights; the configuration last."""
    config, index = others.pop(CONFIG, b""), others.pop(INDEX, b"")
    others.pop(DIVISION, None)
    for name, content in others.items():
        (folder / name).write_bytes(content)
    if list(division) != [WEIGHTS]:
        where = {name: file for file, content in division.items() for name in content.tensors}
        if not index or json.loads(index).get("weight_map") != where:
            parameters = sum(math.prod(target.shape) for target in targets.values())
            index = index_json(where, sum(target.nbytes for target in targets.values()), parameters)
        (folder / INDEX).write_bytes(index)
    if not config or json.loads(config) != values:
        config = (json.dumps(values, indent=2, sort_keys=True) + "\n").encode()
    (folder / CONFIG).write_bytes(config)
