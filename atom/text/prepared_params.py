"""Sampling parameters prepared once for all sequences of a request."""

from __future__ import annotations

import msgspec

from atom.sampling_params import SamplingParams
from atom.text.stop_strings import StopStrings


class PreparedParams:
    """Sampling parameters in the forms that all sequences share.

    Attributes:
        params: as given.
        stops: the stop strings.
    """

    def __init__(self, params: SamplingParams) -> None:
        self.params = params
        self.stops = StopStrings(params.stop_strings, include=params.include_stop_str_in_output)
        # The engine does not handle text, and computes the prompt's logprobs only once.
        first = msgspec.structs.replace(params, stop=None, kept_special_tokens=None)
        self._first = self._others = first
        if params.prompt_logprobs is not None:
            self._others = msgspec.structs.replace(first, prompt_logprobs=None)

    @classmethod
    def of(cls, params: SamplingParams | PreparedParams) -> PreparedParams:
        """Prepare parameters, unless they are prepared already."""
        return params if isinstance(params, PreparedParams) else cls(params)

    def for_engine(self, index: int) -> SamplingParams:
        """The engine's parameters for completion `index`; equal ones are the same object."""
        return self._first if index == 0 else self._others
