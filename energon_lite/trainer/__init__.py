"""The reference trainer: a small Llama with an image prefix, parallel along four axes, exactly resumable.

    with Trainer(load_config("run.yaml", ["mesh.tp=2"])) as trainer:
        trainer.run()

To read the code, follow ``docs/trainer.md``, from one GPU to four axes: it visits each file of ``data``, ``models``,
``optimizer``, ``training``, ``parallel`` and ``checkpointing`` once. It uses the public names of the loader only.
"""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
