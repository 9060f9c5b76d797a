"""A layer whose recurrent state says which tokens it has seen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from atom.model_ops.attention.metadata import StateMetadata
from atom.model_ops.attention.recurrent_layer import RecurrentLayer, StatePart

PRIME = 1_000_003
# Of a state, and of the two tokens before its last one.
Seen = tuple[int, int, int]


class Hashes(RecurrentLayer):
    """Its state is a hash of all tokens so far; it also keeps the last two tokens themselves."""

    def state_parts(self) -> Mapping[str, StatePart]:
        return {
            "hash": StatePart((), torch.int64),
            "tokens": StatePart((), torch.int64, reach=2),
        }

    def bind_states(self, parts: Mapping[str, torch.Tensor]) -> None:
        self.hashes, self.tokens = parts["hash"].numpy(), parts["tokens"].numpy()

    def step(self, tokens: list[int], metadata: StateMetadata) -> list[Seen]:
        """The hash after each token, and the two tokens before it; anything for padding."""
        ends, found = metadata.cu_seqlens_q.tolist(), []
        padding = metadata.padding_lens
        for s, (row, start) in enumerate(
            zip(metadata.rows.tolist(), metadata.starts.tolist(), strict=True)
        ):
            own = tokens[ends[s] : ends[s + 1]]
            count = len(own) - (0 if padding is None else int(padding[s]))
            hashes, kept = self.hashes[row], self.tokens[row]
            state = int(hashes[(start - 1) % len(hashes)]) if start else 0
            before = [int(kept[(start - i) % len(kept)]) if start >= i else 0 for i in (2, 1)]
            states = []
            for token in own:
                state = (state * 31 + token + 1) % PRIME
                states.append(state)
                found.append((state, *before))
                before = [before[1], token]
            for i in range(max(count - len(hashes), 0), count):
                hashes[(start + i) % len(hashes)] = states[i]
            for i in range(max(count - len(kept), 0), count):
                kept[(start + i) % len(kept)] = own[i]
        return found


def hash_of(tokens: Sequence[int]) -> Seen:
    """What a step finds for the last of these tokens."""
    state = 0
    for token in tokens:
        state = (state * 31 + token + 1) % PRIME
    before = [0, 0, *tokens][len(tokens) - 1 : len(tokens) + 1]
    return state, before[0], before[1]
