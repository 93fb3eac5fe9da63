"""vLLM plug-ins for the tests: each is a module and a dist-info in a folder that a server gets as PYTHONPATH."""

from __future__ import annotations

import textwrap
from pathlib import Path

NO_TRANSFER = """
    def register():
        # The maps are committed, the weights stay where they were.
        from vllm.distributed.eplb import eplb_state, rebalance_execute
        for module in (eplb_state, rebalance_execute):
            assert hasattr(module, "move_from_buffer")
            module.move_from_buffer = lambda *args, **kwargs: None
"""

CAPTURE_ROUTER = """
    import os
    import numpy as np

    LAYERS, EXPERTS = 6, 32

    def register():
        # Counts the logical experts that the router of each layer picks, into a file that the test reads.
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
        stock = BaseRouter._apply_eplb_mapping
        layers = {}
        counts = np.memmap(os.environ["CAPTURE_FILE"], dtype=np.int64, mode="r+", shape=(LAYERS, EXPERTS))

        def apply(self, topk_ids):
            layer = layers.setdefault(id(self), len(layers))
            np.add.at(counts[layer], topk_ids.flatten().long().numpy(), 1)
            return stock(self, topk_ids)

        BaseRouter._apply_eplb_mapping = apply
"""


def write_plugin(folder: Path, name: str, source: str) -> Path:
    """Makes `folder` a place from which vLLM loads the plug-in `name`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    info = folder / f"{name}-0.0.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.0.0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {name}:register\n")
    return folder
