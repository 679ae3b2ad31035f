#!/usr/bin/env bash
# A fixed number of machines. Start it on each machine, with its number.
#
#     NODES=2 NODE=0 FIRST=host-0 examples/launch/nodes_static.sh examples/configs/digits.yaml   # on host-0
#     NODES=2 NODE=1 FIRST=host-0 examples/launch/nodes_static.sh examples/configs/digits.yaml   # on host-1
#
# If a rank dies, all machines restart their ranks, up to RESTARTS times. They wait for a machine that is lost.
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
