"""The optional tensors of a draft."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from atom.config import ConfigError
from atom.models.config.aux_layers import AuxLayers
from atom.models.config.model_config import ModelConfig, PretrainedConfig


class DraftConfig(Protocol):
    """What the configs of all drafts in folders of their own say."""

    @property
    def architecture(self) -> str: ...
    @property
    def network(self) -> ModelConfig: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def target_hidden_size(self) -> int: ...
    @property
    def num_aux_hidden_states(self) -> int: ...
    @property
    def fc_fan_in(self) -> int: ...
    @property
    def aux_layers(self) -> AuxLayers | None: ...
    @property
    def tied(self) -> bool: ...
    @property
    def shares_vocabulary(self) -> bool: ...
    @property
    def ignored_keys(self) -> tuple[str, ...]: ...

    def check_against_target(self, target: PretrainedConfig) -> None:
        """Refuse a draft that was made for another target, given its text configuration.

        Raises:
            ConfigError: with the numbers of both.
        """
        ...


@dataclass(frozen=True)
class DraftParts:
    """Which optional tensors a draft's checkpoint has.

    Attributes:
        embed_tokens, lm_head: if absent, the target's are shared.
        d2t: offsets from draft to target token ids; if absent, the ids are the same.
    """

    embed_tokens: bool
    lm_head: bool
    d2t: bool

    @classmethod
    def of(cls, tensor_names: Iterable[str]) -> DraftParts:
        """The parts in a list of tensor names; some checkpoints prefix them with `model.`."""
        names = {name.removeprefix("model.") for name in tensor_names}
        modules = {name.rpartition(".")[0] for name in names}
        return cls("embed_tokens" in modules, "lm_head" in modules, "d2t" in names)

    def check(self, config: DraftConfig, target: PretrainedConfig) -> None:
        """Refuse parts that are missing and cannot be shared.

        Args:
            target: the target's text configuration.

        Raises:
            ConfigError: with the sizes of both.
        """
        shared = [
            name
            for name, own in (("embed_tokens", self.embed_tokens), ("lm_head", self.lm_head))
            if not own
        ]
        if shared and config.hidden_size != target.hidden_size:
            raise ConfigError(
                f"the draft has no {' and no '.join(shared)} of its own and is "
                f"{config.hidden_size} wide (hidden_size); the target's are {target.hidden_size} "
                f"wide and cannot be shared"
            )
        if not self.lm_head and config.draft_vocab_size != target.vocab_size:
            raise ConfigError(
                f"the draft has no lm_head of its own and a vocabulary of "
                f"{config.draft_vocab_size} (draft_vocab_size); the target's head has "
                f"{target.vocab_size} tokens and cannot be shared"
            )
        if not self.d2t and config.draft_vocab_size != config.vocab_size:
            raise ConfigError(
                f"the draft knows {config.draft_vocab_size} of {config.vocab_size} tokens and "
                f"has no d2t tensor that says which"
            )
        if config.tied and self.embed_tokens and not self.lm_head:
            raise ConfigError(
                "the draft has its own embed_tokens, tie_word_embeddings=true and no lm_head: "
                "whether its head is its own embedding or the target's head is anyone's guess; "
                "store the lm_head"
            )
