"""Runs `gimbal simulate` and keeps its figures: `python bench/simulate/run.py --trace AZURE.csv`.

Writes bench/results/simulate.json: commit, machine, versions, command, and the rows of both tables. All arguments
are those of `gimbal simulate`; `--json` names another file.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import numpy
from gimbal_runtime import cli

ROOT = Path(__file__).resolve().parents[2]


def main(arguments: list[str]) -> int:
    """Runs the command; its exit code."""
    target = ROOT / "bench" / "results" / "simulate.json"
    if "--json" in arguments:
        place = arguments.index("--json")
        target = Path(arguments[place + 1])
        arguments = arguments[:place] + arguments[place + 2 :]
    begun = time.monotonic()
    code = cli.main(["simulate", *arguments, "--json", str(target)])
    if code != 0:
        return code
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    # The trace's folder is a fact of the machine; its name is enough.
    named = [Path(word).name if "/" in word else word for word in arguments]
    head = {
        "commit": commit,
        "command": " ".join(["gimbal", "simulate", *named]),
        "machine": f"{platform.machine()}, {platform.system()}",
        "versions": {"python": platform.python_version(), "numpy": numpy.__version__},
        "seconds": round(time.monotonic() - begun, 1),
        "note": "simulated engines; the iteration model's coefficients are assumed, not measured",
    }
    target.write_text(json.dumps({**head, **json.loads(target.read_text())}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
