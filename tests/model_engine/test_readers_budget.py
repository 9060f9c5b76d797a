"""How many files and functions a steady step passes: who reads it reads these. Only ever fewer."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType

import pytest
from spec_decode.engines import PROMPTS, Folders, create_engine, params

import atom
from atom.messages import EngineRequest

_ROOT = str(Path(atom.__file__).parent)
# Files and functions. Op by op 17 of these files are the model and its operations.
_MOST = {"replayed": (26, 86), "op by op": (40, 167)}


@pytest.mark.parametrize("run", _MOST)
def test_a_steady_step_with_eagle3(run: str, folders: Folders) -> None:
    engine = create_engine(
        folders("llama"),
        **folders.speculation("mha"),
        speculative_adaptive=False,
        enforce_eager=run == "op by op",
    )
    core = engine.engine.core
    sampling = params("greedy", max_tokens=100)
    core.add_request(EngineRequest(id="a", prompt_token_ids=PROMPTS[0], params=sampling, seed=0))
    for _ in range(8):
        core.step()
    seen: set[tuple[str, int, str]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        # Newer interpreters do not call comprehensions.
        if event == "call" and code.co_filename.startswith(_ROOT) and code.co_name[0] != "<":
            seen.add((code.co_filename.removeprefix(_ROOT), code.co_firstlineno, code.co_name))

    sys.setprofile(note)
    try:
        core.step()
    finally:
        sys.setprofile(None)
    files = sorted({file for file, _, _ in seen})
    print(run, len(files), len(seen))
    print(files)
    print(sorted(seen))
    most_files, most_functions = _MOST[run]
    assert len(files) <= most_files, files
    assert len(seen) <= most_functions, sorted(seen)
