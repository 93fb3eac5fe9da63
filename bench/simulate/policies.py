"""Times of one engine choice and one deflection decision, kept in bench/results/policies.json.

`python bench/simulate/policies.py` runs the microbenchmarks test_engine_select.py and test_deflection.py of bench/.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCHES = ("bench/test_engine_select.py", "bench/test_deflection.py")


def main() -> int:
    """Runs the benchmarks; pytest's exit code."""
    with tempfile.TemporaryDirectory() as folder:
        full = Path(folder) / "full.json"
        command = [sys.executable, "-m", "pytest", "-q", *BENCHES, f"--benchmark-json={full}"]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code != 0:
            return code
        measured = json.loads(full.read_text())
    result = {
        "commit": measured["commit_info"]["id"],
        "command": "pytest " + " ".join(BENCHES),
        "machine": f"{platform.machine()}, {measured['machine_info']['cpu'].get('brand_raw', 'unknown')}",
        "versions": {"python": platform.python_version()},
        "unit": "microseconds",
        "rows": [
            {
                "name": row["name"],
                "median": round(1e6 * row["stats"]["median"], 2),
                "min": round(1e6 * row["stats"]["min"], 2),
                "rounds": row["stats"]["rounds"],
            }
            for row in measured["benchmarks"]
        ],
    }
    target = ROOT / "bench" / "results" / "policies.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
