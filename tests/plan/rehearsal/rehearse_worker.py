"""Rehearses one of `published.TARGETS` with each of `published.DRAFTS`; run as a program.

    python rehearse_worker.py TARGET GPU RANKS [every-layer]

So many ranks are built with the first draft, one with the others. Writes what was found as
JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from published import DRAFTS, TARGETS, write

from atom.model_engine.arg_utils import engine_config
from atom.model_loader.source import resolve_model
from atom.plan.gpus import find_gpu
from atom.plan.rehearsal.libraries import KNOWN
from atom.plan.rehearsal.rehearse import Rehearser
from atom.plan.rehearsal.repeated import RepeatedLayers


def main(target: str, name: str, ranks: str, *every_layer: str) -> None:
    if every_layer:  # equal ones, too
        RepeatedLayers.count = lambda *_: None  # type: ignore[method-assign]
    gpu = find_gpu(name)
    rehearser = Rehearser(gpu)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        model = write(folder / target, TARGETS[target])
        for draft, fields in DRAFTS.items():
            config = engine_config(
                model=str(model),
                load_format="dummy",
                device="cuda",
                tensor_parallel_size=8,
                method="eagle3",
                draft_model=str(write(folder / draft, fields)),
                num_speculative_tokens=3,
            )
            source = resolve_model(config.model)
            num_built = 1 if found else int(ranks)
            own = rehearser.rehearse(config, source, frozenset(KNOWN[gpu.kind]), num_built)
            found[draft] = {
                "is_ready": own.is_ready,
                "num_ranks": own.num_ranks,
                "ops": own.ops,
                "memory": asdict(own.memory) | {"kv_cache": own.memory.kv_cache},
                "graphs": asdict(own.graphs),
                "launches": dict(own.decoding.launches.by_library),
                "bytes_read": own.decoding.bytes_read,
                "stored": own.stored,
                "kernels": own.kernels,
            }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
