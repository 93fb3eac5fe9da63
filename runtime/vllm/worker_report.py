"""Hook: a worker's figures (traffic, moves, MoE pressure) reach its engine with the model runner's output."""

from __future__ import annotations

from typing import Any

from .guard import Fuse, Hook, expect
from .source_rows import rows_of_this_process

FIGURES = "gimbal_figures"
_fuse = Fuse("worker-report")


def _attach(output: Any, empty: Any) -> None:
    """Puts the figures on a model runner output; vLLM's shared empty output is left alone."""
    rows = rows_of_this_process()
    if rows is not None and output is not None and output is not empty:
        setattr(output, FIGURES, rows.figures())


def _install() -> None:
    worker = expect("vllm.v1.worker.gpu_worker", "Worker")
    stock_execute = expect("vllm.v1.worker.gpu_worker", "Worker.execute_model", ["self", "scheduler_output"])
    stock_sample = expect("vllm.v1.worker.gpu_worker", "Worker.sample_tokens", ["self", "grammar_output"])
    finished = expect("vllm.v1.outputs", "ModelRunnerOutput")
    scheduler = expect("vllm.v1.core.sched.scheduler", "Scheduler")
    stock_update = expect(
        "vllm.v1.core.sched.scheduler",
        "Scheduler.update_from_output",
        ["self", "scheduler_output", "model_runner_output"],
    )
    deferred = expect("vllm.v1.outputs", "AsyncModelRunnerOutput")
    empty = expect("vllm.v1.outputs", "EMPTY_MODEL_RUNNER_OUTPUT")

    def attach_later(output: Any) -> None:
        get_output = output.get_output

        def get_output_with_figures() -> Any:
            # Called once. Left in place, the closure and the output would hold each other and its tensors.
            vars(output).pop("get_output", None)
            result = get_output()
            _fuse.attempt(_attach, result, empty)
            return result

        output.get_output = get_output_with_figures

    def with_figures(output: Any) -> Any:
        if isinstance(output, deferred):
            _fuse.attempt(attach_later, output)
        elif isinstance(output, finished):
            _fuse.attempt(_attach, output, empty)
        return output

    def execute_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        return with_figures(stock_execute(self, *args, **kwargs))  # a result only where nothing is sampled

    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        return with_figures(stock_sample(self, *args, **kwargs))

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        figures = getattr(model_runner_output, FIGURES, None)
        if figures is not None:
            self.gimbal_figures = figures
        return stock_update(self, scheduler_output, model_runner_output)

    worker.execute_model = execute_model
    worker.sample_tokens = sample_tokens
    scheduler.update_from_output = update_from_output


HOOKS = (Hook("worker-report", _install),)
