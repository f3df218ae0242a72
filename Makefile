# Everything runs in .venv of this checkout; `make setup` makes it.
PYTHON ?= python3
RELEASE ?= 1.1.0
JOBS ?= 2
SUITE ?= forward
CASE ?= P1
SHAPE ?=
CAUSAL ?=
ARGS ?=
RESUME ?=
PY := .venv/bin/python
PIP := $(PY) -m pip --disable-pip-version-check
PIP_VERSION := 26.3
TORCH := torch==2.13.0+cpu
SECOND := 1.2.0
SECOND_DIR := .toolchain/bishengir-$(SECOND)
SCORING := $(PY) -m scoring --release $(RELEASE) --jobs $(JOBS) $(if $(RESUME),--resume)

.DEFAULT_GOAL := help
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*## .*/\1/p' $(MAKEFILE_LIST))

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "  RELEASE=1.1.0|1.2.0 (compiler), JOBS=N (cases at a time), ARGS='...' (see python -m scoring --help)"
	@echo "  RESUME=1 goes on with a check or score that was ended before its last case"
	@echo "  DEVICE=npu|cuda|virtual in the environment chooses the device"

setup: ## .venv with pinned packages and both compilers; NPU=1 keeps the machine's torch, torch_npu and triton (on a GPU too)
ifeq ($(NPU),1)
	test -x $(PY) || $(PYTHON) -m venv --system-site-packages .venv
	$(PIP) install --quiet pip==$(PIP_VERSION)
	$(PIP) install --quiet --group base --group dev
else
	@test -x $(PY) || $(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "error: PYTHON must be 3.11, as the compiler's wheels are, got $$($(PYTHON) -V): make setup PYTHON=python3.11" >&2; exit 1; }
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PIP) install --quiet pip==$(PIP_VERSION)
	$(PIP) install --quiet "$(TORCH)" 2>/dev/null || \
	  $(PIP) install --quiet "$(TORCH)" --extra-index-url https://download.pytorch.org/whl/cpu
	$(PIP) install --quiet --group base --group virtual --group dev
	@chmod +x "$$($(PY) -c 'import ascendnpuir, pathlib; print(pathlib.Path(ascendnpuir.__file__).parent / "bin")')"/*
	@test -x $(SECOND_DIR)/ascendnpuir/bin/bishengir-compile || { \
	  set -e; rm -rf $(SECOND_DIR) .toolchain/download; \
	  $(PIP) download --quiet --no-deps --dest .toolchain/download ascendnpu-ir==$(SECOND); \
	  $(PY) -m zipfile -e .toolchain/download/ascendnpu_ir-$(SECOND)-*.whl $(SECOND_DIR); \
	  chmod +x $(SECOND_DIR)/ascendnpuir/bin/*; rm -r .toolchain/download; }
	@$(PY) -c 'from harness import virtual_npu; print("compilers:", ", ".join(virtual_npu.available_releases()))'
endif
	@echo "ready: make score"

check: ## correctness of both suites
	$(SCORING) --mode check $(ARGS)

score: ## correctness, then time; writes results/score.json
	$(SCORING) --mode score $(ARGS)

submission: ## forward.py and backward.py alone in dist/submission, with a proof that they run there
	$(PY) -m scoring.submission $(ARGS)

npu-doctor: ## on a machine with an NPU: what works there, and times to send back; ARGS=--quick
	$(PY) -m harness.doctor $(ARGS)

npu-rows: ## take the times of a doctor's file for make calibrate; FILE=npu-doctor.json
	$(PY) -m harness.doctor --rows "$(FILE)"

npu-profile: ## on a machine with an NPU: msprof's pipe counters beside the prediction; SUITE and CASE as for trace
	$(PY) -m harness.msprof --suite $(SUITE) --case $(CASE) $(ARGS)

npu-schema: ## the calls into torch_npu against an unpacked wheel; WHEEL=FOLDER
	$(PY) -m harness.fake_npu.check "$(WHEEL)"

check-full: ## correctness of all heads of all cases (hours)
	$(SCORING) --mode check --full $(ARGS)

.PHONY: html ablation roofline accuracy
cuda: ## the same sources on a CUDA GPU: all heads checked, timed beside SDPA; writes results/cuda.json
	$(PY) -m harness.studies.cuda $(ARGS)

report: ## tables and figures of REPORT.md and README.md from results/
	$(PY) -m report

html: ## REPORT.md as one page with sortable tables: results/local/report.html
	$(PY) -m report --html results/local/report.html

ablation: ## each technique switched off alone (predicted; minutes); writes results/ablation.json
	$(PY) -m harness.studies.ablation --jobs $(JOBS) $(ARGS)

roofline: ## floors, pipes and timelines of each case; writes results/roofline.json and timelines.json
	$(PY) -m harness.studies.roofline --jobs $(JOBS) $(ARGS)
	$(PY) -m harness.studies.timelines

accuracy: ## errors against fp64 over input scales; writes results/accuracy.json
	$(PY) -m harness.studies.accuracy --jobs $(JOBS) $(ARGS)

test: ## the tests, on JOBS processes
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist worksteal $(ARGS)

test-full: ## the slow tests: the whole matrix of shapes (hours)
	$(PY) -m pytest -m slow $(ARGS)

bench: ## host time of the toolchain and of the virtual NPU, instructions a second; writes results/bench.json
	$(PY) -m pytest -o addopts= -W error -p no:cacheprovider --benchmark-only tests/bench_virtual_npu.py $(ARGS)

calibrate: ## the virtual NPU's times beside published ones of a 910B3; writes results/calibration.json
	$(PY) -m harness.studies.calibration $(ARGS)

trace: ## Perfetto trace and picture of a case; SUITE=forward|backward CASE=P1
	$(PY) -m harness.studies.trace --suite $(SUITE) --case $(CASE) --release $(RELEASE) $(ARGS)

profile: ## predicted cycles of a case by source line; SUITE and CASE as for trace
	$(PY) -m harness.studies.profile --suite $(SUITE) --case $(CASE) --release $(RELEASE) $(ARGS)

tune: ## fastest settings of a case (P1, C2, all), or of SHAPE=Z,H,N,D CAUSAL=1 SUITE=backward; writes results/tune.json
	$(PY) -m harness.studies.tune $(if $(SHAPE),--shape $(SHAPE) --suite $(SUITE) $(if $(CAUSAL),--causal),--case $(CASE)) --release $(RELEASE) --jobs $(JOBS) $(ARGS)

tiles: ## pipelines' settings under other published constants; writes results/tiles.json
	OMP_NUM_THREADS=1 $(PY) -m harness.studies.tiles --jobs $(JOBS) $(ARGS)

mutation: ## does every deleted synchronisation get noticed? writes results/mutation.json
	OMP_NUM_THREADS=1 $(PY) -m harness.studies.surveys $(ARGS)

schedules: ## no hazard under four schedules, both compilers, all official configurations? writes results/schedules.json
	OMP_NUM_THREADS=1 $(PY) -m harness.studies.schedules $(ARGS)

sensitivity: ## what the predicted times hang on; writes results/sensitivity.json
	OMP_NUM_THREADS=1 $(PY) -m harness.studies.sensitivity $(ARGS)

lint: ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m mypy

clean: ## caches; leaves .venv and the compilers
	rm -rf .cache .benchmarks .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -r {} +
