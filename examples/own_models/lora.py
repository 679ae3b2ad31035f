"""LoRA by peft: the language model of ``train.init_from`` stays as it is, and small matrices beside its own learn.

python examples/own_models/lora.py run.yaml train.init_from=models/llama      # tensor parallelism (tp) must be 1
"""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from peft.utils import get_peft_model_state_dict
from safetensors.torch import save_file

from energon_lite.errors import TopologyError
from energon_lite.trainer import ColumnParallelLinear, RowParallelLinear, Trainer, language_model, load_config


class LoraLinear(Linear):
    """The small matrices beside a layer of the trainer."""

    def __init__(self, layer, adapter_name, **settings):
        layer.out_features, layer.in_features = layer.weight.shape
        super().__init__(layer, adapter_name, **settings)
        self.group, self.sequence = None, False

    def enter(self, x):
        return x


def adapted(settings):
    """Return a maker of the language model with the adapter of a ``LoraConfig``."""

    def make_model(config, mesh):
        if mesh.tp > 1:
            raise TopologyError("LoRA needs whole layers", fix="set mesh.tp=1")
        model = language_model(config, mesh)
        torch.manual_seed(config.seed)
        settings._register_custom_module({ColumnParallelLinear: LoraLinear, RowParallelLinear: LoraLinear})
        return inject_adapter_in_model(settings, model)

    return make_model


def save_adapter(model, settings, folder, base):
    """Write the adapter for ``PeftModel.from_pretrained(model of transformers, folder)``."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    tensors = {f"base_model.model.model.{name}": t for name, t in get_peft_model_state_dict(model).items()}
    save_file(tensors, f"{folder}/adapter_model.safetensors")
    settings.base_model_name_or_path, settings.task_type = base, "CAUSAL_LM"
    settings.save_pretrained(folder)


if __name__ == "__main__":
    settings = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "o_proj", "up_proj"])
    config = load_config(sys.argv[1], sys.argv[2:])
    with Trainer(config, make_model=adapted(settings)) as trainer:
        trainer.run()
        trainer.optimizer.wait_parameters()
        if trainer.mesh.is_main:
            save_adapter(trainer.model, settings, f"{config.output}/adapter", config.train.init_from)
