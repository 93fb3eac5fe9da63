"""The registry of per-expert tensors: what it takes, what it refuses, what it finds in a module."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from gimbal_kernels.migration import ExpertWeights

DTYPES = [torch.uint8, torch.int8, torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16]
DTYPES += [torch.float32, torch.int32, torch.float64, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_dtype_is_seen_as_bytes_of_the_same_memory(dtype):
    tensor = torch.zeros(4, 3, 5).to(dtype)
    weights = ExpertWeights([{"w": tensor}])
    (rows,) = weights.rows(0)
    assert rows.shape == (4, 15 * tensor.element_size())
    assert rows.data_ptr() == tensor.data_ptr()
    rows[2].fill_(1)
    assert tensor.view(torch.uint8)[2].all()
    assert not tensor.view(torch.uint8)[[0, 1, 3]].any()


def test_scalars_per_expert_and_parameters_are_taken():
    layer = {"scale": torch.ones(4), "w": torch.nn.Parameter(torch.ones(4, 2))}
    weights = ExpertWeights([layer])
    assert [rows.shape for rows in weights.rows(0)] == [(4, 4), (4, 8)]
    assert weights.bytes_per_expert == 12
    assert weights.offsets(0) == [0, 16]
    assert weights.row_bytes == 32


def test_dimensions_may_be_permuted_inside_an_expert():
    tensor = torch.arange(24.0).view(2, 3, 4).transpose(1, 2)
    (rows,) = ExpertWeights([{"w": tensor}]).rows(0)
    assert rows[1].view(torch.float32).tolist() == list(range(12, 24))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(3, 4, 5).transpose(0, 1),  # the expert dimension is not the outermost
        torch.zeros(4, 6)[:, :3],  # other data lies between two experts
        torch.zeros(8, 3)[::2],
        torch.zeros(3).expand(4, 3),  # all experts share one memory
        torch.zeros(4, 3, 1).expand(4, 3, 2),
    ],
)
def test_an_expert_dimension_that_is_not_contiguous_is_refused(tensor):
    with pytest.raises(
        ValueError, match=r"layer 0, 'w': shape .* with strides .*valid: contiguous in the expert"
    ):
        ExpertWeights([{"w": tensor}])


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([], "layers: empty"),
        ([{}], "layers: empty, or a layer without tensors"),
        ([{"w": [1, 2]}], "layer 0, 'w': list; valid: a tensor"),
        (
            [{"w": torch.zeros(4, 2)}, {"w": torch.zeros(3, 2)}],
            r"layer 1, 'w': shape \(3, 2\); valid: \[4, ...\]",
        ),
        ([{"w": torch.zeros(4, 0)}], "not empty"),
        ([{"w": torch.tensor(1.0)}], "valid:"),
        ([{"a": torch.zeros(2), "w": torch.zeros(2, device="meta")}], "on meta; valid: cpu"),
    ],
)
def test_what_is_no_layer_of_experts_is_refused(layers, message):
    with pytest.raises(ValueError, match=message):
        ExpertWeights(layers)


def test_the_signature_tells_layouts_apart_and_nothing_else():
    def signature(shape=(4, 6), dtype=torch.float32, name="w"):
        return ExpertWeights([{name: torch.rand(shape).to(dtype)}]).signature

    assert signature() == signature()
    assert len({signature(), signature((4, 2, 3)), signature(dtype=torch.bfloat16), signature(name="v")}) == 4


@dataclass
class Quantisation:
    w1_scale: torch.Tensor
    shared: torch.Tensor


class MoE(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w13_weight = torch.nn.Parameter(torch.zeros(4, 6, 2))
        self.w2_weight = torch.nn.Parameter(torch.zeros(4, 2, 3))
        self.register_buffer("expert_map", torch.zeros(16))
        self.gate = torch.nn.Linear(2, 16)
        self.quantisation = Quantisation(torch.zeros(4), torch.zeros(7))
        self.by_name = {"alias": self.w2_weight.data}


NAMES = ("w13_*", "w2_*", "quantisation.*")


def collect(modules, **options):
    return ExpertWeights.from_modules(modules, **({"slots_per_rank": 4, "names": NAMES} | options))


def test_tensors_are_collected_by_structure():
    weights = collect([MoE(), MoE()])
    assert weights.num_layers == 2
    assert list(weights.layers[1]) == ["quantisation.w1_scale", "w13_weight", "w2_weight"]


@pytest.mark.parametrize("kind", ["attribute", "private", "buffer", "parameter", "nested", "child"])
def test_an_unregistered_tensor_of_the_experts_is_refused(kind):
    module = MoE()
    extra = torch.zeros(4, 9)
    if kind == "attribute":
        module.g1_alphas = extra
    elif kind == "private":
        module._g1_alphas = extra
    elif kind == "buffer":
        module.register_buffer("g1_alphas", extra)
    elif kind == "parameter":
        module.g1_alphas = torch.nn.Parameter(extra)
    elif kind == "nested":
        module.by_name["g1_alphas"] = [extra]
    else:
        module.gate.g1_alphas = extra
    with pytest.raises(
        ValueError, match=r"modules: layer 1 has 4 rows in .*g1_alphas.*, covered neither by names"
    ):
        collect([MoE(), module])
    assert collect([MoE(), module], ignore=("*g1_alphas*",)).num_layers == 2
    assert collect([MoE(), module], names=(*NAMES, "*g1_alphas*")).num_layers == 2


def test_a_layer_without_the_named_tensors_is_refused():
    with pytest.raises(ValueError, match=r"names: .* match no tensor of 4 rows in layer 1"):
        collect([MoE(), torch.nn.Linear(2, 2)])


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, 3, device="meta"),
        torch._neg_view(torch.ones(2, 3)),
        torch.ones(2, 3, dtype=torch.complex64).conj(),
    ],
    ids=["meta", "negative", "conjugate"],
)
def test_tensors_whose_memory_is_not_their_content_are_refused(tensor):
    with pytest.raises(ValueError, match="layer 0, 'w': a meta tensor, or a conjugate or negative view"):
        ExpertWeights([{"w": tensor}])
