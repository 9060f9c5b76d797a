"""The embedded model answers well when a request says nothing about sampling."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_process import ServerProcess

QUESTIONS = {
    "What is the capital of France?": r"\bParis\b",
    "What is 2 + 2?": r"\b(4|four)\b",
    "What color is the sky?": r"\bblue\b",
    "What is the opposite of hot?": r"\bcold\b",
    "How many days are in a week?": r"\b(7|seven)\b",
}
SAMPLES = 16


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """The embedded model with every option at its default but the cache's size."""
    process = ServerProcess(None, "--kv-cache-memory", "256MiB")
    try:
        yield process.wait_ready()
    finally:
        process.stop()


@pytest.mark.slow
def test_trivial_questions_are_answered(server: ServerProcess) -> None:
    client = server.client()

    def answer(question: str, seed: int) -> str:
        messages = [{"role": "user", "content": question}]
        reply = client.chat.completions.create(
            model="SmolLM2-135M-Instruct", messages=messages, seed=seed, max_tokens=64
        )
        return reply.choices[0].message.content or ""

    asked = [(question, seed) for question in QUESTIONS for seed in range(SAMPLES)]
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda each: answer(*each), asked))
    right: dict[str, int] = dict.fromkeys(QUESTIONS, 0)
    for (question, _), text in zip(asked, answers, strict=True):
        right[question] += re.search(QUESTIONS[question], text, re.IGNORECASE) is not None
    print(right)
    assert sum(right.values()) >= 70, right


@pytest.mark.slow
def test_the_capital_of_france_at_temperature_0(server: ServerProcess) -> None:
    """Its first logits are an exact tie in bfloat16."""
    reply = server.client().chat.completions.create(
        model="SmolLM2-135M-Instruct",
        messages=[{"role": "user", "content": "What is the capital of France?"}],
        temperature=0,
        max_tokens=32,
    )
    assert "Paris" in (reply.choices[0].message.content or "")
