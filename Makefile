# Prerequisites: Linux x86-64, Rust 1.89+, python3 with pip and venv, make, a C compiler. Everything else is fetched here.
LTX2 := target/release/ltx2
CPU_PLUGIN := plugins/cpu/installed.txt

.PHONY: reliability oracle-check verify-rehearsal demo reference nano-sheet test-nano nano-parity check test test-tpu test-cuda test-gpu test-full mutants soak fuzz fuzz-seeds sanitize sanitize-leaks sanitize-threads test-mosaic tpu-tables test-processes-gpu ablations-gpu agree traces-gpu ablations tuning-image layouts-figure fixtures report-page serve-page serve-sdk serve-load container clean-demo

# A video with sound by the toy model of assets/nano: PROMPT="a red circle bounces on blue, low beeps".
PROMPT ?= a red circle bounces on blue, low beeps
demo: $(CPU_PLUGIN)
	$(LTX2) generate -c configs/nano.yml --prompt "$(PROMPT)" -o out/demo.mp4 --force

# The README's image: what the toy model makes of the prompts in docs/images/nano.txt.
nano-sheet: $(CPU_PLUGIN)
	rm -rf out/sheet
	$(LTX2) generate -c configs/nano.yml --platform cpu --prompts docs/images/nano.txt -o out/sheet/clips \
		--set output.save_frames=out/sheet/frames --set output.save_audio=out/sheet/sounds
	cargo run --locked --release --example contact_sheet out/sheet/frames out/sheet/sounds > docs/images/nano.png

$(LTX2): FORCE
	cargo build --release --locked

FORCE:

$(CPU_PLUGIN): $(LTX2)
	$(LTX2) plugin install cpu

# The tiers of docs/internals/testing.md. Each runs to its end; its last line counts what passed, failed and was ignored.
TIER := python3 scripts/tests/tier.py

# Formatting, lints, dependencies and the tests that need no plugin.
check:
	$(TIER) check

# Decides whether a change is right: the CPU plugin with one and with eight virtual devices.
test:
	$(TIER) test

# Compiles the programs for TPUs, without a TPU.
test-tpu:
	$(TIER) test-tpu

# Compiles the programs for CUDA, without a GPU.
test-cuda:
	$(TIER) test-cuda

# On the NVIDIA GPUs of this machine: agreement with the CPU, repeatability, several against one.
test-gpu:
	$(TIER) test-gpu

# Everything: long runs, all combinations of layouts, all prompts, JAX's kernels, damaged inputs, planted faults.
test-full:
	$(TIER) test-full

# Writes the generated pages of docs/reference: the command line, the YAML's keys and their JSON Schemas.
reference:
	LTX2_WRITE_REFERENCE=1 cargo test --locked --test host reference::

# The table of docs/internals/reliability.md with pass, fail or not run a row; what no tier has run, or in short only, is run in full.
reliability:
	python3 scripts/tests/reliability.py --run

# Plants faults one at a time; the test named with each must find it: scripts/mutants/README.md.
mutants:
	python3 scripts/mutants/mutants.py

# All held-out prompts of the toy model, with guidance and without; `make test` has some of them.
test-nano: $(CPU_PLUGIN)
	LTX2_REQUIRE=cpu LTX2_TEST_FULL=1 cargo test --locked --release --test cli nano_quality::

# The same clips by diffusers from the same weights and noise, with both scores; needs the .venv of `make fixtures`.
nano-parity: $(CPU_PLUGIN)
	.venv/bin/python scripts/nano/parity.py assets/nano $(LTX2)
	.venv/bin/python scripts/nano/parity.py assets/nano $(LTX2) --dtype bf16 --count 8

# Bytes from elsewhere, damaged two million times each, by tests/it/fuzz_regression.rs on the stable toolchain.
RUNS ?= 2000000
soak:
	LTX2_FUZZ_CASES=$(RUNS) cargo test --locked --release --test it fuzz_regression::

# The same readers under libFuzzer with AddressSanitizer, each for RUNS runs or SECONDS of processor time, or only READERS:
# benchmarks/fuzz.md. Needs nightly with llvm-tools, and `cargo install cargo-fuzz --locked`.
READERS ?=
SECONDS ?= 1200
fuzz:
	python3 scripts/fuzz/run.py $(READERS) --runs $(RUNS) --seconds $(SECONDS)

# Sanitizers, which need nightly. The layers that call C and the readers of files under AddressSanitizer: the plugin is not built so,
# and what it never frees is not looked at. The ABI's own crate with leaks, by its tests and on the CPU plugin. Runtime and server under
# ThreadSanitizer, with rust-src, and on scripted devices alone: no plugin is found, so tests that need one are ignored.
SANITIZED := --locked --target x86_64-unknown-linux-gnu
sanitize: sanitize-leaks
	for part in "--lib" "--test it pjrt::" "--test it spmd::" "--test it fuzz_regression::"; do \
		RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=0 LTX2_REQUIRE=cpu \
			cargo +nightly test $(SANITIZED) $$part || exit 1; \
	done

sanitize-leaks:
	for part in "test --lib" "run --example hello"; do \
		RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=1 LSAN_OPTIONS=suppressions=$(CURDIR)/scripts/tests/leaks.supp \
			cargo +nightly $$part $(SANITIZED) -p ltx2-pjrt || exit 1; \
	done

# Without the tests that judge times and memory, which are others under it.
sanitize-threads:
	for part in "--lib runtime::" "--test serve -- --skip load:: --skip costs_little --skip slow_clients --skip within_two_seconds"; do \
		RUSTFLAGS=-Zsanitizer=thread LTX2_PJRT_PLUGIN=/nowhere/cpu.so TSAN_OPTIONS=suppressions=$(CURDIR)/scripts/tests/threads.supp \
			cargo +nightly test -Zbuild-std $(SANITIZED) $$part || exit 1; \
	done

# Optimized modules of three platforms, by the plugins of all of them, and LoRA files.
fuzz-seeds:
	cargo build --locked
	scripts/fuzz/seeds.sh

# The TPU's attention kernel by the interpreter of tests/it/mosaic, and the interpreter by JAX's own kernel, which JAX writes
# here: nothing of it is kept in the repository.
JAX_FLASH := target/jax-flash

test-mosaic:
	python3 -m venv $(JAX_FLASH)/venv
	$(JAX_FLASH)/venv/bin/pip install -q jax==0.10.2
	$(JAX_FLASH)/venv/bin/python scripts/oracle/jax_flash.py $(JAX_FLASH)/cases
	LTX2_REQUIRE=jax LTX2_JAX_FLASH=$(CURDIR)/$(JAX_FLASH)/cases cargo test --locked --test it mosaic::

# Several processes on the GPUs of this machine: the bytes of one process; all exit if one is killed.
test-processes-gpu: $(LTX2)
	scripts/gpu/setup.sh $(LTX2)
	scripts/gpu/processes.sh $(LTX2) out/processes

# Compares `ltx2 profile` with xprof on traces: by default all that scripts/tune/trace.sh left in out/traces.
XPROF := target/xprof
TRACES ?= $(shell find out/traces -name '*.xplane.pb*' 2> /dev/null)

agree: $(LTX2)
	python3 -m venv $(XPROF)
	$(XPROF)/bin/pip install -q -r scripts/tune/requirements.txt
	$(XPROF)/bin/python scripts/tune/agree.py $(LTX2) $(TRACES)

# Records those traces on the NVIDIA GPUs of this machine.
traces-gpu: $(LTX2)
	scripts/gpu/setup.sh $(LTX2)
	scripts/tune/trace.sh $(LTX2) out/traces

# What each technique saves on the GPUs of this machine: benchmarks/ablations-gpu.md.
ablations-gpu: $(LTX2)
	scripts/gpu/setup.sh $(LTX2)
	python3 scripts/gpu/ablations.py --ltx2 $(LTX2) -o benchmarks/ablations-gpu.md

# Memory and predicted times of TPU slices, compiled without one: the tables of benchmarks/tpu.md. An hour.
tpu-tables: $(LTX2)
	$(LTX2) plugin install tpu
	python3 scripts/layouts/pods.py --ltx2 $(LTX2) -o benchmarks/tpu.md

# The published ablation, compiled for TPUs and GPUs; half an hour, of which nothing is done twice. Its measurements on four
# H200s are in benchmarks/calibration.
out/ablation/results.jsonl: $(LTX2)
	$(LTX2) plugin install tpu
	$(LTX2) plugin install cuda
	mkdir -p out/ablation
	[ -e $@ ] || cp benchmarks/calibration/ablation-4.jsonl $@
	TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 $(LTX2) experiment experiments/ablation.yml -o out/ablation

# What each published tuning step saves: benchmarks/ablations.md.
ablations: out/ablation/results.jsonl
	python3 scripts/layouts/ablations.py out/ablation/results.jsonl -o benchmarks/ablations.md

# The tuning guide's images of that experiment's report, in a Chromium of its own.
BROWSER := target/browser
BROWSE := $(BROWSER)/venv/bin/python

TUNING_LOOKS := light,--size,1300x1150 dark,--size,1300x900,--dark,--at,.figures narrow,--size,360x900,--at,.figures

tuning-image: out/ablation/results.jsonl
	scripts/browser/setup.sh $(BROWSER)
	for look in $(TUNING_LOOKS); do \
		$(BROWSE) scripts/tune/browse.py out/ablation/report.html docs/images/tuning-$${look%%,*}.png \
			$$(echo "$${look#*,}" | tr , ' ') || exit 1; \
	done

# Reports of 60 and of 400 made-up cases in that Chromium, with axe. One case: ONLY=overlap.
REPORTS := target/report-page
report-page:
	mkdir -p $(REPORTS)
	LTX2_WRITE_REPORTS=$(CURDIR)/$(REPORTS) cargo test --locked --lib tune::html
	scripts/browser/setup.sh $(BROWSER)
	$(BROWSE) scripts/tune/check.py $(REPORTS) $(BROWSER) $(REPORTS) $(if $(ONLY),--only $(ONLY))

# The server's page in that Chromium, with axe, on a server of the toy model; writes docs/images/serve-*.png. One case: ONLY=narrow.
serve-page:
	cargo build --locked
	target/debug/ltx2 plugin install cpu
	scripts/browser/setup.sh $(BROWSER)
	$(BROWSE) scripts/serve/page/check.py target/debug/ltx2 $(BROWSER) target/serve-page \
		$(if $(ONLY),--only $(ONLY),--images docs/images)

# Collectives of a transformer block by layout, compiled for TPUs, and the figure of them. A quarter of an hour.
FIGURES := benchmarks/layouts
V5P_LAYOUTS := cfg-ulysses ulysses hybrid ring sequence
V6E_LAYOUTS := tensor fsdp-ulysses
FIGURE = TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 $(LTX2) compile -c ltx2 --layers 3

layouts-figure: $(LTX2)
	$(LTX2) plugin install tpu
	mkdir -p $(FIGURES)
	for l in $(V5P_LAYOUTS); do $(FIGURE) --target tpu:v5p:2x2x2 --layout $$l --json $(FIGURES)/$$l.json --force || exit 1; done
	for l in $(V6E_LAYOUTS); do $(FIGURE) --target tpu:v6e:2x4 --layout $$l --json $(FIGURES)/$$l.json --force || exit 1; done
	cargo run --locked --example layouts_figure $(FIGURES)/*.json > $(FIGURES).svg

# The binary beside the reference on random models and requests, all drawn: SEEDS of them from FIRST, or one, SEED; then the same of
# LTX-2.5. PYTHON is
# a Python that has the pinned reference; left out, a venv is made once.
ORACLE := target/oracle
PYTHON ?= $(ORACLE)/bin/python
FIRST ?= 0
SEEDS ?= 100
SEEDS_2_5 ?= 40

oracle-check:
	cargo build --locked
	target/debug/ltx2 plugin install cpu
	[ "$(PYTHON)" != $(ORACLE)/bin/python ] || scripts/oracle/venv.sh $(ORACLE)
	for of in "" "--generation 2.5"; do \
		OMP_NUM_THREADS=1 $(PYTHON) scripts/oracle/check.py --ltx2 target/debug/ltx2 $$of \
			$(if $(SEED),--seed $(SEED),--seeds $(FIRST) $$([ -z "$$of" ] && echo $(SEEDS) || echo $(SEEDS_2_5))) || exit 1; \
	done

# scripts/verify_real.sh from end to end on tiny random models; docs/images/verify.png is the top of one of its reports.
verify-rehearsal: $(CPU_PLUGIN)
	[ "$(PYTHON)" != $(ORACLE)/bin/python ] || scripts/oracle/venv.sh $(ORACLE)
	PYTHON=$(PYTHON) scripts/verify/rehearse.sh $(LTX2) out/rehearsal

# OpenAI's own Python client against `ltx2 serve` on the toy model, and, from PEERS, a folder of their checkouts, the example
# clients of SGLang, vLLM-Omni and TensorRT-LLM. RECORD=1 writes the requests that `cargo test --test serve recorded::` sends again.
SERVE_SDK := target/serve-sdk
RECORDED := tests/fixtures/serve

serve-sdk:
	cargo build --locked
	target/debug/ltx2 plugin install cpu
	python3 -m venv $(SERVE_SDK)
	$(SERVE_SDK)/bin/pip install -q -r scripts/serve/requirements.txt
	$(SERVE_SDK)/bin/python scripts/serve/sdk.py --ltx2 target/debug/ltx2 $(if $(RECORD),--record $(RECORDED)/openai.json)
	$(SERVE_SDK)/bin/python scripts/serve/peers.py --ltx2 target/debug/ltx2 --peers "$(PEERS)" \
		$(if $(RECORD),--record $(RECORDED)/peers.json)

# The server under load, faults and full disks, as it is installed (a release build): the table of benchmarks/serving.md. A quarter
# of an hour.
serve-load: $(LTX2)
	$(LTX2) plugin install cpu
	python3 scripts/serve/load.py -o benchmarks/serving.md

# An image of the server by docker; where there is none, the steps of its recipe in a clean folder.
IMAGE ?= ltx2
ACCELERATOR ?= cpu
container:
	container/build.sh $(ACCELERATOR) $(IMAGE)

# Regenerates tests/fixtures from the pinned reference releases.
fixtures:
	python3 -m venv .venv
	.venv/bin/pip install -q -r scripts/oracle/requirements.txt
	.venv/bin/pip install -q --no-deps -r scripts/oracle/requirements-official.txt
	.venv/bin/python scripts/oracle/make_fixtures.py
	.venv/bin/python scripts/oracle/cases_official.py
	.venv/bin/python scripts/oracle/cases_given_video.py
