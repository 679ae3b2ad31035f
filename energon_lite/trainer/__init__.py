"""The reference trainer: a small Llama with an image prefix, parallel along four axes, exactly resumable.

    with Trainer(load_config("run.yaml", ["mesh.tp=2"])) as trainer:
        trainer.run()

To read the code, follow ``docs/how_the_trainer_works.md``, from YAML to a step on one GPU, and on to four axes. The
trainer uses the public names of the loader only.
"""

from energon_lite.lazy_exports import lazy_exports

__getattr__, __dir__ = lazy_exports(__name__, __file__)
