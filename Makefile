# The two commands a newcomer needs: `make ppo` and `make test`. Everything else is for those who work on ostinato.
SHELL := /bin/sh
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export TOKENIZERS_PARALLELISM ?= false
export RAY_ENABLE_UV_RUN_RUNTIME_ENV := 0
unexport PYTHONDONTWRITEBYTECODE VIRTUAL_ENV
-include .venv/ostinato.mk
export PATH := $(PATH):$(CURDIR)/.uv/bin
BIN := .venv/bin
PACKAGES := $(wildcard packages/* apps/*)

.DEFAULT_GOAL := help
.PHONY: help setup ppo test test-gpu bench-data bench-algos bench-fsdp suites-alone check lint types layers isolated figures docs clean

help:  ## these lines
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup:  ## make .venv (fetches uv and finds a Python 3.12)
	@sh tools/bootstrap.sh

ppo: setup  ## GRPO, then PPO, end to end on this machine: a tiny model learns a verifiable task
	@$(BIN)/python examples/quickstart.py

test: setup  ## every test that needs no GPU
	@$(BIN)/python -m pytest -m "not gpu and not multigpu" packages apps tests

test-gpu: setup  ## the tests that need NVIDIA GPUs
	@$(BIN)/python -m pytest -m "gpu or multigpu" packages apps tests

check: setup lint types layers isolated figures  ## style, types, layers, namespaces, pins, each wheel alone

lint:
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types:
	@$(BIN)/basedpyright

layers:
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m pytest -q tests/contract

isolated:
	@$(BIN)/python tools/isolated.py

figures:
	@$(BIN)/python tools/figures.py

suites-alone: setup  ## protocol, algos and controller, each installed alone, run their own tests
	@$(BIN)/python tools/suites_alone.py

bench-fsdp: setup  ## an update and log-probabilities against a plain loop, padded and packed (on a CPU: a small model)
	@$(BIN)/python benchmarks/workers-fsdp/bench_update.py

bench-algos: setup  ## advantage estimators and statistics against verl's functions and a memory copy
	@$(BIN)/python benchmarks/algos/bench_verl.py

bench-data: setup  ## the data plane against a copy and against verl's DataProto; what a step and a call cost the driver
	@$(BIN)/python benchmarks/protocol/bench_dataproto.py
	@$(BIN)/python benchmarks/controller/bench_data_plane.py
	@$(BIN)/python benchmarks/controller/bench_ranks.py

docs: setup  ## regenerate docs/config.md
	@$(BIN)/python tools/gen_config_docs.py

clean:  ## remove what the above made, the environment included
	rm -rf .venv .uv dist .pytest_cache .ruff_cache .hypothesis
