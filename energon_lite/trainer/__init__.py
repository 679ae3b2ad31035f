"""The reference trainer: a small Llama with an image prefix, parallel along four axes, exactly resumable.

    with Trainer(load_config("run.yaml", ["mesh.tp=2"])) as trainer:
        trainer.run()

To read the code, follow ``docs/how_the_trainer_works.md``, from YAML to a step on one GPU, and on to four axes. The
trainer uses the public names of the loader only.
"""

from energon_lite.entry_points import Command
from energon_lite.imports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)

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
