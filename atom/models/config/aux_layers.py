"""The layer id conventions of published drafts."""

from __future__ import annotations

from dataclasses import dataclass

from atom.config import AUX_LAYER_CONVENTIONS

# What a layer id i names: the hidden state that enters decoder layer i, or the output of layer i,
# which enters layer i + 1.
BOUNDARY, OUTPUT = AUX_LAYER_CONVENTIONS

# Field of a draft's config -> what its ids name; None where both conventions are published.
AUX_FIELDS: dict[str, str | None] = {
    "eagle_aux_hidden_state_layer_ids": None,
    "aux_hidden_state_layer_ids": BOUNDARY,
    "target_layer_ids": OUTPUT,
    "layer_ids": BOUNDARY,
}


@dataclass(frozen=True)
class AuxLayers:
    """Layer ids as a draft's config gives them, in `field`.

    Attributes:
        stated: what they name, where the config's layout says more than the field.
    """

    field: str
    ids: tuple[int, ...]
    stated: str | None = None

    def convention(self, num_layers: int) -> str:
        """What the ids name in a target of `num_layers` layers, by the name of their field.

        `eagle_aux_hidden_state_layer_ids` holds what enters layers, except where an exporter
        that counts outputs wrote it: its ids start with 1, and no others do.
        """
        if (stated := self.stated or AUX_FIELDS[self.field]) is not None:
            return stated
        counts_outputs = self.ids[:1] == (1,) and num_layers not in self.ids
        return OUTPUT if counts_outputs else BOUNDARY

    def resolve(
        self, num_layers: int, convention: str | None = None
    ) -> tuple[tuple[int, ...], str]:
        """The ids as boundary ids, and the convention by which they were read.

        Args:
            num_layers: of the target.
            convention: what the user says that they name; None leaves it to the field.

        Raises:
            ValueError: when there are no ids, one occurs twice or is out of range, or one names
                the last layer's output in a field whose drafts may mean the normed one.
        """
        applied = convention or self.convention(num_layers)
        shift = 1 if applied == OUTPUT else 0
        resolved = tuple(i + shift for i in self.ids)
        if not resolved or len(set(resolved)) != len(resolved):
            raise ValueError(
                f"aux layer ids must be distinct and at least one; got {list(self.ids)}"
            )
        if any(not 0 <= i <= num_layers for i in resolved):
            raise ValueError(
                f"aux layer ids {list(self.ids)} of {self.field} ({applied} ids) must lie in "
                f"{-shift}..{num_layers - shift} for a target of {num_layers} layers"
            )
        if convention is None and shift and num_layers in resolved:
            raise ValueError(
                f"aux layer ids {list(self.ids)} of {self.field} name the output of the last of "
                f"{num_layers} layers, and some drafts were trained on what the final norm makes "
                f"of it; draft_aux_layer_convention=output takes it as it is before the norm"
            )
        return resolved, applied
