"""Continue texts with the newest checkpoint of a run, on one process or several:

    python examples/generate.py output/checkpoints "To be, or not to be"
    torchrun --standalone --nproc-per-node 4 examples/generate.py output/checkpoints "To be" --tp 2 --pp 2

A checkpoint of any layout can be used.
"""

from __future__ import annotations

import argparse

from energon_lite.trainer import Sampling, build_mesh, find_weights, generate_text, load_model, load_tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Go on with texts.")
    parser.add_argument("checkpoints", help="a checkpoint, or the folder of a run's checkpoints")
    parser.add_argument("prompts", nargs="+", help="texts to go on with")
    parser.add_argument("--tp", type=int, default=1, help="parts of each weight matrix")
    parser.add_argument("--pp", type=int, default=1, help="pipeline stages")
    parser.add_argument("--max-new-tokens", type=int, default=100)
    parser.add_argument("--temperature", type=float, default=0.0, help="0 takes the likeliest token")
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    told = parser.parse_args()
    mesh = build_mesh(tp=told.tp, pp=told.pp)
    checkpoint = find_weights(told.checkpoints, mesh)
    sampling = Sampling(told.temperature, top_p=told.top_p, seed=told.seed)
    model, tokenizer = load_model(checkpoint, mesh), load_tokenizer(checkpoint)
    answers = generate_text(model, tokenizer, told.prompts, max_new_tokens=told.max_new_tokens, sampling=sampling)
    if mesh.is_main:
        print("\n".join(prompt + answer for prompt, answer in zip(told.prompts, answers, strict=True)))
    mesh.close()


if __name__ == "__main__":
    main()
