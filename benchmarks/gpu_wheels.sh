#!/usr/bin/env bash
# Collect what a rented GPU machine lacks, to be carried beside the tree: wheels for Python 3.12 on x86-64, where torch,
# Triton and numpy are installed already. About 7 MB, at most 35 with compiled kernels of an earlier call beside them.
#
#   benchmarks/gpu_wheels.sh          # here, in minutes; fills .gpu/ in the project's root, which git ignores
#   python3 -m pip install -q --no-index --no-deps --target /tmp/site .gpu/*.whl      # there
#   PYTHONPATH=/tmp/site benchmarks/gpu.sh --minutes 7 --out gpu_results              # there
#   cp gpu_results/caches.tar.gz .gpu/     # here: for the next call, with --caches .gpu/caches.tar.gz
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-$(command -v python3.12)} || { echo "error: no Python 3.12, whose wheels are needed; PYTHON=... names it" >&2; exit 1; }
mkdir -p .gpu
pin() { sed -n "s/^$1==\([^ ]*\).*/\1/p" requirements.txt; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/env"
pip=$work/env/bin/pip
$pip install -q setuptools wheel packaging py-cpuinfo psutil ninja
# DeepSpeed comes as source; without torch its wheel has Python files only, whose operators compile where they run.
ls .gpu/deepspeed-* >/dev/null 2>&1 ||
  DS_BUILD_OPS=0 DS_BUILD_STRING="" $pip wheel -q --no-deps --no-build-isolation -w .gpu "deepspeed==$(pin deepspeed)"
$pip download -q --no-deps --only-binary=:all: -d .gpu "webdataset==$(pin webdataset)" "omegaconf==$(pin omegaconf)" \
  hjson braceexpand pydantic annotated-types typing-inspection fla-core einops
core=$(unzip -p .gpu/pydantic-[0-9]*.whl '*/METADATA' | sed -n 's/^Requires-Dist: pydantic-core *[=(]*=*\([0-9.]*\).*/\1/p' | head -1)
$pip download -q --no-deps --only-binary=:all: -d .gpu "pydantic-core==$core"
size=$(du -sk .gpu | cut -f1)
[ "$size" -le 35000 ] || { echo "error: .gpu has $size KiB, more than 35 MB" >&2; exit 1; }
ls -sh .gpu
