#!/usr/bin/env bash
# Train on this machine through the deepspeed launcher, one process per visible GPU (or RANKS processes).
#
#   RANKS=2 launch/local.sh configs/demo.yaml train.steps=100
#   CUDA_VISIBLE_DEVICES=2,3 launch/local.sh configs/demo.yaml      # on these GPUs; with an empty value, on CPUs
#
# The same with torchrun:  torchrun --nproc_per_node 2 -m dist_mem train configs/demo.yaml
# One process, no launcher: python -m dist_mem train configs/demo.yaml
set -euo pipefail

tree=$(cd "$(dirname "$0")/.." && pwd)
if ! command -v deepspeed >/dev/null && [ -x "$tree/.venv/bin/deepspeed" ]; then
  PATH="$tree/.venv/bin:$PATH" # the environment that make setup made, not activated
fi
# In a source tree, train with its code: nothing needs to be installed but what it depends on.
[ ! -e "$tree/dist_mem/__main__.py" ] || export PYTHONPATH="$tree${PYTHONPATH:+:$PYTHONPATH}"
# What CUDA sees: without the variable all GPUs, else the names before the first that is none, such as -1.
gpus=$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true) # 0 without the program; a line of MIG is no GPU
if [ "$gpus" -gt 0 ] && [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
  gpus=$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed -E '/^ *([0-9]|GPU-|MIG-)/!Q' | wc -l)
fi
ranks=${RANKS:-$gpus}
[ "$ranks" -gt 0 ] || ranks=1
port=${MASTER_PORT:-$((20000 + RANDOM % 20000))}
[ "$gpus" -gt 0 ] || export DS_ACCELERATOR=cpu

# The launcher numbers the GPUs from 0 for its ranks; `env` gives them those of this shell. Slots by hand: without a GPU
# to count, it would start a single process. No rank imports from the working directory.
devices=(-u CUDA_VISIBLE_DEVICES)
[ -z "${CUDA_VISIBLE_DEVICES+set}" ] || devices=("CUDA_VISIBLE_DEVICES=$CUDA_VISIBLE_DEVICES")
export PYTHONSAFEPATH=1
exec env -u CUDA_VISIBLE_DEVICES deepspeed --log_level error --num_gpus "$ranks" --num_nodes 1 --no_local_rank \
  --master_port "$port" --no_python env "${devices[@]}" python -m dist_mem train "$@"
