"""Tokenising short records: `energon-lite tokenize` beside `datasets.map` with the same tokenizer.

Both read one JSONL file of prompts and responses (sentences of the standard library's docstrings) and use two
processes. Ours writes tar shards with tokens and masks, and the index; theirs writes Arrow files with the same columns.
Each figure is a new process, start of the interpreter included; the two take turns.

    python -m venv peers && peers/bin/pip install datasets tokenizers
    python tools/bench/tokenizing.py --peers-python peers/bin/python [--records 1000000] [--runs 1]
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

from common import machine, spread, table

THEIRS = """
import sys
from datasets import load_dataset
from tokenizers import Tokenizer

def encode(batch):
    prompts = tokenizer.encode_batch(batch["prompt"], add_special_tokens=False)
    responses = tokenizer.encode_batch(batch["response"], add_special_tokens=False)
    tokens = [[1, *p.ids, *r.ids, 2] for p, r in zip(prompts, responses)]
    masks = [[0] * (1 + len(p.ids)) + [1] * (len(r.ids) + 1) for p, r in zip(prompts, responses)]
    return {"tokens": tokens, "mask": masks}

if __name__ == "__main__":
    path, tokenizer_path, output = sys.argv[1:]
    tokenizer = Tokenizer.from_file(tokenizer_path)
    data = load_dataset("json", data_files=path, split="train", cache_dir=output + "-cache")
    data.map(encode, batched=True, num_proc=2, remove_columns=data.column_names).save_to_disk(output)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--peers-python", help="interpreter with datasets and tokenizers; without it, only ours")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sentences = docstring_sentences()
        make_records(folder / "records.jsonl", arguments.records, sentences)
        make_tokenizer(folder / "tokenizer", sentences)
        ours = [sys.executable, "-m", "energon_lite.cli.main", "tokenize", str(folder / "records.jsonl")]
        ours += ["-t", str(folder / "tokenizer"), "-o", str(folder / "out"), "--num-workers", "2", "--no-progress"]
        (folder / "theirs.py").write_text(THEIRS)
        theirs = [arguments.peers_python or "", str(folder / "theirs.py"), str(folder / "records.jsonl")]
        theirs += [str(folder / "tokenizer" / "tokenizer.json"), str(folder / "out")]
        commands = {"energon-lite": ours} | ({"datasets.map": theirs} if arguments.peers_python else {})
        times: dict[str, list[float]] = {what: [] for what in commands}
        for _ in range(arguments.runs):
            for what, command in commands.items():
                times[what].append(run(command))
                for made in folder.glob("out*"):
                    shutil.rmtree(made)
    print(machine())
    print(f"{arguments.records} records")
    rows = [
        [what, spread(found, 1), f"{arguments.records / statistics.median(found):,.0f}"]
        for what, found in times.items()
    ]
    print(table(["what", "s", "records/s"], rows))


def run(command: list[str]) -> float:
    start = time.perf_counter()
    environment = os.environ | {"TOKENIZERS_PARALLELISM": "false", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise SystemExit(f"{command} failed:\n{done.stderr}")
    return time.perf_counter() - start


def docstring_sentences() -> list[str]:
    """Sentences from the docstrings of the standard library."""
    sentences = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        try:
            tree = ast.parse(path.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)) and (text := ast.get_docstring(node)):
                sentences += [sentence.strip() for sentence in text.replace("\n", " ").split(". ") if sentence.strip()]
    return sentences


def make_records(path: Path, count: int, sentences: list[str]) -> None:
    draw = random.Random(0)
    with open(path, "w") as file:
        for _ in range(count):
            prompt, response = draw.choice(sentences), " ".join(draw.choices(sentences, k=draw.randrange(1, 4)))
            file.write(json.dumps({"prompt": prompt, "response": response}) + "\n")


def make_tokenizer(folder: Path, sentences: list[str]) -> None:
    """A byte-level BPE of 8,000 tokens, trained on the sentences."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sentences, trainer)
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))


if __name__ == "__main__":
    main()
