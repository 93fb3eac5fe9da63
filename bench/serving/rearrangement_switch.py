"""vLLM plug-in for `rearrangement.py`: rearrangements take turns between vLLM's transfer and Gimbal's.

Each rank keeps both communicators and counts rearrangements, which all ranks begin at the same step. Rank 0 writes
a line for each into the file named by REARRANGEMENT_LOG: way, start and end on the machine's monotonic clock.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

WAYS = ("stock", "gimbal")


class Turns:
    """The state of one rank."""

    def __init__(self) -> None:
        self.count = 0
        self.begun: float | None = None
        self.stock: tuple[Any, Any] | None = None  # communicator and buffers
        self.ours: tuple[Any, Any] | None = None

    def switch(self, state: Any) -> None:
        """Called before a rearrangement, when none is under way."""
        if self.ours is None:
            self.ours = (state.communicator, state.expert_buffer)
        state.communicator, state.expert_buffer = (self.stock, self.ours)[self.count % 2]
        self.count += 1
        self.begun = time.perf_counter()

    def note_end(self) -> None:
        """Called once all layers are committed."""
        row = {"way": WAYS[(self.count - 1) % 2], "start": self.begun, "end": time.perf_counter()}
        self.begun = None
        with open(os.environ["REARRANGEMENT_LOG"], "a") as log:
            log.write(json.dumps(row) + "\n")


def register() -> None:
    """Entry point of the plug-in."""
    from gimbal_runtime.vllm import register as register_hooks

    register_hooks()  # whatever the order in which vLLM loads its plug-ins
    from vllm.distributed.eplb import eplb_state
    from vllm.distributed.parallel_state import get_ep_group

    turns = Turns()
    create, state_class = eplb_state.create_eplb_communicator, eplb_state.EplbState
    rearrange, step = state_class.rearrange, state_class.step

    def create_communicator(*args: Any, **kwargs: Any) -> Any:
        communicator = create(*args, **kwargs)
        turns.stock = (communicator, kwargs["expert_buffer"])
        return communicator

    def rearrange_in_turn(self: Any, is_profile: bool = False, *args: Any, **kwargs: Any) -> Any:
        if not is_profile:
            [state] = self.model_states.values()
            turns.switch(state)
        return rearrange(self, is_profile, *args, **kwargs)

    def step_and_note(self: Any, *args: Any, **kwargs: Any) -> None:
        step(self, *args, **kwargs)
        moving = any(state.rebalanced for state in self.model_states.values())
        if turns.begun is not None and not moving and get_ep_group().rank_in_group == 0:
            turns.note_end()

    eplb_state.create_eplb_communicator = create_communicator
    state_class.rearrange = rearrange_in_turn
    state_class.step = step_and_note
