"""The configuration of a model, without transformers: importing that takes longer than loading a
small model.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

import msgspec

# What models read: a `ModelConfig`, or transformers' own. Fields are found by name, which mypy does
# not check.
PretrainedConfig: TypeAlias = Any

# Types whose scaling starts from the length that the model was first trained for.
_SCALED_FROM_A_LENGTH = ("llama3", "yarn", "longrope")


@dataclass(kw_only=True)
class ModelConfig:
    """The fields of a `config.json` as attributes, as transformers' `PretrainedConfig` has them.

    Its classes declare the fields of a model type with their defaults; what else a file has becomes
    an attribute, too.
    """

    model_type: ClassVar[str] = ""
    # Other names of fields.
    aliases: ClassVar[Mapping[str, str]] = {}
    default_rope_theta: ClassVar[float] = 10_000.0

    architectures: list[str] | None = None

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """The configuration of these fields, which are copied.

        Raises:
            TypeError: naming a field of a wrong type.
        """
        given = {cls.aliases.get(name, name): copy.deepcopy(raw[name]) for name in raw}
        given.pop("model_type", None)
        types = _field_types(cls)  # type: ignore[arg-type]  # mypy: a class has no hash
        for name in types.keys() & given.keys():
            try:
                msgspec.convert(given[name], types[name])
            except msgspec.ValidationError as error:
                raise TypeError(f"{name}={given[name]!r}: {error}") from None
        if "rope_parameters" in types:
            cls.rotate_partly(given)
            _gather_rope_parameters(given, cls.default_rope_theta)
        config = cls(**{name: value for name, value in given.items() if name in types})
        for name in given.keys() - types.keys():
            setattr(config, name, given[name])
        config.complete()
        return config

    @classmethod
    def rotate_partly(cls, given: dict[str, Any]) -> None:
        """Set `partial_rotary_factor`, if another field or none says it."""

    def complete(self) -> None:
        """Fill in the fields that follow from others when absent."""
        rope = getattr(self, "rope_parameters", None)
        if rope is not None and rope.get("rope_type") in _SCALED_FROM_A_LENGTH:
            rope.setdefault("original_max_position_embeddings", self.max_position_embeddings)

    def get_text_config(self) -> ModelConfig:
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"model_type": self.model_type, **copy.deepcopy(vars(self))}

    def __getattr__(self, name: str) -> Any:
        """Fields that no class declares; mypy does not know of them."""
        raise AttributeError(f"{type(self).__name__} has no {name}")


@functools.cache
def _field_types(cls: type[ModelConfig]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {field.name: hints[field.name] for field in dataclasses.fields(cls)}


def _gather_rope_parameters(given: dict[str, Any], default_theta: float) -> None:
    """Older files have `rope_theta` and `rope_scaling` instead of `rope_parameters`."""
    parameters = given.pop("rope_scaling", None) or given.get("rope_parameters") or {}
    theta = given.pop("rope_theta", default_theta)
    parameters.setdefault("rope_theta", theta)
    if (factor := given.pop("partial_rotary_factor", None)) is not None:
        parameters.setdefault("partial_rotary_factor", factor)
    parameters.setdefault("rope_type", parameters.get("type", "default"))
    given["rope_parameters"] = parameters
