"""Damaged messages between frontend and engine process."""

from __future__ import annotations

from random import Random

import msgspec
import pytest
from fuzz.damage import damaged_bytes, damaged_json
from fuzz.judge import cases, judge

from atom import SamplingParams, StructuredOutput
from atom.messages import EngineRequest, FinishReason, SequenceOutput, StepReport
from atom.model_engine.processes import wire

_PARAMS = SamplingParams(
    temperature=0.5,
    top_k=3,
    stop=["x"],
    logit_bias={3: 1.5},
    structured_output=StructuredOutput.json_schema({"type": "object"}),
)
_REQUEST = EngineRequest(id="a", prompt_token_ids=[1, 2, 3], params=_PARAMS, seed=1)
TO_ENGINE = [
    wire.encode(wire.AddRequests.of([_REQUEST, _REQUEST])),
    wire.encode(wire.Abort(["a", "b"])),
    wire.encode(wire.Shutdown()),
]
_OUTPUT = SequenceOutput(id="a", token_ids=[1, 2], finish_reason=FinishReason.STOP)
FROM_ENGINE = [
    wire.encode(wire.Step(StepReport(outputs=[_OUTPUT], refused=[]))),
    wire.encode(wire.Heartbeat(wire.StepProgress(5, 0.5, 60.0))),
    wire.encode(wire.RequestRefused("a", "too long", "prompt")),
    wire.encode(wire.EngineFailed("lost")),
]


@pytest.mark.parametrize("seeds", cases(1000, 50_000))
def test_messages(seeds: range) -> None:
    """They decode to what their types say, or to the error for wrong ones."""

    def read(seed: int) -> None:
        random = Random(seed)
        to_engine = random.random() < 0.5
        data = random.choice(TO_ENGINE if to_engine else FROM_ENGINE)
        if random.random() < 0.6:
            changed = damaged_json(msgspec.msgpack.decode(data), random)
            try:
                data = msgspec.msgpack.encode(changed)
            except OverflowError:  # a number that msgpack has no form for
                data = damaged_bytes(data, random)
        else:
            data = damaged_bytes(data, random)
        if not to_engine:
            wire.decode_from_engine(data)
            return
        message = wire.decode_to_engine(data)
        if isinstance(message, wire.AddRequests):
            for request in message.requests():
                assert type(request.id) is str

    judge(seeds, read, (wire.WireError,))


def test_a_place_that_is_none_is_no_other() -> None:
    """A negative one would be another's prompt."""
    shared = wire.SharedRequest("a", -1, 0, 1, 0, "", 0.0, 0, 0)
    message = wire.AddRequests([[1]], [_PARAMS], [()], [shared])
    with pytest.raises(wire.WireError, match="'a' names a prompt"):
        list(message.requests())
