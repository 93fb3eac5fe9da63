"""Build: compiles csrc/ beside the Python packages.

One host library when a C++ compiler is there, and one fatbin per folder with a device.cu when nvcc is there. The
device sources are shipped too: without nvcc, NVRTC compiles them at first use.
"""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
# host_<instruction set>.cpp set their own target; flags for the processor at hand would not be portable.
HOST_SOURCES = sorted((ROOT / "csrc").glob("*/host*.cpp"))
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
DEVICE_SOURCES = sorted((ROOT / "csrc").glob("*/device.cu"))
# -fmad=false: as on the host.
DEVICE_FLAGS = ["-O3", "-std=c++17", "-fmad=false"]
# Machine code for these, and PTX of the last for what comes later.
ARCHITECTURES = ("80", "90", "100", "120")


class BuildWithNative(build_py):
    """Adds `gimbal_kernels/_native`; without compilers the numpy and torch references serve."""

    def run(self) -> None:
        super().run()
        base = ROOT if self.editable_mode else Path(self.build_lib)
        native = base / "gimbal_kernels" / "_native"
        self.build_host(native)
        self.build_device(native)
        if not self.editable_mode:
            self.copy_device_sources(native / "csrc")

    def build_device(self, folder: Path) -> None:
        compiler = shlex.split(os.environ.get("NVCC", "nvcc"))
        if shutil.which(compiler[0]) is None:
            print(f"gimbal: no CUDA compiler ({compiler[0]}): NVRTC compiles the device kernels at first use")
            return
        listed = subprocess.run(
            [*compiler, "--list-gpu-arch"], capture_output=True, text=True, check=True
        ).stdout
        known = [arch for arch in ARCHITECTURES if f"compute_{arch}" in listed.split()]
        codes = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in known]
        codes.append(f"-gencode=arch=compute_{known[-1]},code=compute_{known[-1]}")
        folder.mkdir(parents=True, exist_ok=True)
        for source in DEVICE_SOURCES:
            target = folder / f"{source.parent.name}.fatbin"
            command = [*compiler, "-fatbin", *DEVICE_FLAGS, *codes, f"-I{ROOT / 'csrc'}", str(source)]
            subprocess.run([*command, "-o", str(target)], check=True)

    def copy_device_sources(self, folder: Path) -> None:
        for source in DEVICE_SOURCES:
            for path in [source, *source.parent.glob("*.cuh")]:
                target = folder / path.relative_to(ROOT / "csrc")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)

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
