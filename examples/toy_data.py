"""Small data for ``variant=toy`` of the configurations: a tokenizer, tokens, chats, a model of Hugging Face, pictures.

    python examples/toy_data.py                                                    # into the folder toy-data
    python examples/train.py examples/configs/pretrain-160M.yaml variant=toy

Nothing is downloaded: texts are the source of Python's standard library, pictures are drawn, chats add numbers.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import sys
import sysconfig
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from energon_lite.cli.main import main as energon_lite

#: The chat template.
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ["<s>", "</s>", "<|system|>", "<|user|>", "<|assistant|>"]
VOCABULARY = 320
COLOURS = {"red": (220, 40, 40), "green": (40, 180, 60), "blue": (50, 80, 220), "yellow": (230, 210, 40)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make small data for variant=toy.")
    parser.add_argument("folder", nargs="?", default="toy-data", type=Path)
    make_toy_data(parser.parse_args().folder)


def make_toy_data(folder: Path, *, texts: int = 60, chats: int = 200, pictures: int = 60) -> None:
    """Fill a folder; arguments are the numbers of records."""
    folder.mkdir(parents=True, exist_ok=True)
    corpus = folder / "texts.jsonl"
    write_lines(corpus, ({"text": text} for text in library_texts(texts)))
    write_tokenizer(folder / "tokenizer", corpus)
    command = ["tokenize", str(corpus), "--tokenizer", str(folder / "tokenizer"), "--output", str(folder / "tokens")]
    options = ["--task", "pt", "--max-length", "129", "--too-long", "split", "--records-per-shard", str(-(-texts // 6))]
    run(*command, *options, "--split-ratio", "5,1,0", "--num-workers", "1", "--force-overwrite")
    write_lines(folder / "chats.jsonl", map(chat, range(chats)))
    write_lines(folder / "held_out.jsonl", map(chat, range(chats, chats + chats // 4)))
    write_model(folder / "llama", folder / "tokenizer")
    write_pictures(folder / "captions", pictures)
    splits = ["--split-parts", "train:train.tar", "--split-parts", "val:val.tar", "--force-overwrite"]
    run("prepare", str(folder / "captions"), "--non-interactive", "--sample-type", "CrudeWebdataset", *splits)


def run(*arguments: str) -> None:
    """``energon-lite`` with these arguments."""
    energon_lite(list(arguments), standalone_mode=False)


def write_lines(path: Path, records: Iterator[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")


def library_texts(number: int) -> Iterator[str]:
    """The beginnings of modules of the standard library."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(folder / f"{name}.py" for name in sys.stdlib_module_names if not name.startswith("_"))
    for path in [path for path in paths if path.is_file()][:number]:
        yield path.read_text(encoding="utf-8", errors="replace")[:2000]


def write_tokenizer(folder: Path, corpus: Path) -> None:
    """A byte-level BPE that was trained on the texts."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    texts = [json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines()]
    tokenizer.train_from_iterator(texts, trainer)
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def chat(number: int) -> dict[str, Any]:
    """A conversation of one or two sums."""
    drawn = random.Random(number)
    messages = [{"role": "system", "content": "You add."}] if drawn.random() < 0.3 else []
    for _ in range(drawn.randint(1, 2)):
        one, other = drawn.randrange(20), drawn.randrange(20)
        messages.append({"role": "user", "content": f"What is {one} + {other}?"})
        messages.append({"role": "assistant", "content": f"{one} + {other} = {one + other}"})
    return {"messages": messages}


def write_model(folder: Path, tokenizer: Path) -> None:
    """A random Llama of Hugging Face, with its tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}
    special = {"bos_token_id": 0, "eos_token_id": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **shape, **heads, **special)).save_pretrained(folder)
    for path in tokenizer.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())


def write_pictures(folder: Path, number: int) -> None:
    """Tars of squares on a grey ground, with captions."""
    from PIL import Image, ImageDraw

    folder.mkdir(exist_ok=True)
    for name, count in (("train", number), ("val", number // 4)):
        with tarfile.open(folder / f"{name}.tar", "w") as tar:
            for place in range(count):
                drawn = random.Random(f"{name}{place}")
                colour, left = drawn.choice(sorted(COLOURS)), drawn.random() < 0.5
                image = Image.new("RGB", (32, 32), (128, 128, 128))
                corner = drawn.randrange(1, 6) + (0 if left else 16)
                ImageDraw.Draw(image).rectangle((corner, 8, corner + 9, 24), fill=COLOURS[colour])
                stream = io.BytesIO()
                image.save(stream, "png")
                caption = f"a {colour} square on the {'left' if left else 'right'}"
                for part, data in (("png", stream.getvalue()), ("txt", caption.encode())):
                    member = tarfile.TarInfo(f"{name}{place:04d}.{part}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


if __name__ == "__main__":
    main()
