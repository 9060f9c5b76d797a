"""The frontend's state of a sequence: text, tokens, logprobs and finish reason."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from atom.messages import FinishReason, SequenceOutput, TokenLogprobs
from atom.outputs import CompletionOutput, Logprob, PositionLogprobs, StepTokens
from atom.sampling_params import SamplingParams
from atom.text.detokenizer import Vocabulary
from atom.text.stop_strings import StopMatcher, StopStrings


class SequenceState:
    """Turns the engine's outputs for one sequence into `CompletionOutput`s.

    Outputs accumulate until `take_output`; streaming takes them after each step, otherwise they are
    taken once at the end.

    Attributes:
        id: the engine's id.
        index: which of the request's n completions.
        finish_reason: None while the sequence runs.
        num_tokens: tokens so far, without those after a stop string.
        num_preemptions: as last reported.
        last_token_time: seconds, `time.monotonic()`.
    """

    def __init__(
        self,
        sequence_id: str,
        index: int,
        params: SamplingParams,
        vocabulary: Vocabulary,
        stops: StopStrings,
        prompt_token_ids: Sequence[int],
        is_end: Callable[[str], bool] | None = None,
    ) -> None:
        self.id = sequence_id
        self.index = index
        self.finish_reason: FinishReason | None = None
        self.num_tokens = 0
        self.num_preemptions = 0
        self.last_token_time: float | None = None
        self._params = params
        self._vocabulary = vocabulary
        self._detokenizer = vocabulary.detokenizer(
            skip_special_tokens=params.skip_special_tokens,
            kept=[
                *(params.kept_special_tokens or ()),
                *spelled_tokens(vocabulary, params.stop_strings),
            ],
            context_ids=prompt_token_ids,
        )
        self._matcher = StopMatcher(stops) if stops else None
        self._is_end = is_end
        # By a stop string or `is_end`.
        self._is_stopped = False
        self._cumulative_logprob = 0.0
        self._stop_reason: int | str | None = None
        self._end_is_taken = False
        self._text: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: list[PositionLogprobs] = []
        self._steps: list[StepTokens] = []

    def apply(self, output: SequenceOutput) -> int:
        """Add the output of one step; returns how many of its tokens are kept.

        A stop string ends the sequence with the token that completes it, even if the engine
        continued or ended the sequence for another reason. `is_end` does the same.
        """
        token_ids = output.token_ids
        visible = token_ids
        if output.finish_reason is FinishReason.STOP and self._leaves_out(token_ids[-1]):
            visible = token_ids[:-1]
        num_kept = self._read(visible)
        if self._is_stopped:
            self.finish_reason, self._stop_reason = FinishReason.STOP, self._matched()
        else:
            num_kept = len(token_ids)
            self.finish_reason, self._stop_reason = output.finish_reason, output.stop_reason
        self._token_ids += token_ids[:num_kept]
        self.num_tokens += num_kept
        if num_kept:
            counts = output.num_draft_tokens, output.num_accepted_tokens, output.draft_source
            self._steps.append(StepTokens(num_kept, *counts))
        if self._params.logprobs is not None:
            self._add_logprobs((output.logprobs or [])[:num_kept], num_kept)
        if output.finish_reason is not None and not self._is_stopped:
            self._read_rest(token_ids[len(visible) :])
        return num_kept

    def take_output(self) -> CompletionOutput | None:
        """Everything since the last call; None if there is nothing new."""
        ended = self.finish_reason is not None and not self._end_is_taken
        text = "".join(self._text)
        if not (text or self._token_ids or ended):
            return None
        with_logprobs = self._params.logprobs is not None
        output = CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self._token_ids,
            cumulative_logprob=self._cumulative_logprob if with_logprobs else None,
            logprobs=self._logprobs if with_logprobs else None,
            finish_reason=None if self.finish_reason is None else self.finish_reason.value,
            stop_reason=self._stop_reason,
            steps=self._steps,
        )
        self._text, self._token_ids, self._logprobs, self._steps = [], [], [], []
        self._end_is_taken = self.finish_reason is not None
        return output

    def _leaves_out(self, end: int) -> bool:
        """Whether an end token has no text: neither is it wanted, nor is it a stop string."""
        given = self._params
        return not (
            given.include_stop_str_in_output
            or (given.stop_strings and self._vocabulary.token_text(end) in given.stop_strings)
        )

    def _matched(self) -> str | None:
        return None if self._matcher is None else self._matcher.matched

    def _read(self, token_ids: list[int]) -> int:
        """Add the tokens' text up to where it stops; returns the number of tokens read."""
        if self._matcher is None and self._is_end is None:
            self._text.append(self._detokenizer.feed(token_ids))
            return len(token_ids)
        for count, token_id in enumerate(token_ids, start=1):
            piece = self._detokenizer.feed([token_id])
            if self._matcher is not None:
                may_match = self.num_tokens + count >= self._params.min_tokens
                piece = self._matcher.feed(piece, may_match=may_match)
            self._text.append(piece)
            ended = self._is_end is not None and self._is_end(piece)
            if ended or self._matched() is not None:
                self._is_stopped = True
                return count
        return len(token_ids)

    def _read_rest(self, end: Sequence[int]) -> None:
        """Add the text that was held back.

        Args:
            end: an end token without a text of its own, with which a stop string may end.
        """
        rest = self._detokenizer.finish()
        if self._matcher is None:
            self._text.append(rest)
            return
        # An incomplete character becomes U+FFFD, which may also be in a stop string.
        may_match = self.num_tokens >= self._params.min_tokens
        hidden = "".join(map(self._vocabulary.token_text, end))
        if not any(string.endswith(hidden) for string in self._params.stop_strings):
            hidden = ""
        text = self._matcher.feed(rest + hidden, may_match=may_match)
        if self._matcher.matched is None:
            text = (text + self._matcher.finish()).removesuffix(hidden)
        else:
            self.finish_reason, self._stop_reason = FinishReason.STOP, self._matcher.matched
        self._text.append(text)

    def _add_logprobs(self, positions: list[TokenLogprobs], num_tokens: int) -> None:
        if len(positions) != num_tokens:
            raise ValueError(
                f"sequence {self.id!r} got {num_tokens} tokens with {len(positions)} logprobs"
            )
        for position in positions:
            self._cumulative_logprob += position.logprobs[0]
            self._logprobs.append(decode_logprobs(position, self._vocabulary))


def spelled_tokens(vocabulary: Vocabulary, stop_strings: Sequence[str]) -> list[str]:
    """The special tokens that stop strings spell; they stay in the text, or none would match."""
    if not stop_strings:
        return []
    return [t for t in vocabulary.special_tokens if any(t in string for string in stop_strings)]


def decode_logprobs(position: TokenLogprobs, vocabulary: Vocabulary) -> PositionLogprobs:
    """The candidates of one position with their text, the chosen token first."""
    return {
        token_id: Logprob(logprob, rank, vocabulary.token_text(token_id))
        for token_id, logprob, rank in zip(
            position.token_ids, position.logprobs, position.ranks, strict=True
        )
    }
