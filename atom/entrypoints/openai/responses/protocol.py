"""The body of `POST /v1/responses`.

The server keeps nothing between requests, so what refers to kept things is refused; a response
says `store: false`, also when the request leaves `store` out.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from atom.entrypoints.chat.protocol import (
    ApiModel,
    SamplingFields,
    kind_of,
    list_or_string,
)
from atom.entrypoints.http.provider_tools import PROVIDER_TAG, ProviderTool, tool_kind
from atom.entrypoints.http.unknown_fields import UNSUPPORTED_CONTENT

ItemStatus = Literal["in_progress", "completed", "incomplete"]


class InputText(ApiModel):
    """Text of a message or of a function's output."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "annotations": ([],),
        "prompt_cache_breakpoint": (),
    }

    type: Literal["input_text", "output_text"]
    text: str
    logprobs: Any = None  # harmless: what an answer said of its tokens


class ReasoningText(ApiModel):
    type: Literal["reasoning_text"]
    text: str


class InputImage(ApiModel):
    """An image by its URL; always read in full, so `detail` cannot be low. No files are kept."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "detail": ("auto", "high", "original"),
        "file_id": (),
        "prompt_cache_breakpoint": (),
    }

    type: Literal["input_image"]
    image_url: str


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[InputText, Tag("<output_text>")]
    | Annotated[InputImage, Tag("<input_image>")],
    Discriminator(
        kind_of("<input_text>"),
        custom_error_type=UNSUPPORTED_CONTENT,
        custom_error_message="only parts of type input_text, input_image and output_text are "
        "supported",
    ),
]
Parts = Annotated[list[Part], Field(fail_fast=True)]
Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[Parts, Tag("<list>")],
    Discriminator(list_or_string),
]


class InputMessage(ApiModel):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content
    id: str | None = None
    status: ItemStatus | None = None
    phase: str | None = None  # harmless: a label


class FunctionCall(ApiModel):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "async": (False,),
        "caller": ({"type": "direct"},),
        "namespace": (),
    }

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: ItemStatus | None = None


class FunctionCallOutput(ApiModel):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "caller": ({"type": "direct"},),
        "namespace": (),
    }

    type: Literal["function_call_output"]
    call_id: str
    output: Content
    id: str | None = None
    name: str | None = None
    status: ItemStatus | None = None


class ReasoningItem(ApiModel):
    """Only a text in plain is told to the model: of other servers' reasoning, which is summed up or
    encrypted, nothing is left that a model could read.
    """

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True)] | None = None
    summary: Any = None
    encrypted_content: Any = None
    id: str | None = None
    status: ItemStatus | None = None


InputItem = Annotated[
    Annotated[InputMessage, Tag("<message>")]
    | Annotated[FunctionCall, Tag("<function_call>")]
    | Annotated[FunctionCallOutput, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    Discriminator(
        kind_of("<message>"),
        custom_error_type=UNSUPPORTED_CONTENT,
        custom_error_message="only items of type message, function_call, function_call_output and "
        "reasoning are supported",
    ),
]
Items = Annotated[list[InputItem], Field(fail_fast=True)]


class FunctionTool(ApiModel):
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


Tools = Annotated[
    list[
        Annotated[
            Annotated[FunctionTool, Tag("<function>")] | Annotated[ProviderTool, Tag(PROVIDER_TAG)],
            Discriminator(tool_kind("function")),
        ]
    ],
    Field(fail_fast=True),
]


class ToolReference(ApiModel):
    type: Literal["function"]
    name: str


class AllowedTools(ApiModel):
    """The tools of the request that may be called; the model sees no others."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ToolReference], Field(fail_fast=True, min_length=1)]


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<string>")]
    | Annotated[ToolReference, Tag("<function>")]
    | Annotated[AllowedTools, Tag("<allowed_tools>")],
    Discriminator(
        kind_of("<string>"),
        custom_error_type=UNSUPPORTED_CONTENT,
        custom_error_message="only 'none', 'auto', 'required' and choices of type function and "
        "allowed_tools are supported",
    ),
]


class ReasoningConfig(ApiModel):
    """`summary: auto` leaves it to the server, which makes none."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "summary": ("auto",),
        "generate_summary": ("auto",),
        "context": ("auto",),
        "mode": ("standard",),
    }

    effort: str | None = None


class TextConfig(ApiModel):
    """`format` is checked where chat's `response_format` is."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"verbosity": ("medium",)}

    format: dict[str, Any] | None = None


# Only logprobs add anything: there are no encrypted contents, images are not given back, and the
# calls that the others are of are those of tools that run elsewhere.
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "code_interpreter_call.outputs",
    "computer_call_output.output.image_url",
    "file_search_call.results",
    "message.input_image.image_url",
    "web_search_call.action.sources",
    "web_search_call.results",
]


class StreamConfig(ApiModel):
    include_obfuscation: bool | None = None  # harmless


class ResponsesRequest(SamplingFields):
    """`POST /v1/responses`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "access_programs": (),
        "background": (False,),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "store": (False,),
        "truncation": ("disabled",),
    }

    model: str | None = None
    input: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[Items, Tag("<list>")],
        Discriminator(list_or_string),
    ]
    instructions: str | None = None
    max_output_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamConfig | None = None
    tools: Tools | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningConfig | None = None
    text: TextConfig | None = None
    top_logprobs: int | None = None
    include: Annotated[list[Included], Field(fail_fast=True)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    # Harmless; `metadata` and the like come back in the response. There are no built-in tools
    # whose calls `max_tool_calls` could count.
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    max_tool_calls: int | None = None
    client_metadata: Any = None
