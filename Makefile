# Needs Linux x86-64, Rust 1.89+, make and a C compiler; tests, `make dist` and tools also need python3 with pip and venv.
LTX2 := target/release/ltx2
DEBUG := target/debug/ltx2

.PHONY: $(filter-out out/% plugin-%,$(MAKECMDGOALS)) sanitize-leaks debug $(LTX2)

# A video with sound by the toy model in assets/nano: make demo PROMPT="a red circle bounces on blue, low beeps".
PROMPT ?= a red circle bounces on blue, low beeps
unexport PROMPT
demo: export DEMO_PROMPT = $(value PROMPT)
demo: plugin-cpu
	$(LTX2) generate -c configs/nano.yml --prompt "$$DEMO_PROMPT" -o out/demo.mp4 --force

# Writes docs/images/nano.png, the README's image.
nano-sheet: plugin-cpu
	rm -rf out/sheet
	$(LTX2) generate -c configs/nano.yml --platform cpu --prompts docs/images/nano.txt -o out/sheet/clips \
		--set output.save_frames=out/sheet/frames --set output.save_audio=out/sheet/sounds
	cargo run --locked --release --example contact_sheet out/sheet/frames out/sheet/sounds > docs/images/nano.png

$(LTX2):
	cargo build --release --locked

plugin-%: $(LTX2)
	$(LTX2) plugin install $*

debug:
	cargo build --locked
	$(DEBUG) plugin install cpu

# $(call VENV,FOLDER,PACKAGES)
VENV = python3 -m venv $(1) && $(1)/bin/pip install -q $(2)

# Test tiers: docs/internals/testing.md.
lint check test test-tpu test-cuda test-gpu test-full:
	python3 scripts/tests/tier.py $@

reference:
	LTX2_WRITE_REFERENCE=1 cargo test --locked --test host reference::
	LTX2_WRITE_REFERENCE=1 cargo test --locked --test it formats::

# Runs the tests of docs/internals/reliability.md in full; prints pass or fail per row.
reliability:
	python3 scripts/tests/reliability.py

# Mutates the modules in .cargo/mutants.toml in place, one shard a day. Needs `cargo install cargo-mutants --locked`.
SHARDS := 60
SHARD ?= $(shell expr $$(date +%s) / 86400 % $(SHARDS))/$(SHARDS)
mutants: debug
	LTX2_REQUIRE=cpu cargo mutants --workspace --in-place --no-shuffle --shard $(SHARD) --output target \
		-- --locked --lib --test host --test it -- --skip source_rules::

# All held-out prompts of the toy model; `make test` has some of them.
test-nano: plugin-cpu
	LTX2_REQUIRE=cpu LTX2_TEST_FULL=1 cargo test --locked --release --test cli nano_quality::

# The same clips by diffusers from the same weights and noise; needs the .venv of `make fixtures`.
nano-parity: plugin-cpu
	.venv/bin/python scripts/nano/parity.py assets/nano $(LTX2)
	.venv/bin/python scripts/nano/parity.py assets/nano $(LTX2) --dtype bf16 --count 8

# The fuzz readers on the stable toolchain, RUNS damaged inputs each, and every out-of-range number of a model config.
RUNS ?= 2000000
soak:
	LTX2_FUZZ_CASES=$(RUNS) cargo test --locked --release --test it fuzz_regression::
	cargo test --locked --release --lib pipeline::plan::derive::

# The fuzz readers (or READERS alone) under libFuzzer with AddressSanitizer, RUNS runs or SECONDS (1200) of processor time each.
# Needs nightly with llvm-tools, and `cargo install cargo-fuzz --locked`.
fuzz:
	python3 scripts/fuzz/run.py $(READERS) --runs $(RUNS) $(if $(SECONDS),--seconds $(SECONDS))

# Writes fuzz/seeds/module: optimized modules of three platforms.
fuzz-seeds:
	cargo build --locked
	scripts/fuzz/seeds.py

# Tests under sanitizers; needs nightly. Leaks are checked only in the ABI crate, as plugins leak.
# $(call SANITIZED,SANITIZER,VARIABLES,COMMANDS)
SANITIZED = for command in $(3); do RUSTFLAGS=-Zsanitizer=$(1) CARGO_BUILD_TARGET=x86_64-unknown-linux-gnu $(2) \
	cargo +nightly --locked $$command || exit 1; done
sanitize: sanitize-leaks
	$(call SANITIZED,address,ASAN_OPTIONS=detect_leaks=0 LTX2_REQUIRE=cpu,"test --lib" "test --test it pjrt::" \
		"test --test it spmd::" "test --test it fuzz_regression::")

sanitize-leaks:
	$(call SANITIZED,address,ASAN_OPTIONS=detect_leaks=1 LSAN_OPTIONS=suppressions=$(CURDIR)/scripts/tests/leaks.supp,\
		"test --lib -p ltx2-pjrt" "run --example hello -p ltx2-pjrt")

# Runtime and server under ThreadSanitizer (needs rust-src), without a plugin and without tests that judge time or memory.
TIMED := $(addprefix --skip ,load:: request_overhead_is_small slow_clients within_two_seconds)
sanitize-threads:
	$(call SANITIZED,thread,LTX2_PJRT_PLUGIN=/nowhere/cpu.so TSAN_OPTIONS=suppressions=$(CURDIR)/scripts/tests/threads.supp,\
		"test -Zbuild-std -p ltx2-runtime --lib" "test -Zbuild-std --test serve -- $(TIMED)")

# The interpreter of Mosaic kernels (tests/it/mosaic) against JAX's own flash attention.
JAX_FLASH := target/jax-flash
jax-cases:
	$(call VENV,$(JAX_FLASH)/venv,jax==0.10.2)
	$(JAX_FLASH)/venv/bin/python scripts/oracle/jax_flash.py $(JAX_FLASH)/cases

test-mosaic: jax-cases
	LTX2_REQUIRE=jax LTX2_JAX_FLASH=$(CURDIR)/$(JAX_FLASH)/cases cargo test --locked --test it mosaic::

# Several processes on the GPUs of this machine: the bytes of one process, equal repetitions; all exit if one is killed.
test-processes-gpu: $(LTX2)
	scripts/gpu/setup.sh $(LTX2)
	scripts/gpu/processes.sh $(LTX2) out/processes

# Compares `ltx2 profile` with xprof on TRACES; default: all that `make traces-gpu` recorded.
XPROF := target/xprof
TRACES ?= $(shell find out/traces -name '*.xplane.pb*' 2> /dev/null)
agree: $(LTX2)
	$(call VENV,$(XPROF),-r scripts/tune/requirements.txt)
	$(XPROF)/bin/python scripts/tune/agree.py $(LTX2) $(TRACES)

traces-gpu: $(LTX2)
	scripts/gpu/setup.sh $(LTX2)
	scripts/tune/trace.sh $(LTX2) out/traces

# Writes the tables of benchmarks/tpu.md by compiling for TPU slices without a TPU. An hour.
tpu-tables: plugin-tpu
	python3 scripts/layouts/pods.py $(LTX2) benchmarks/tpu.md

# The published ablation: half an hour; cases that are done are not repeated.
TPU_ENV := TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
out/ablation/results.jsonl: plugin-tpu plugin-cuda
	mkdir -p out/ablation
	[ -e $@ ] || cp benchmarks/calibration/ablation-4.jsonl $@
	$(TPU_ENV) $(LTX2) experiment experiments/ablation.yml -o out/ablation

# Writes benchmarks/ablations.md: what each published tuning step saves.
ablations: out/ablation/results.jsonl
	python3 scripts/layouts/ablations.py out/ablation/results.jsonl benchmarks/ablations.md

# Writes docs/images/tuning-*.png: that experiment's report in the pinned Chromium.
BROWSER := target/browser
BROWSE := scripts/browser/setup.sh $(BROWSER) && $(BROWSER)/venv/bin/python
tuning-image: out/ablation/results.jsonl
	$(BROWSE) scripts/tune/check.py out/ablation/report.html $(BROWSER) docs/images

# Tests an experiment's report in the pinned Chromium, with axe. One case: ONLY=overlap.
REPORTS := target/report-page
report-page:
	mkdir -p $(REPORTS)
	LTX2_WRITE_REPORTS=$(CURDIR)/$(REPORTS) cargo test --locked --lib tune::html
	$(BROWSE) scripts/tune/check.py $(REPORTS) $(BROWSER) $(REPORTS) $(if $(ONLY),--only $(ONLY))

# Tests the server's page in the pinned Chromium, with axe, and writes docs/images/serve-*.png. One case: ONLY=narrow.
serve-page: debug
	$(BROWSE) scripts/serve/page/check.py $(DEBUG) $(BROWSER) target/serve-page $(if $(ONLY),--only $(ONLY),--images docs/images)

# Writes benchmarks/layouts: the collectives of a transformer block by layout, compiled for TPUs. A quarter of an hour.
FIGURES := benchmarks/layouts
FIGURE = $(TPU_ENV) $(LTX2) compile -c ltx2 --layers 3 --force
layouts-figure: plugin-tpu
	mkdir -p $(FIGURES)
	for l in cfg-ulysses ulysses hybrid ring sequence; do \
		$(FIGURE) --target tpu:v5p:2x2x2 --layout $$l --json $(FIGURES)/$$l.json || exit 1; done
	for l in tensor fsdp-ulysses; do $(FIGURE) --target tpu:v6e:2x4 --layout $$l --json $(FIGURES)/$$l.json || exit 1; done
	cargo run --locked --example layouts_figure $(FIGURES)/*.json > $(FIGURES).svg

# Compares ltx2 with the reference on random models and requests: seeds FIRST to FIRST + SEEDS, or SEED alone.
# PYTHON is a Python that has the pinned reference; default: a venv that is created once.
ORACLE := target/oracle
PYTHON ?= $(ORACLE)/bin/python
ORACLE_VENV = [ "$(PYTHON)" != $(ORACLE)/bin/python ] || scripts/oracle/venv.sh $(ORACLE)
FIRST ?= 0
SEEDS ?= 100
SEEDS_2_5 ?= 40
ORACLE_CHECK = OMP_NUM_THREADS=1 $(PYTHON) scripts/oracle/check.py --ltx2 $(DEBUG)
oracle-check: debug
	$(ORACLE_VENV)
	$(ORACLE_CHECK) $(if $(SEED),--seed $(SEED),--seeds $(FIRST) $(SEEDS))
	$(ORACLE_CHECK) --generation 2.5 $(if $(SEED),--seed $(SEED),--seeds $(FIRST) $(SEEDS_2_5))

# scripts/verify_real.sh from end to end on tiny random models.
verify-rehearsal: plugin-cpu
	$(ORACLE_VENV)
	$(PYTHON) scripts/verify/rehearse.py $(LTX2) out/rehearsal

# OpenAI's Python client against `ltx2 serve` on the toy model; with PEERS, a folder of checkouts, also the example clients of
# SGLang, vLLM-Omni and TensorRT-LLM. RECORD=1 writes the requests that `cargo test --test serve recorded::` replays.
SERVE_SDK := target/serve-sdk
RECORDED := tests/fixtures/serve
serve-sdk: debug
	$(call VENV,$(SERVE_SDK),-r scripts/serve/requirements.txt)
	$(SERVE_SDK)/bin/python scripts/serve/sdk.py --ltx2 $(DEBUG) $(if $(RECORD),--record $(RECORDED)/openai.json)
	$(SERVE_SDK)/bin/python scripts/serve/peers.py --ltx2 $(DEBUG) --peers "$(PEERS)" $(if $(RECORD),--record $(RECORDED)/peers.json)

# Writes benchmarks/serving.md: the server under load, faults and full disks. A quarter of an hour.
serve-load: plugin-cpu
	python3 scripts/serve/load.py benchmarks/serving.md

# An image of the server by docker; without docker, the same steps in a clean folder. ACCELERATOR=cuda, IMAGE=NAME.
container:
	container/build.sh $(or $(ACCELERATOR),cpu) $(IMAGE)

# Packages in target/dist: a wheel, a tarball with the wheel's binary, and SHA256SUMS. Zig links for the glibc that pyproject.toml
# states. The tools come from PyPI.
DIST := target/dist
TREE = $(DIST)/ltx2-$(shell sed -n 's/^version = "\(.*\)"/\1/p' Cargo.toml | head -1)-x86_64-linux
dist: export SOURCE_DATE_EPOCH = $(shell git log -1 --format=%ct)
dist:
	$(call VENV,target/dist-tools,maturin==1.16.0 ziglang==0.15.2)
	rm -rf $(DIST) && mkdir -p $(TREE)/completions
	PATH="$(CURDIR)/target/dist-tools/bin:$$PATH" maturin build --release --zig --out $(DIST)
	python3 -m zipfile -e $(DIST)/*.whl $(DIST)/wheel && install $(DIST)/wheel/*.data/scripts/ltx2 $(TREE)
	cp LICENSE README.md $(TREE)
	for file in bash/ltx2.bash fish/ltx2.fish zsh/_ltx2; do \
		$(TREE)/ltx2 completions $${file%/*} > $(TREE)/completions/$${file#*/} || exit 1; done
	tar --sort=name --owner=0 --group=0 --numeric-owner --mode=u+rwX,go=rX --mtime=@$$SOURCE_DATE_EPOCH \
		-C $(DIST) -c $(notdir $(TREE)) | gzip -9n > $(TREE).tar.gz
	rm -r $(DIST)/wheel $(TREE)
	cd $(DIST) && sha256sum ltx2-* > SHA256SUMS

# Regenerates tests/fixtures from the pinned releases, and with OFFICIAL=FOLDER from the checkout: scripts/oracle/README.md.
fixtures:
	scripts/oracle/venv.sh .venv
	.venv/bin/python scripts/oracle/make_fixtures.py
	$(if $(OFFICIAL),.venv/bin/python scripts/oracle/make_fixtures.py --official $(OFFICIAL))
