"""The reference trainer: a small Llama with an image prefix, parallel along four axes, exactly resumable.

    with Trainer(load_config("run.yaml", ["mesh.tp=2"])) as trainer:
        trainer.run()

To read it: ``config``, ``data``, ``sequence``, ``attention``, ``vision``, ``llama`` and ``cross_entropy`` (the model),
``pipeline`` (with one stage, one micro-batch after the other), the optimizer's ``partition`` and ``plain_optimizer``,
``step`` and ``loop`` are the trainer of one GPU. What makes it parallel follows: ``parallel`` (who is who among the
ranks, and what is cut), ``tensor_parallel``, ``pipeline_schedule``, ``overlapped_optimizer`` and ``checkpointing``.
"An evening" in ``docs/trainer.md`` says a sentence about each.
"""

from energon_lite.trainer.checkpointing.checkpoint import (
    CheckpointSaver,
    find_checkpoint,
    latest_checkpoint,
    load_checkpoint,
    read_state,
    save_checkpoint,
)
from energon_lite.trainer.checkpointing.weights import load_weights
from energon_lite.trainer.optimizer.overlapped_optimizer import OverlappedDistributedOptimizer
from energon_lite.trainer.optimizer.plain_optimizer import AdamW, learning_rate, make_optimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh, build_mesh
from energon_lite.trainer.parallel.parameters import ParameterLayout, freeze, initialize_parameters, new_parameter
from energon_lite.trainer.parallel.rank_grid import RankGrid
from energon_lite.trainer.training.config import (
    DataConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RopeScaling,
    TrainConfig,
    TrainerConfig,
)
from energon_lite.trainer.training.config_file import config_from_dict, config_to_dict, load_config
from energon_lite.trainer.training.cross_entropy import vocab_parallel_cross_entropy
from energon_lite.trainer.training.data import (
    ByteTokenizer,
    MultimodalBatch,
    MultimodalTaskEncoder,
    make_task_encoder,
    resize_image,
)
from energon_lite.trainer.training.generate import generate_captions, load_model, load_tokenizer
from energon_lite.trainer.training.llama import LlamaModel
from energon_lite.trainer.training.loop import Trainer
from energon_lite.trainer.training.pipeline import run_pipeline
from energon_lite.trainer.training.pipeline_schedule import pipeline_schedule
from energon_lite.trainer.training.presets import PRESETS, model_preset
from energon_lite.trainer.training.registry import adopt_norm, register_attention, register_norm
from energon_lite.trainer.training.step import StepResult, evaluate, train_step
from energon_lite.trainer.training.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    VocabParallelEmbedding,
)

__all__ = [
    "PRESETS",
    "AdamW",
    "ByteTokenizer",
    "CheckpointSaver",
    "ColumnParallelLinear",
    "DataConfig",
    "LlamaModel",
    "MeshConfig",
    "ModelConfig",
    "MultimodalBatch",
    "MultimodalTaskEncoder",
    "OptimizerConfig",
    "OverlappedDistributedOptimizer",
    "ParallelMesh",
    "ParameterLayout",
    "RankGrid",
    "RopeScaling",
    "RowParallelLinear",
    "StepResult",
    "TrainConfig",
    "Trainer",
    "TrainerConfig",
    "VocabParallelEmbedding",
    "adopt_norm",
    "build_mesh",
    "config_from_dict",
    "config_to_dict",
    "evaluate",
    "find_checkpoint",
    "freeze",
    "generate_captions",
    "initialize_parameters",
    "latest_checkpoint",
    "learning_rate",
    "load_checkpoint",
    "load_config",
    "load_model",
    "load_tokenizer",
    "load_weights",
    "make_optimizer",
    "make_task_encoder",
    "model_preset",
    "new_parameter",
    "pipeline_schedule",
    "read_state",
    "register_attention",
    "register_norm",
    "resize_image",
    "run_pipeline",
    "save_checkpoint",
    "train_step",
    "vocab_parallel_cross_entropy",
]
