"""``energon-lite convert-weights``: convert weights between Hugging Face models, checkpoints and single files."""

from __future__ import annotations

from typing import Any

import click

from energon_lite.cli import parse_bytes

_SOURCE = click.argument("source", type=click.Path())
_TARGET = click.argument("target", type=click.Path())
_DTYPE = click.Choice(["float32", "float64", "bfloat16"])


@click.group(name="convert-weights", context_settings={"show_default": True})
def command() -> None:
    """Convert weights from and to Hugging Face, or into one file.

    Supported models are LlamaForCausalLM, Qwen2ForCausalLM (also Qwen 2.5), Qwen3ForCausalLM and MistralForCausalLM.
    Tensors are converted piece by piece: the memory needed is that of a part of the largest one.

    \b
    energon-lite convert-weights hf-to-native models/llama checkpoints/llama
    energon-lite convert-weights native-to-hf output/run/checkpoints models/mine
    energon-lite convert-weights to-file output/run/checkpoints weights.safetensors
    """


@command.command(name="hf-to-native")
@_SOURCE
@_TARGET
@click.option("--dtype", type=_DTYPE, help="Type of the model's numbers.  [default: that of the weights]")
@click.option("--vocab-multiple", type=click.IntRange(min=1), default=64, help="Pad the vocabulary to a multiple.")
@click.option("--ignore", multiple=True, metavar="KEY", help="A key of config.json that is not checked.")
@click.option("--vision", type=click.Path(), metavar="FOLDER", help="Folder of a SigLIP or CLIP encoder to add.")
def hf_to_native(source: str, target: str, **options: Any) -> None:
    """Make a checkpoint of the model in folder SOURCE (config.json and safetensors).

    TARGET is a folder or URL; training starts from it with train.init_from=TARGET, on any layout of ranks. The
    tokenizer is copied to TARGET/huggingface.
    """
    from energon_lite.trainer.conversion.from_huggingface import huggingface_to_native

    place = huggingface_to_native(source, target, **options)
    click.echo(f"wrote {place}")


@command.command(name="native-to-hf")
@_SOURCE
@_TARGET
@click.option("--like", type=click.Path(), help="Folder of a model whose tokenizer, configuration and files are used.")
@click.option("--shard-size", help="Size of a file of weights, such as 5GB.  [default: as in the former model]")
@click.option("--dtype", type=_DTYPE, help="Type of the weights.  [default: their present type]")
@click.option("--max-length", type=click.IntRange(min=1), help="Value of max_position_embeddings.")
@click.option("--text-only", is_flag=True, help="Only the language model of a model with images.")
@click.option("--vision-only", is_flag=True, help="Only the image encoder of a model with images.")
@click.option("--image-token", type=click.IntRange(min=0), help="The token that is used only for images.")
def native_to_hf(source: str, target: str, shard_size: str | None, **options: Any) -> None:
    """Make a folder for transformers of a checkpoint.

    SOURCE is a checkpoint of any layout, or a folder of checkpoints, of which the newest is used. TARGET is a folder
    that is empty or does not exist. If hf-to-native made the checkpoint, its original files are written again. For a
    training run, the tokenizer is included.
    """
    from energon_lite.trainer.conversion.export import native_to_huggingface
    from energon_lite.trainer.conversion.huggingface_folder import has_tokenizer

    shard_bytes = None if shard_size is None else parse_bytes(shard_size)
    folder = native_to_huggingface(source, target, shard_bytes=shard_bytes, **options)
    names = sorted(file.name for file in folder.iterdir())
    click.echo(f"wrote {folder}: {', '.join(names)}")
    if not has_tokenizer(names) and not options["vision_only"]:
        click.echo("no tokenizer is known, or that of the run is not where it was: --like FOLDER takes that of a model")


@command.command(name="to-file")
@_SOURCE
@_TARGET
@click.option("--optimizer", is_flag=True, help="Include the state of the optimizer.")
def to_file(source: str, target: str, optimizer: bool) -> None:
    """Write a checkpoint of any layout to one safetensors file, by the trainer's names."""
    from energon_lite.trainer.conversion.export import native_to_file

    click.echo(f"wrote {native_to_file(source, target, optimizer=optimizer)}")
