# `make help` lists the targets. Files are written to this clone only (.libtorch, target), or to $ELMO_BUILD_CACHE.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help libtorch demo stream-demo test services torture torture-cluster lint readme bench books gpu install

# `make install` writes bin/elmo and lib/elmo to this folder.
PREFIX ?= $(HOME)/.local

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Variables: LIBTORCH=DIR (use the libtorch 2.11.0 in DIR), TORCH=cuda (also download the CUDA libraries),"
	@echo "           ELMO_BUILD_CACHE=DIR (cache downloads in DIR), PREFIX=DIR (for install)"

libtorch: ## download libtorch into .libtorch (0.55 GB, 0.5 GB on disk) without installing anything
	@echo "==> libtorch: the tensor library that the biLM runs on"
	@python3 scripts/libtorch.py

demo: libtorch ## build, embed the built-in reviews, show nearest neighbours, a word in two senses and surprisals
	@echo "==> demo: cargo run -- demo (the first build takes about a quarter of an hour on two cores)"
	@cargo run --locked -- demo

stream-demo: libtorch ## stream messages from Kafka to S3, kill the stream in the middle, start it again and count
	@echo "==> stream-demo: fetches and starts Kafka (Java, Maven) and an S3 server, without Docker"
	@scripts/stream-demo

test: libtorch ## build and run the whole test suite
	@echo "==> test: cargo test --workspace, then the count of all results"
	@scripts/test

services: libtorch ## run the tests that need a Kafka broker, an S3 server, an Azure server or Python libraries
	@echo "==> services: starts Kafka, moto and Azurite on the loopback interface and runs the tests against them"
	@scripts/services

torture: libtorch ## kill streams and their broker hundreds of times and count the messages (25 minutes; scripts/torture)
	@echo "==> torture: fetches and starts Kafka; prints a table at the end, and a seed that repeats the run"
	@scripts/torture

torture-cluster: libtorch ## kill and stop workers of a cluster 50 times and compare what they wrote (15 minutes; scripts/torture-cluster)
	@echo "==> torture-cluster: prints what happened in each run, and a seed that repeats it"
	@scripts/torture-cluster

lint: libtorch ## check formatting, clippy, documentation, spelling, licences and the rules of ARCHITECTURE.md
	@echo "==> lint: runs all checks, also after a failure"
	@scripts/lint

readme: libtorch ## run every block of README.md and docs/recipes.md and every example
	@echo "==> readme: runs the blocks of README.md and docs/recipes.md in temporary folders"
	@scripts/readme

bench: libtorch ## measure tokens per second and the share of the matrix product ceiling (release build)
	@echo "==> bench: three published sizes with random weights; benches/RESULTS.md explains the figures"
	@for size in small medium original; do cargo run --locked --release -- bench --size $$size; done

books: libtorch ## train the built-in model again from the corpus in CORPUS, into the folder OUT (hours; scripts/books)
	@test -n "$(CORPUS)" -a -n "$(OUT)" || { echo "usage: make books CORPUS=DIR OUT=DIR; scripts/books says what DIR has" >&2; exit 2; }
	@cargo build --locked --release
	@ELMO="$${CARGO_TARGET_DIR:-$(CURDIR)/target}/release/elmo" scripts/books "$(CORPUS)" "$(OUT)"

gpu: ## on a machine with CUDA: run the self-test, the GPU tests and the benchmarks
	@echo "==> gpu: downloads the CUDA libraries (2.6 GB) unless LIBTORCH is set"
	@scripts/gpu

install: libtorch ## release build, installed into PREFIX (default ~/.local) with its libtorch
	@echo "==> install: elmo into $(PREFIX)/bin, libtorch into $(PREFIX)/lib/elmo"
	@PREFIX="$(PREFIX)" scripts/install
