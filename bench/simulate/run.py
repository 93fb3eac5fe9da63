"""Runs `gimbal simulate` and keeps its figures: `python bench/simulate/run.py --trace AZURE.csv`.

Writes bench/results/simulate.json: the rows of both tables, and for each the commit, the command, the versions and
its CPU seconds. All arguments are those of `gimbal simulate`; with `--only` the other table stays as it is.
`--json` names another file.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy
from gimbal_runtime import cli

ROOT = Path(__file__).resolve().parents[2]
PARTS = {"engines": ("engines", "verdict", "skipped"), "deflection": ("deflection",)}
"""Table -> its keys in the result."""


def main(arguments: list[str]) -> int:
    """Runs the command; its exit code."""
    target = ROOT / "bench" / "results" / "simulate.json"
    if "--json" in arguments:
        place = arguments.index("--json")
        target = Path(arguments[place + 1])
        arguments = arguments[:place] + arguments[place + 2 :]
    begun = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "made.json"
        code = cli.main(["simulate", *arguments, "--json", str(made)])
        if code != 0:
            return code
        figures = json.loads(made.read_text())
    kept = json.loads(target.read_text()) if target.is_file() else {}
    result = merged(kept, figures, _origin(arguments, time.process_time() - begun))
    target.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _origin(arguments: list[str], seconds: float) -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    # The trace's folder is a fact of the machine; its name is enough.
    named = [Path(word).name if "/" in word else word for word in arguments]
    return {
        "commit": commit,
        "command": " ".join(["gimbal", "simulate", *named]),
        "machine": f"{platform.machine()}, {platform.system()}",
        "versions": {"python": platform.python_version(), "numpy": numpy.__version__},
        "cpu_seconds": round(seconds, 1),
    }


def merged(kept: dict[str, Any], figures: dict[str, Any], origin: dict[str, Any]) -> dict[str, Any]:
    """The results file with the tables that `figures` has replaced in it."""
    runs = dict(kept.get("runs", {}))
    result: dict[str, Any] = {
        "note": "simulated engines; the iteration model's coefficients are assumed, not measured",
        "runs": runs,
    }
    for part, keys in PARTS.items():
        source = figures if part in figures else kept
        if source is figures:
            runs[part] = origin
        result |= {key: source[key] for key in keys if key in source}
    return result


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
