# What a person types. A target is one script or one cargo call; what there is to know is written in that script.
#
# PG_CONFIG=...   the PostgreSQL to use. install: default is the pg_config of PATH. The others: that one if it will do, else the
#                 newest PostgreSQL 15 to 18 on the machine, else the distribution's own, which is installed.
# MAJORS=...      test-assert and test-majors: those PostgreSQLs, of those that scripts/build-postgres can build
# MINUTES=, SEED= chaos: for how long, and which one; KILLS=, PROMOTIONS=, CLOCK_STEPS= and more: pg_test/src/chaos/long.rs
# ARGS=...        handed on: to the server tests a filter, to the benchmark its options, to psql its own.
#
# RUSTFLAGS and cargo's variables are left alone on purpose: cargo-pgrx adds linker arguments that they would replace.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help demo test chaos test-assert test-majors psql install bench fmt lint clean distclean

export PG_CONFIG

# bootstrap, then the extension in the PostgreSQL that bootstrap has seen to
ready = @scripts/bootstrap $(1) && scripts/install "$$(scripts/pg-config)"

help: ## this list
	@echo 'make TARGET [PG_CONFIG=/path/to/pg_config] [ARGS=...]'
	@echo
	@sed -nE 's/^([a-z-]+):.*## (.*)/  \1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

demo: ## the story of a stale worker, without and with the fence; installs what is missing
	$(call ready,build)
	@scripts/cluster demo/story

test: ## all tests; installs what is missing (ARGS: a filter for the server tests)
	$(call ready,test)
	@scripts/test $(ARGS)

chaos: ## kills, stops, promotions and clock steps under load for MINUTES=n, or KILLS=n PROMOTIONS=n ...; SEED=n repeats
	$(call ready,test)
	@cargo run --quiet --package leasehold-pg-test -- --chaos --pg-config "$$(scripts/pg-config)"

test-assert: ## all tests on a PostgreSQL 15 compiled from Debian's source package with its assertions
	@scripts/test-majors assert '$(or $(MAJORS),15)' $(ARGS)

test-majors: ## all tests on PostgreSQL 15, 17 and 18, compiled from Debian's source packages
	@scripts/test-majors plain '$(or $(MAJORS),15 17 18)' $(ARGS)

psql: ## a psql to play with, on a throwaway server with the example loaded
	$(call ready,build)
	@scripts/cluster demo/psql $(ARGS)

install: ## only build a release and install it into PG_CONFIG (default: the pg_config of PATH)
	@scripts/install

bench: ## leasehold beside its peers, medians and ratios (ARGS='--help': its parts and options)
	$(call ready,bench)
	@cargo run --quiet --release --package leasehold-bench -- --pg-config "$$(scripts/pg-config)" $(ARGS)

fmt: ## format the Rust code
	@cargo fmt --all

lint: ## rustfmt and clippy, a finding is an error
	@scripts/bootstrap test
	@scripts/lint

clean: ## remove what was built, but not the installed build tools and PostgreSQLs
	@[ ! -d target ] || find target -mindepth 1 -maxdepth 1 ! -name tools ! -name postgres ! -name clusters -exec rm -rf {} +

distclean: ## remove all of target/
	@scripts/build-postgres remove
	@rm -rf target
