"""A contrastive model of two towers, as CLIP: images and their captions find each other among those of a micro-batch.

python examples/own_models/contrastive.py run.yaml train.steps=100       # data.path: captioned images
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite import Batch, TaskEncoder, edataclass
from energon_lite.trainer import LossSums, Trainer, load_config


@edataclass
class Pairs(Batch):
    image: torch.Tensor  # [rows, 3, side, side]
    text: torch.Tensor  # [rows, longest], bytes, with zeros at the end

    @property
    def loss_tokens(self):
        return len(self.text)


class PairsEncoder(TaskEncoder):
    def batch(self, samples):
        texts = [torch.tensor(list(sample.caption.encode())) for sample in samples]
        return Pairs.from_samples(samples, text=nn.utils.rnn.pad_sequence(texts, batch_first=True))


class Clip(nn.Module):
    def __init__(self, side=4, width=16):
        super().__init__()
        self.image_tower = nn.Sequential(
            nn.Flatten(), nn.Linear(3 * side * side, width), nn.GELU(), nn.Linear(width, width)
        )
        self.text_tower = nn.EmbeddingBag(256, width, padding_idx=0)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, text):
        image, text = F.normalize(self.image_tower(image), dim=-1), F.normalize(self.text_tower(text), dim=-1)
        return self.scale.exp() * image @ text.T


def make_clip(config, mesh):
    torch.manual_seed(config.seed)
    return Clip().to(mesh.device)


def contrastive_loss(model, batch):
    logits = model(batch.image, batch.text)
    own = torch.arange(len(logits), device=logits.device)
    loss = (F.cross_entropy(logits, own, reduction="sum") + F.cross_entropy(logits.T, own, reduction="sum")) / 2
    return LossSums(loss, batch.loss_tokens, {"found": (logits.argmax(dim=1) == own).sum()})


PARTS = {"make_model": make_clip, "loss": contrastive_loss, "metrics": ["found"], "task_encoder": PairsEncoder()}

if __name__ == "__main__":
    with Trainer(load_config(sys.argv[1], sys.argv[2:]), **PARTS) as trainer:
        trainer.run()
