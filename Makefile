# Every target sets up what it needs: a virtual environment in .venv with torch, this package built in place, and its extras.
#
#   make demo       the main job: dispatch -> experts -> combine between 4 processes on a real text, every row checked
#   make train      trains a small language model, its experts spread over 2 processes (2 to 3 minutes); RANKS=4 for more
#   make test       the tests (about a quarter of an hour on 2 cores)
#   make transformers-test  the tests inside models of transformers, its newest version and 5.14.1, each in an environment of its own
#                   beside the other (`make transformers-test-newest`, `make transformers-test-5.14.1`)
#   make bench      dispatch + combine against gloo and MPI; writes benchmarks/results/*.json (`make bench-short`: half a minute;
#                   `make bench-protocol`: push, pull, formats and quantisation against each other; `make bench-moe`: the
#                   whole layer, fused and not; `make bench-transformers`: models of transformers, against its own all_to_all)
#   make lint       ruff and mypy
#   make aarch64-check  compiles the kernels for aarch64 (Debian: apt-get install g++-aarch64-linux-gnu)
#   make aarch64-test   runs ranks as threads on them, under qemu (Debian: apt-get install qemu-user)
#   make ascend-check   lowers every Triton kernel for Ascend 910B, 910_93 and 950 and checks what the compiler made of it
#                   (`make ascend-check-short`: the small sizes, for 910B)
#   make native-check   runs what the Ascend compiler gets of the Triton kernels on this CPU: ranks as processes, programs as threads
#   make mutation-check puts faults into the Triton kernels and says which of the checks notices each
#   make gpu-check      compiles every Triton kernel for sm_90 and gfx942, with no GPU: registers, shared memory, spills
#   make model      checks the protocol's model, all of it (Debian: apt-get install spin gcc libc6-dev); `make model-short`: minutes
#   make test-long  what `make test` leaves away: most of the products of many options, and what takes minutes or tens of GB
#
# TORCH="torch==2.14.0" picks another torch, with options of pip if need be; PYTHON=python3.12 another Python (3.10 or newer).

PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check

# Files that say what is done: one for this torch and Python, one for the build. Another torch or Python makes the environment anew.
SOURCES := setup.py pyproject.toml $(wildcard op_kernel/cpu/*) $(wildcard op_host/cpu/*)
CHOICE := $(VENV)/.torch-$(shell echo '$(TORCH) $(PYTHON)' | cksum | cut -d' ' -f1)

.PHONY: demo train test test-long bench bench-protocol bench-moe bench-short bench-transformers transformers-setup transformers-test \
  transformers-test-newest transformers-test-5.14.1 lint format aarch64-check aarch64-test ascend-check ascend-check-short native-check mutation-check gpu-check \
  model model-short wheel clean setup

setup: $(VENV)/.ready

$(CHOICE):
	@command -v $(PYTHON) >/dev/null || { echo "make: $(PYTHON) not found; install Python 3.10 or newer, or run: make PYTHON=..."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "make: $(PYTHON) is older than 3.10; run: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "make: $(PYTHON) can't make virtual environments (Debian: apt-get install python3-venv)"; exit 1; }
	@command -v c++ >/dev/null || command -v g++ >/dev/null || command -v clang++ >/dev/null || { echo "make: no C++ compiler found (Debian: apt-get install g++)"; exit 1; }
	@echo "== setting up $(VENV): $(TORCH) and the tools, once (a minute or two; longer where the index serves torch with CUDA)"
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) install "setuptools>=77" wheel ninja numpy $(TORCH)
	@touch $@

$(VENV)/.ready: $(CHOICE) $(SOURCES)
	@echo "== building moe_a2a (half a minute) and installing what demo and tests need"
	$(PIP) install --no-build-isolation --editable '.[demo,test]'
	@touch $@

demo: $(VENV)/.ready
	$(BIN)/python examples/demo.py

RANKS ?= 2
train: $(VENV)/.ready
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/train_lm.py

test: $(VENV)/.ready
	$(BIN)/python -m pytest -q

test-long: $(VENV)/.ready
	$(BIN)/python -m pytest -q -m slow

# Environments that see what $(VENV) has, so torch isn't installed twice; in its folder, so that they go with it.
TRANSFORMERS ?= 5.24.0
NEWEST := $(VENV)/transformers-$(TRANSFORMERS)
OLDER := $(VENV)/transformers-5.14.1
SITE := import sysconfig; print(sysconfig.get_path("purelib"))

$(VENV)/transformers-%/.ready: | $(VENV)/.ready
	@echo "== setting up $(@D): transformers $* (half a minute)"
	$(BIN)/python -m venv --clear --without-pip $(@D)
	echo "import site; site.addsitedir('$$($(BIN)/python -c '$(SITE)')')" > $$($(@D)/bin/python -c '$(SITE)')/above.pth
	$(PIP) --python $(@D)/bin/python install transformers==$* psutil
	$(PIP) --python $(@D)/bin/python install --no-deps accelerate
	@touch $@

transformers-setup: $(NEWEST)/.ready $(OLDER)/.ready

transformers-test: transformers-test-newest transformers-test-5.14.1

transformers-test-newest: $(NEWEST)/.ready
	$(NEWEST)/bin/python -m pytest -q -m "transformers and not experts_function and not slow"

# Compiled models are the newest version's business.
transformers-test-5.14.1: $(OLDER)/.ready
	$(OLDER)/bin/python -m pytest -q -m "transformers and not ep_implementation and not slow" -k "not compiled"

bench: $(VENV)/.ready
	-$(PIP) install --quiet mpich mpi4py # MPI is a yardstick: without it the table has no MPI columns
	$(BIN)/python benchmarks/bench_dispatch_combine.py

bench-protocol: $(VENV)/.ready
	$(BIN)/python benchmarks/bench_protocol.py

bench-moe: $(VENV)/.ready
	$(BIN)/python benchmarks/bench_moe.py --trace benchmarks/traces/train_lm.npz

bench-transformers: $(NEWEST)/.ready
	$(NEWEST)/bin/python benchmarks/bench_transformers.py

bench-short: $(VENV)/.ready
	$(BIN)/python benchmarks/bench_dispatch_combine.py --short

lint: $(VENV)/.ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=examples:benchmarks:tests $(BIN)/mypy examples/*.py benchmarks/*.py tests/*.py tests/rank_bodies/*.py tests/triton_lanes/*.py docs/model/run.py

format: $(VENV)/.ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# What runs on the device or core, and the group on top of it, know no torch; so they compile with nothing but a compiler.
AARCH64_CXX ?= aarch64-linux-gnu-g++
aarch64-check:
	@command -v $(AARCH64_CXX) >/dev/null || { echo "make: $(AARCH64_CXX) not found (Debian: apt-get install g++-aarch64-linux-gnu)"; exit 1; }
	@for source in $(wildcard op_kernel/cpu/*.cpp) $(wildcard op_host/cpu/group*.cpp) op_host/cpu/pool.cpp op_host/cpu/window.cpp; do \
	  $(AARCH64_CXX) -std=c++20 -O2 -ffp-contract=off -Wall -Wextra -Werror -Wno-psabi -c $$source -o /dev/null \
	    && echo "aarch64: $$source compiles" || exit 1; \
	done

# Builds and computes the right values: that is all it shows. The emulator runs on this machine's memory, so a missing order
# between two stores is no fault here; ThreadSanitizer looks for those.
AARCH64_RUN ?= qemu-aarch64
aarch64-test: $(VENV)/.ready
	@command -v $(AARCH64_CXX) >/dev/null || { echo "make: $(AARCH64_CXX) not found (Debian: apt-get install g++-aarch64-linux-gnu)"; exit 1; }
	@command -v $(AARCH64_RUN) >/dev/null || { echo "make: $(AARCH64_RUN) not found (Debian: apt-get install qemu-user)"; exit 1; }
	$(BIN)/python tests/thread_ranks.py --cxx $(AARCH64_CXX) --flags=-static --under $(AARCH64_RUN)

# triton-ascend takes the module name triton for itself, so it lives in an environment of its own; there is no torch in it.
# Its packages are named in op_host/ascend/lower.py too. They are there for Python 3.10 and 3.11.
ASCEND_VENV ?= .venv-ascend
ASCEND_PYTHON ?= $(PYTHON)
ASCEND_BIN := $(ASCEND_VENV)/bin
ASCEND_PACKAGES := triton-ascend==3.2.0 ascendnpu-ir==1.2.0 pybind11
$(ASCEND_VENV)/.ready: Makefile
	@$(ASCEND_PYTHON) -c 'import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 12))' || { echo "make: $(ASCEND_PYTHON) is neither 3.10 nor 3.11, for which triton-ascend 3.2.0 is built; run: make ascend-check ASCEND_PYTHON=python3.11"; exit 1; }
	@echo "== setting up $(ASCEND_VENV): $(ASCEND_PACKAGES), once (half a minute; 0.7 GB)"
	$(ASCEND_PYTHON) -m venv --clear $(ASCEND_VENV)
	$(ASCEND_BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps $(ASCEND_PACKAGES)
	$(ASCEND_BIN)/python -m pip --disable-pip-version-check install --quiet pytest
	@touch $@

# The seeded faults first: what the table says is worth as much as they find.
ascend-check: $(ASCEND_VENV)/.ready
	PYTHONPATH=$(CURDIR) $(ASCEND_BIN)/python -m pytest -q --noconftest -p no:cacheprovider tests/ascend
	PYTHONPATH=$(CURDIR) $(ASCEND_BIN)/python -m moe_a2a.ascend_lint

ascend-check-short: $(ASCEND_VENV)/.ready
	PYTHONPATH=$(CURDIR) $(ASCEND_BIN)/python -m moe_a2a.ascend_lint --kernel '*-small' --target Ascend910B1
	PYTHONPATH=$(CURDIR) $(ASCEND_BIN)/python -m pytest -q --noconftest -p no:cacheprovider tests/ascend

# What Triton kernels are checked by, beside the tests; docs/triton-lanes.md says what each of these can't see.
LANES := PYTHONPATH=$(CURDIR):$(CURDIR)/tests MOE_A2A_ASCEND_PYTHON=$(abspath $(ASCEND_BIN))/python $(BIN)/python -m
native-check: $(VENV)/.ready $(ASCEND_VENV)/.ready
	$(LANES) triton_lanes.native_check

mutation-check: $(VENV)/.ready $(ASCEND_VENV)/.ready
	$(LANES) triton_lanes.mutation_check

gpu-check: $(VENV)/.ready
	$(LANES) triton_lanes.gpu_check

model:
	$(PYTHON) docs/model/run.py --lane all

model-short:
	$(PYTHON) docs/model/run.py --lane ci

wheel: $(VENV)/.ready
	$(BIN)/python -m build --no-isolation --outdir dist

clean:
	rm -rf $(VENV) $(ASCEND_VENV) build dist *.egg-info moe_a2a/*.so demo_out train_out .pytest_cache .ruff_cache .mypy_cache
