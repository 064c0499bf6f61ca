#!/usr/bin/env bash
# Measure training on this machine's GPU by one command: every memory at 125 M, 350 M and 1.3 G parameters, with every
# attention back end and with and without torch.compile, and NVIDIA's Transformer-XL base configuration.
#
#   benchmarks/gpu.sh                                             # all 344 cases: a day or more; started again, it continues
#   benchmarks/gpu.sh --sizes transformer_xl_base,125m --memories transformer_xl,infinite
#   benchmarks/gpu.sh --cpu --tiny --out /tmp/tiny                # without a GPU: shows that all of this runs
#
# Results are in gpu_results/ after every case: gpu.json (tokens/s, MFU, peak memory, the costliest operators; failures
# with their output) and gpu.md, a table. One process on one GPU: choose it with CUDA_VISIBLE_DEVICES.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)

out=gpu_results cpu=false arguments=("$@")
while [ $# -gt 0 ]; do
  case $1 in
    --out) out=${2:?--out needs a folder} && shift ;;
    --out=*) out=${1#--out=} ;;
    --cpu) cpu=true ;;
  esac
  shift
done

if ! command -v dist-mem >/dev/null; then
  [ -x "$here/../.venv/bin/dist-mem" ] || make --directory "$here/.." setup
  PATH=$(cd "$here/../.venv/bin" && pwd):$PATH
fi
if [ "$cpu" = true ]; then
  export CUDA_VISIBLE_DEVICES="" DS_ACCELERATOR=cpu
elif ! command -v nvidia-smi >/dev/null; then
  echo "error: no nvidia-smi here; --cpu --tiny shows on CPUs that everything runs" >&2
  exit 2
fi

mkdir -p "$out"
[ "$cpu" = true ] || nvidia-smi -q >"$out/nvidia-smi.txt"
if ! dist-mem doctor >"$out/doctor.txt" 2>&1; then
  cat "$out/doctor.txt" >&2
  echo "error: the doctor found what would break or falsify the measurement" >&2
  exit 1
fi
PYTHONPATH=$here${PYTHONPATH:+:$PYTHONPATH} python -m lib.gpu_cases "${arguments[@]}"
cat "$out/gpu.md"
