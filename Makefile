# What a person types. A target is one script or one cargo call; what there is to know is written in that script.
#
# PG_CONFIG=...   the PostgreSQL to use. install: default is the pg_config of PATH. The others: that one if it will do, else the
#                 newest PostgreSQL 15 to 18 on the machine, else the distribution's own, which is installed.
# ARGS=...        handed on: to the server tests a filter, to the benchmark its options, to psql its own.
#
# RUSTFLAGS and cargo's variables are left alone on purpose: cargo-pgrx adds linker arguments that they would replace.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test psql install bench fmt lint clean distclean

export PG_CONFIG

# bootstrap, then the extension in the PostgreSQL that bootstrap has seen to
ready = @scripts/bootstrap $(1) && scripts/install "$$(scripts/pg-config)"

help: ## this list
	@echo 'make TARGET [PG_CONFIG=/path/to/pg_config] [ARGS=...]'
	@echo
	@sed -nE 's/^([a-z]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: ## the story of a stale worker, without and with the fence; installs what is missing
	$(call ready,build)
	@scripts/cluster demo/story

test: ## all tests; installs what is missing (ARGS: a filter for the server tests)
	$(call ready,test)
	@scripts/test $(ARGS)

psql: ## a psql to play with, on a throwaway server with the example loaded
	$(call ready,build)
	@scripts/cluster demo/psql $(ARGS)

install: ## only build a release and install it into PG_CONFIG (default: the pg_config of PATH)
	@scripts/install

bench: ## leasehold beside its peers, medians and ratios
	$(call ready,build)
	@cargo run --quiet --release --package leasehold-bench -- --pg-config "$$(scripts/pg-config)" $(ARGS)

fmt: ## format the Rust code
	@cargo fmt --all

lint: ## rustfmt and clippy, a finding is an error
	@scripts/bootstrap test
	@scripts/lint

clean: ## remove what was built, but not the installed build tools
	@[ ! -d target ] || find target -mindepth 1 -maxdepth 1 ! -name tools ! -name clusters -exec rm -rf {} +

distclean: ## remove all of target/
	@rm -rf target
