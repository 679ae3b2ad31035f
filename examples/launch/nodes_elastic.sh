#!/usr/bin/env bash
# As many machines as there are, within bounds. Start the same on each; numbers are given out when they meet.
#
#     NODES=2:4 FIRST=host-0 JOB=run-7 examples/launch/nodes_elastic.sh examples/configs/digits.yaml
#
# If a machine is lost or comes, all ranks are started anew, on the machines that there are then, and go on from the
# newest checkpoint. What they meet at is on the machine FIRST, which must stay.
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
