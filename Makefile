# Everything starts from nothing but Python 3.11+, make and a package registry.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
DEV := $(VENV)/.dev
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check

.PHONY: serve demo quick test lint unit docs workers gpu kills gpubench plots bench delays cluster soak clean help

help:  ## list the targets
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# What `serve` and `demo` need. torch is first and by itself: a plain requirement would pull gigabytes of CUDA packages.
$(READY): pyproject.toml constraints.txt $(wildcard src/symbiosis/kernels/cpu/*.[ch])
	@echo 'Creating .venv'
	$(PYTHON) -m venv $(VENV)
	@echo 'Installing torch (0.6 GB): 1 to 2 minutes'
	$(INSTALL) torch==$(shell sed -n 's/^torch==//p' constraints.txt)
	@echo 'Installing the other packages and compiling the CPU kernels: about a minute'
	$(INSTALL) -c constraints.txt -e .
	touch $@

# linters, test tools and the libraries that tests compare with
$(DEV): $(READY)
	@echo 'Installing linters and test tools: about a minute'
	$(INSTALL) -c constraints.txt -e '.[dev]'
	touch $@

serve: $(READY)  ## serve the embedded default model: to tenants at tcp://127.0.0.1:7777, over HTTP at 127.0.0.1:8000
	@echo 'Starting the server: some 20 seconds until it listens'
	$(BIN)/symbiosis serve --http $(ARGS)

demo: $(READY)  ## three tenants fine-tune at once on the default model while a fourth chats
	$(BIN)/symbiosis demo $(ARGS)

# Pure parts, and one parity case per link.
QUICK := tests/common tests/adapters/test_safe_regex.py tests/jobs/test_states.py tests/jobs/test_queue.py \
	tests/jobs/test_plan.py tests/serving/scheduling tests/serving/lora/test_byte_allocator.py tests/serving/test_detokenizer.py \
	tests/finetuning/scheduling tests/finetuning/loop/test_recipe.py tests/split/executor/test_policies.py \
	tests/device_sharing tests/cluster/policies tests/transport/test_messages.py tests/server/test_json_budget.py
PARITY := tests/parity/test_architectures.py -k 'llama-'

quick: $(DEV)  ## lint, types, import contract, tests of pure parts, one parity case per link: under 2 minutes
	$(MAKE) --no-print-directory -j2 lint pure

pure: $(DEV)
	OMP_NUM_THREADS=1 $(BIN)/pytest -m 'not slow and not gpu and not real' $(QUICK)
	OMP_NUM_THREADS=1 $(BIN)/pytest $(PARITY)

test: lint unit  ## everything CI runs: under 15 minutes on 2 cores

lint: $(DEV)  ## ruff, strict types, import contract, retired words, forbidden calls
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/check_vocabulary.py
	@! grep -rnE '\b(pickle|cloudpickle|recv_pyobj|send_pyobj|torch\.load)\(' src/ || (echo 'forbidden near outside input' && false)

unit: $(DEV)  ## the tests
	@$(BIN)/python -c 'from symbiosis.models.default_model import default_model_folder as fetch; fetch()'  # outside of the timeouts of tests
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist worksteal -m 'not slow and not gpu'

docs: $(VENV)/.docs  ## the documentation site, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

$(VENV)/.docs: $(DEV)
	@echo 'Installing the tools of the documentation site: about half a minute'
	$(INSTALL) -c constraints.txt -e '.[docs]'
	touch $@

workers: $(DEV)  ## the tests of the server with several HTTP workers, about 5 minutes
	SYMBIOSIS_TEST_WORKERS=2 OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile -m 'not slow and not gpu' tests/server

gpu:  ## parity, links and kernels on a GPU, with the Python packages of the machine and pyzmq
	PYTHONPATH=src $(PYTHON) -m pytest -m "gpu and not slow" tests/gpu tests/kernels tests/serving tests/finetuning

kills:  ## kill tenants and executors on a GPU at random moments, a hundred times, about 2 minutes
	PYTHONPATH=src $(PYTHON) -m pytest -rP -m "gpu and slow" tests/gpu/test_kills.py

gpubench:  ## the GPU part of docs/benchmarks.md, with the packages of the machine, about 40 minutes; then `make plots`
	PYTHONPATH=src $(PYTHON) -m benchmarks.sharing 1b
	PYTHONPATH=src $(PYTHON) -m benchmarks.sharing 1b --mps
	PYTHONPATH=src $(PYTHON) -m benchmarks.sharing 7b
	PYTHONPATH=src $(PYTHON) -m benchmarks.sharing 7b --mps
	PYTHONPATH=src $(PYTHON) -m benchmarks.deferral 7b
	PYTHONPATH=src $(PYTHON) -m benchmarks.deferral 7b --mps
	PYTHONPATH=src $(PYTHON) -m benchmarks.deferral 1b --round-trip-ms 1
	PYTHONPATH=src $(PYTHON) -m benchmarks.deferral 1b --round-trip-ms 1 --batch 1 --tokens 32
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_memory 7b
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_policies gemma27b --mps
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_policies 7b --mps
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_policies 7b --remote 8 --seconds 4
	PYTHONPATH=src $(PYTHON) -m benchmarks.small_and_large 7b
	PYTHONPATH=src $(PYTHON) -m benchmarks.mixed 7b --mps
	PYTHONPATH=src $(PYTHON) -m benchmarks.lora 1b --seconds 0.4
	PYTHONPATH=src $(PYTHON) -m benchmarks.lora 13b
	PYTHONPATH=src $(PYTHON) -m benchmarks.lora 13b --mps
	PYTHONPATH=src $(PYTHON) -m benchmarks.lora gemma27b --seconds 0.5
	PYTHONPATH=src $(PYTHON) -m benchmarks.adapter_kernels
	PYTHONPATH=src $(PYTHON) -m benchmarks.kernel_launch
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_serving 7b
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_prefill 1b
	PYTHONPATH=src $(PYTHON) -m benchmarks.zoo_serving 7b --device cuda
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_prefill qwen4b
	PYTHONPATH=src $(PYTHON) -m benchmarks.decode_attention
	PYTHONPATH=src $(PYTHON) -m benchmarks.token_draw
	PYTHONPATH=src $(PYTHON) -m benchmarks.long_context 7b_long
	PYTHONPATH=src $(PYTHON) -m benchmarks.engine_host_blocks 7b_long
	PYTHONPATH=src $(PYTHON) -m benchmarks.kv_copies 1b_long
	PYTHONPATH=src $(PYTHON) -m benchmarks.kv_copies 1b_long --link host
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_training 1b
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_training 1b --mps
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_training 1b --fair
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_training 1b --scale
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_training 7b --jobs 4
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_training 7b --jobs 8 --no-plain
	PYTHONPATH=src $(PYTHON) -m benchmarks.gpu_colocation 7b --load chat
	for shape in 1b qwen4b; do for mode in "" --burst --open; do PYTHONPATH=src $(PYTHON) -m benchmarks.http_load $$shape $$mode || exit 1; done; done
	PYTHONPATH=src $(PYTHON) -m benchmarks.http_load 1b --open --lengths azure_conv --adapters 32
	PYTHONPATH=src $(PYTHON) -m benchmarks.http_load 1b --soak 540
	PYTHONPATH=src $(PYTHON) -m benchmarks.cluster_live 1b --mps
	PYTHONPATH=src $(PYTHON) -m benchmarks.cluster_replay 1b --engines 1
	PYTHONPATH=src $(PYTHON) -m benchmarks.cluster_kills 1b --device cuda --kills 20

plots: $(DEV)  ## plots of the results of gpubench, on any machine
	$(BIN)/python -m benchmarks.plots

bench: $(DEV)  ## the benchmarks of docs/benchmarks.md, about 2.5 hours on 2 cores, as root
	$(BIN)/python -m benchmarks.policies
	$(BIN)/python -m benchmarks.independence
	$(BIN)/python -m benchmarks.memory
	$(BIN)/python -m benchmarks.serving
	$(BIN)/python -m benchmarks.colocation
	$(BIN)/python -m benchmarks.queueing
	$(BIN)/python -m benchmarks.busy_cores
	$(BIN)/python -m benchmarks.sharding
	$(BIN)/python -m benchmarks.network
	$(BIN)/python -m benchmarks.plan_memory
	$(BIN)/python -m benchmarks.zoo_surrogates
	$(BIN)/python -m benchmarks.zoo_speculation
	$(BIN)/python -m benchmarks.wire_compression
	$(BIN)/python -m benchmarks.http_load default --cpu
	$(BIN)/python -m benchmarks.kv_copies --cpu
	$(BIN)/python -m benchmarks.zoo_serving
	$(BIN)/python -m benchmarks.adapter_loads $(if $(RAY_PYTHON),--ray-python $(RAY_PYTHON))
	$(BIN)/python -m benchmarks.zoo_admission
	$(BIN)/python -m benchmarks.cluster_live
	$(BIN)/python -m benchmarks.cluster_replay
	$(BIN)/python -m benchmarks.cluster_simulation $(if $(TRACES),--traces $(TRACES),decisions)
	$(BIN)/python -m benchmarks.zoo_simulation $(if $(TRACES),--traces $(TRACES) 20 30 kv overload trace)

SEED ?= 1
delays: $(DEV)  ## the tests with random delays in threads, others with each SEED, about 35 minutes on 2 cores (tests/delays.py)
	SYMBIOSIS_DELAYS_SEED=$(SEED) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -p tests.delays -n 4 --dist worksteal -m 'not slow and not gpu' $(ARGS)

cluster: $(DEV)  ## a live cluster: killed processes, cut links, moved requests, stores, Ray; more than an hour on 2 cores
	OMP_NUM_THREADS=1 $(BIN)/pytest -m slow tests/app/cluster tests/cli/test_cluster.py
	$(BIN)/python -m benchmarks.cluster_kills

soak: $(DEV)  ## long proofs: the demo on the real model, faults by the thousand, HTTP with stalled readers
	$(BIN)/pytest -m slow
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.http_load tiny --cpu --streams 512 --soak 600 --out build/soak

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .import_linter_cache site
