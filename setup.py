"""Build: compiles csrc/ into one host library (always, when a C++ compiler is there) beside the Python packages."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
HOST_SOURCES = sorted((ROOT / "csrc").glob("*/host.cpp"))
# -ffp-contract=off: a fused multiply-add would make ranks with different compilers disagree on a placement.
# -fno-trapping-math lets comparisons of floats become vector instructions; it changes no value.
HOST_FLAGS = [
    "-O3",
    "-std=c++17",
    "-ffp-contract=off",
    "-fno-trapping-math",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-pthread",
]


class BuildWithNative(build_py):
    """Adds `gimbal_kernels/_native/libgimbal_host.so`; without a C++ compiler the numpy reference serves."""

    def run(self) -> None:
        super().run()
        base = ROOT if self.editable_mode else Path(self.build_lib)
        self.build_host(base / "gimbal_kernels" / "_native")

    def build_host(self, folder: Path) -> None:
        compiler = shlex.split(os.environ.get("CXX", "g++"))
        if shutil.which(compiler[0]) is None:
            print(f"gimbal: no C++ compiler ({compiler[0]}): host kernels are left out, numpy serves instead")
            return
        folder.mkdir(parents=True, exist_ok=True)
        target = folder / "libgimbal_host.so"
        command = [*compiler, *HOST_FLAGS, f"-I{ROOT / 'csrc'}", *map(str, HOST_SOURCES), "-o", str(target)]
        subprocess.run(command, check=True)


class PlatformWheel(bdist_wheel):
    """The library is loaded by ctypes: any Python 3, one platform."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


class NativeDistribution(Distribution):
    def has_ext_modules(self) -> bool:
        return True


setup(cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel}, distclass=NativeDistribution)
