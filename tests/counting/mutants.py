"""Plausible mistakes in the CUDA kernels, each with the case that shows it; as a command, prints what caught each.

python tests/counting/mutants.py
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from counting_cases import BY_NAME, Case  # noqa: E402
from simt_lane import make_call, program, run_calls  # noqa: E402

from tests.simt import build  # noqa: E402

FOLDER = ROOT / "csrc" / "counting"
TSAN, ASAN = 66, 67


@dataclass(frozen=True)
class Mutant:
    """`old` replaced by `new` in a header, and how the case shows it."""

    name: str
    old: str
    new: str
    case: str
    shown_by: str = "results"  # or "deadlock", "race", "overrun" of an array
    header: str = "counting.cuh"


CASES = {
    **BY_NAME,
    "blocks": Case("blocks", tokens=300, experts=16, slots=20),
    "ragged": Case("ragged", tokens=37, top_k=3, experts=16, slots=20),
    "no window": Case("no window", tokens=64, experts=7000, slots=7000, with_load=False, source="mixed"),
}
CLEARED = "histogram.clear();\n  __syncthreads();"
COUNTED = "__syncthreads();\n  histogram.flush(a);"
WIDE_ADD = "atomicAdd(static_cast<UInt64*>(counters) + at, static_cast<UInt64>(picks));"
SHARED_ADD = "atomicAdd(&bins[(source - first_source) * experts + expert], picks);"
CHOICE = "choice.cuh"
LOAD = "a.vectorised && first + kPicks <= total) {\n    if constexpr (sizeof(Id) == 4) {\n      const int4".replace(
    "a.", "arguments."
)
STORE = "first + kPicks <= total) {\n    if constexpr (sizeof(Id) == 4) {\n      *reinterpret_cast<int4*>"
LEADER = "__ffs(equal) - 1 == static_cast<int>(threadIdx.x & 31u)"
VALID = "static_cast<UInt64>(ids[i]) < static_cast<UInt64>(a.experts)"
STRAY = "static_cast<UInt64>(source) < static_cast<UInt64>(a.sources)"

MUTANTS = [
    Mutant("no barrier after clearing", CLEARED, "histogram.clear();", "blocks"),
    Mutant("no barrier before the flush", COUNTED, "histogram.flush(a);", "blocks"),
    Mutant("no barrier after clearing, seen as a race", CLEARED, "histogram.clear();", "ragged", "race"),
    Mutant("flush without atomics", WIDE_ADD, "static_cast<UInt64*>(counters)[at] += picks;", "blocks", "race"),
    Mutant(
        "shared counters without atomics",
        SHARED_ADD,
        "bins[(source - first_source) * experts + expert] += picks;",
        "ragged",
        "race",
    ),
    Mutant("all lanes in the mask", "any_sync(lanes,", "any_sync(kAllLanes,", "padding ids", "deadlock"),
    Mutant("off by one at E", VALID, VALID.replace("<", "<=").replace("<=UInt64>", "<UInt64>"), "padding ids"),
    Mutant("negative ids mapped", VALID, "ids[i] < a.experts", "padding ids", "overrun"),
    Mutant("padding rows counted", "valid && row < counted_rows", "valid", "num_tokens on the device"),
    Mutant("one padding row counted", "row < counted_rows", "row <= counted_rows", "num_tokens on the device"),
    Mutant("flag ignored", "!is_enabled(a)", "false", "disabled on the device"),
    Mutant("group counted once", "static_cast<unsigned>(__popc(equal))", "1u", "blocks"),
    Mutant("every lane adds its group", LEADER, "true", "blocks"),
    Mutant("sources not told apart", "static_cast<UInt64>(source) << 32 | ", "", "source mixed"),
    Mutant("stray source mapped", STRAY, "source < a.sources", "source stray", "overrun"),
    Mutant("one source past the window", "first_source < window", "first_source <= window", "no window", "overrun"),
    Mutant("load past the window lost", "if (slots != 0) {", "if (true) {", "no slots", "overrun"),
    Mutant("last pick of a block lost", "tile < first_tile + tiles", "tile + 1 < first_tile + tiles", "ragged"),
    Mutant("16-byte load past the end", LOAD, LOAD.replace("+ kPicks <=", "<"), "ragged", "overrun"),
    Mutant("16-byte store past the end", STORE, STORE.replace("+ kPicks <=", "<"), "ragged", "overrun"),
    Mutant("row not advanced", "if (++column == top_k)", "if (++column > top_k)", "ragged"),
    Mutant("source not mixed in", "+ source + expert) % choices", "+ expert) % choices", "plain", header=CHOICE),
    Mutant("carry lost", "(row >> 5) * kCarry5Step", "(row >> 6) * kCarry5Step", "blocks", header=CHOICE),
    Mutant("threshold at its own copy", "at >= static_cast", "at > static_cast", "even shares", header=CHOICE),
]  # fmt: skip
CASES["no slots"] = Case("no slots", tokens=9, experts=6000, slots=6400)
SANITIZER = {"results": "plain", "deadlock": "plain", "race": "tsan", "overrun": "asan"}


def plant(mutant: Mutant, folder: Path) -> Path:
    """The altered header, in a folder that goes before csrc/ when headers are looked for."""
    text = (FOLDER / mutant.header).read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(
            f"{mutant.name}: its text is in {mutant.header} {text.count(mutant.old)} times; valid: 1"
        )
    target = folder / "counting" / mutant.header
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text.replace(mutant.old, mutant.new))
    return folder


def catch(mutant: Mutant | None, case: str, shown_by: str, folder: Path, *, seeds: int = 3) -> str:
    """What the lane finds in a planted kernel (None: the real one): "" or a line that says how it is wrong."""
    headers = None if mutant is None else plant(mutant, folder)
    driver = program(SANITIZER[shown_by], headers)
    calls = [make_call(CASES[case], seed) for seed in range(1 if shown_by == "race" else seeds)]
    done, wrong = run_calls(driver, calls, folder)
    if shown_by == "results":
        bad = next((names for names in wrong if names), [])
        return f"differs from the reference in {', '.join(bad)}" if bad and done.returncode == 0 else ""
    if shown_by == "deadlock":
        return next((line for line in done.stderr.splitlines() if line.startswith("SIMT: ")), "")
    if shown_by == "race":
        return "data race" if done.returncode == TSAN and "data race" in done.stderr else ""
    found = "heap-buffer-overflow" in done.stderr or "SEGV" in done.stderr
    return "access outside an array" if done.returncode == ASAN and found else ""


def main() -> int:
    missed = 0
    print(f"{'mutant':42} {'lane':6} {'case':26} found")
    for mutant in MUTANTS:
        lane = SANITIZER[mutant.shown_by]
        reason = build.why_not(lane)
        with tempfile.TemporaryDirectory() as folder:
            found = (
                f"skipped: {reason}" if reason else catch(mutant, mutant.case, mutant.shown_by, Path(folder))
            )
        missed += not found
        print(f"{mutant.name:42} {lane:6} {mutant.case:26} {found or 'NOT CAUGHT'}", flush=True)
    print(f"{len(MUTANTS) - missed} of {len(MUTANTS)} caught; each is a case of "
          "test_counting_simt.py::test_a_planted_fault_is_caught")  # fmt: skip
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
