"""A tokenizer that one can follow by hand: each letter is a token, by the number of its byte; and a file of chats."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

BEGIN, END = 256, 257

CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '</s>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    folder = tmp_path_factory.mktemp("tokenizer")
    # GPT-2's letters for the 256 bytes, so that any text can be tokenised.
    vocabulary = {letter: byte for byte, letter in sorted(bytes_to_unicode().items())}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"content": "</s>", "__type": "AddedToken"},
        "chat_template": CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="session")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 prompts and responses of 3 to 22 tokens; two records are broken."""
    path, draw = tmp_path_factory.mktemp("chats") / "chats.jsonl", random.Random(0)
    lines = []
    for number in range(200):
        lines.append(json.dumps({"prompt": f"q{number}" * draw.randrange(4), "response": "a" * draw.randrange(1, 9)}))
    lines[17] = "{broken"
    lines[33] = json.dumps({"prompt": "no response"})
    path.write_text("\n".join(lines))
    return path
