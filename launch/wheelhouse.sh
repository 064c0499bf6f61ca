#!/usr/bin/env bash
# Every wheel that dist_mem takes, its own too, in one folder, to be carried to a site without network. See docs/howto/offline.md.
#
#   launch/wheelhouse.sh wheelhouse
#   PYTHON=python3.12 launch/wheelhouse.sh wheelhouse       # for a site with another Python than this machine
#
# Run it on a machine with network, with the Python and the kind of processor of the site. It installs nothing here.
set -euo pipefail
out=$(realpath --canonicalize-missing "${1:?error: which folder? launch/wheelhouse.sh FOLDER}")
cd "$(dirname "$0")/.."

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
"${PYTHON:-python3}" -m venv "$scratch/venv"
pip() { "$scratch/venv/bin/python" -m pip "$@" --quiet --disable-pip-version-check; }

mkdir -p "$out"
# DeepSpeed comes as source. Its ops are compiled when they are first used, on the machine that uses them.
export DS_BUILD_OPS=0
pip wheel --wheel-dir "$out" --constraint requirements.txt '.[dev]' # dev: the build back end too, for `pip install .`

# What is missing is told here and not at the site.
PIP_CONFIG_FILE=/dev/null PIP_FIND_LINKS=$out pip install --dry-run --no-index --constraint requirements.txt 'dist-mem[dev]'
(cd "$out" && sha256sum -- *.whl >SHA256SUMS)
echo "$out: $(find "$out" -name '*.whl' | wc -l) wheels, $(du -sh "$out" | cut -f1), for $("$scratch/venv/bin/python" --version)"
