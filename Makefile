# The commands of README.md. Everything lands in .venv, build and .demo; outside the checkout change
# system packages (only when they are missing) and caches: ~/.cache/blinkc (stages), ccache and pip.
PYTHON ?= python3
TORCH ?= torch==2.13.0
# Builds plans without a GPU; 228 MB, seconds to install. Empty: its tests are skipped.
TENSORRT_RTX ?= tensorrt-rtx-cu13-libs==1.7.1.116 tensorrt-rtx-cu13-bindings==1.7.1.116
VENV := .venv
BIN := $(VENV)/bin
DEMO := .demo
MODEL := $(DEMO)/SmolLM2-135M-Instruct
BUNDLE := $(DEMO)/bundle
GPU_MODELS := .cache/gpu_models
SYSTEM_PACKAGES := g++ cmake ninja-build ccache libboost1.81-dev|libboost1.83-dev libibverbs-dev \
  libssl-dev
# Of the tests alone: virtual machines with an RDMA device (tests/rdma), certificates, libFuzzer (fuzz).
TEST_PACKAGES := qemu-system-x86 busybox-static ibverbs-providers iproute2 openssl clang-14|clang-18 \
  libclang-rt-14-dev|libclang-rt-18-dev
# Of the tests for the DPU's processor and of wheel-aarch64; Debian 12 on x86-64.
AARCH64_PACKAGES := mmdebstrap qemu-user-static g++-12-aarch64-linux-gnu
ifeq ($(shell uname -m),x86_64)
TEST_PACKAGES += $(AARCH64_PACKAGES)
endif
# Of each fuzz target.
SECONDS ?= 60

.PHONY: demo test test-slow test-gpu lint bench bench-cpu bench-gpu fuzz system-packages native wheel wheel-aarch64 clean

demo: $(BUNDLE)/manifest.json
	$(BIN)/python examples/01_smollm2/ask.py $(BUNDLE) "What is the capital of France?"

test: $(VENV)/.dev $(BUNDLE)/manifest.json
	$(BIN)/python -m pytest -m "not gpu and not trt and not slow" -n 2 --dist loadfile $(PYTEST_ARGS)

test-slow: $(VENV)/.clients $(BUNDLE)/manifest.json
	$(BIN)/python -m pytest -m "slow and not gpu" $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m "hypothesis and not gpu" --hypothesis-profile=random $(PYTEST_ARGS)

fuzz: $(VENV)/.dev
	$(BIN)/python fuzz/run.py $(SECONDS)

# On a machine with an NVIDIA GPU; docs/gpu.md says what it wants.
test-gpu: $(VENV)/.dev
	$(BIN)/python -m pytest -m gpu tests/gpu $(PYTEST_ARGS)

lint: $(VENV)/.dev
	$(BIN)/ruff check blinkc runtime tests examples benchmarks fuzz
	$(BIN)/ruff format --check blinkc runtime tests examples benchmarks fuzz
	$(BIN)/mypy
	$(BIN)/python tests/lint/run.py

bench: bench-cpu

bench-cpu: $(BUNDLE)/manifest.json
	$(BIN)/python benchmarks/bench_cpu.py $(MODEL) $(BUNDLE)

# On a machine with an NVIDIA GPU. The models are compiled once (about ten minutes, no weights).
bench-gpu: $(GPU_MODELS)/.prepared
	$(BIN)/python -m benchmarks.bench_gpu --models $(GPU_MODELS)

$(GPU_MODELS)/.prepared: | $(VENV)/.installed
	$(BIN)/python -m benchmarks.prepare_gpu $(GPU_MODELS)
	@touch $@

.PHONY: bench-frontend
bench-frontend: $(BUNDLE)/manifest.json
	$(BIN)/python benchmarks/bench_frontend.py $(BUNDLE) $(BENCH_ARGS)

system-packages:
	@.ci/system-packages $(foreach package,$(SYSTEM_PACKAGES),'$(package)')

$(VENV)/.installed: pyproject.toml | system-packages
	$(PYTHON) -m venv $(VENV)
	@echo "installing torch: about a minute"
	$(BIN)/pip install -q $(TORCH)
	$(BIN)/pip install -q "scikit-build-core>=0.10" "nanobind>=2.4"
	@echo "installing packages and compiling the native module: about four minutes on two cores"
	$(BIN)/pip install -q --no-build-isolation -e ".[compile,cuda,demo]"
	@touch $@

$(VENV)/.dev: $(VENV)/.installed
	@.ci/system-packages $(foreach package,$(TEST_PACKAGES),'$(package)')
	$(BIN)/pip install -q "cffi>=1.16" "httpx>=0.27" "hypothesis>=6" "mypy>=1.15" "pytest>=8" \
	  "pytest-timeout>=2" "pytest-xdist>=3" "ruff>=0.9" "clang-format==18.1.8"
	$(if $(TENSORRT_RTX),$(BIN)/pip install -q $(TENSORRT_RTX))
	@touch $@

# Unmodified clients that the slow tests run against the front end.
$(VENV)/.clients: $(VENV)/.dev
	$(BIN)/pip install -q langchain-openai litellm
	@touch $@

native: $(VENV)/.installed
	$(BIN)/pip install -q --no-build-isolation -e ".[compile,cuda]"

$(MODEL)/config.json: | $(VENV)/.installed
	$(BIN)/python examples/01_smollm2/get_weights.py $(MODEL)

$(BUNDLE)/manifest.json: $(MODEL)/config.json
	$(BIN)/blinkc compile $(MODEL) --target cpu --shapes auto -o $(DEMO)/build
	$(BIN)/blinkc bundle $(DEMO)/build -o $(BUNDLE)

wheel: $(VENV)/.installed
	$(BIN)/pip wheel -q --no-deps --no-build-isolation -w dist .

wheel-aarch64: $(VENV)/.installed
	@.ci/system-packages $(AARCH64_PACKAGES)
	$(BIN)/python runtime/dpu/build_wheel.py

clean:
	rm -rf build dist $(DEMO)/build $(BUNDLE)
