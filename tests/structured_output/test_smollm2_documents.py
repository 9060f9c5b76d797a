"""Documents of the embedded model at temperature 1, with speculation and without."""

from __future__ import annotations

import json
from typing import Any

import pytest

from atom import LLM, RequestOutput, SamplingParams, StructuredOutput
from atom.model_loader.drafts.shipped import shipped_draft_for

NUM_REQUESTS = 200
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 60},
        "year": {"type": "integer", "minimum": 1900, "maximum": 2100},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "mood": {"enum": ["calm", "tense", "joyful"]},
        "sequel": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["title", "year", "tags", "mood", "sequel"],
    "additionalProperties": False,
}


def generate(count: int, **speculation: Any) -> list[RequestOutput]:
    options = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16, **speculation}
    llm = LLM(**options, no_speculation=not speculation)
    prompts = [
        llm.render_chat([{"role": "user", "content": f"Invent film number {i}, as JSON."}])
        for i in range(count)
    ]
    wanted = StructuredOutput.json_schema(SCHEMA)
    params = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=160, structured_output=wanted)
        for i in range(count)
    ]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    llm.shutdown()
    return outputs


def check_documents(outputs: list[RequestOutput]) -> int:
    """Every text is a valid document or was cut; how many are whole."""
    whole = 0
    for output in outputs:
        [completion] = output.outputs
        assert completion.finish_reason in ("stop", "length")
        if completion.finish_reason == "length":
            continue
        whole += 1
        document = json.loads(completion.text)
        assert list(document) == list(SCHEMA["properties"])
        assert isinstance(document["title"], str)
        assert len(document["title"]) <= 60
        assert isinstance(document["year"], int)
        assert 1900 <= document["year"] <= 2100
        assert len(document["tags"]) <= 3
        assert all(isinstance(tag, str) and len(tag) <= 12 for tag in document["tags"])
        assert document["mood"] in ("calm", "tense", "joyful")
        assert document["sequel"] in (None, True, False)
    return whole


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_documents_are_valid_and_the_same() -> None:
    plain = generate(NUM_REQUESTS)
    assert check_documents(plain) > NUM_REQUESTS // 2
    draft = {"method": "eagle3", "draft_model": str(shipped_draft_for(None))}
    for speculation in (draft, {**draft, "speculative_lookup": True}):
        fast = generate(NUM_REQUESTS, num_speculative_tokens=3, **speculation)
        check_documents(fast)
        pairs = zip(plain, fast, strict=True)
        differing = sum(a.outputs[0].text != b.outputs[0].text for a, b in pairs)
        # Rows are multiplied in other groups, so that near ties may fall the other way.
        assert differing <= 1
