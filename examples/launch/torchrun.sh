#!/usr/bin/env bash
# This node's part of the validation, and where that passes of the pretraining example. Run it on every node:
#
#   FABRIC=ib NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 bash examples/launch/torchrun.sh
#
#   FABRIC           nvlink, ib, roce, efa or single-gpu: "python -m megatron_moe_v2 env FABRIC" is exported; none: nothing is
#   NNODES           nodes of the job; default 1
#   NODE_RANK        number of this one, from 0
#   MASTER_ADDR      host name or address of node 0, as the others reach it
#   MASTER_PORT      free on node 0, as is the one after it; default 29500
#   NPROC            ranks on this node; default gpu, one for each GPU
#   PYTHON           default python
#   ENV_FILE         sourced last, to change or add variables
#   VALIDATE_FLAGS   of examples/validate.py; default --expect-backend deepep_v2, and nothing where FABRIC is none
#   PRETRAIN_FLAGS   of examples/pretrain.py
#   ONLY             validate or pretrain: nothing else
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

fail() {
    echo "torchrun.sh: $*" >&2
    exit 2
}

PYTHON=${PYTHON:-python} FABRIC=${FABRIC:-} NNODES=${NNODES:-1} NPROC=${NPROC:-gpu} ONLY=${ONLY:-}
MASTER_PORT=${MASTER_PORT:-29500}
[ -n "$FABRIC" ] || fail "set FABRIC to nvlink, ib, roce, efa, single-gpu or none"
case $ONLY in "" | validate | pretrain) ;; *) fail "ONLY=$ONLY, expected validate or pretrain" ;; esac
if [ "$NNODES" -gt 1 ]; then
    [ -n "${NODE_RANK:-}" ] || fail "set NODE_RANK, 0 to $((NNODES - 1))"
    [ -n "${MASTER_ADDR:-}" ] || fail "set MASTER_ADDR to the address of node 0"
fi
NODE_RANK=${NODE_RANK:-0} MASTER_ADDR=${MASTER_ADDR:-127.0.0.1}

export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
expected=""
if [ "$FABRIC" != none ]; then
    exports=$("$PYTHON" -m megatron_moe_v2 env "$FABRIC")
    eval "$exports"
    expected="--expect-backend deepep_v2"
fi
if [ -n "${ENV_FILE:-}" ]; then
    # shellcheck source=/dev/null
    . "$ENV_FILE"
fi
read -r -a validate_flags <<<"${VALIDATE_FLAGS-$expected}"
read -r -a pretrain_flags <<<"${PRETRAIN_FLAGS:---preset tiny --hidden 256 --steps 100 --no-save --no-plots}"

launch() {
    local port=$1
    shift
    "$PYTHON" -m torch.distributed.run --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC" \
        --master-addr "$MASTER_ADDR" --master-port "$port" "$@"
}

[ "$ONLY" = pretrain ] || launch "$MASTER_PORT" examples/validate.py "${validate_flags[@]}"
[ "$ONLY" = validate ] || launch "$((MASTER_PORT + 1))" examples/pretrain.py "${pretrain_flags[@]}"
