"""The CUDA kernels of one folder of csrc/: the fatbin of the build, or its source compiled by NVRTC at first use.

CuPy loads and launches them, on torch's current stream, so that they take part in torch's CUDA graphs.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parent
NATIVE = PACKAGE / "_native"
# A block has so much shared memory without asking.
FREE_SHARED_BYTES = 48 << 10
# The sources lie beside the package in a checkout, and in _native once installed.
SOURCES = (PACKAGE.parent / "csrc", NATIVE / "csrc")
NVRTC_OPTIONS = ("--std=c++17", "--fmad=false")


def fatbin(folder: str) -> Path:
    """Where the build puts the kernels of csrc/<folder>."""
    return NATIVE / f"{folder}.fatbin"


def source(folder: str) -> Path | None:
    """csrc/<folder>/device.cu, or None when the sources are not installed."""
    for root in SOURCES:
        if (root / folder / "device.cu").exists():
            return root / folder / "device.cu"
    return None


@lru_cache(maxsize=8)
def status(folder: str) -> str:
    """ "ready", or the reason why these kernels cannot be used here."""
    if importlib.util.find_spec("cupy") is None:
        return "the package cupy is not installed (extras cuda12 and cuda13)"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.version.hip is not None:
        return "the CUDA kernels are not built for ROCm; triton serves there"
    if not fatbin(folder).exists() and source(folder) is None:
        return f"neither {fatbin(folder).name} nor its sources were installed"
    try:
        import cupy  # noqa: F401
    except Exception as error:  # a CuPy of another CUDA version must not take the caller down
        return f"cupy cannot be imported: {type(error).__name__}: {error}"
    return "ready"


@lru_cache(maxsize=256)
def kernel(folder: str, name: str, device: int) -> Any:
    """A kernel by its extern "C" name, loaded on the CUDA device with this index, which is the current one."""
    return _module(folder, device).get_function(name)


@lru_cache(maxsize=32)
def _module(folder: str, device: int) -> Any:
    import cupy

    if fatbin(folder).exists():
        try:
            module = cupy.RawModule(path=str(fatbin(folder)))
            module.compile()
            return module
        except cupy.cuda.driver.CUDADriverError:
            # No code for this GPU in it, or one newer than the driver: NVRTC compiles what the device takes.
            if source(folder) is None:
                raise
    path = source(folder)
    if path is None:
        raise RuntimeError(f"{fatbin(folder).name} and its sources are not installed")
    options = (*NVRTC_OPTIONS, f"-I{path.parents[1]}")
    return cupy.RawModule(code=path.read_text(), options=options, backend="nvrtc")


@dataclass(frozen=True)
class _Handle:
    """A stream's handle in the form that CuPy 14 takes (the CUDA stream protocol)."""

    handle: int

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


@lru_cache(maxsize=64)
def _stream(handle: int, device: int) -> Any:
    """CuPy's view of a CUDA stream; it owns nothing, so it may be kept after the stream is gone."""
    import cupy

    if hasattr(cupy.cuda.Stream, "from_external"):
        return cupy.cuda.Stream.from_external(_Handle(handle))
    return cupy.cuda.ExternalStream(handle, device)


def launch(
    folder: str, name: str, device: Any, *, blocks: int, threads: int, shared_bytes: int, argument: Any
) -> None:
    """Launches a kernel on torch's current stream of `device`.

    argument: a numpy array of one element, or a tuple of numpy scalars, one per parameter of the kernel.
    shared_bytes: dynamic shared memory of a block, up to `most_shared_bytes`.
    """
    arguments = argument if isinstance(argument, tuple) else (argument,)
    with torch.cuda.device(device):
        index = torch.cuda.current_device()
        function = kernel(folder, name, index)
        if shared_bytes > FREE_SHARED_BYTES:
            function.max_dynamic_shared_size_bytes = shared_bytes
        with _stream(torch.cuda.current_stream(index).cuda_stream, index):
            function((blocks,), (threads,), arguments, shared_mem=shared_bytes)


@lru_cache(maxsize=64)
def most_shared_bytes(device: int) -> int:
    """The most dynamic shared memory that a block on the CUDA device with this index can have."""
    import cupy

    return int(cupy.cuda.Device(device).attributes["MaxSharedMemoryPerBlockOptin"])
