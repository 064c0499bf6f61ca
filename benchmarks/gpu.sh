#!/usr/bin/env bash
# Check and measure dist_mem on this machine's GPU: what tells most comes first, each case has a limit, and the command
# stops in time. Start it again to go on.
#
#   benchmarks/gpu.sh --minutes 7 --out gpu_results     # results of all calls are in gpu_results/gpu.json and gpu.md
#   benchmarks/gpu.sh --minutes 7 --out gpu_results --retry           # what failed is made again, first
#   benchmarks/gpu.sh --minutes 7 --out gpu_results --caches gpu_results/caches.tar.gz   # on a fresh machine: compiled kernels
#   benchmarks/gpu.sh --cpu --tiny --out /tmp/tiny                    # without a GPU: every step runs to the end
#
# It uses the python3 that it finds (PYTHON=... names another), from this source tree: nothing has to be installed but
# torch, deepspeed, webdataset, omegaconf, numpy and safetensors; benchmarks/gpu_wheels.sh collects what is missing.
# Peers are measured where they can be imported: transformers, fla. One GPU is used: choose it with CUDA_VISIBLE_DEVICES.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/..:$here${PYTHONPATH:+:$PYTHONPATH}"
exec "${PYTHON:-python3}" -m lib.gpu_cases "$@"
