"""The body of `gimbal demo`: reference, then one server per mode, then the comparison."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from . import demo_report, demo_table
from .demo import DemoSettings
from .demo_result import ModeResult
from .replay import Record, Request, count_identical, load_prompts, make_requests, replay, summarize
from .scrape import Snapshot, scrape
from .server import VllmServer, check_model, check_port
from .windows import SavedWindow, combine, judge, load_windows

ENGINES = 2
RANKS = 2
WARM_UP = tuple(
    Request(f"warm-up {i}", f"# {i}\ndef area(radius):\n" * (1 + 3 * (i % 12)), 0.05 * i, 4 + i % 9)
    for i in range(48)
)
"""Sent before the measurement: the first batch of each size costs extra. No prompt of the replay begins so."""


class Clock:
    """Prints progress lines with the seconds since its creation."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since creation."""
        return time.monotonic() - self._start

    def say(self, text: str) -> None:
        """One line, at once even into a pipe."""
        print(f"[{self.seconds:6.1f} s] {text}", flush=True)

    def quarters(self, count: int) -> Callable[[int], None]:
        """A progress function for `count` requests that speaks four times."""
        marks = {(count * i + 3) // 4 for i in range(1, 5)}

        def progress(done: int) -> None:
            if done in marks:
                self.say(f"  {done} of {count} requests answered")

        return progress


@contextlib.contextmanager
def _log_folder(keep: Path | None) -> Iterator[Path]:
    """The folder for logs and windows: `keep`, else a temporary one that stays only when the run fails."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
        yield keep
        return
    folder = Path(tempfile.mkdtemp(prefix="gimbal-demo-"))
    try:
        yield folder
    except Exception:
        print(f"server logs are kept in {folder}", flush=True)
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _engine_arguments(settings: DemoSettings) -> list[str]:
    return [
        "--max-num-seqs",
        str(settings.sequences),
        "--max-num-batched-tokens",
        str(settings.token_budget),
    ]


def run_reference(
    settings: DemoSettings, requests: Sequence[Request], logs: Path, clock: Clock
) -> list[Record]:
    """Answers of one stock engine without expert parallelism; all prompts at once, as times do not matter."""
    clock.say("reference: starting one stock vLLM engine")
    server = VllmServer(
        settings.model,
        "off",
        data_parallel=1,
        expert_parallel=False,
        eplb=False,
        extra_args=_engine_arguments(settings),
        log_path=logs / "reference.log",
        port=settings.port,
    )
    at_once = [Request(r.name, r.prompt, 0.0, r.output_tokens) for r in requests]
    with server:
        clock.say(f"reference: ready; sending {len(requests)} prompts")
        records, seconds = replay(
            server.url, server.model_name, at_once, progress=clock.quarters(len(requests))
        )
    clock.say(f"reference: {sum(r.status == 200 for r in records)} answers in {seconds:.1f} s")
    return records


def run_mode(
    settings: DemoSettings,
    mode: str,
    requests: Sequence[Request],
    reference: Sequence[Record],
    logs: Path,
    clock: Clock,
) -> ModeResult:
    """Serves the requests in one mode and gathers its figures."""
    clock.say(f"{mode}: starting vLLM with {ENGINES} engines, experts over {RANKS} ranks, EPLB on")
    traffic = logs / f"windows-{mode}"
    shutil.rmtree(traffic, ignore_errors=True)
    traffic.mkdir(parents=True)
    # Where vLLM's own balancer places the experts only counting is added, for traffic figures to compare with.
    more = {"GIMBAL_OBSERVE": "1"} if mode in ("off", "dp") else {}
    server = VllmServer(
        settings.model,
        mode,
        data_parallel=ENGINES,
        eplb_window=settings.window,
        extra_args=_engine_arguments(settings),
        env={"GIMBAL_TRAFFIC_DIR": str(traffic), **more},
        log_path=logs / f"{mode}.log",
        port=settings.port,
    )
    with server:
        clock.say(f"{mode}: ready; warming up, then {len(requests)} requests at {settings.rate:g}/s")
        replay(server.url, server.model_name, WARM_UP)
        ignored = {window.name for window in load_windows(traffic)}
        before = scrape(server.url)
        records, seconds = replay(
            server.url, server.model_name, requests, progress=clock.quarters(len(requests))
        )
        time.sleep(1.5)  # the last counters reach the front end with the next engine statistics
        growth = scrape(server.url).since(before)
    windows = [window for window in load_windows(traffic) if window.name not in ignored]
    result = _mode_result(mode, records, reference, seconds, windows, growth)
    clock.say(f"{mode}: done; {result.identical} of {len(requests)} answers identical to the reference")
    return result


def _mode_result(
    mode: str,
    records: Sequence[Record],
    reference: Sequence[Record],
    seconds: float,
    windows: Sequence[SavedWindow],
    growth: Snapshot,
) -> ModeResult:
    identical, different = count_identical(records, reference)
    figures = [judge(window, ranks=RANKS, sources=ENGINES) for window in windows]
    reasons = growth.by_label("gimbal_engine_decisions_total", "reason")
    return ModeResult(
        mode=mode,
        records=tuple(records),
        identical=identical,
        different=tuple(different),
        summary=summarize(records, seconds),
        windows=tuple(windows),
        figures=tuple(figures),
        total=combine(figures),
        rearrangements=_whole(growth.total("gimbal_rearrangements_total")),
        experts_moved=_whole(growth.total("gimbal_experts_moved_total")),
        decisions={reason: round(count) for reason, count in sorted(reasons.items()) if count} or None,
    )


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def run(settings: DemoSettings) -> int:
    """The whole demo.

    Returns:
        0 when every answer of every mode has the reference's token ids, else 1.

    Raises:
        InputError: model or prompts are not there or not valid, or the port is in use.
        ServerError: a server did not come up.
    """
    check_model(settings.model)
    if settings.port is not None:
        check_port(settings.port)
    requests = make_requests(
        load_prompts(settings.prompts), count=settings.requests, rate=settings.rate, seed=settings.seed
    )
    clock = Clock()
    results: list[ModeResult] = []
    with _log_folder(settings.logs) as logs:
        reference = run_reference(settings, requests, logs, clock)
        for mode in settings.modes:
            results.append(run_mode(settings, mode, requests, reference, logs, clock))
    print(f"\n{demo_table.table(results)}\n")
    failed = sum(record.status != 200 for record in reference)
    if failed:
        print(f"reference: {failed} of {len(reference)} requests failed")
    for result in results:
        for line in demo_table.difference_lines(result, reference):
            print(line)
    if settings.json is not None:
        demo_table.write_json(settings.json, settings, results, clock.seconds)
        print(f"figures  {settings.json}")
    if settings.report is not None:
        settings.report.write_text(demo_report.page(settings, results), encoding="utf-8")
        print(f"report   {settings.report}")
    same = all(result.identical == len(requests) for result in results)
    print("every answer equals the reference" if same else "ANSWERS DIFFER FROM THE REFERENCE")
    return 0 if same else 1
