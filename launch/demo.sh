#!/usr/bin/env bash
# The whole path in a few minutes on two cores: books -> shards -> two ranks with ZeRO-2 in bf16, interrupted by a real
# SIGTERM halfway and resumed -> evaluation -> does the memory remember? -> a page of one book. `make demo` runs it.
set -euo pipefail
cd "$(dirname "$0")/.."

run=runs/demo
baseline=runs/demo_none
config=configs/demo.yaml
export RANKS=2 OMP_NUM_THREADS=1
export PYTHONSAFEPATH=1 # torchrun's ranks import nothing from the working directory
# Two ranks need two GPUs, or none.
[ "$(nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU ' || true)" -ge 2 ] || export CUDA_VISIBLE_DEVICES=

say() { printf '\n== %s\n' "$*"; }

train() { bash launch/local.sh "$config" "$@"; }

# Ask rank 0 to stop, as a scheduler would, once half of the steps are done.
stop_halfway() {
  local half=$1 step=0
  until [ "${step:-0}" -ge "$half" ]; do
    sleep 0.5
    step=$(sed -n 's/^{"kind": "point".*"step": \([0-9]*\), "metrics".*/\1/p' "$run/metrics.jsonl" 2>/dev/null | tail -1) || true
  done
  say "SIGTERM to rank 0 after step $half"
  kill -TERM "$(sed 's/.*"pid": \([0-9]*\).*/\1/' "$run/lease.json")"
}

say "1. A library of synthetic books, a tokenizer, shards"
dist-mem data build sample --out data/sample
dist-mem data verify data/sample

say "2. What will be trained"
dist-mem train "$config" --check --world 2

steps=$(sed -n 's/^ *steps: *\([0-9]*\).*/\1/p' "$config")
if [ -d "$run/checkpoints" ]; then
  say "$run is here from an earlier demo: it is resumed (make clean starts over)"
else
  say "3. Transformer-XL memory on two ranks, ZeRO-2, bf16; a stop signal halfway"
  stop_halfway $((steps / 2)) &
  stopper=$!
  code=0
  train || code=$?
  kill "$stopper" 2>/dev/null || true # it would wait for ever for a training that failed before
  wait "$stopper" || true
  [ "$code" -eq 85 ] || { echo "error: expected exit code 85 (stopped, everything saved), got $code" >&2; exit 1; }
  echo "exit code 85: stopped, everything saved; the same command resumes"
fi
say "4. The same command again: it resumes"
output=$(mktemp)
train 2>&1 | tee "$output"

say "5. The same without memory"
train memory/none.yaml name=demo_none

say "6. Evaluation on the test split: every token of every book once"
for directory in "$baseline" "$run"; do
  torchrun --nproc_per_node 2 -m dist_mem evaluate "$directory" --split test
done

say "7. Does the memory remember? Perplexity of words that only an earlier passage tells, by the distance to it"
dist-mem compare "$baseline" "$run" --split test --plot runs/recall.png

say "8. What the memory remembers of one book, as a page to click through"
dist-mem report "$run" "$baseline" --book 9003 --split test

say "Look at it"
echo "What each word of the book gains from the memory: $PWD/$run/report.html"
echo "Training curves: $(grep -o 'mlflow ui .*' "$output" | tail -1)"
rm "$output"
