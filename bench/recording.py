"""What recording costs in a MoE layer of vLLM: ours against the function that it replaces, in one process.

    python bench/recording.py [--device cpu|cuda] [--seconds 1] [--json FILE]

Both are called as vLLM's router calls them, through `BaseRouter._apply_eplb_mapping`, with 128 experts, 16 spare
slots on 4 ranks and top-8. On a GPU "vLLM" is its own Triton kernel; on a CPU, where vLLM 0.32 maps and counts
nothing, it is the function of this package's platform layer, which vLLM runs there. "by loads" adds what counting
from vLLM's load counters costs per layer of a 48-layer model. Times compare only within one run.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gimbal_runtime.tools.bench import environment
from gimbal_runtime.tools.bench_counting import time_on_cpu, time_on_gpu
from gimbal_runtime.vllm import cpu_eplb
from gimbal_runtime.vllm.kernel_recording import STOCK_RECORDING, KernelRecording
from gimbal_runtime.vllm.loads_recording import LoadsRecording
from gimbal_runtime.vllm.rank_place import RankPlace

LAYERS, EXPERTS, SLOTS, TOP_K = 48, 128, 144, 8
PLACE = RankPlace(0, 2, 4, 0, 2)
TOKENS = {"cpu": (1, 4, 16, 64), "cuda": (1, 16, 64, 1024, 16_384)}


def make_state(device: str) -> Any:
    """An EplbModelState of one rank, with vLLM's layer state in every layer."""
    from vllm.distributed.eplb.eplb_state import EplbLayerState, compute_logical_maps

    slots = (torch.arange(SLOTS) % EXPERTS).repeat(LAYERS, 1)
    copies, num_copies = (table.to(device) for table in compute_logical_maps(slots, EXPERTS))
    load = torch.zeros(LAYERS, SLOTS, dtype=torch.int32, device=device)
    num_tokens = [torch.tensor(1 << 20, dtype=torch.int32, device=device)]
    layers = []
    for index in range(LAYERS):
        layer_state = EplbLayerState(load[index], copies[index], num_copies[index])
        layer_state.should_record_tensor = torch.tensor(True, device=device)
        layer_state.num_unpadded_tokens_tensors = num_tokens
        layers.append(
            SimpleNamespace(
                router=make_router(layer_state),
                eplb_state=layer_state,
                do_naive_dispatch_combine=False,
                moe_config=SimpleNamespace(is_sequence_parallel=False),
            )
        )
    model = SimpleNamespace(num_moe_layers=LAYERS, num_logical_experts=EXPERTS, moe_layers=layers)
    return SimpleNamespace(
        model=model,
        expert_load_pass=load,
        physical_to_logical_map=slots.to(device),
        logical_to_physical_map=copies,
        logical_replica_count=num_copies,
    )


def make_router(layer_state: Any) -> Any:
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    class Router(BaseRouter):
        routing_method_type = None

        def _compute_routing(self, *_: Any, **__: Any) -> Any:
            raise NotImplementedError

    return Router(TOP_K, EXPERTS, layer_state)


def make_steps(device: str, tokens: int) -> dict[str, Any]:
    stock, ours = make_state(device), make_state(device)
    counts = torch.zeros(LAYERS, PLACE.num_sources, EXPERTS, dtype=torch.int64, device=device)
    recording = KernelRecording(ours, PLACE, counts, PLACE.topology(1), compare=False)
    recording.attach()
    recording.before_forward()
    weights = torch.rand(tokens, EXPERTS, generator=torch.Generator().manual_seed(tokens))
    ids = weights.topk(TOP_K).indices.int().to(device)
    copied = torch.empty_like(ids)
    stock_map = stock.model.moe_layers[0].router._apply_eplb_mapping
    our_map = ours.model.moe_layers[0].router._apply_eplb_mapping
    steps = {"vLLM": lambda: stock_map(ids), "ours": lambda: our_map(ids)}
    if device == "cpu":
        reads = LoadsRecording(stock.expert_load_pass, stock.physical_to_logical_map, counts[:, 1])

        def read() -> None:
            reads.before_forward()
            reads.after_forward(is_dummy=False)

        steps["a step by loads"] = read
    steps["copy only"] = lambda: copied.copy_(ids)
    return steps


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--seconds", type=float, default=1.0, help="for each number of tokens, on a CPU")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device; valid here: cpu")
    from vllm.model_executor.layers.fused_moe.router import base_router

    if arguments.device == "cpu":
        torch.set_num_threads(1)
        setattr(base_router, STOCK_RECORDING, cpu_eplb.map_and_record)
    rows = []
    with torch.inference_mode():
        for tokens in TOKENS[arguments.device]:
            steps = make_steps(arguments.device, tokens)
            spent = (
                time_on_gpu(steps) if arguments.device == "cuda" else time_on_cpu(steps, arguments.seconds)
            )
            if "a step by loads" in spent:
                spent["by loads"] = spent["vLLM"] + spent.pop("a step by loads") / LAYERS
            rows.append({"tokens": tokens, "microseconds": {n: round(v, 2) for n, v in spent.items()}})
            print(f"{tokens:6} x {TOP_K}", rows[-1]["microseconds"], flush=True)
    if arguments.json is not None:
        command = f"python bench/recording.py --device {arguments.device} --seconds {arguments.seconds:g}"
        result = {"rows": rows, "unit": "microseconds per MoE layer"} | environment(arguments.device, 1)
        result["command"] = command
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
