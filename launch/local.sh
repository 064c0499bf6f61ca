#!/usr/bin/env bash
# Train on this machine through the deepspeed launcher, one process per GPU (or RANKS processes on CPUs).
#
#   RANKS=2 launch/local.sh configs/demo.yaml train.steps=100
#
# The same with torchrun:  torchrun --nproc_per_node 2 -m dist_mem train configs/demo.yaml
# One process, no launcher: python -m dist_mem train configs/demo.yaml
set -euo pipefail

own=$(cd "$(dirname "$0")/.." && pwd)/.venv/bin
if ! command -v deepspeed >/dev/null && [ -x "$own/deepspeed" ]; then
  PATH="$own:$PATH" # the environment that make setup made, not activated
fi
ranks=${RANKS:-$(nvidia-smi --list-gpus 2>/dev/null | wc -l)}
[ "$ranks" -gt 0 ] || ranks=1
port=${MASTER_PORT:-$((20000 + RANDOM % 20000))}
if ! command -v nvidia-smi >/dev/null; then
  export DS_ACCELERATOR=cpu
fi

# Slots by hand: without a GPU to count, the launcher would start a single process.
exec deepspeed --log_level error --num_gpus "$ranks" --num_nodes 1 --no_local_rank --master_port "$port" --module dist_mem train "$@"
