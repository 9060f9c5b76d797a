"""Options that are written once: a field of a frozen dataclass, and what follows from it.

A tree is a dataclass of options (`option`) and of groups: dataclasses of options in turn. Command
line flags (`add_flags`, `given_flags`), the names of keyword arguments and what help says come
from the fields; `build` makes a tree of whatever was given. A group whose type allows None is
absent until one of its options is given, and may be given as one JSON object, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import types
import typing
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

Tree = TypeVar("Tree")

REQUIRED: Final[Any] = dataclasses.MISSING
_KEY = "option"
_log = logging.getLogger(__name__)


class ConfigError(ValueError):
    """An engine option is wrong; the message says what was given and what is expected."""


@dataclass(frozen=True)
class Declaration:
    """What a field says of its option besides type and default.

    Attributes:
        help: one phrase, units included.
        name: of the flag and of the keyword argument, where it is not the field's.
        alias: another name of the flag.
        short: another spelling of the flag, dashes included.
        choices: the only values there are.
        spellings: what users write for some of the choices -> the choice.
        nearest: other engines' values that there are not -> the choice that stands in for each,
            with a warning.
        at_least: the least integer there may be.
        parse: from what a user writes to the field's value.
        on_gpu: the default on a GPU, where it is not the field's.
    """

    help: str
    name: str | None = None
    alias: str | None = None
    short: str | None = None
    choices: Collection[str] | None = None
    spellings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    nearest: Mapping[str, str] = dataclasses.field(default_factory=dict)
    at_least: int | None = None
    parse: Callable[[Any], Any] | None = None
    on_gpu: int | None = None


def option(
    default: Any,
    help: str,
    *,
    name: str | None = None,
    alias: str | None = None,
    short: str | None = None,
    choices: Collection[str] | None = None,
    spellings: Mapping[str, str] | None = None,
    nearest: Mapping[str, str] | None = None,
    at_least: int | None = None,
    parse: Callable[[Any], Any] | None = None,
    on_gpu: int | None = None,
    is_secret: bool = False,
) -> Any:
    """A field of a dataclass that users can set; the arguments are those of `Declaration`.

    Args:
        default: `REQUIRED` when there is none.
        is_secret: the dataclass's repr leaves it out.
    """
    declared = Declaration(
        help, name, alias, short, choices, spellings or {}, nearest or {}, at_least, parse, on_gpu
    )
    return dataclasses.field(default=default, repr=not is_secret, metadata={_KEY: declared})


class Options:
    """Base of dataclasses of options: checks what the fields declare when one is built."""

    def __post_init__(self) -> None:
        """Raises:
        ConfigError: naming the field, its value and what is expected.
        """
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = vars(self)[field.name]
            if _KEY not in field.metadata or (value is None and field.default is None):
                continue
            declared: Declaration = field.metadata[_KEY]
            if declared.choices is not None:
                check_choice(field.name, value, declared.choices)
            if declared.at_least is not None:
                check_at_least(field.name, value, declared.at_least)
            if isinstance(field.default, bool) and not isinstance(value, bool):
                raise ConfigError(f"{field.name} must be true or false, got {value!r}")


def check_choice(name: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name} must be one of {', '.join(choices)}; got {value!r}")


def check_at_least(name: str, value: Any, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ConfigError(f"{name} must be an integer of at least {low}, got {value!r}")


@dataclass(frozen=True)
class Option:
    """An option of a tree, as users know it.

    Attributes:
        name: of the keyword argument.
        field: its field, in `group` or, when that is None, in the tree itself.
        kind: the type of its values; a dataclass is given as a JSON object.
    """

    name: str
    field: dataclasses.Field[Any]
    group: str | None
    kind: Any
    declared: Declaration

    @property
    def flag(self) -> str:
        return _kebab(self.name)

    @property
    def default(self) -> Any:
        return None if self.is_required else self.field.default

    @property
    def is_document(self) -> bool:
        """Whether it stands for a whole group."""
        return dataclasses.is_dataclass(self.kind)

    @property
    def is_required(self) -> bool:
        return self.field.default is REQUIRED

    def parse(self, value: Any) -> Any:
        """The field's value."""
        if isinstance(value, str):
            if (nearest := self.declared.nearest.get(value)) is not None:
                _log.warning(
                    "there is no %s %s; %s %s stands in for it",
                    self.name,
                    value,
                    self.name,
                    nearest,
                )
                value = nearest
            value = self.declared.spellings.get(value, value)
        if value is None or self.declared.parse is None:
            return value
        try:
            return self.declared.parse(value)
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    def _parse_word(self, word: str) -> Any:
        try:
            return self.parse(word)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    @property
    def is_told_apart(self) -> bool:
        """Whether its flag has no default, and so a default that is given is told from none."""
        return self.kind is bool or self.declared.on_gpu is not None

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Add the flag, in kebab and in snake spelling."""
        names = [name for name in (self.name, self.declared.alias) if name is not None]
        flags = [_kebab(name) for name in names]
        flags += [f"--{name}" for name in names if "_" in name]
        flags += [] if self.declared.short is None else [self.declared.short]
        declared = self.declared
        extra: dict[str, Any] = {"default": self.default}
        if self.kind is bool:
            extra |= {"action": argparse.BooleanOptionalAction, "default": None}
        elif typing.get_origin(self.kind) is tuple:
            extra |= {"default": None, "nargs": "+", "action": "extend"}
        elif declared.choices is not None:
            extra["choices"] = tuple(declared.choices)
            extra["type"] = self._parse_word
        elif declared.parse is None and not self.is_document:
            extra["type"] = self.kind
        suffix = "" if extra["default"] in (None, "") else " (default: %(default)s)"
        if isinstance(self.default, bool):
            suffix = f" (default: {self.default})"
        if declared.on_gpu is not None:
            suffix = f" (default: {self.default}, on a GPU {declared.on_gpu})"
            extra["default"] = None
        parser.add_argument(*flags, help=(declared.help + suffix).strip(), **extra)


def options_of(tree: type[Any], group: str | None = None) -> Iterator[Option]:
    """Every option of a tree and of its groups, in the order of the fields."""
    hints = typing.get_type_hints(tree)
    for field in dataclasses.fields(tree):
        kind = _without_none(hints[field.name])
        if dataclasses.is_dataclass(kind):
            assert isinstance(kind, type)
            yield from options_of(kind, field.name)
        if _KEY in field.metadata:
            declared: Declaration = field.metadata[_KEY]
            yield Option(declared.name or field.name, field, group, kind, declared)


def add_flags(parser: argparse._ActionsContainer, tree: type[Any]) -> None:
    """Add a flag for every option of `tree`."""
    for each in options_of(tree):
        each.add_to(parser)


def add_flags_by_subject(
    parser: argparse.ArgumentParser,
    tree: type[Any],
    subjects: Mapping[str | None, str],
    without: Collection[str] = (),
) -> None:
    """Add a flag for every option of `tree`, in a section of the help for each subject.

    Args:
        subjects: by the name of the group; None is of options that are in no group.
        without: options that get none.
    """
    sections = {title: parser.add_argument_group(title) for title in subjects.values()}
    for each in (each for each in options_of(tree) if each.name not in without):
        group = each.field.name if each.is_document else each.group
        each.add_to(sections[subjects[group]])


def given_flags(namespace: argparse.Namespace, tree: type[Any]) -> dict[str, Any]:
    """What the flags of `add_flags` say, by name; defaults say nothing, but where others may stand
    in for them.
    """
    values = vars(namespace)
    return {
        each.name: values[each.name]
        for each in options_of(tree)
        if values.get(each.name) is not None
        and (values[each.name] != each.default or each.is_told_apart)
    }


def with_gpu_defaults(tree: type[Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """What was given, and the defaults on a GPU of what was not."""
    defaults = {each.name: each.declared.on_gpu for each in options_of(tree)}
    values = {name: value for name, value in given.items() if value is not None}
    return {name: value for name, value in defaults.items() if value is not None} | values


def build(tree: type[Tree], given: Mapping[str, Any], what: str = "option") -> Tree:
    """The tree that keyword arguments stand for; a value that is its default says nothing.

    Args:
        given: values by the options' names.
        what: what messages call an option.

    Raises:
        TypeError: naming every unknown option and the known ones.
        ConfigError: saying what was given and what is expected.
    """
    known = {each.name: each for each in options_of(tree)}
    if unknown := sorted(set(given) - set(known)):
        raise TypeError(
            f"unknown {what}(s) {', '.join(unknown)}; known: {', '.join(sorted(known))}"
        )
    members: defaultdict[str | None, list[Option]] = defaultdict(list)
    for each in known.values():
        members[each.group].append(each)
    fields: defaultdict[str | None, dict[str, Any]] = defaultdict(dict)
    for name, value in given.items():
        if value != known[name].default:
            fields[known[name].group][known[name].field.name] = known[name].parse(value)
    top = fields.pop(None, {})
    for document in (each for each in members[None] if each.is_document):
        group = document.field.name
        if group in top:
            fields[group] = _read_document(document, top[group], members[group], fields[group])
    hints = typing.get_type_hints(tree)
    for group_name, values in fields.items():
        assert group_name is not None
        _refuse_missing(members[group_name], values)
        top[group_name] = _without_none(hints[group_name])(**values)
    return tree(**top)


def _read_document(
    option: Option, value: Any, members: Collection[Option], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The fields of a group that is given as JSON, or as what JSON stands for.

    Args:
        given: fields that are given otherwise; there may be none.
    """
    if flags := _flags(members, given):
        raise ConfigError(f"{option.flag} and {flags[0]} say the same thing; give one of them")
    try:
        document = json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option.flag} is not valid JSON: {error}") from error
    if not isinstance(document, Mapping):
        raise ConfigError(f"{option.flag} must be a JSON object, got {value!r}")
    known = {each.field.name: each for each in members}
    if unknown := sorted(set(document) - set(known)):
        raise ConfigError(
            f"{option.flag} does not know {', '.join(unknown)}; it knows {', '.join(known)}"
        )
    missing = [each for each in members if each.is_required and each.field.name not in document]
    if missing:
        wanted = " and ".join(map(_key_and_choices, missing))
        has = ", ".join(document) or "nothing"
        raise ConfigError(f"{option.flag} needs {wanted}; it has {has}")
    return {name: known[name].parse(each) for name, each in document.items()}


def _key_and_choices(option: Option) -> str:
    choices = option.declared.choices
    return option.field.name + (f" ({', '.join(choices)})" if choices else "")


def _refuse_missing(members: Collection[Option], fields: Mapping[str, Any]) -> None:
    """The first required option of a group is the one that the others need."""
    required = [each for each in members if each.is_required]
    missing = [each for each in required if each.field.name not in fields]
    if not missing:
        return
    first = required[0]
    if first in missing:
        given = ", ".join(_flags(members, fields))
        raise ConfigError(f"{given} has no effect without {first.flag}")
    raise ConfigError(f"{first.name} {fields[first.field.name]} needs {missing[0].name}")


def _flags(members: Collection[Option], fields: Mapping[str, Any]) -> list[str]:
    return sorted(each.flag for each in members if each.field.name in fields)


def _kebab(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _without_none(hint: Any) -> Any:
    """`X` of `X | None`."""
    if typing.get_origin(hint) not in (types.UnionType, typing.Union):
        return hint
    (kind,) = (each for each in typing.get_args(hint) if each is not types.NoneType)
    return kind
