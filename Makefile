# make help lists the targets.

GO ?= go
# What to test, and more flags for go test: make test PKG=./store/... ARGS='-run Claim -v'
PKG ?= ./...
ARGS ?=
# Of one package's tests. A test that hangs must end well before the whole run is given up.
TIMEOUT ?= 10m

GOTESTSUM = $(GO) run gotest.tools/gotestsum@v1.13.0
GOLANGCI = $(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0

.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | \
		while IFS='|' read -r name text; do printf '  %-14s %s\n' "$$name" "$$text"; done

.PHONY: test
test: fmt-check servers ## everything: formatting, vet, all tests with the race detector, on real servers
	@eval "$$(scripts/servers env)" && $(MAKE) --no-print-directory test-env

# The race detector needs cgo, and a slow disk is made by strace. Vet with -race shares its builds with the tests that follow.
.PHONY: test-env
test-env: ## vet and all tests, on the servers that the environment names (scripts/compose.yaml)
	@NEED_WITH=libc6-dev scripts/need gcc:gcc strace:strace
	CGO_ENABLED=1 $(GO) vet -race $(PKG)
	OUTRIDER_TEST_REQUIRE=1 CGO_ENABLED=1 $(GOTESTSUM) --format=pkgname-and-test-fails --format-hide-empty-pkg --hide-summary=skipped -- \
		-race -timeout=$(TIMEOUT) $(ARGS) $(PKG)

# Without the addresses, whatever needs a server skips itself.
.PHONY: test-short
test-short: ## quick tests, no servers
	env $$(env | sed -n 's/^\(OUTRIDER_TEST_[A-Z_]*\)=.*/-u \1/p') CI= \
		$(GO) test -short -timeout=$(TIMEOUT) $(ARGS) $(PKG)

# Random walks over the store seam: a bounded number is part of the tests, this is the long run.
.PHONY: model
model: servers ## thousands of random walks over each store: make model CHECKS=20000 ARGS='-run Postgres'
	@eval "$$(scripts/servers env)" && OUTRIDER_MODEL_CHECKS=$(or $(CHECKS),3000) \
		$(GO) test -count=1 -timeout=4h $(ARGS) ./test/model

# The short form is part of the tests. OUTRIDER_CRASH_SEED repeats a run, as far as processes let it.
.PHONY: crash
crash: servers ## kill -9: 30 times in 50,000 events with Kafka, 20 in 20,000 with SQLite and NATS; and halted relays
	@scripts/need strace:strace
	@eval "$$(scripts/servers env)" && OUTRIDER_CRASH=long OUTRIDER_TEST_REQUIRE=1 \
		$(GO) test -count=1 -timeout=1h -v $(ARGS) ./test/chaos

# Sizes of the tables over time, printed; the short form is part of the tests.
.PHONY: sizes
sizes: servers ## sizes beside a forgotten transaction and a standby with feedback: make sizes EVENTS=1000000
	@eval "$$(scripts/servers env)" && OUTRIDER_SIZES_EVENTS=$(or $(EVENTS),1000000) OUTRIDER_TEST_REQUIRE=1 \
		$(GO) test -count=1 -timeout=4h -v -run SizesBeside $(ARGS) ./pgstore

# Nothing in the tree is changed: the compiler is given other files.
.PHONY: bite
bite: servers ## take out of the code what its tests hold, line by line, and see each test fail: make bite ARGS='-only 5'
	@eval "$$(scripts/servers env)" && $(GO) run ./test/bite $(ARGS)

.PHONY: departures
departures: servers ## relay departures while they are booked: make departures FILE=departures.csv.gz
	@eval "$$(scripts/servers env)" && $(GO) run ./examples/departures --db "$$OUTRIDER_TEST_POSTGRES" \
		--kafka "$$OUTRIDER_TEST_KAFKA" $(if $(FILE),--file $(FILE)) $(ARGS)

# Three quarters of an hour in full, on a machine that does nothing else. docs/BENCH.md says what it measures.
.PHONY: bench
bench: servers ## ratios against bare loops, 45 minutes: make bench SCENARIOS='kafka memsink' PAIRS=3
	@eval "$$(scripts/servers env)" && $(GO) run ./bench -pairs $(or $(PAIRS),5) $(if $(JSON),-json $(JSON)) $(ARGS) $(SCENARIOS)

.PHONY: lint
lint: fmt-check ## the rules in .golangci.yml; the first run builds golangci-lint, for a minute or two
	$(GOLANGCI) run $(PKG)

.PHONY: fmt
fmt: ## format all Go files
	gofmt -w .

.PHONY: fmt-check
fmt-check:
	@files=$$(gofmt -l .); if [ -n "$$files" ]; then echo "not formatted (make fmt):" $$files >&2; exit 1; fi

.PHONY: servers
servers: ## bring the real servers up; they stay up
	@scripts/servers up

.PHONY: servers-down
servers-down: ## take them down; their data stays
	@scripts/servers down
