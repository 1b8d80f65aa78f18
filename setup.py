"""Builds the C++ kernels with CMake; all else about the package stands in pyproject.toml."""

import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

KERNELS = Extension(
    "biased_flash_attn._C",
    sources=["CMakeLists.txt", *sorted(str(path) for path in Path("csrc").rglob("*.*"))],
)


class BuildKernels(build_ext):
    """Puts `_C` into the package or, where that fails, `_build_error.txt`, which says why."""

    def run(self):
        extension = Path(self.get_ext_fullpath(KERNELS.name)).resolve()
        build_error = extension.with_name("_build_error.txt")
        extension.parent.mkdir(parents=True, exist_ok=True)
        extension.unlink(missing_ok=True)
        build_error.unlink(missing_ok=True)
        try:
            build_kernels(extension.parent)
        except (OSError, CompileError) as error:
            build_error.write_text(f"{error}\n")
            self.warn(f"NO C++ KERNELS, only the slow reference backend will work: {error}")


class WheelTaggedByContent(bdist_wheel):
    """Without the kernels a wheel is Python only, for every machine."""

    def get_tag(self):
        extension = Path(self.get_finalized_command("build_ext").get_ext_fullpath(KERNELS.name))
        return super().get_tag() if extension.exists() else ("py3", "none", "any")


def build_kernels(package):
    build = Path("build", f"cmake-{sys.implementation.cache_tag}")
    # The compiler is chosen anew at every build; what it compiled before is kept.
    (build / "CMakeCache.txt").unlink(missing_ok=True)
    cmake("-S", ".", "-B", build, "-G", "Ninja", f"-DPython_EXECUTABLE={sys.executable}")
    cmake("--build", build)
    cmake("--install", build, "--prefix", package)


def cmake(*arguments):
    """Runs CMake, with its output as it appears, which `pip install -v` shows."""
    command = ["cmake", *map(str, arguments)]
    output = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            print(line, end="", flush=True)
            output.append(line)
    if process.returncode:
        raise CompileError(f"`{' '.join(command)}` failed\n\n{''.join(output)}")


setup(
    ext_modules=[KERNELS],
    cmdclass={"build_ext": BuildKernels, "bdist_wheel": WheelTaggedByContent},
)
