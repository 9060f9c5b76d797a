"""Prompts of requests as token ids: plain text and rendered chat templates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jinja2

from atom.entrypoints.openai.chat.protocol import ChatMessage, ChatPrompt
from atom.entrypoints.openai.http.errors import ApiError, ContextExceededError, bad_request
from atom.entrypoints.openai.http.json_budget import JsonBudget
from atom.entrypoints.openai.http.options import OptionError
from atom.entrypoints.openai.http.provider_tools import own_tools
from atom.entrypoints.openai.parsing.tool_parsers import GENERIC
from atom.entrypoints.openai.parsing.tool_prompt import tell_calls, tell_tools
from atom.messages import ContextLengthError
from atom.model_loader.plain_tokenizer import PlainTokenizer
from atom.quoting import excerpt

# What the templates in use call the switch; the others ignore it.
THINKING_VARIABLES = ("thinking", "enable_thinking")

# Arguments of `apply_chat_template` that are not variables of the template.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)

# What templates are asked to write, to find out whether they do.
_PROBE = "probe_of_calls"
_PROBE_ARGUMENTS = '{"probe":  1}'
_PROBE_TOOL = {
    "type": "function",
    "function": {"name": _PROBE, "description": "", "parameters": {"type": "object"}},
}


@dataclass(frozen=True)
class Prompt:
    """Attributes:
    text: what was tokenised; None when the client sent token ids.
    """

    token_ids: list[int]
    text: str | None = None


class PromptEncoder:
    """Tokenises text and chats, in any thread; long ones take seconds.

    Raises:
        OptionError: when `chat_template` is not a Jinja template.

    Args:
        tool_format: how tools and calls are told where the template knows none.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_model_len: int,
        chat_template: str | None,
        *,
        tool_format: str = GENERIC,
    ) -> None:
        self._tool_format = tool_format
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._template = chat_template or default_template(tokenizer)
        # Then history reads as the model wrote it; other templates spell out an object.
        self._takes_arguments_as_text = self._probe(_PROBE_ARGUMENTS) is True
        self._lacks_calls = self._probe("probe") is False
        self._lacks_tools = self._probe(_PROBE, tools=[_PROBE_TOOL]) is False
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        if chat_template is not None:
            self._check_syntax()

    def encode(self, text: str, *, add_special_tokens: bool, param: str) -> Prompt:
        """Tokenise `text`.

        Raises:
            ApiError: 400 when no tokenisation of so long a text fits the context; checked
                first, since tokenising megabytes takes seconds and much memory.
        """
        self._check_length(len(text), param)
        token_ids: list[int] = self._tokenizer.encode(
            text, add_special_tokens=add_special_tokens, verbose=False
        )
        return Prompt(token_ids, text)

    def encode_chat(
        self, chat: ChatPrompt, *, add_special_tokens: bool, with_tools: bool = True
    ) -> Prompt:
        """Render the chat template, then tokenise.

        The template writes the special tokens itself, so none are added unless asked for.
        Without `with_tools` the model is not told of the chat's tools.

        Raises:
            ApiError: 400 when there is no template or it does not accept the messages.
        """
        if not chat.messages:
            raise bad_request("messages must hold at least one message", "messages")
        if self._template is None:
            raise bad_request(
                "this model has no chat template; start the server with --chat-template FILE, "
                "or use /v1/completions",
                "messages",
            )
        if len(chat.messages) > self._max_model_len:
            raise self._too_long(len(chat.messages), "messages")
        _check_partial(chat.messages)
        budget = JsonBudget()
        messages = [self._message(i, message, budget) for i, message in enumerate(chat.messages)]
        self._check_length(sum(len(message["content"]) for message in messages), "messages")
        tools = tool_dicts(chat) if with_tools else None
        if self._lacks_calls:
            messages = tell_calls(messages, self._tool_format)
        if tools and self._lacks_tools:
            messages = tell_tools(messages, tools, self._tool_format)
        text = self._render(messages, chat, tools)
        return self.encode(text, add_special_tokens=add_special_tokens, param="messages")

    def describe(self) -> dict[str, Any]:
        """What clients need who render chats themselves and have their text tokenised here."""
        tokenizer = self._tokenizer
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {
            "tokenizer_class": _class_name(tokenizer),
            "model_max_length": self._max_model_len,
            **{name: getattr(tokenizer, name, None) for name in names},
            "chat_template": self._template,
        }

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _render(
        self,
        messages: list[dict[str, Any]],
        chat: ChatPrompt,
        tools: list[dict[str, Any]] | None,
    ) -> str:
        continues = chat.continues
        opens = not continues if chat.add_generation_prompt is None else chat.add_generation_prompt
        variables = {**_thinking(chat), **(chat.chat_template_kwargs or {})}
        if chat.reasoning_effort is not None:
            if "reasoning_effort" in variables:
                raise bad_request(
                    "reasoning_effort and chat_template_kwargs.reasoning_effort are one; send one",
                    "reasoning_effort",
                )
            variables["reasoning_effort"] = chat.reasoning_effort
        reserved = sorted(RESERVED_TEMPLATE_KWARGS & variables.keys())
        if reserved:
            raise bad_request(
                f"chat_template_kwargs cannot set {', '.join(reserved)}", "chat_template_kwargs"
            )
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                chat_template=self._template,
                add_generation_prompt=opens,
                continue_final_message=continues,
                tokenize=False,
                **variables,
            )
        except Exception as error:  # a template is a program: anything can come out of it
            raise bad_request(
                f"the chat template does not accept these messages: {excerpt(str(error))}",
                "messages",
            ) from error
        return text

    def _message(self, index: int, message: ChatMessage, budget: JsonBudget) -> dict[str, Any]:
        """What templates expect: string contents, tool arguments as objects."""
        where = f"messages[{index}]"
        role: str = message.role
        if role == "developer" and "developer" not in (self._template or ""):
            role = "system"
        rendered: dict[str, Any] = {"role": role, "content": _text(message, where)}
        if message.thought is not None:
            rendered["reasoning_content"] = message.thought
        if message.name is not None:
            rendered["name"] = message.name
        if message.tool_call_id is not None:
            rendered["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            rendered["tool_calls"] = [
                self._tool_call(call, where, budget) for call in message.tool_calls
            ]
        return rendered

    def _tool_call(self, call: dict[str, Any], where: str, budget: JsonBudget) -> dict[str, Any]:
        """A call of the history, its arguments as the template wants them."""
        function = call.get("function")
        if not isinstance(function, dict):
            raise bad_request(f"{where}.tool_calls need a 'function' object", where)
        arguments = function.get("arguments")
        if self._takes_arguments_as_text or not isinstance(arguments, str):
            return call
        try:
            return {**call, "function": {**function, "arguments": budget.loads(arguments)}}
        except ValueError as error:
            message = f"{where}.tool_calls: arguments are not JSON: {excerpt(str(error))}"
            raise bad_request(message, where) from error

    def _probe(self, text: str, **variables: Any) -> bool | None:
        """Whether the template writes `text`, a part of a call or tool; None when it refuses."""
        call = {"name": _PROBE, "arguments": _PROBE_ARGUMENTS}
        messages = [
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "functions.probe:0", "type": "function", "function": call}],
            },
        ]
        if variables:
            messages = messages[:1]
        if self._template is None:
            return None
        try:
            rendered: str = self._tokenizer.apply_chat_template(
                messages, chat_template=self._template, tokenize=False, **variables
            )
        except Exception:  # it refuses texts, or this chat
            return None
        return text in rendered

    def _check_length(self, size: int, param: str) -> None:
        if size > self._max_model_len * self._longest_token:
            raise self._too_long(-(-size // self._longest_token), param)

    def _too_long(self, least_tokens: int, param: str) -> ApiError:
        error = ContextLengthError(least_tokens, self._max_model_len, is_at_least=True)
        return ContextExceededError(error, param)

    def _check_syntax(self) -> None:
        try:
            self._tokenizer.apply_chat_template(
                [{"role": "user", "content": ""}], chat_template=self._template, tokenize=False
            )
        except jinja2.TemplateSyntaxError as error:
            raise OptionError(f"--chat-template, line {error.lineno}: {error}") from error
        except Exception:
            return  # the template may well refuse this particular chat


def tool_dicts(chat: ChatPrompt) -> list[dict[str, Any]] | None:
    """The chat's tools as templates and parsers take them; None without tools."""
    return [tool.model_dump(exclude_none=True) for tool in own_tools(chat.tools)] or None


def default_template(tokenizer: Any) -> str | None:
    template = tokenizer.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _class_name(tokenizer: Any) -> str:
    """Of transformers' class."""
    return tokenizer.hf_class if isinstance(tokenizer, PlainTokenizer) else type(tokenizer).__name__


def _thinking(chat: ChatPrompt) -> dict[str, bool]:
    if chat.thinking is None:
        return {}
    return dict.fromkeys(THINKING_VARIABLES, chat.thinking.type == "enabled")


def _check_partial(messages: list[ChatMessage]) -> None:
    for index, message in enumerate(messages):
        is_last = index == len(messages) - 1
        if message.partial and not (is_last and message.role == "assistant"):
            name = f"messages[{index}].partial"
            raise bad_request(f"{name}: only the last message, an assistant's, can be", name)


def _text(message: ChatMessage, where: str) -> str:
    """The message's text; parts follow one another with nothing between."""
    text = message.content
    if isinstance(text, list):
        text = "".join(part.text for part in text)
    if message.refusal:  # a refusal stands where the answer would
        return (text or "") + message.refusal
    if text is not None:
        return text
    if message.role == "assistant" and (message.tool_calls or message.thought):
        return ""
    raise bad_request(f"{where}.content is missing", f"{where}.content", "missing_field")
