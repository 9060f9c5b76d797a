"""How likely a model finds a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from atom.bench.report import read_text
from atom.sampling_params import SamplingParams

if TYPE_CHECKING:
    from atom import LLM


def read_scored_text(path: Path, fields: Sequence[str]) -> str:
    """The text of a plain file, or of the fields of a JSONL file.

    Raises:
        ValueError: naming the line that lacks a field.
    """
    content = read_text(path)
    if ".jsonl" not in path.suffixes:
        return content
    records = []
    for number, line in enumerate(content.splitlines(), 1):
        try:
            record = json.loads(line)
            records.append("\n".join(str(record[field]) for field in fields))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path}:{number} is no JSON object with {', '.join(fields)}: {error!r}"
            ) from error
    return "\n\n".join(records)


def windows_of(llm: LLM, text: str, num_tokens: int, window: int) -> list[list[int]]:
    """Token ids of the text's beginning, cut into contexts.

    Raises:
        ValueError: when the text is shorter.
    """
    token_ids = llm.tokenizer.encode(text, add_special_tokens=False, verbose=False)
    if len(token_ids) < num_tokens:
        raise ValueError(f"the text has {len(token_ids)} tokens, {num_tokens} are to be scored")
    starts = range(0, num_tokens, window)
    return [token_ids[start : min(start + window, num_tokens)] for start in starts]


def score(llm: LLM, windows: Sequence[list[int]]) -> list[float]:
    """Negative log likelihood of every token but each window's first, in nats."""
    params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0)
    losses = []
    for window in windows:
        (output,) = llm.generate([window], params, use_tqdm=False)
        assert output.prompt_logprobs is not None
        for token_id, row in zip(window, output.prompt_logprobs, strict=True):
            if row is not None:
                losses.append(-row[token_id].logprob)
    return losses
