"""Every tensor of an expert, so that a moved expert is whole: weights, scales, zero points, derived tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any

import torch

ALIGNMENT = 16  # the widest access of the copy kernel, in bytes


class ExpertWeights:
    """The per-expert tensors of one rank, layer by layer, as bytes that can be moved.

    Args:
        layers: per layer a dict name -> tensor [C, ...], C slots on this rank, any dtype. What the other
            dimensions look like is free, but the memory of one slot must be one block and slots must follow
            each other, so that an expert can be copied as bytes.
        after_commit: called with the layer's number after its slots were overwritten, once per commit that
            changed the layer: the place to recompute what is derived from the weights.

    Raises:
        ValueError: no layers or an empty one, something that is no tensor, another number of slots than
            elsewhere, tensors on several devices or without memory that is their content (meta, negative
            or conjugate views), or an expert dimension that is not contiguous.
    """

    def __init__(
        self,
        layers: Sequence[Mapping[str, Any]],
        *,
        after_commit: Callable[[int], None] | None = None,
    ) -> None:
        if not layers or not all(layers):
            raise ValueError(
                "layers: empty, or a layer without tensors; valid: at least one tensor per layer"
            )
        self.layers = [dict(sorted(layer.items())) for layer in layers]
        self.after_commit = after_commit
        some = next(iter(self.layers[0].values()))
        shape: Any = getattr(some, "shape", ())
        self.slots_per_rank = int(shape[0]) if len(shape) else 0
        self.device: Any = getattr(some, "device", None)
        self._bytes = [
            [self._as_bytes(tensor, layer, name) for name, tensor in tensors.items()]
            for layer, tensors in enumerate(self.layers)
        ]

    @classmethod
    def from_modules(
        cls,
        modules: Sequence[Any],
        *,
        slots_per_rank: int,
        names: Iterable[str],
        ignore: Iterable[str] = (),
        after_commit: Callable[[int], None] | None = None,
    ) -> ExpertWeights:
        """Collects what belongs to experts from the modules of the MoE layers, by shape.

        Every tensor that a module holds (parameters, buffers, plain attributes, tensors inside its lists,
        dicts and dataclasses) and whose first dimension is C is taken for a per-expert tensor. It must be
        named, or be ruled out by name: one that nobody thought of is an error and not a silent omission.

        Args:
            modules: one torch module per MoE layer.
            slots_per_rank: C.
            names: patterns (as in fnmatch) of the tensors that move with an expert.
            ignore: patterns of tensors that have C rows but stay: not per expert, or recomputed by
                `after_commit`.

        Raises:
            ValueError: a per-expert tensor that no pattern covers, a layer in which nothing matches `names`,
                and what the constructor refuses.
        """
        wanted, unwanted = tuple(names), tuple(ignore)
        layers = []
        for layer, module in enumerate(modules):
            found: dict[str, Any] = {}
            unknown: dict[str, Any] = {}
            for name, tensor in _tensors_of(module):
                if tensor.ndim == 0 or tensor.shape[0] != slots_per_rank or _matches(name, unwanted):
                    continue
                (found if _matches(name, wanted) else unknown)[name] = tensor
            known = {_memory(tensor) for tensor in found.values()}
            missed = sorted(name for name, tensor in unknown.items() if _memory(tensor) not in known)
            if missed:
                raise ValueError(
                    f"modules: layer {layer} has {slots_per_rank} rows in {', '.join(missed)}, covered neither by "
                    f"names {list(wanted)} nor by ignore {list(unwanted)}; valid: every such tensor in one of them"
                )
            if not found:
                raise ValueError(
                    f"names: {list(wanted)} match no tensor of {slots_per_rank} rows in layer {layer}"
                )
            layers.append(found)
        return cls(layers, after_commit=after_commit)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def bytes_per_expert(self) -> int:
        """Bytes of one expert, in the layer that has most."""
        return max(sum(int(rows.shape[1]) for rows in layer) for layer in self._bytes)

    @property
    def row_bytes(self) -> int:
        """Bytes of one expert in staging, each tensor aligned; the same for all layers."""
        return max(sum(_aligned(rows.shape[1]) for rows in layer) for layer in self._bytes)

    def rows(self, layer: int) -> list[Any]:
        """The layer's tensors as bytes: uint8 [C, bytes of one expert] each, sharing the tensors' memory."""
        return self._bytes[layer]

    def offsets(self, layer: int) -> list[int]:
        """Where each of `rows(layer)` starts in a staging row."""
        starts, at = [], 0
        for rows in self._bytes[layer]:
            starts.append(at)
            at += _aligned(rows.shape[1])
        return starts

    @property
    def signature(self) -> int:
        """63 bits that tell layouts apart (names, dtypes, shapes, strides): rows go only between equal ones."""
        described = [
            [
                (name, str(tensor.dtype), tuple(tensor.shape), tensor.stride())
                for name, tensor in layer.items()
            ]
            for layer in self.layers
        ]
        return (
            int.from_bytes(hashlib.blake2b(repr(described).encode(), digest_size=8).digest(), "little") >> 1
        )

    def committed(self, layer: int) -> None:
        """To be called after a layer's slots were overwritten."""
        if self.after_commit is not None:
            self.after_commit(layer)

    def _as_bytes(self, tensor: Any, layer: int, name: str) -> Any:
        where = f"layers: layer {layer}, {name!r}"
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{where}: {type(tensor).__name__}; valid: a tensor")
        tensor = tensor.detach()
        if tensor.ndim == 0 or tensor.shape[0] != self.slots_per_rank or tensor.numel() == 0:
            raise ValueError(
                f"{where}: shape {tuple(tensor.shape)}; valid: [{self.slots_per_rank}, ...], not empty"
            )
        if tensor.device != self.device:
            raise ValueError(f"{where}: on {tensor.device}; valid: {self.device}, where the first tensor is")
        if tensor.is_meta or tensor.is_conj() or tensor.is_neg():
            raise ValueError(
                f"{where}: a meta tensor, or a conjugate or negative view; valid: one whose memory is its content"
            )
        per_slot = tensor.numel() // self.slots_per_rank
        if not _is_dense(tensor[0]) or (self.slots_per_rank > 1 and tensor.stride(0) != per_slot):
            raise ValueError(
                f"{where}: shape {tuple(tensor.shape)} with strides {tensor.stride()}: the memory of an expert is "
                f"not one block of {per_slot} elements after the other; valid: contiguous in the expert dimension"
            )
        return tensor.as_strided((self.slots_per_rank, per_slot), (per_slot, 1)).view(torch.uint8)


def is_whole(value: Any) -> bool:
    """Whether it is an integer of any type, but no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _is_dense(tensor: Any) -> bool:
    """Whether its elements fill one block of memory, in whatever order of the dimensions."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _memory(tensor: Any) -> tuple[int, int]:
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _tensors_of(module: Any) -> Iterable[tuple[str, Any]]:
    """Name and tensor of everything that a module and its children hold."""
    yield from module.named_parameters()
    yield from module.named_buffers()
    for prefix, child in module.named_modules():
        for name, value in vars(child).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                yield from _tensors_in(f"{prefix}.{name}" if prefix else name, value)


def _tensors_in(name: str, value: Any, depth: int = 4) -> Iterable[tuple[str, Any]]:
    if isinstance(value, torch.Tensor):
        yield name, value
    elif depth == 0:
        return
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors_in(f"{name}.{key}", item, depth - 1)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            yield from _tensors_in(f"{name}.{i}", item, depth - 1)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from _tensors_in(f"{name}.{field.name}", getattr(value, field.name, None), depth - 1)
