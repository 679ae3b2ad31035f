"""Train a model on images and text, on one process or several:

    python examples/train.py examples/configs/digits.yaml
    torchrun --standalone --nproc-per-node 4 examples/train.py examples/configs/digits.yaml mesh.tp=2 train.steps=50

Started again, it resumes from its newest checkpoint, in any layout of ranks.
"""

from __future__ import annotations

import argparse
import logging

from energon_lite.trainer import Trainer, load_config


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model on images and text.")
    parser.add_argument("config", help="a YAML file; see examples/configs")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that win over the file's")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    with Trainer(load_config(arguments.config, arguments.overrides)) as trainer:
        trainer.run()


if __name__ == "__main__":
    main()
