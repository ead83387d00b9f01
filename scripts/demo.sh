#!/usr/bin/env bash
# The main job on this machine: bash scripts/demo.sh [options of examples/pretrain.py]
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_env.sh

echo "Trains a small mixture-of-experts language model on two ranks of this machine; results go to out/demo."
setup_env examples
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
"$python" -m torch.distributed.run --standalone --nproc-per-node 2 \
    examples/pretrain.py --preset tiny --out out/demo "$@"
echo "Next: source ${VENV:-.venv}/bin/activate; torchrun --standalone --nproc-per-node 2 examples/pretrain.py --help;" \
    "more in examples/README.md and docs/README.md."
