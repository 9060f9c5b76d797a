"""Prompts of requests as token ids: plain text and rendered chat templates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jinja2

from atom.entrypoints.chat.image_marks import mark_of, without_marks
from atom.entrypoints.chat.images import ImageReader, kind_of
from atom.entrypoints.chat.prompt import Prompt
from atom.entrypoints.chat.protocol import ChatMessage, ChatPrompt, ImagePart, VideoPart
from atom.entrypoints.chat.template import ChatTemplate, ChatTemplates, MessageError
from atom.entrypoints.http.errors import ApiError, ContextExceededError, bad_request
from atom.entrypoints.http.json_budget import JsonBudget
from atom.entrypoints.http.provider_tools import own_tools
from atom.entrypoints.http.unknown_fields import UNSUPPORTED_CONTENT
from atom.entrypoints.parsing.tool_parsers import GENERIC
from atom.entrypoints.server_options import OptionError
from atom.messages import ContextLengthError
from atom.model_loader.tokenizers.plain_tokenizer import PlainTokenizer
from atom.multimodal.media import DEFAULT_FPS, VideoSource
from atom.quoting import excerpt
from atom.text.control_tokens import ControlTokens

# What the templates in use call the switch; the others ignore it.
THINKING_VARIABLES = ("thinking", "enable_thinking")

# Arguments of `apply_chat_template` that are not variables of the template.
RESERVED_TEMPLATE_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "conversations",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "self",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


class PromptEncoder:
    """Tokenises text and chats, in any thread; long ones take seconds.

    Raises:
        OptionError: when `chat_template` is not a Jinja template.

    Args:
        tool_format: how tools and calls are told where the template knows none.
        sanitize_control_tokens: special tokens that chats spell stay text.
        images: reads those of prompts, and videos; None where the model reads none.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_model_len: int,
        chat_template: str | None,
        *,
        tool_format: str = GENERIC,
        sanitize_control_tokens: bool = True,
        images: ImageReader | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._max_model_len = max_model_len
        self._templates = ChatTemplates(tokenizer, chat_template, tool_format=tool_format)
        self._control_tokens = ControlTokens(tokenizer)
        self._sanitizes = sanitize_control_tokens
        self._images = images
        self._longest_token = max(map(len, tokenizer.get_vocab()))
        template = self._templates.choose(with_tools=False)
        if chat_template is not None and template is not None:
            try:
                template.check_syntax()
            except jinja2.TemplateSyntaxError as error:
                raise OptionError(f"--chat-template, line {error.lineno}: {error}") from error

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

    @property
    def reads_images(self) -> bool:
        """Whether it reads images or videos."""
        return self._images is not None

    @property
    def input_modalities(self) -> list[str]:
        return ["text", *([] if self._images is None else self._images.kinds)]

    def with_images(self, prompt: Prompt, given: Sequence[str | VideoSource], param: str) -> Prompt:
        """The prompt with the tokens of its images and videos, which are read first.

        Args:
            given: URLs of images, and videos, in the order of their placeholders.
            param: the request's field that has them.

        Raises:
            ApiError: 400 for images that cannot be read, or where the model reads none.
        """
        self._check_read(given, param)
        if not given or self._images is None:
            return prompt
        return self._images.read(prompt, given, param)

    def _check_read(self, given: Sequence[str | VideoSource], param: str) -> None:
        if given and self._images is None:
            raise bad_request(
                f"{param} hold {kind_of(given[0])}s, and this model reads none; send text alone",
                param,
                UNSUPPORTED_CONTENT,
            )

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
        tools = tool_dicts(chat) if with_tools else None
        template = self._templates.choose(with_tools=bool(tools))
        if template is None:
            raise bad_request(
                "this model has no chat template; start the server with --chat-template FILE, "
                "or use /v1/completions",
                "messages",
            )
        if len(chat.messages) > self._max_model_len:
            raise self._too_long(len(chat.messages), "messages")
        _check_partial(chat.messages)
        media: list[str | VideoSource] = []
        messages = [_plain(message, media) for message in chat.messages]
        # Before the template, which may not take a message of parts.
        self._check_read(media, "messages")
        self._check_length(sum(len(m["content"] or "") for m in messages), "messages")
        rendered, order = self._render(template, messages, chat, tools)
        self._check_length(len(rendered), "messages")
        text, token_ids = self._control_tokens.encode(
            rendered, add_special_tokens=add_special_tokens
        )
        return self.with_images(Prompt(token_ids, text), [media[i] for i in order], "messages")

    def describe(self) -> dict[str, Any]:
        """What clients need who render chats themselves and have their text tokenised here."""
        tokenizer = self._tokenizer
        names = ("bos_token", "eos_token", "pad_token", "unk_token")
        return {
            "tokenizer_class": _class_name(tokenizer),
            "model_max_length": self._max_model_len,
            **{name: getattr(tokenizer, name, None) for name in names},
            "chat_template": self._templates.default,
        }

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def _render(
        self,
        template: ChatTemplate,
        messages: list[dict[str, Any]],
        chat: ChatPrompt,
        tools: list[dict[str, Any]] | None,
    ) -> tuple[str, list[int]]:
        """The text, and the numbers of the images in it in their order."""
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
            return template.render_images(
                messages,
                tools,
                {
                    "add_generation_prompt": opens,
                    "continue_final_message": continues,
                    **variables,
                },
                loads=JsonBudget().loads,
                sanitizes=self._sanitizes,
            )
        except ApiError:
            raise
        except MessageError as error:
            raise bad_request(excerpt(str(error)), error.where) from error
        except Exception as error:  # a template is a program: anything can come out of it
            raise bad_request(
                f"the chat template does not accept these messages: {excerpt(str(error))}",
                "messages",
            ) from error

    def _check_length(self, size: int, param: str) -> None:
        if size > self._max_model_len * self._longest_token:
            raise self._too_long(-(-size // self._longest_token), param)

    def _too_long(self, least_tokens: int, param: str) -> ApiError:
        error = ContextLengthError(least_tokens, self._max_model_len, is_at_least=True)
        return ContextExceededError(error, param)


def tool_dicts(chat: ChatPrompt) -> list[dict[str, Any]] | None:
    """The chat's tools as templates and parsers take them; None without tools."""
    return [tool.model_dump(exclude_none=True) for tool in own_tools(chat.tools)] or None


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


def _video(part: VideoPart) -> VideoSource:
    return VideoSource(part.url, DEFAULT_FPS if part.fps is None else part.fps)


def _plain(message: ChatMessage, media: list[str | VideoSource]) -> dict[str, Any]:
    """The message as all APIs have it.

    Args:
        media: takes the message's images and videos, for which marks stand.
    """
    content = message.content
    if isinstance(content, str):
        content = without_marks(content)
    elif content is not None:
        pieces = []
        for part in content:
            if not isinstance(part, (ImagePart, VideoPart)):
                pieces.append(without_marks(part.text))
                continue
            if message.role == "assistant":
                raise bad_request(f"messages: an assistant's hold no {part.type}", "messages")
            given = _video(part) if isinstance(part, VideoPart) else part.url
            pieces.append(mark_of(len(media), kind_of(given)))
            media.append(given)
        content = "".join(pieces)
    return {
        "role": message.role,
        "content": content,
        "refusal": message.refusal,
        "reasoning_content": message.thought,
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "tool_calls": message.tool_calls,
    }
