PYTHON := python3
IN_VENV := . .venv/bin/activate &&
INSTALLED := .venv/installed
KERNELS := $(shell find csrc -type f)
# Calls where the compiler would inline checks halve the time it takes.
SANITIZERS := -fsanitize=address,undefined -fno-sanitize-recover=undefined \
	--param asan-instrumentation-with-call-threshold=0
SANITIZER_RUNTIME = $(foreach library,libasan.so libstdc++.so,$(shell $(CXX) -print-file-name=$(library)))

.PHONY: help demo test lint sanitize bench gpu clean

help:  ## list these targets
	@sed -n 's/^\([a-z]*\):.*##/\1\t/p' Makefile

demo: $(INSTALLED)  ## every bias on real text: errors, time and memory
	$(IN_VENV) python -m biased_flash_attn demo

test: $(INSTALLED)  ## the whole test suite
	$(IN_VENV) pytest

lint: $(INSTALLED)  ## ruff and clang-format
	$(IN_VENV) ruff check
	$(IN_VENV) ruff format --check
	$(IN_VENV) clang-format --dry-run -Werror $(KERNELS)

bench: $(INSTALLED)  ## time and memory against other ways to compute the same
	$(IN_VENV) pytest bench -v --benchmark-quiet

# A second copy of the package, so that the installed one keeps its fast kernels.
sanitize: $(INSTALLED)  ## kernel tests under AddressSanitizer and UBSan
	$(IN_VENV) cmake -S . -B build/sanitize -G Ninja \
		-DCMAKE_BUILD_TYPE=RelWithDebInfo -DCMAKE_CXX_FLAGS="$(SANITIZERS)"
	$(IN_VENV) cmake --build build/sanitize
	rm -rf build/sanitize/package
	cp -R python build/sanitize/package
	rm -f build/sanitize/package/biased_flash_attn/_C.*
	$(IN_VENV) cmake --install build/sanitize --prefix build/sanitize/package/biased_flash_attn
	$(IN_VENV) PYTHONPATH=build/sanitize/package LD_PRELOAD="$(SANITIZER_RUNTIME)" \
		ASAN_OPTIONS=detect_leaks=0 pytest -m sanitize

# In an environment that already holds torch for the GPU, Triton and the build tools: works offline.
gpu:  ## tests of the Triton kernels on this machine's GPU
	$(PYTHON) -m pip install --no-deps --no-build-isolation -e .
	$(PYTHON) -m pytest tests/test_triton.py

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
