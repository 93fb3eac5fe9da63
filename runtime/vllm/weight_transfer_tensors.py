"""Every per-expert tensor of vLLM's MoE layers, collected by structure (SPEC section 5).

vLLM lists the parameters of a layer that its balancer moves. What else a layer or its quantisation holds per
expert (scales or factors derived after loading, for example) would stay behind and spoil the experts that
moved. So everything with one row per local slot is looked for, and must either move or be known to stay.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch

from gimbal_kernels.migration import ExpertWeights

MOVES = ("*weight*", "w1*", "w2*", "w3*", "w13*", "*scale*", "*alpha*", "*zero*", "*zp*", "*bias*")
"""Last parts of the names of tensors that belong to experts, whoever made them."""

STAYS = ("*expert_map*", "*e_score_correction_bias*", "*hash_indices_table*", "*physical*", "*logical*")
"""Tables about experts or slots: the same on every rank, or kept up to date by vLLM."""

DEPTH = 6


def collect(layers: Sequence[Any], listed: Sequence[Sequence[torch.Tensor]]) -> ExpertWeights:
    """The weights of one rank's MoE layers.

    Args:
        layers: vLLM's MoE runners, one per layer.
        listed: per layer the tensors [C, n] that vLLM's balancer moves. They come first, in vLLM's order.

    Raises:
        ValueError: a tensor of C rows of which it is not known whether it moves; the message names it.
    """
    return ExpertWeights([_of_layer(i, *both) for i, both in enumerate(zip(layers, listed, strict=True))])


def _of_layer(number: int, layer: Any, listed: Sequence[torch.Tensor]) -> dict[str, Any]:
    slots = listed[0].shape[0]
    moving: dict[str, Any] = {f"{i:04d}": tensor for i, tensor in enumerate(listed)}
    known = [_span(tensor) for tensor in listed]
    for name, tensor in tensors_of(layer.routed_experts):
        if not _is_per_expert(tensor, slots) or any(low <= tensor.data_ptr() < high for low, high in known):
            continue
        last = name.rsplit(".", 1)[-1]
        if any(fnmatchcase(name, pattern) for pattern in STAYS):
            continue
        if not any(fnmatchcase(last, pattern) for pattern in MOVES):
            raise ValueError(
                f"layer {number}: {name} {list(tensor.shape)} has a row for each of the {slots} slots, and it is "
                f"not known whether it moves with them; valid: names like {', '.join((*MOVES, *STAYS))}"
            )
        moving[f"more.{name}"] = tensor
        known.append(_span(tensor))
    return moving


def _is_per_expert(tensor: torch.Tensor, slots: int) -> bool:
    """One value for all experts, spread over them without memory of its own (stride 0), is not per expert."""
    rows = tensor.ndim > 0 and tensor.shape[0] == slots and tensor.numel() > 0
    return rows and (slots == 1 or tensor.stride(0) != 0)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """First and last address of its elements, the latter exclusive."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def tensors_of(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor of what a module holds: parameters, buffers, and whatever its attributes lead to.

    Attributes are followed through lists, dicts, dataclasses and objects of vLLM (quantisation methods, kernels),
    but not into other modules and configurations, which lead to the rest of the model.
    """
    yield from module.named_parameters()
    yield from module.named_buffers()
    seen: set[int] = set()
    for prefix, child in module.named_modules():
        for name, value in list(vars(child).items()):
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors_in(f"{prefix}.{name}" if prefix else name, value, seen, DEPTH)


def _tensors_in(name: str, value: Any, seen: set[int], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield name, value
        return
    if depth == 0 or id(value) in seen or isinstance(value, (torch.nn.Module, type)):
        return
    for part, item in _parts(value):
        seen.add(id(value))
        yield from _tensors_in(f"{name}.{part}", item, seen, depth - 1)


def _parts(value: Any) -> list[tuple[str, Any]]:
    module = type(value).__module__
    if isinstance(value, dict):
        return [(str(key), item) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [(str(i), item) for i, item in enumerate(value)]
    if module.startswith("vllm.config"):
        return []
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in fields(value)]
    if module.startswith("vllm."):
        return list(getattr(value, "__dict__", {}).items())
    return []
