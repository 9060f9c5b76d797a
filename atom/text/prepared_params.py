"""Sampling parameters prepared once for all sequences of a request."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from atom.sampling_params import SamplingParams
from atom.text.stop_strings import StopStrings

CreateEnd = Callable[[], Callable[[str], bool]]


class PreparedParams:
    """Sampling parameters in the forms that all sequences share.

    Attributes:
        params: a validated copy of what was given.
        stops: the stop strings.
        create_end: makes, for each sequence, what is given its text piece by piece, and ends the
            sequence as a stop string would by returning true.
    """

    def __init__(self, params: SamplingParams, create_end: CreateEnd | None = None) -> None:
        self.create_end = create_end
        self.params = params = msgspec.structs.replace(params)
        self.stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        # The engine does not handle text, and computes the prompt's logprobs only once.
        self._share(msgspec.structs.replace(params, stop=None, kept_special_tokens=None))

    @classmethod
    def of(cls, params: SamplingParams | PreparedParams) -> PreparedParams:
        """Prepare parameters, unless they are prepared already."""
        return params if isinstance(params, PreparedParams) else cls(params)

    def spell_bad_words(self, encode: Callable[[str], list[int]]) -> None:
        """Tokenize `bad_words` for the engine; only the first call does anything.

        Args:
            encode: tokenizes a text without adding special tokens.
        """
        words = self._first.bad_words
        if not words:
            return
        # A word inside of a text begins with white space, which most tokenizers join to it.
        spelled = [encode(text) for word in words for text in (word, f" {word.lstrip()}")]
        known = [*(self._first.bad_word_ids or ()), *(ids for ids in spelled if ids)]
        distinct = [list(ids) for ids in dict.fromkeys(map(tuple, known))]
        self._share(msgspec.structs.replace(self._first, bad_words=None, bad_word_ids=distinct))

    def _share(self, first: SamplingParams) -> None:
        self._first = self._others = first
        if first.prompt_logprobs is not None:
            self._others = msgspec.structs.replace(first, prompt_logprobs=None)

    def for_engine(self, index: int) -> SamplingParams:
        """The engine's parameters for completion `index`; equal ones are the same object."""
        return self._first if index == 0 else self._others
