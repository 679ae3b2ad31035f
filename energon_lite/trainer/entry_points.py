"""Entry points of the trainer."""

from energon_lite.entry_points import Command

_GROUP = "Trainer"

COMMANDS = {
    "tokenize": Command(
        "energon_lite.trainer.tokenizing.tokenize_command:command",
        "Tokenise JSONL, text or Parquet files into a data set of tokens and loss masks.",
        _GROUP,
    ),
    "convert-weights": Command(
        "energon_lite.trainer.conversion.convert_weights_command:command",
        "Convert weights from and to Hugging Face, or into one file.",
        _GROUP,
    ),
}
STATE_READERS = {".metadata": "energon_lite.trainer:read_state"}
