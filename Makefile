# One command to see it (make demo), and one to test it (make test). CI runs the second.

CARGO ?= cargo
TARGET_DIR := $(abspath $(or $(CARGO_TARGET_DIR),target))

# Most tests wait for servers and not for the processor, so there are more of them at once than two cores.
export RUST_TEST_THREADS ?= 4

.PHONY: help demo bench test failures soak check format-check lint docs relay servers test-servers cargo

help:
	@echo "make demo    the order shop on private servers, two of them killed in the middle (DEMO_ORDERS=20000)"
	@echo "make bench   how fast it is, on private servers (QUICK=1: about three minutes)"
	@echo "make test    formatting, lints, documentation, all tests and doctests; what CI runs"
	@echo "make failures  every fault of the failure suite, against naive code and against the outbox; prints a table"
	@echo "make soak    its soak alone, reproducible (SECONDS=600 SEED=1)"
	@echo "make check   the quick part of it: formatting and lints"
	@echo "make relay   the release binary of the relay"

demo: servers cargo
	$(CARGO) build --release --locked -p outbox-demo -p outbox-relay
	@exec $(TARGET_DIR)/release/outbox-demo

# A measure alone: BENCH="--only latency"; all of them: BENCH=--list
bench: servers cargo
	$(CARGO) build --release --locked -p outbox-bench -p outbox-relay
	@exec $(TARGET_DIR)/release/outbox-bench $(if $(filter-out 0,$(QUICK)),--quick) $(BENCH)

test: test-servers check docs
	$(CARGO) test --locked --workspace --no-fail-fast

# ARGS are those of `outbox-failures run`: ARGS='--only FLUSHALL', or --consumer for your own handler.
failures: servers cargo
	$(CARGO) build --release --locked -p outbox-relay -p outbox-tests
	@exec $(TARGET_DIR)/release/outbox-failures run --report $(TARGET_DIR) $(ARGS)

SECONDS ?= 600
SEED ?= 1
soak:
	$(MAKE) failures ARGS="--only soak --soak-seconds $(SECONDS) --seed $(SEED)"

check: format-check lint

format-check: cargo
	$(CARGO) fmt --all --check

lint: cargo
	$(CARGO) clippy --locked --workspace --all-targets -- -D warnings

docs: cargo
	RUSTDOCFLAGS="-D warnings" $(CARGO) doc --locked --workspace --no-deps

relay: cargo
	$(CARGO) build --release --locked -p outbox-relay

# Postgres and Redis, installed where they are missing.
servers:
	@sh scripts/install-servers.sh

# What tests put before and beside them, too.
test-servers:
	@sh scripts/install-servers.sh --for-tests

cargo:
	@command -v $(CARGO) >/dev/null || { \
		echo "There is no $(CARGO): install Rust 1.89 or later, see https://rustup.rs" >&2; exit 1; }
	@command -v cc >/dev/null || { \
		echo "There is no C compiler (cc): apt-get install gcc libc6-dev, or xcode-select --install" >&2; exit 1; }
