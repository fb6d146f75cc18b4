# make help lists the targets. Everything lands in this clone (.libtorch, target) or in $ELMO_BUILD_CACHE.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help libtorch demo test services lint readme bench gpu install

# Where `make install` puts bin/elmo and lib/elmo.
PREFIX ?= $(HOME)/.local

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo "Variables: LIBTORCH=DIR (use a libtorch 2.11.0 of your own), TORCH=cuda (fetch the CUDA libraries too),"
	@echo "           ELMO_BUILD_CACHE=DIR (keep downloads there), PREFIX=DIR (for install)"

libtorch: ## fetch libtorch into .libtorch (0.55 GB down, 0.5 GB kept); nothing is installed
	@echo "==> libtorch: the tensor library that the biLM runs on"
	@python3 scripts/libtorch.py

demo: libtorch ## build, then embed the reviews that ship with elmo and show the nearest ones
	@echo "==> demo: cargo run -- demo (the first build takes about a quarter of an hour on two cores)"
	@cargo run --locked -- demo

test: libtorch ## build and run the whole test suite
	@echo "==> test: cargo test --workspace, then the count of all results"
	@scripts/test

services: libtorch ## run the tests that need an S3 server, an Azure server, or Python readers
	@echo "==> services: starts moto and Azurite on loopback, runs the tests against them, stops them"
	@scripts/services

lint: libtorch ## rustfmt, clippy, documentation, spelling, licences, and the rules of ARCHITECTURE.md
	@echo "==> lint: every check runs, failures are listed at the end"
	@scripts/lint

readme: libtorch ## run every shell block of README.md and every example
	@echo "==> readme: the blocks of README.md as written, in a folder that goes away"
	@scripts/readme

bench: libtorch ## measure tokens per second and the share of the matmul ceiling (release build)
	@echo "==> bench: three published sizes with random weights; what the columns mean is in benches/RESULTS.md"
	@for size in small medium original; do cargo run --locked --release -- bench --size $$size; done

gpu: ## on a machine with CUDA: self-test, GPU tests, and the share of what its matrix products reach
	@echo "==> gpu: fetches the CUDA libraries (2.6 GB) unless LIBTORCH has them"
	@scripts/gpu

install: libtorch ## release build into PREFIX (default ~/.local): bin/elmo and its libtorch in lib/elmo
	@echo "==> install: elmo into $(PREFIX)/bin, libtorch beside it in $(PREFIX)/lib/elmo"
	@PREFIX="$(PREFIX)" scripts/install
