# Two commands do everything: `make demo` and `make test`. See README.md.
PYTHON ?= python3
VENV ?= .venv
# Processes that share the tests, a file each; 0: none but one's own, as for a debugger.
JOBS ?= 2
SHARED := --dist loadfile --no-loadscope-reorder
BIN := $(VENV)/bin
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check
CPU_TORCH ?= https://download.pytorch.org/whl/cpu
# CONTRIBUTING.md says what each has. ARGS: more arguments of pytest, as ARGS="-m ranks" or files.
PYTEST := $(BIN)/python -m pytest --numprocesses $(JOBS) $(SHARED)

.PHONY: setup compiler demo example test test-all nightly versions messages durations lint docs bench coverage clean

setup: $(VENV)/.ready

compiler:
	@command -v g++ >/dev/null || command -v c++ >/dev/null || { \
	  echo "error: no C++ compiler. DeepSpeed compiles a small CPU communication op at its first start."; \
	  echo "       install one: 'apt-get install g++' (Debian, Ubuntu) or 'dnf install gcc-c++' (Fedora, RHEL)"; exit 1; }

# What `make demo` needs. Without an NVIDIA driver, torch is its CPU build, some GB smaller, where its index answers.
$(VENV)/.demo: requirements.txt pyproject.toml | compiler
	$(PYTHON) -m venv $(VENV)
	@if command -v nvidia-smi >/dev/null || [ -n "$$PIP_NO_INDEX$$PIP_INDEX_URL" ]; then :; \
	elif timeout 5 $(PYTHON) -c "import urllib.request; urllib.request.urlopen('$(CPU_TORCH)/torch/')" 2>/dev/null; then \
	  echo "no NVIDIA driver here: the CPU build of torch"; \
	  $(PIP) --no-deps --index-url $(CPU_TORCH) "$$(grep '^torch==' requirements.txt)"; \
	fi
	$(PIP) --constraint requirements.txt --editable '.[train,mlflow,plots]'
	@touch $@

$(VENV)/.ready: $(VENV)/.demo
	$(PIP) --constraint requirements.txt --editable '.[dev]'
	@touch $@

demo: $(VENV)/.demo
	@PATH="$(CURDIR)/$(BIN):$$PATH" bash launch/demo.sh

# Rebuild the model of `dist-mem report --example`: an export of the run of `make demo`, and a book of its test split.
example: demo
	rm -rf examples/demo
	$(BIN)/dist-mem export runs/demo --out examples/demo --precision fp16
	cp data/sample/texts/test/9003.txt examples/demo/flora_marsh.txt

test: setup
	$(PYTEST) --run quick $(ARGS)

test-all: setup
	$(PYTEST) --run all $(ARGS)

# What `make test-all` leaves out: hours. Durations that have changed are written anew, to be committed.
nightly: setup
	$(PYTEST) --run night --timeout 7200 --store-durations

# `make test` on other versions of Python, whose torch is the build of the package index: that for CUDA, without a GPU.
VERSIONS ?= 3.12 3.13
versions:
	@for version in $(VERSIONS); do \
	  CUDA_VISIBLE_DEVICES= $(MAKE) test PYTHON=python$$version VENV=build/python$$version CPU_TORCH=none || exit 1; \
	done

# build/messages.txt, for reading: what the program says in these tests when it refuses something.
messages: setup
	@mkdir -p build && rm -f build/messages.txt
	DIST_MEM_MESSAGES=$(CURDIR)/build/messages.txt $(PYTEST) --run all \
	  $$(grep -rlE "import .*(refused|said)" tests --include='test_*.py')
	@sort -u -o build/messages.txt build/messages.txt

# Measure all tests on an idle machine, for tests/durations.json.
durations: setup
	$(PYTEST) --run all --store-durations

# build/coverage/html/index.html shows the lines of dist_mem that no test of `make test` runs. Takes about twice as long.
coverage: setup
	$(PYTEST) --run quick --timeout 1200 --cov --cov-report=html --cov-report=term:skip-covered

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/codespell $$(git ls-files)
	@if command -v shellcheck >/dev/null; then shellcheck launch/*.sh benchmarks/*.sh .ci/run .ci/release; else echo "shellcheck is not installed: shell scripts not checked"; fi

docs: setup
	$(BIN)/python -m mkdocs build --strict

bench: setup
	@for script in benchmarks/*.py; do echo "== $$script"; $(BIN)/python "$$script" || exit 1; done

# What the demo made. Other runs stay, and so does MLflow's store, which has theirs too.
clean:
	rm -rf runs/demo runs/demo_none runs/recall.png data/sample
