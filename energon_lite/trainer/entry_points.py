"""Entry points of the trainer."""

from energon_lite.entry_points import Command

_GROUP = "Trainer"

COMMANDS = {
    "tokenize": Command(
        "energon_lite.trainer.commands.tokenize:command",
        "Tokenise JSONL, text or Parquet files into a data set of tokens and loss masks.",
        _GROUP,
    ),
    "convert-weights": Command(
        "energon_lite.trainer.commands.convert_weights:command",
        "Convert weights from and to Hugging Face, or into one file.",
        _GROUP,
    ),
}
STATE_READERS = {".metadata": "energon_lite.trainer:read_state"}
