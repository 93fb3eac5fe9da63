"""Turning whatever array a caller has into a numpy array on the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

DLPACK_CUDA = 2  # kDLCUDA


def cuda_device(value: Any) -> torch.device | None:
    """The CUDA device that a tensor or DLPack array lies on; None for all else."""
    if isinstance(value, torch.Tensor):
        return value.device if value.is_cuda else None
    if not hasattr(value, "__dlpack_device__"):
        return None
    kind, index = value.__dlpack_device__()
    return torch.device("cuda", index) if kind == DLPACK_CUDA else None


def to_host(value: Any, name: str) -> Any:
    """The numbers of `value` as a numpy array on the host, without a copy where that is possible.

    Args:
        value: a torch tensor on any device, a numpy array, any DLPack array, or nested sequences of numbers.
        name: the argument's name, for the error.

    Returns:
        A numpy array of a boolean, integer or real dtype. bfloat16 and other types that numpy lacks become
        float64, which holds each of their values exactly.

    Raises:
        ValueError: ragged sequences, strings, objects or complex numbers.
    """
    if not isinstance(value, (torch.Tensor, np.ndarray)) and hasattr(value, "__dlpack__"):
        value = torch.from_dlpack(value)
    if isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        try:
            return value.numpy()
        except TypeError:
            return value.to(torch.float64).numpy()
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name}: not an array of numbers ({error}); valid: a tensor or array") from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name}: dtype {array.dtype}; valid: integers or real numbers")
    return array
