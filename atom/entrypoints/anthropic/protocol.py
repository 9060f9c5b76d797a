"""The bodies of `POST /v1/messages` and `POST /v1/messages/count_tokens`."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from atom.entrypoints.anthropic.context_management import ContextManagement
from atom.entrypoints.chat.protocol import (
    ApiModel,
    SamplingFields,
    StopStrings,
    kind_of,
    list_or_string,
)
from atom.entrypoints.http.provider_tools import PROVIDER_TAG, ProviderTool, tool_kind
from atom.entrypoints.http.unknown_fields import UNSUPPORTED_CONTENT


class MessageBlock(ApiModel):
    """A block of a message; `cache_control` is harmless: prefixes are cached without it."""

    cache_control: Any = None


class TextBlock(MessageBlock):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"citations": ([],)}

    type: Literal["text"]
    text: str


class ThinkingBlock(MessageBlock):
    """`signature` is harmless: thinking is not signed here."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None


class ToolUseBlock(MessageBlock):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "caller": ({"type": "direct"},),
        "toolset_name": (),
    }

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


TextBlocks = Annotated[
    list[
        Annotated[
            TextBlock,
            Tag("<text>"),
            Discriminator(
                kind_of("<text>"),
                custom_error_type=UNSUPPORTED_CONTENT,
                custom_error_message="only blocks of type text are supported here",
            ),
        ]
    ],
    Field(fail_fast=True),
]
Text = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[TextBlocks, Tag("<list>")],
    Discriminator(list_or_string),
]


class Base64Source(ApiModel):
    type: Literal["base64"]
    media_type: str
    data: str

    @property
    def as_url(self) -> str:
        return f"data:{self.media_type};base64,{self.data}"


class UrlSource(ApiModel):
    type: Literal["url"]
    url: str

    @property
    def as_url(self) -> str:
        return self.url


class ImageBlock(MessageBlock):
    type: Literal["image"]
    source: Annotated[
        Annotated[Base64Source, Tag("<base64>")] | Annotated[UrlSource, Tag("<url>")],
        Discriminator(
            kind_of("<base64>"),
            custom_error_type=UNSUPPORTED_CONTENT,
            custom_error_message="only sources of type base64 and url are supported",
        ),
    ]


ResultBlocks = Annotated[
    list[
        Annotated[
            Annotated[TextBlock, Tag("<text>")] | Annotated[ImageBlock, Tag("<image>")],
            Discriminator(
                kind_of("<text>"),
                custom_error_type=UNSUPPORTED_CONTENT,
                custom_error_message="only blocks of type text and image are supported here",
            ),
        ]
    ],
    Field(fail_fast=True),
]


class ToolResultBlock(MessageBlock):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"toolset_name": ()}

    type: Literal["tool_result"]
    tool_use_id: str
    content: (
        Annotated[
            Annotated[str, Tag("<string>")] | Annotated[ResultBlocks, Tag("<list>")],
            Discriminator(list_or_string),
        ]
        | None
    ) = None
    is_error: bool | None = None


Block = Annotated[
    Annotated[TextBlock, Tag("<text>")]
    | Annotated[ImageBlock, Tag("<image>")]
    | Annotated[ThinkingBlock, Tag("<thinking>")]
    | Annotated[ToolUseBlock, Tag("<tool_use>")]
    | Annotated[ToolResultBlock, Tag("<tool_result>")],
    Discriminator(
        kind_of("<text>"),
        custom_error_type=UNSUPPORTED_CONTENT,
        custom_error_message="only blocks of type text, image, thinking, tool_use and tool_result "
        "are supported",
    ),
]
Blocks = Annotated[list[Block], Field(fail_fast=True)]


class InputMessage(ApiModel):
    role: Literal["user", "assistant", "system"]
    content: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[Blocks, Tag("<list>")],
        Discriminator(list_or_string),
    ]


class Tool(ApiModel):
    """A function of the client; `eager_input_streaming` is harmless: input always streams."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "defer_loading": (False,),
        "input_examples": ([],),
    }

    name: str
    input_schema: dict[str, Any]
    type: Literal["custom"] | None = None
    description: str | None = None
    strict: bool | None = None
    cache_control: Any = None
    eager_input_streaming: Any = None


Tools = Annotated[
    list[
        Annotated[
            Annotated[Tool, Tag("<custom>")] | Annotated[ProviderTool, Tag(PROVIDER_TAG)],
            Discriminator(tool_kind("custom")),
        ]
    ],
    Field(fail_fast=True),
]


class ToolChoice(ApiModel):
    type: Literal["auto", "any", "none", "tool"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(ApiModel):
    """Whether the chat template is told to think; what is thought is always shown.

    `budget_tokens` is harmless: nothing holds the model to less than `max_tokens`.
    """

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"display": ("summarized",)}

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: int | None = None


class OutputFormat(ApiModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(ApiModel):
    effort: str | None = None
    format: OutputFormat | None = None


class CountTokensRequest(ApiModel):
    """`POST /v1/messages/count_tokens`: what a message's prompt is made of."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "container": (),
        "diagnostics": (),
        "inference_geo": (),
        "mcp_servers": ([],),
        "speed": ("standard",),
        "workspace_id": (),
    }

    model: str | None = None
    messages: Annotated[list[InputMessage], Field(fail_fast=True)]
    system: Text | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    context_management: ContextManagement | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Refused as its clients understand, who go on without it.
    thread: Any = None

    # Harmless.
    cache_control: Any = None
    user_profile_id: Any = None


class MessagesRequest(SamplingFields, CountTokensRequest):
    """`POST /v1/messages`."""

    max_tokens: int
    stop_sequences: StopStrings | None = None
    stream: bool | None = None

    # Harmless.
    metadata: Any = None
    service_tier: Any = None
