"""Where the grammars of requests are compiled, for a model's vocabulary."""

from __future__ import annotations

import logging
from functools import partial

from atom.config import ModelOptions
from atom.model_loader.source import ModelSource
from atom.model_loader.tokenizers.tokenizer import load_tokenizer
from atom.structured_output.base import GrammarBackend
from atom.structured_output.cache import GrammarCache
from atom.structured_output.spelling import Spelling
from atom.structured_output.trials.client import TrialProcess
from atom.structured_output.trials.compiler import TriedCompiler
from atom.structured_output.vocabulary import read_vocabulary
from atom.structured_output.xgrammar_backend import XGrammarBackend
from atom.structured_output.xgrammar_import import INSTALL_HINT, why_unusable

logger = logging.getLogger(__name__)


def create_grammars(options: ModelOptions, source: ModelSource) -> GrammarCache:
    if unusable := why_unusable():
        logger.warning(
            "requests for structured output will be refused: %s; run: %s",
            unusable,
            INSTALL_HINT,
        )
    create_backend = partial(_create_backend, options, source)
    return GrammarCache(TriedCompiler(create_backend, TrialProcess()))


def _create_backend(options: ModelOptions, source: ModelSource) -> GrammarBackend:
    vocab_size = source.hf_config.get_text_config().vocab_size
    tokenizer = load_tokenizer(source, options)
    vocabulary = read_vocabulary(tokenizer, vocab_size, source.eos_token_ids)
    encode = partial(tokenizer.encode, add_special_tokens=False)
    return XGrammarBackend(vocabulary, Spelling(vocabulary.tokens, encode))
