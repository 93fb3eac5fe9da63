"""The requests of bench/serving/engine_choice.py on simulated engines, without a machine's noise.

    python bench/simulate/serving.py [--json FILE]

Two engines in lockstep, token counts of the fixture's prompts, 30 seeds, loads 0.8, 1.0 and 1.4; geometric means of
the paired ratios against vLLM's choice in order of arrival. The iteration model is assumed, of the size that two
cores show.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from gimbal_runtime.iteration_model import IterationModel
from gimbal_runtime.tools.replay import load_prompts, make_requests
from gimbal_runtime.tools.sim_engines import EngineSettings
from gimbal_runtime.tools.sim_policies import Policy, build, measure, saturated_rate
from gimbal_runtime.tools.sim_traffic import Arrival
from transformers import AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "fixtures"
MODEL = IterationModel(0.015, 4e-4, 0.0, 6e-4, 0.0)
SETTINGS = {
    "token-bound": EngineSettings(model=MODEL, token_budget=256, max_num_seqs=64, kv_capacity=100_000),
    "slot-bound": EngineSettings(model=MODEL, token_budget=512, max_num_seqs=16, kv_capacity=100_000),
}
POLICIES = {
    "off": Policy("vllm"),
    "choice only": Policy("gimbal"),
    "dp": Policy("gimbal", 5.0),
    "dp, age limit auto": Policy("gimbal", "auto"),
}
FIGURES = ("ttft_mean", "ttft_p99", "tpot_mean", "throughput")
SEEDS, LOADS = 30, (0.8, 1.0, 1.4)


def arrivals(rate: float, seed: int, tokens: dict[str, int], prompts: list[tuple[str, str]]) -> list[Arrival]:
    requests = make_requests(prompts, count=250, rate=rate, seed=seed)
    return [Arrival(r.arrival, tokens[r.name.split(":", 1)[1]], r.output_tokens) for r in requests]


def rows() -> list[dict[str, Any]]:
    tokenizer = AutoTokenizer.from_pretrained(FIXTURES / "tiny-qwen3-moe")
    prompts = list(load_prompts(FIXTURES / "prompts.jsonl"))
    tokens = {name: len(tokenizer(text)["input_ids"]) for name, text in prompts}
    found = []
    for setting, engines in SETTINGS.items():
        full = np.mean(
            [saturated_rate(arrivals(1.0, 10_000 + i, tokens, prompts), engines, 2) for i in range(3)]
        )
        for load in LOADS:
            served = [arrivals(load * float(full), seed, tokens, prompts) for seed in range(SEEDS)]
            runs = {
                name: np.array(
                    [
                        [getattr(run, f) for f in FIGURES]
                        for run in (measure(build(policy, engines, 2), a) for a in served)
                    ]
                )
                for name, policy in POLICIES.items()
            }
            for name, run in runs.items():
                change = np.expm1(np.log(run / runs["off"]).mean(axis=0))
                figures = dict(zip(FIGURES, change.round(4).tolist(), strict=True))
                found.append({"setting": setting, "load": load, "policy": name, **figures})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "bench" / "results" / "simulate-serving.json")
    target = parser.parse_args().json
    result = {"command": "python bench/simulate/serving.py", "seeds": SEEDS, "changes": rows()}
    target.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["changes"]:
        print(row)


if __name__ == "__main__":
    main()
