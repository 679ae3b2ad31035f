#!/usr/bin/env bash
# All GPUs of this machine; without one, as many ranks as cores.
#
#     examples/launch/one_node.sh examples/configs/digits.yaml mesh.tp=2
#     RANKS=2 examples/launch/one_node.sh examples/configs/digits.yaml
set -euo pipefail

train="$(dirname "${BASH_SOURCE[0]}")/../train.py"
exec torchrun --standalone --nproc-per-node "${RANKS:-auto}" "$train" "$@"
