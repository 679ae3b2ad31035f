"""The reference trainer: a small Llama with an image prefix, parallel along four axes, exactly resumable.

    with Trainer(load_config("run.yaml", ["mesh.tp=2"])) as trainer:
        trainer.run()

To read the code, follow ``docs/trainer.md``, from one GPU to four axes: it visits each file of ``data``, ``models``,
``optimizer``, ``training``, ``parallel`` and ``checkpointing`` once, and states its length.

Each name is imported ``as`` itself: type checkers then treat it as public.
"""

from energon_lite.trainer.checkpointing.checkpoint import CheckpointSaver as CheckpointSaver
from energon_lite.trainer.checkpointing.checkpoint import find_checkpoint as find_checkpoint
from energon_lite.trainer.checkpointing.checkpoint import latest_checkpoint as latest_checkpoint
from energon_lite.trainer.checkpointing.checkpoint import load_checkpoint as load_checkpoint
from energon_lite.trainer.checkpointing.checkpoint import read_state as read_state
from energon_lite.trainer.checkpointing.checkpoint import save_checkpoint as save_checkpoint
from energon_lite.trainer.checkpointing.weights import find_weights as find_weights
from energon_lite.trainer.checkpointing.weights import load_weights as load_weights
from energon_lite.trainer.data.config import DataConfig as DataConfig
from energon_lite.trainer.data.rows import RowsTaskEncoder as RowsTaskEncoder
from energon_lite.trainer.data.run_encoder import make_task_encoder as make_task_encoder
from energon_lite.trainer.data.task_encoder import MultimodalTaskEncoder as MultimodalTaskEncoder
from energon_lite.trainer.data.task_encoder import resize_image as resize_image
from energon_lite.trainer.data.tokenizer import ByteTokenizer as ByteTokenizer
from energon_lite.trainer.models.batch import MultimodalBatch as MultimodalBatch
from energon_lite.trainer.models.config import ModelConfig as ModelConfig
from energon_lite.trainer.models.config import RopeScaling as RopeScaling
from energon_lite.trainer.models.cross_entropy import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
from energon_lite.trainer.models.llama import LlamaModel as LlamaModel
from energon_lite.trainer.models.presets import PRESETS as PRESETS
from energon_lite.trainer.models.presets import model_preset as model_preset
from energon_lite.trainer.models.registry import adopt_norm as adopt_norm
from energon_lite.trainer.models.registry import register_attention as register_attention
from energon_lite.trainer.models.registry import register_norm as register_norm
from energon_lite.trainer.models.tensor_parallel import ColumnParallelLinear as ColumnParallelLinear
from energon_lite.trainer.models.tensor_parallel import RowParallelLinear as RowParallelLinear
from energon_lite.trainer.models.tensor_parallel import VocabParallelEmbedding as VocabParallelEmbedding
from energon_lite.trainer.models.vision_config import VisionConfig as VisionConfig
from energon_lite.trainer.optimizer.overlapped_optimizer import (
    OverlappedDistributedOptimizer as OverlappedDistributedOptimizer,
)
from energon_lite.trainer.optimizer.plain_optimizer import AdamW as AdamW
from energon_lite.trainer.optimizer.plain_optimizer import learning_rate as learning_rate
from energon_lite.trainer.optimizer.plain_optimizer import make_optimizer as make_optimizer
from energon_lite.trainer.parallel.mesh import ParallelMesh as ParallelMesh
from energon_lite.trainer.parallel.mesh import build_mesh as build_mesh
from energon_lite.trainer.parallel.parameters import ParameterLayout as ParameterLayout
from energon_lite.trainer.parallel.parameters import freeze as freeze
from energon_lite.trainer.parallel.parameters import initialize_parameters as initialize_parameters
from energon_lite.trainer.parallel.parameters import new_parameter as new_parameter
from energon_lite.trainer.parallel.rank_grid import RankGrid as RankGrid
from energon_lite.trainer.training.config import MeshConfig as MeshConfig
from energon_lite.trainer.training.config import OptimizerConfig as OptimizerConfig
from energon_lite.trainer.training.config import TrainConfig as TrainConfig
from energon_lite.trainer.training.config import TrainerConfig as TrainerConfig
from energon_lite.trainer.training.config_file import config_from_dict as config_from_dict
from energon_lite.trainer.training.config_file import config_to_dict as config_to_dict
from energon_lite.trainer.training.config_file import load_config as load_config
from energon_lite.trainer.training.generate import Sampling as Sampling
from energon_lite.trainer.training.generate import generate as generate
from energon_lite.trainer.training.generate import generate_captions as generate_captions
from energon_lite.trainer.training.generate import generate_text as generate_text
from energon_lite.trainer.training.generate import load_model as load_model
from energon_lite.trainer.training.generate import load_tokenizer as load_tokenizer
from energon_lite.trainer.training.loop import Trainer as Trainer
from energon_lite.trainer.training.metrics import MetricsSink as MetricsSink
from energon_lite.trainer.training.pipeline import run_pipeline as run_pipeline
from energon_lite.trainer.training.pipeline_schedule import pipeline_schedule as pipeline_schedule
from energon_lite.trainer.training.run_dataset import training_dataset as training_dataset
from energon_lite.trainer.training.step import StepResult as StepResult
from energon_lite.trainer.training.step import evaluate as evaluate
from energon_lite.trainer.training.step import train_step as train_step
