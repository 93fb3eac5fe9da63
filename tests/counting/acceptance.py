"""Every backend that works here against the reference on random shapes; prints seeds, exit code 1 on a difference.

    python tests/counting/acceptance.py [--cases 2000] [--simt 200]

Shapes: T 0 to 5,000, E 1 to 1,100, K 1 to 16, S 1 to 64; invalid ids, sources of rows, num_tokens, enabled, shares.
The CUDA kernels run through their host lane (tests/simt) on every tenth seed, or on a GPU on all of them. Triton's
interpreter has its own seeds (lane_interpreter.py).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from counting_cases import differences, prepare, run  # noqa: E402
from random_cases import random_case  # noqa: E402
from simt_lane import make_call, program, run_calls  # noqa: E402

from gimbal_kernels.counting import available_backends  # noqa: E402
from tests.simt import build  # noqa: E402


def wrong_seeds(backend: str, seeds: range, device: str) -> list[int]:
    wrong = []
    for seed in seeds:
        case = random_case(seed)
        found = run(prepare(case, seed=seed, device=device), backend)
        if differences(run(prepare(case, seed=seed), "torch"), found):
            wrong.append(seed)
    return wrong


def wrong_simt_seeds(seeds: range) -> list[int]:
    wrong = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in seeds:
            case = random_case(seed)
            if case.tokens == 0:
                continue  # nothing is launched
            call = make_call(case, seed, multiprocessors=(1, 4, 132)[seed % 3])
            done, found = run_calls(program(), [call], Path(folder))
            if done.returncode or found[0]:
                wrong.append(seed)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=2000, help="random shapes, from seed 0")
    parser.add_argument("--simt", type=int, default=200, help="of them for the CUDA kernels on the host")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    states, failed = available_backends(), False
    seeds = range(arguments.cases)
    lanes = [("host", seeds, "cpu"), *((name, seeds, "cuda") for name in ("torch", "triton", "cuda"))]
    for backend, lane_seeds, device in lanes:
        name = f"{backend} on {device}"
        if device == "cuda" and not torch.cuda.is_available():
            print(f"{name:18} skipped: no CUDA device")
            continue
        if states[backend] != "ready":
            print(f"{name:18} skipped: {states[backend]}")
            continue
        failed |= report(name, lane_seeds, lambda b=backend, s=lane_seeds, d=device: wrong_seeds(b, s, d))
    step = max(1, arguments.cases // max(1, arguments.simt))
    reason = build.why_not()
    if reason is None:
        simt_seeds = range(0, arguments.cases, step)
        failed |= report("cuda through simt", simt_seeds, lambda: wrong_simt_seeds(simt_seeds))
    else:
        print(f"cuda through simt  skipped: {reason}")
    return 1 if failed else 0


def report(name: str, seeds: range, find) -> bool:
    start = time.perf_counter()
    wrong = find()
    spent = time.perf_counter() - start
    text = f"seeds {wrong} differ" if wrong else "equal bit for bit"
    print(f"{name:18} {len(seeds)} shapes, seeds {seeds}: {text} ({spent:.0f} s)", flush=True)
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
