"""Log-probabilities in OpenAI's two shapes: completions' columns and chat's rows."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from typing import Any

from atom.outputs import Logprob, PositionLogprobs
from atom.text.detokenizer import Vocabulary

# JSON has no infinity; OpenAI's number for an impossible token.
MIN_LOGPROB = -9999.0


class CompletionLogprobs:
    """The `logprobs` of one choice of a text completion, delta by delta.

    A token that is not whole characters is spelled `bytes:\\xe2\\x82`, and one that reads like a
    more likely one (or like the chosen one) `token_id:42`, so that different tokens stay different
    keys. `text_offset` counts characters from the choice's start: where a token begins, or the
    character that it is a part of.

    Args:
        kept: texts of special tokens that are not skipped.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        num_top: int,
        skip_special_tokens: bool,
        kept: Collection[str] = (),
    ) -> None:
        self._vocabulary = vocabulary
        self._num_top = num_top
        self._skip_special_tokens = skip_special_tokens
        self._kept = kept
        self._offset = 0
        # Of the bytes of tokens: text is final as soon as its characters are whole.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def format(
        self,
        token_ids: Sequence[int],
        positions: Sequence[PositionLogprobs | None],
        prompt: str | None = None,
    ) -> dict[str, Any]:
        """The columns of these tokens; a position without candidates (the first of a prompt)
        reads null.

        Args:
            prompt: the text of a prompt whose tokens these are, as it is given back.
        """
        return {
            "text_offset": self._offsets(token_ids)
            if prompt is None
            else self._offsets_in(prompt, token_ids),
            "token_logprobs": [
                None if position is None else _finite(position[token_id].logprob)
                for token_id, position in zip(token_ids, positions, strict=True)
            ],
            "tokens": [self._spell(token_id) for token_id in token_ids],
            "top_logprobs": [
                None if position is None else self._candidates(token_id, position)
                for token_id, position in zip(token_ids, positions, strict=True)
            ],
        }

    def _offsets(self, token_ids: Sequence[int]) -> list[int]:
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            if not self._is_left_out(token_id):
                self._offset += len(self._read(token_id))
        return offsets

    def _is_left_out(self, token_id: int) -> bool:
        return (
            self._skip_special_tokens
            and self._vocabulary.is_special(token_id)
            and self._vocabulary.token_text(token_id) not in self._kept
        )

    def _offsets_in(self, text: str, token_ids: Sequence[int]) -> list[int]:
        """Found in the text itself: it may lack the special tokens that tokenizers add, and a
        space that they put before it."""
        offsets = []
        for token_id in token_ids:
            piece = self._read(token_id)
            if not text.startswith(piece, self._offset):
                is_added = self._vocabulary.is_special(token_id)
                piece = "" if is_added else piece.removeprefix(" ")
            offsets.append(self._offset)
            self._offset = min(self._offset + len(piece), len(text))
        self._offset = len(text)
        return offsets

    def _read(self, token_id: int) -> str:
        """The characters that the token completes."""
        return self._decoder.decode(self._vocabulary.token_bytes(token_id))

    def _candidates(self, chosen: int, position: PositionLogprobs) -> dict[str, float]:
        """The most likely tokens, and the chosen one wherever it ranks."""
        kept = [(i, c) for i, c in position.items() if c.rank <= self._num_top or i == chosen]
        kept.sort(key=_by_rank)
        spelled = {self._spell(chosen): chosen}
        for token_id, _ in kept:
            spelled.setdefault(self._spell(token_id), token_id)
        owners = set(spelled.values())
        return {
            self._spell(i) if i in owners else f"token_id:{i}": _finite(c.logprob) for i, c in kept
        }

    def _spell(self, token_id: int) -> str:
        data = self._vocabulary.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def chat_logprobs(
    vocabulary: Vocabulary,
    num_top: int,
    token_ids: Sequence[int],
    positions: Sequence[PositionLogprobs],
) -> list[dict[str, Any]]:
    """The rows of a chat choice's `logprobs` for these tokens."""

    def row(token_id: int, candidate: Logprob) -> dict[str, Any]:
        return {
            "token": vocabulary.token_text(token_id),
            "logprob": _finite(candidate.logprob),
            "bytes": [*vocabulary.token_bytes(token_id)],
        }

    content = []
    for token_id, position in zip(token_ids, positions, strict=True):
        top = [item for item in position.items() if item[1].rank <= num_top]
        top.sort(key=_by_rank)
        rows = [row(*item) for item in top]
        content.append({**row(token_id, position[token_id]), "top_logprobs": rows})
    return content


def prompt_logprobs(positions: Sequence[PositionLogprobs | None] | None) -> list[Any] | None:
    """vLLM's `prompt_logprobs`: for each prompt token its candidates by token id."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": _finite(candidate.logprob),
                "rank": candidate.rank,
                "decoded_token": candidate.decoded_token,
            }
            for token_id, candidate in position.items()
        }
        for position in positions
    ]


def _by_rank(item: tuple[int, Logprob]) -> int:
    return item[1].rank


def _finite(logprob: float) -> float:
    return max(logprob, MIN_LOGPROB)
