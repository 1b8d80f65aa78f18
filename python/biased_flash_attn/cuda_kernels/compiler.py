"""Compiled kernels, from memory, from the disk, or from the compiler."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from hashlib import sha256
from threading import Lock, Timer

from . import cache, nvrtc
from .nvrtc import Kernel
from .variants import AnyVariant

_PATIENCE = 2.0  # seconds before a compilation is announced

_kernels: dict[str, Kernel] = {}
_lock = Lock()


def compiled(variant: AnyVariant, architecture: str) -> Kernel:
    """Returns a kernel, which is compiled if it is neither in memory nor on disk.

    A disk that cannot be read or written costs another compilation in the next process.
    """
    key = key_of(variant, architecture)
    with _lock:
        if key not in _kernels:
            kernel = cache.load(key)
            if kernel is None:
                with announced(variant):
                    kernel = nvrtc.compile_kernel(variant.source, variant.expression, architecture)
                with contextlib.suppress(OSError, RuntimeError):
                    cache.store(key, kernel)
            _kernels[key] = kernel
        return _kernels[key]


def ensure_stored(variant: AnyVariant, architecture: str) -> bool:
    """Compiles a kernel unless there is an intact file of it; returns whether it was compiled.

    Raises:
        OSError, RuntimeError: if the kernel cannot be compiled or stored.
    """
    key = key_of(variant, architecture)
    if cache.load(key) is not None:
        return False
    cache.store(key, nvrtc.compile_kernel(variant.source, variant.expression, architecture))
    return True


def key_of(variant: AnyVariant, architecture: str) -> str:
    """Returns a digest of all that determines the compiled kernel."""
    options, release = nvrtc.options(architecture), nvrtc.version()
    inputs = release, options, variant.source, variant.expression, nvrtc.texts()
    return sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()


@contextlib.contextmanager
def announced(variant: AnyVariant) -> Iterator[None]:
    """Context manager: prints what is compiled if it takes long."""
    line = (
        f"biased_flash_attn: compiling a kernel ({variant});"
        " `python -m biased_flash_attn compile` does this ahead of time"
    )
    timer = Timer(_PATIENCE, print, (line,), {"file": sys.stderr, "flush": True})
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
