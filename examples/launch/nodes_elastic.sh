#!/usr/bin/env bash
# An elastic number of machines, within bounds. Start the same command on each.
#
#     NODES=2:4 FIRST=host-0 JOB=run-7 examples/launch/nodes_elastic.sh examples/configs/digits.yaml
#
# If a machine is lost or added, all ranks restart on the machines that are there, and resume from the newest
# checkpoint. The rendezvous is on the machine FIRST, which must stay.
set -euo pipefail

: "${NODES:?least and most machines, as 2:4}" "${FIRST:?name or address of a machine that stays}"
train="$(dirname "${BASH_SOURCE[0]}")/../train.py"
exec torchrun \
    --nnodes "$NODES" \
    --nproc-per-node "${RANKS:-auto}" \
    --rdzv-backend c10d \
    --rdzv-endpoint "$FIRST:${PORT:-29400}" \
    --rdzv-id "${JOB:-energon-lite}" \
    --max-restarts "${RESTARTS:-100}" \
    "$train" "$@"
