"""Direct preference optimization (DPO): a language model prefers better answers, as far as a frozen reference allows.

python examples/own_models/preferences.py run.yaml train.init_from=models/llama   # data.path: lines of JSON
"""

import sys

import torch
import torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence

from energon_lite import Batch, Cooker, Sample, TaskEncoder, basic_sample_keys, cooker, edataclass
from energon_lite.trainer import ByteTokenizer, LossSums, Trainer, language_model, load_config
from energon_lite.trainer import vocab_parallel_cross_entropy as cross_entropy


@edataclass
class Answers(Sample):
    tokens: torch.Tensor  # [2, length]: prompt and answer, the better one first
    counted: torch.Tensor  # [2, length]: True for the tokens of the answer


@edataclass
class AnswerBatch(Batch):
    tokens: torch.Tensor  # [pairs, 2, longest]
    counted: torch.Tensor  # [pairs, 2, longest]

    @property
    def loss_tokens(self):
        return len(self.tokens)


@cooker
def cook_answers(record):
    tokenizer = ByteTokenizer()
    line = record["json"]
    rows = [tokenizer.encode(line["prompt"] + line[name]) for name in ("chosen", "rejected")]
    prompt = len(tokenizer.encode(line["prompt"])) - 1  # without the end
    counted = [torch.arange(len(row)) >= prompt for row in rows]
    tokens = pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    return Answers(**basic_sample_keys(record), tokens=tokens, counted=pad_sequence(counted, batch_first=True))


class AnswersEncoder(TaskEncoder):
    cookers = [Cooker(cook_answers)]

    def batch(self, samples):
        return AnswerBatch.from_samples(samples)


class Preferences:
    def __init__(self, beta=0.1):
        self.beta = beta

    def make_model(self, config, mesh):
        # Outside of the trained model, so it has no gradients and no optimizer, and no checkpoint has it.
        self.reference = language_model(config, mesh).requires_grad_(False)
        return language_model(config, mesh)

    def loss(self, model, batch):
        better, worse = self.log_probabilities(model, batch).T
        with torch.no_grad():
            usual_better, usual_worse = self.log_probabilities(self.reference, batch).T
        margin = (better - usual_better) - (worse - usual_worse)
        loss = -F.logsigmoid(self.beta * margin).sum()
        return LossSums(loss, batch.loss_tokens, {"preferred": (margin > 0).sum(), "margin": margin.sum()})

    def log_probabilities(self, model, batch):
        tokens, counted = batch.tokens.flatten(0, 1), batch.counted.flatten(0, 1)
        losses = cross_entropy(model(tokens[:, :-1]), tokens[:, 1:], model.mesh, vocab_size=model.config.vocab_size)
        return -(losses * counted[:, 1:]).sum(dim=1).view(-1, 2)


def parts():
    dpo = Preferences()
    how = {"make_model": dpo.make_model, "loss": dpo.loss, "metrics": ["preferred", "margin"]}
    return how | {"task_encoder": AnswersEncoder()}


if __name__ == "__main__":
    with Trainer(load_config(sys.argv[1], sys.argv[2:]), **parts()) as trainer:
        trainer.run()
