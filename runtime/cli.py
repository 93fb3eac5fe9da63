"""The `gimbal` command: one sub-command per job, exit code 2 and one line on bad input."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from types import FrameType

from .tools import bench, calibrate, demo, doctor, place, report, route, simulate
from .tools.errors import InputError, RunError

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130


def build_parser() -> argparse.ArgumentParser:
    """The parser of all sub-commands; each sets `run`, a function of the parsed arguments to an exit code."""
    parser = argparse.ArgumentParser(
        prog="gimbal",
        description="Counting, expert placement and engine choice for MoE serving.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    demo.add_parser(commands)
    doctor.add_parser(commands)
    simulate.add_parser(commands)
    bench.add_parser(commands)
    route.add_parser(commands)
    place.add_parser(commands)
    report.add_parser(commands)
    calibrate.add_parser(commands)
    return parser


def _terminate(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one sub-command.

    Returns:
        0 done, 1 ran and failed (a comparison that does not hold, a server that does not come up), 2 bad
        input, 130 interrupted.
    """
    arguments = build_parser().parse_args(argv)
    # A terminated run must clean up like an interrupted one.
    signal.signal(signal.SIGTERM, _terminate)
    try:
        return int(arguments.run(arguments))
    except InputError as error:
        print(f"gimbal {arguments.command}: {error}", file=sys.stderr)
        return BAD_INPUT
    except RunError as error:
        print(f"gimbal {arguments.command}: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"gimbal {arguments.command}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
