#!/usr/bin/env bash
# A fixed number of machines. Start it on each, with its number; they wait for each other.
#
#     NODES=2 NODE=0 FIRST=host-0 examples/launch/nodes_static.sh examples/configs/digits.yaml   # on host-0
#     NODES=2 NODE=1 FIRST=host-0 examples/launch/nodes_static.sh examples/configs/digits.yaml   # on host-1
#
# If a rank dies, its torchrun starts all ranks of its machine anew, and so do the others when theirs lose touch, up to
# RESTARTS times. A machine that is gone is waited for.
set -euo pipefail

: "${NODES:?number of machines}" "${NODE:?number of this machine, from 0}" "${FIRST:?name or address of machine 0}"
train="$(dirname "${BASH_SOURCE[0]}")/../train.py"
exec torchrun \
    --nnodes "$NODES" \
    --node-rank "$NODE" \
    --nproc-per-node "${RANKS:-auto}" \
    --master-addr "$FIRST" \
    --master-port "${PORT:-29500}" \
    --max-restarts "${RESTARTS:-3}" \
    "$train" "$@"
