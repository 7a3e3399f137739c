# Everything a developer runs. `make help` lists it; .ci/run calls the same targets.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
PY := $(VENV)/bin/python
READY := $(VENV)/.ready
export PYTHONPATH := .
ASAN_LIBS = $(shell gcc -print-file-name=libasan.so):$(shell gcc -print-file-name=libubsan.so)
ATHERIS = LD_PRELOAD=$$($(abspath $(PY)) -c 'import atheris; print(atheris.path())')/asan_with_fuzzer.so OMP_NUM_THREADS=1 \
    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:quarantine_size_mb=32 UBSAN_OPTIONS=print_stacktrace=1 \
    $(abspath $(PY)) -m tests.fuzz.fuzz_entries
ASAN_COPY := automodel_c tests benchmarks csrc examples tools setup.py pyproject.toml README.md Makefile
C_FILES := $(shell git ls-files 'csrc/*.[ch]' 'csrc/*.inc' 'csrc/*.cu' 'csrc/*.cuh' 'tests/*.c')

.DEFAULT_GOAL := help
.PHONY: help venv build demo demo-dp long-run test test-isa asan tsan fuzz fuzz-core fuzz-entries leaks faults soak valgrind lint format-check fix api bench cpu-only cuda-report wheel clean

help: ## print this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/\1|\2/' | awk -F'|' '{printf "  %-12s %s\n", $$1, $$2}'

$(READY): pyproject.toml
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PY) -m pip install -q --upgrade pip
	$(PY) -c 'import torch' 2>/dev/null || $(PY) -m pip install -q '$(TORCH)'
	$(PY) -m pip install -q 'setuptools>=77' wheel numpy
	$(PY) -m pip install -q --no-build-isolation -e '.[train,dev]'
	@touch $@

venv: $(READY) ## the environment in .venv: torch, the training extras, the tools

build: venv ## compile automodel_c._amcore in place
	$(PY) setup.py -q build_ext --inplace

demo: build ## two ranks on this machine's CPU share every pack and learn handwritten digits: the main job
	$(VENV)/bin/automodel-c train examples/digits_cp2.yaml --nproc 2

demo-dp: build ## the same with packs of their own for the two ranks
	$(VENV)/bin/automodel-c train examples/digits.yaml --nproc 2

long-run: build ## a hundred steps over 48 mixed packs on four ranks that share packs and experts, checked
	$(PY) examples/long_run.py write
	$(VENV)/bin/automodel-c train examples/long_run.yaml --nproc 4
	$(PY) examples/long_run.py check runs/long_run

test: build ## every test that this machine can run, on the inputs that CI draws; CI= make test draws fresh ones
	CI=$${CI-true} $(PY) -m pytest -q

test-isa: build ## tests/core and tests/ops once with each row of CPU kernels as the default
	for isa in scalar avx2 avx512 avx512_bf16; do AM_ISA=$$isa $(PY) -m pytest -q tests/core tests/ops || exit 1; done

asan: venv ## tests/core and tests/ops with AddressSanitizer and UBSan, built apart in build/asan
	mkdir -p build/asan && cd build/asan && rm -rf $(ASAN_COPY)
	cp -r $(ASAN_COPY) build/asan/
	rm -f build/asan/automodel_c/*.so
	cd build/asan && AM_CUDA=0 AM_SANITIZE=address $(abspath $(PY)) setup.py -q build_ext --inplace
	cd build/asan && LD_PRELOAD=$(ASAN_LIBS) PYTHONMALLOC=malloc \
	    ASAN_OPTIONS=detect_leaks=0:allocator_may_return_null=1:halt_on_error=1 UBSAN_OPTIONS=print_stacktrace=1 \
	    $(abspath $(PY)) -m pytest -q -p no:cacheprovider tests/core tests/ops

tsan: venv ## the thread pool under ThreadSanitizer
	AM_POOL_ROUNDS=5000 $(PY) -m pytest -q tests/core/test_pool.py

fuzz: build ## random arguments and random packs for ten minutes each, and long hypothesis runs
	HYPOTHESIS_PROFILE=long $(PY) -m pytest -q tests/ops tests/fuzz
	$(PY) -m tests.fuzz.fuzz_args --seconds 600
	$(PY) -m tests.fuzz.fuzz_plan --seconds 600

fuzz-core: ## the C core under libFuzzer with ASan and UBSan for FUZZ_SECONDS (600); needs clang; what is new is kept
	mkdir -p build/fuzz/corpus
	$(PY) -m tests.fuzz.corpus_core unpack build/fuzz/corpus
	clang -std=gnu11 -D_GNU_SOURCE -O1 -g -w -pthread -fno-math-errno -ffp-contract=off -fsanitize=fuzzer,address,undefined \
	    -fno-sanitize-recover=undefined -Icsrc/core -Icsrc/partition -Icsrc/exchange tests/fuzz/fuzz_core.c \
	    $(filter-out %_py.c,$(wildcard csrc/core/*.c csrc/partition/*.c csrc/exchange/*.c)) -o build/fuzz/fuzz_core -lm -ldl
	build/fuzz/fuzz_core -max_total_time=$(or $(FUZZ_SECONDS),600) -max_len=256 -verbosity=0 -print_final_stats=1 \
	    -artifact_prefix=build/fuzz/ build/fuzz/corpus
	rm -rf build/fuzz/small && mkdir build/fuzz/small && build/fuzz/fuzz_core -merge=1 build/fuzz/small build/fuzz/corpus
	$(PY) -m tests.fuzz.corpus_core pack build/fuzz/small

fuzz-entries: venv ## every method of the extension under atheris with hostile producers, ASan and UBSan; FUZZ_SECONDS (600)
	@$(PY) -c 'import atheris' || { echo "needs clang, a CPU with AVX-512, and: $(PY) -m pip install atheris"; exit 1; }
	mkdir -p build/fuzz/entries build/fuzz_tree && cd build/fuzz_tree && rm -rf $(ASAN_COPY)
	cp -r $(ASAN_COPY) build/fuzz_tree/
	rm -f build/fuzz_tree/automodel_c/*.so
	cd build/fuzz_tree && CC=clang AM_CUDA=0 AM_SANITIZE=fuzz $(abspath $(PY)) setup.py -q build_ext --inplace
	$(PY) -m tests.fuzz.fuzz_entries unpack build/fuzz/entries
	cd build/fuzz_tree && $(ATHERIS) -max_total_time=$(or $(FUZZ_SECONDS),600) -len_control=20 -max_len=160 \
	    -timeout=60 -rss_limit_mb=4096 -print_final_stats=1 -artifact_prefix=../fuzz/ ../fuzz/entries
	rm -rf build/fuzz/small && mkdir build/fuzz/small
	cd build/fuzz_tree && $(ATHERIS) -merge=1 -max_len=160 ../fuzz/small ../fuzz/entries
	$(PY) -m tests.fuzz.fuzz_entries pack build/fuzz/small

faults: build ## 4 ranks by the command line: 20 are killed, disks fill, bits flip, SIGTERM comes; build/faults.jsonl
	AM_FAULT_RANKS=4 AM_FAULTS=20 $(PY) -m pytest -q tests/faults/test_runs.py tests/recipes/test_integrity.py

soak: build ## 2,000 steps of ever new packs on two ranks: memory, descriptors and plans are watched
	AM_SOAK=2000 $(PY) -m pytest -q tests/faults/test_soak.py

valgrind: build ## memcheck of the binding layer: every door and every hostile producer, NumPy alone
	$(PY) -m tests.core.memcheck

leaks: build ## every entry point a hundred thousand times, memory and references watched
	AM_LEAK_ROUNDS=100000 $(PY) -m pytest -q tests/leaks

lint: format-check ## clang-format, ruff, and the project's own rules
	$(PY) -m pytest -q tests/lint

format-check: build
	$(VENV)/bin/clang-format --dry-run --Werror $(C_FILES)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

fix: venv ## format everything
	$(VENV)/bin/clang-format -i $(C_FILES)
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

api: build ## docs/api.md from docstrings, docs/recipe_keys.md from the recipes' schema
	$(PY) tools/gen_docs.py

bench: build ## every operator beside its peers; JSON into benchmarks/results
	for file in benchmarks/ops/bench_*.py; do $(PY) -m benchmarks.ops.$$(basename $$file .py) || exit 1; done
	$(PY) -m benchmarks.recipes.bench_step

cpu-only: venv ## compile without CUDA, apart in build/cpu, and load it
	AM_CUDA=0 $(PY) setup.py -q build_ext --build-lib build/cpu
	cd build/cpu/automodel_c && $(abspath $(PY)) -c 'import _amcore; assert not _amcore.build_info()["cuda"]'

cuda-report: build ## registers, shared memory and spills of every CUDA kernel
	$(PY) tools/ptxas_table.py

wheel: venv ## manylinux wheels for the CPU and, with nvcc, for CUDA, and the sdist, into dist
	PATH="$(abspath $(VENV))/bin:$$PATH" $(PY) tools/wheels.py

clean: ## remove what was built, but keep the environment
	rm -rf build dist automodel_c/*.so *.egg-info .pytest_cache .ruff_cache .hypothesis
