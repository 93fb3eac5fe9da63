"""The sources that NVRTC compiles at first use where no fatbin was built, compiled by it here; without a GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import importlib.util
from pathlib import Path

import pytest

from gimbal_kernels import _device_library


def nvrtc():
    """The NVRTC library of the nvidia-cuda-nvrtc package or of the system, or None."""
    found = [ctypes.util.find_library("nvrtc")]
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations if spec else ():
        libraries = sorted(Path(root).rglob("libnvrtc*.so*"))
        for builtins in (p for p in libraries if "builtins" in p.name and "alt" not in p.name):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)  # nvrtc looks for it by its bare name
        found += [str(p) for p in libraries if p.name.startswith("libnvrtc.so")]
    return next((ctypes.CDLL(name) for name in found if name), None)


def compile_for(library, folder, architecture):
    """Error code, log and size of the machine code."""
    source = _device_library.source(folder)
    options = [*_device_library.NVRTC_OPTIONS, f"-I{source.parents[1]}", f"--gpu-architecture={architecture}"]
    program = ctypes.c_void_p()
    text = source.read_bytes()
    assert library.nvrtcCreateProgram(ctypes.byref(program), text, b"device.cu", 0, None, None) == 0
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    code = library.nvrtcCompileProgram(program, len(options), array)
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, log)
    size.value = 0
    library.nvrtcGetCUBINSize(program, ctypes.byref(size))
    return code, log.value.decode(), size.value


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("folder", ["counting", "migration", "placement"])
def test_nvrtc_compiles_the_sources(folder, architecture):
    library = nvrtc()
    if library is None:
        pytest.skip("NVRTC is not installed (package nvidia-cuda-nvrtc)")
    code, log, size = compile_for(library, folder, architecture)
    assert code == 0, log
    assert size > 5_000
