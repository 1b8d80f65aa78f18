"""The binary of the kernels needs no PyTorch, and only the symbols of its manylinux tag."""

from __future__ import annotations

import platform
import sys
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from biased_flash_attn import _C

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no ELF files")

# torch loads a library of this name before `_C`.
OPENMP = "libgomp.so.1"
# Symbols defined by CPython, and optional ones.
OTHERS = ("Py", "_Py", "__gmon_start__", "_ITM_", "__cxa_finalize")


def libraries_and_symbols(path: Path) -> tuple[set[str], dict[str, set[str]], set[str]]:
    """The libraries that a binary needs, the symbol versions it needs of each, and its undefined
    symbols without a version."""
    from elftools.elf.elffile import ELFFile

    with path.open("rb") as file:
        elf = ELFFile(file)
        needed = {tag.needed for tag in elf.get_section_by_name(".dynamic").iter_tags("DT_NEEDED")}
        versions = defaultdict(set)
        name_of_version = {}
        for library, required in elf.get_section_by_name(".gnu.version_r").iter_versions():
            for version in required:
                versions[library.name].add(version.name)
                name_of_version[version["vna_other"]] = version.name
        unversioned = set()
        of_symbols = elf.get_section_by_name(".gnu.version")
        for n, symbol in enumerate(elf.get_section_by_name(".dynsym").iter_symbols()):
            is_undefined = symbol.name and symbol["st_shndx"] == "SHN_UNDEF"
            if is_undefined and of_symbols.get_symbol(n)["ndx"] not in name_of_version:
                unversioned.add(symbol.name)
    return needed, dict(versions), unversioned


def foreign(symbols: set[str]) -> set[str]:
    return {name for name in symbols if not name.startswith(OTHERS)}


@pytest.fixture(scope="module")
def kernels():
    return libraries_and_symbols(Path(_C.__file__))


def test_binary_needs_no_symbols_of_torch(kernels):
    _, _, symbols = kernels
    assert any(name.startswith("PyModule") for name in symbols)
    assert foreign(symbols) == set()


def test_binaries_that_need_torch_are_detected():
    (path,) = Path(torch.__file__).parent.glob("lib/libtorch_python.so")
    _, _, symbols = libraries_and_symbols(path)
    assert any("c10" in name for name in foreign(symbols))


def test_binary_needs_only_manylinux_symbols(kernels):
    from auditwheel.architecture import Architecture
    from auditwheel.libc import Libc
    from auditwheel.policy import WheelPolicies

    needed, versions, _ = kernels
    if OPENMP not in needed:
        pytest.skip("built by Clang, whose OpenMP is another: wheels are built by GCC")
    policies = WheelPolicies(libc=Libc.GLIBC, arch=Architecture(platform.machine()))
    policy = policies.versioned_symbols_policy(
        {library: names for library, names in versions.items() if library != OPENMP}
    )
    assert policy.name.startswith("manylinux_")
    loader = {name for name in needed if name.startswith("ld-linux")}
    assert needed - policy.whitelist - loader == {OPENMP}
    assert (Path(torch.__file__).parent / "lib" / OPENMP).exists()
