"""Speech recognition by an encoder of audio and a decoder of letters. The audio is made here: a tone for each letter.

python examples/own_models/speech.py run.yaml train.steps=100            # data.path: texts
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn

from energon_lite import Batch, Sample, TaskEncoder, edataclass
from energon_lite.trainer import LossSums, Trainer, load_config

PER_LETTER = 64  # samples of audio


@edataclass
class Utterance(Sample):
    audio: torch.Tensor  # [samples]
    letters: torch.Tensor  # [length]


@edataclass
class Utterances(Batch):
    audio: torch.Tensor  # [rows, longest], with zeros at the end
    letters: torch.Tensor  # [rows, longest], with zeros at the end

    @property
    def loss_tokens(self):
        return (self.letters > 0).sum()


class UtteranceEncoder(TaskEncoder):
    def encode_sample(self, sample):
        letters = torch.tensor(list(sample.text.encode()))
        audio = torch.sin(letters.repeat_interleave(PER_LETTER) * torch.arange(len(letters) * PER_LETTER) / 40)
        return Utterance.derive_from(sample, audio=audio, letters=letters)

    def batch(self, samples):
        return Utterances.from_samples(samples)


class Recogniser(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.frames = nn.Conv1d(1, width, PER_LETTER, PER_LETTER)
        self.letters = nn.Embedding(256, width)
        self.places = nn.Embedding(512, width)
        self.layers = nn.Transformer(width, 2, 1, 1, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, audio, letters):
        heard, said = self.frames(audio[:, None]).transpose(1, 2), self.letters(F.pad(letters, (1, 0))[:, :-1])
        heard, said = (x + self.places(torch.arange(x.shape[1], device=x.device)) for x in (heard, said))
        causal = self.layers.generate_square_subsequent_mask(said.shape[1], device=said.device)
        silent = (audio == 0).unflatten(1, (-1, PER_LETTER)).all(dim=2)
        return self.head(self.layers(heard, said, tgt_mask=causal, memory_key_padding_mask=silent))


def make_recogniser(config, mesh):
    torch.manual_seed(config.seed)
    return Recogniser().to(mesh.device)


def letters_loss(model, batch):
    logits = model(batch.audio, batch.letters)
    loss = F.cross_entropy(logits.flatten(0, 1), batch.letters.flatten(), ignore_index=0, reduction="sum")
    return LossSums(loss, batch.loss_tokens)


PARTS = {"make_model": make_recogniser, "loss": letters_loss, "task_encoder": UtteranceEncoder()}

if __name__ == "__main__":
    with Trainer(load_config(sys.argv[1], sys.argv[2:]), **PARTS) as trainer:
        trainer.run()
