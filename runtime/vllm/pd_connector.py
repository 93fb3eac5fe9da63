"""vLLM's ExampleConnector made safe for several prefill and decode nodes: KV caches in files of a shared folder.

The stock class takes every server for both sides. A decode node would then store prompts that it computes in
chunks as if they were complete, and a prefill node would load what another one was killed while writing. Here the
role in vLLM's `kv_role` decides: a `kv_producer` only stores, a `kv_consumer` only loads, and only what its router
says a prefill node has completed. Prefill nodes must not cut prompts (`--no-enable-chunked-prefill`): the connector
stores what is there after a prompt's first iteration.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    align_to_block_size,
)

from ..node_report import TRANSFERRED_ARGUMENT
from .iteration_recorder import argument


class SharedFolderConnector(ExampleConnector):  # type: ignore[misc]
    """One direction of the transfer, by `kv_role`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._stores = self._kv_transfer_config.kv_role == "kv_producer"
        self._written: dict[str, str] | None = None  # file that is being written -> its name when complete
        # Not the process id: nodes in containers of their own may have the same.
        self._suffix = uuid.uuid4().hex

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens to load beyond those that are here; whole blocks, and never the last token."""
        if self._stores or not argument(request, TRANSFERRED_ARGUMENT):
            return 0, False
        tokens = list(request.prompt_token_ids or ())
        stored = align_to_block_size(len(tokens), self._block_size) if tokens else 0
        if stored <= num_computed_tokens:
            return 0, False
        folder = self._generate_foldername_debug(
            torch.tensor(tokens)[:stored], [feature.identifier for feature in request.mm_features]
        )
        return (stored - num_computed_tokens, False) if os.path.exists(folder) else (0, False)

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        """What the worker stores (prefill nodes) or loads (decode nodes) in this iteration."""
        meta = super().build_connector_meta(scheduler_output)
        meta.requests = [entry for entry in meta.requests if entry.is_store == self._stores]
        return meta

    def _found_match_for_prompt(self, prompt_token_ids: list[int], mm_hashes: list[str]) -> bool:
        # Asked before a prompt is stored: what a killed server left there must not count as stored.
        return False

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Each file appears complete: another node may be reading that of an equal prompt."""
        self._written = {}
        try:
            super().save_kv_layer(*args, **kwargs)
            for partial, final in self._written.items():  # once, also for equal prompts of one batch
                os.replace(partial, final)
        finally:
            self._written = None

    def _generate_filename_debug(self, layer_name: str, token_ids: Any, mm_hashes: list[str]) -> str:
        final = str(super()._generate_filename_debug(layer_name, token_ids, mm_hashes))
        if self._written is None:
            return final
        partial = f"{final}.{self._suffix}"
        self._written[partial] = final
        return partial
