"""A process that tries grammars, shared by the tests: it takes seconds to start."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers import PreTrainedTokenizerFast

from atom.structured_output.trials.client import TrialProcess
from atom.structured_output.trials.messages import TrialLimits
from atom.structured_output.vocabulary import read_vocabulary
from atom.structured_output.xgrammar_backend import XGrammarBackend

# Grammars of tests take milliseconds, or minutes.
LIMITS = TrialLimits(seconds=8.0, slices=(0.1, 0.2), places=1)


@pytest.fixture(scope="session")
def trials() -> Iterator[TrialProcess]:
    process = TrialProcess(LIMITS)
    yield process
    process.shutdown()


@pytest.fixture(scope="session")
def backend(byte_level_tokenizer: PreTrainedTokenizerFast) -> XGrammarBackend:
    tokenizer = byte_level_tokenizer
    assert tokenizer.eos_token_id is not None
    return XGrammarBackend(read_vocabulary(tokenizer, len(tokenizer), [tokenizer.eos_token_id]))
