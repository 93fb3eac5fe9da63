"""The coordinator passes an engine's report on to every API server.

vLLM's coordinator sends each API server one row (waiting, running, kv) per engine. An engine's report travels to
it inside the statistics' free-form field and is appended to that engine's row. Plug-ins are not loaded in the
coordinator's process, so its entry function is replaced, in the parent, by one that can be pickled.
"""

from __future__ import annotations

from typing import Any

from .guard import Fuse, expect, logger, patch

MODULE = "vllm.v1.engine.coordinator"
REPORT_KEY = "gimbal"
STOCK_ROW = 3
"""Columns of a stock row: waiting, running, kv."""


def attach_report(engines: list[Any], outputs: Any) -> None:
    """Appends the report in `outputs`, if there is one, to the row of the engine that sent it."""
    stats = outputs.scheduler_stats
    report = (stats.kv_connector_stats or {}).get(REPORT_KEY) if stats else None
    if report is not None and 0 <= outputs.engine_index < len(engines):
        engines[outputs.engine_index].request_counts[STOCK_ROW:] = [report]


def _patch_this_process() -> None:
    process_class = expect(MODULE, "DPCoordinatorProc")
    decoder_class = expect(MODULE, "MsgpackDecoder")
    coordinators: list[Any] = []
    fuse = Fuse("coordinator")

    class Decoder(decoder_class):  # type: ignore[misc, valid-type]
        def decode(self, bufs: Any) -> Any:
            outputs = super().decode(bufs)
            for coordinator in coordinators:
                fuse.attempt(attach_report, coordinator.engines, outputs)
            return outputs

    stock_init = process_class.__init__

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        stock_init(self, *args, **kwargs)
        coordinators.append(self)

    patch(MODULE, "MsgpackDecoder", Decoder)
    process_class.__init__ = init


def run_coordinator(*args: Any, **kwargs: Any) -> Any:
    """Process entry: patches, then runs vLLM's own coordinator; without the patch if it does not fit."""
    stock = expect(MODULE, "DPCoordinatorProc.run_coordinator")
    if stock is run_coordinator:  # a forked child has inherited the replacement
        stock = _stock_entry
    try:
        _patch_this_process()
    except Exception:
        logger.exception("Gimbal hook 'coordinator' failed; reports of engines will not arrive")
    return stock(*args, **kwargs)


_stock_entry: Any = None


def check() -> None:
    """Looks up all that is changed here and in the coordinator's process, and changes nothing.

    Raises:
        HookMismatch: this vLLM is not as expected.
    """
    expect(MODULE, "DPCoordinatorProc.run_coordinator", ["engine_count", "front_publish_address"])
    expect(MODULE, "DPCoordinatorProc.__init__", ["self", "engine_count"])
    expect(MODULE, "MsgpackDecoder.decode", ["self", "bufs"])
    expect(MODULE, "EngineState")


def install() -> None:
    """Replaces the coordinator's entry function in this (parent) process."""
    global _stock_entry
    _stock_entry = expect(MODULE, "DPCoordinatorProc.run_coordinator")
    expect(MODULE, "DPCoordinatorProc").run_coordinator = staticmethod(run_coordinator)
