"""The tokenizer of a converted GGUF file, without transformers, which takes a second to import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from atom.model_loader.tokenizers.chat_template import render_chat_template
from atom.models.config.file import is_there, read_json_object

# In the `tokenizer_config.json` of folders whose `tokenizer.json` says all.
MARK = "converted_from"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class PlainTokenizer:
    """What the engine and the server use of transformers' tokenizers, with the same results.

    Attributes:
        chat_template: one, or several by name; None if there is none.
        hf_class: what transformers would read the folder as.
    """

    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None

    def __init__(self, folder: Path) -> None:
        config = read_json_object(folder / "tokenizer_config.json")
        self.backend_tokenizer: Tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.chat_template = read_chat_templates(folder, config)
        self.hf_class: str = config["tokenizer_class"]
        self._named = {name: config[name] for name in NAMED_TOKENS if name in config}
        for name in NAMED_TOKENS:
            setattr(self, name, self._named.get(name))

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    @property
    def added_tokens_decoder(self) -> Mapping[int, AddedToken]:
        added: dict[int, AddedToken] = self.backend_tokenizer.get_added_tokens_decoder()
        return added

    def encode(self, text: str, add_special_tokens: bool = True, verbose: bool = True) -> list[int]:
        """The token ids of a text, of any length; `verbose` is transformers', and says nothing."""
        del verbose
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(
        self,
        token_ids: Sequence[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool = False,
    ) -> str:
        assert not clean_up_tokenization_spaces, "no GGUF file asks for it"
        text: str = self.backend_tokenizer.decode(
            list(token_ids), skip_special_tokens=skip_special_tokens
        )
        return text

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary

    def convert_ids_to_tokens(self, token_id: int) -> str | None:
        token: str | None = self.backend_tokenizer.id_to_token(token_id)
        return token

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        *,
        tokenize: bool,
        **variables: Any,
    ) -> str:
        """The text of a conversation; see `render_chat_template`.

        Args:
            chat_template: another template than the model's, or the name of one of these.

        Raises:
            ValueError: also when there is no template.
        """
        assert not tokenize, "tokens of a chat are those of its text"
        template = self._choose_template(chat_template, tools)
        return render_chat_template(
            template, conversation, tools=tools, **{**self._named, **variables}
        )

    def _choose_template(self, given: str | None, tools: object) -> str:
        own = self.chat_template
        if isinstance(own, dict):
            name = given or ("tool_use" if tools is not None and "tool_use" in own else "default")
            if name in own:
                return own[name]
            if given is None:
                raise ValueError(f"the model has no default chat template, only {sorted(own)}")
        template = given if given is not None or isinstance(own, dict) else own
        if template is None:
            raise ValueError("the model has no chat template, and none was given")
        return template


# Tokenizers that were read before somebody asked for them.
_ahead: dict[Path, PlainTokenizer] = {}


def read_plain_ahead(folder: Path) -> None:
    """Read the tokenizer of a folder that is likely to be asked for, if it is a plain one."""
    if is_plain(folder):
        _ahead[folder] = PlainTokenizer(folder)


def plain_tokenizer(folder: Path) -> PlainTokenizer:
    """That of a folder, which is not read again where it was read ahead."""
    found = _ahead.pop(folder, None)
    return PlainTokenizer(folder) if found is None else found


def is_plain(folder: Path) -> bool:
    """Whether a folder's tokenizer can be read as a `PlainTokenizer`."""
    path = folder / "tokenizer_config.json"
    return is_there(path) and read_json_object(path).get(MARK) == "gguf"


def read_chat_templates(folder: Path, config: Mapping[str, Any]) -> str | dict[str, str] | None:
    """A folder's chat template, several by name, or None if there is none.

    Args:
        config: the content of `tokenizer_config.json`, where older folders have them.
    """
    paths = {path.stem: path for path in (folder / "additional_chat_templates").glob("*.jinja")}
    if is_there(folder / "chat_template.jinja"):
        paths["default"] = folder / "chat_template.jinja"
    templates = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    if list(templates) == ["default"]:
        return templates["default"]
    return templates or _templates_in(config.get("chat_template"))


def _templates_in(stated: Any) -> str | dict[str, str] | None:
    if isinstance(stated, list):
        named = [entry for entry in stated if isinstance(entry, dict)]
        return {str(e["name"]): str(e["template"]) for e in named if {"name", "template"} <= {*e}}
    return stated if isinstance(stated, str) else None


def _byte_of_char() -> dict[str, int]:
    """The printable characters that ByteLevel BPE (GPT-2) uses for bytes: character -> byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    table.update({chr(256 + i): byte for i, byte in enumerate(others)})
    return table


BYTE_OF_CHAR = _byte_of_char()
