"""PTX compiled by NVRTC, once for each version of the source and of the packages."""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.emulator.third_party import nvrtc

PACKAGES = "nvidia-cuda-nvrtc", "nvidia-cuda-cccl", "nvidia-cuda-runtime", "nvidia-cutlass"


@pytest.fixture(scope="session")
def cuda_ptx(pytestconfig):
    """Returns a function from the name of a CUDA source file in this folder to its PTX for sm_90a.

    NVRTC takes nine seconds for CuTe's headers, so the PTX is stored in pytest's cache.
    """

    def ptx(name: str) -> str:
        source = Path(__file__).with_name(name)
        made_of = [source.read_text(), *map(version, PACKAGES)]
        digest = hashlib.sha256("\n".join(made_of).encode()).hexdigest()[:16]
        cached = pytestconfig.cache.mkdir("ptx") / f"{source.stem}-{digest}.ptx"
        if not cached.exists():
            cached.write_text(nvrtc.compile_to_ptx(source, "sm_90a", "-default-device"))
        return cached.read_text()

    return ptx
