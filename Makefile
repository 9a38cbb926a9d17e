# Everything a fresh machine needs beside a Rust toolchain, python3 with pip, make and a C compiler is fetched here.
LTX2 := target/release/ltx2
CPU_PLUGIN := plugins/cpu/installed.txt

.PHONY: demo nano-sheet test-nano nano-parity check test test-tpu test-cuda test-gpu test-full mutants soak fuzz fuzz-seeds sanitize test-mosaic tpu-tables test-processes-gpu ablations-gpu agree traces-gpu ablations tuning-picture layouts-figure fixtures clean-demo

# A video with sound from a prompt, by the trained toy model of assets/nano: PROMPT="a red circle bounces on blue, low beeps".
PROMPT ?= a red circle bounces on blue, low beeps
demo: $(CPU_PLUGIN)
	$(LTX2) generate -c configs/nano.yml --prompt "$(PROMPT)" -o out/demo.mp4 --force

# The README's picture of what the toy model makes of the prompts in docs/images/nano.txt.
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

# The tiers of docs/internals/testing.md. Each runs to its end, and says in its last line what passed, failed and was ignored.
TIER := python3 scripts/tests/tier.py

# Formatting, lints, dependencies and the tests that need no plugin.
check:
	$(TIER) check

# All that decides whether a change is right, on the CPU plugin with one and with eight virtual devices.
test:
	$(TIER) test

# What the TPU compiler makes of our programs, with no TPU.
test-tpu:
	$(TIER) test-tpu

# What the CUDA compiler makes of our programs, with no GPU.
test-cuda:
	$(TIER) test-cuda

# On the NVIDIA GPUs of this machine: agreement with the CPU, repetition, several as one.
test-gpu:
	$(TIER) test-gpu

# Everything: long runs, whole products of layouts, all prompts, JAX's kernels, damaged inputs, planted faults.
test-full:
	$(TIER) test-full

# Plants faults, each alone, and demands that the test named beside it finds it: scripts/mutants/README.md.
mutants:
	python3 scripts/mutants/mutants.py

# All held-out prompts of the toy model, with guidance and without; `make test` has some of them.
test-nano: $(CPU_PLUGIN)
	LTX2_REQUIRE=cpu LTX2_TEST_FULL=1 cargo test --locked --release --test cli meaning::

# The same clips by diffusers from the same weights and noise, and the scores of both; needs the .venv of `make fixtures`.
nano-parity: $(CPU_PLUGIN)
	.venv/bin/python scripts/nano/parity.py assets/nano $(LTX2)
	.venv/bin/python scripts/nano/parity.py assets/nano $(LTX2) --dtype bf16 --count 8

# Bytes from elsewhere, damaged two million times each, by tests/it/inputs.rs on the stable toolchain; then the same readers under
# libFuzzer with AddressSanitizer, which needs nightly and `cargo install cargo-fuzz`.
RUNS ?= 2000000
SEEDS_config := configs fuzz/seeds/config
SEEDS_layout := shardings
SEEDS_experiment := experiments
SEEDS_tokenizer := tests/fixtures/tokenizer
SEEDS_model_config := tests/fixtures/models
SEEDS_trace := tests/fixtures/trace
soak:
	LTX2_INPUTS=$(RUNS) cargo test --locked --release --test it inputs::

fuzz:
	for kind in $$(cargo fuzz list); do \
		mkdir -p fuzz/corpus/$$kind; \
		seeds=$$(make -s --no-print-directory seeds-of-$$kind); \
		cargo +nightly fuzz run $$kind fuzz/corpus/$$kind $$seeds -- -runs=$(RUNS) -max_len=300000 || exit 1; \
	done

# The layers that call C, and the readers of files, under AddressSanitizer, which needs nightly. The plugin itself is not built so:
# what it never frees is not looked at.
sanitize:
	for part in "--lib" "--test it pjrt::" "--test it spmd::" "--test it inputs::"; do \
		RUSTFLAGS=-Zsanitizer=address ASAN_OPTIONS=detect_leaks=0 LTX2_REQUIRE=cpu cargo +nightly test --locked \
			--target x86_64-unknown-linux-gnu $$part || exit 1; \
	done

# Optimized modules of three platforms, by the plugins of all of them, and low-rank updates.
fuzz-seeds:
	cargo build --locked
	scripts/fuzz/seeds.sh

seeds-of-%:
	@echo $(or $(SEEDS_$*),fuzz/seeds/$*)

# The TPU's attention kernel by the interpreter of tests/it/mosaic, and the interpreter by JAX's own kernel, which JAX writes
# here: nothing of it is kept in the repository.
JAX_FLASH := target/jax-flash

test-mosaic:
	python3 -m venv $(JAX_FLASH)/venv
	$(JAX_FLASH)/venv/bin/pip install -q jax==0.10.2
	$(JAX_FLASH)/venv/bin/python scripts/oracle/jax_flash.py $(JAX_FLASH)/cases
	LTX2_REQUIRE=jax LTX2_JAX_FLASH=$(CURDIR)/$(JAX_FLASH)/cases cargo test --locked --test it mosaic::

# Several processes on the GPUs of this machine: the bytes of one process, and the end when one is killed.
test-processes-gpu: $(LTX2)
	scripts/gpu/setup.sh $(LTX2)
	scripts/gpu/processes.sh $(LTX2) out/processes

# Whether `ltx2 profile` and xprof say the same of recordings: by default of all that scripts/lab/trace.sh left in out/traces.
XPROF := target/xprof
RECORDINGS ?= $(shell find out/traces -name '*.xplane.pb*' 2> /dev/null)

agree: $(LTX2)
	python3 -m venv $(XPROF)
	$(XPROF)/bin/pip install -q -r scripts/lab/requirements.txt
	$(XPROF)/bin/python scripts/lab/agree.py $(LTX2) $(RECORDINGS)

# Recordings on the NVIDIA GPUs of this machine, for that.
traces-gpu: $(LTX2)
	scripts/gpu/setup.sh $(LTX2)
	scripts/lab/trace.sh $(LTX2) out/traces

# What each technique saves on the GPUs of this machine: benchmarks/ablations-gpu.md.
ablations-gpu: $(LTX2)
	scripts/gpu/setup.sh $(LTX2)
	python3 scripts/gpu/ablations.py --ltx2 $(LTX2) -o benchmarks/ablations-gpu.md

# What slices of TPUs need and are predicted to take, compiled without one: the tables of benchmarks/tpu.md. An hour.
tpu-tables: $(LTX2)
	$(LTX2) plugin install tpu
	python3 scripts/layouts/pods.py --ltx2 $(LTX2) -o benchmarks/tpu.md

# The published ablation, asked from the compilers of TPUs and GPUs; half an hour, of which nothing is done twice. What it
# measured on four H200s stands in benchmarks/calibration.
out/ablation/results.jsonl: $(LTX2)
	$(LTX2) plugin install tpu
	$(LTX2) plugin install cuda
	mkdir -p out/ablation
	[ -e $@ ] || cp benchmarks/calibration/ablation-4.jsonl $@
	TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 $(LTX2) experiment experiments/ablation.yml -o out/ablation

# What the history layouts move and what mends them: benchmarks/ablations.md.
ablations: out/ablation/results.jsonl
	python3 scripts/layouts/ablations.py out/ablation/results.jsonl -o benchmarks/ablations.md

# The guide's picture of a report. Needs Chromium.
tuning-picture: out/ablation/results.jsonl
	scripts/lab/browse.py out/ablation/report.html docs/images/tuning.png --size 1300x1180

# What each layout moves in a transformer block, asked from the TPU compiler, and the picture of it. A quarter of an hour.
FIGURES := benchmarks/layouts
V5P_LAYOUTS := cfg-ulysses ulysses hybrid ring sequence
V6E_LAYOUTS := tensor fsdp-ulysses
FIGURE = TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1 $(LTX2) compile -c ltx2 --layers 3

layouts-figure: $(LTX2)
	$(LTX2) plugin install tpu
	mkdir -p $(FIGURES)
	for l in $(V5P_LAYOUTS); do $(FIGURE) --target tpu:v5p:2x2x2 --layout $$l --json $(FIGURES)/$$l.json || exit 1; done
	for l in $(V6E_LAYOUTS); do $(FIGURE) --target tpu:v6e:2x4 --layout $$l --json $(FIGURES)/$$l.json || exit 1; done
	cargo run --locked --example layouts_figure $(FIGURES)/*.json > $(FIGURES).svg

# Regenerates tests/fixtures from the pinned reference releases.
fixtures:
	python3 -m venv .venv
	.venv/bin/pip install -q -r scripts/oracle/requirements.txt
	.venv/bin/pip install -q --no-deps -r scripts/oracle/requirements-official.txt
	.venv/bin/python scripts/oracle/make_fixtures.py
