"""The bodies of requests: every field by name and type, and what becomes of it.

A field is either used, harmless (accepted, changes nothing, listed in docs/server.md), or not
supported: then it is refused unless its value asks for nothing. Unknown fields are kept for
`http/unknown_fields.py` to judge. Ranges are the business of `SamplingParams`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from atom.entrypoints.http.provider_tools import PROVIDER_TAG, ProviderTool, tool_kind
from atom.entrypoints.http.unknown_fields import UNSUPPORTED_CONTENT, UNSUPPORTED_FIELD

# More than any client needs: OpenAI takes 4 stop strings and 300 biases. Each stop string costs
# time at every token, biases and stop ids cost time and memory of the engine.
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIASES = 1024
MAX_SALT_CHARACTERS = 1024

Role = Literal["system", "developer", "user", "assistant", "tool"]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
Int32 = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
# Lists fail at their first wrong item: megabytes of wrong items must not become errors each.
StopString = Annotated[str, Field(max_length=MAX_STOP_CHARACTERS)]
StopStrings = Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS, fail_fast=True)]
StopTokenIds = Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)]
LogitBias = Annotated[dict[int, float], Field(max_length=MAX_LOGIT_BIASES)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]


class ApiModel(BaseModel):
    """Strict: no "5" for 5.

    Attributes:
        UNSUPPORTED: unsupported fields, with the values that ask for nothing. They need no line
            of their own where a model takes unknown fields.
    """

    model_config = ConfigDict(extra="allow", strict=True, protected_namespaces=())
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Of unsupported fields the schema allows the values that ask for nothing."""
        described = handler(schema)
        properties = handler.resolve_ref_schema(described).get("properties", {})
        for name, values in cls.UNSUPPORTED.items():
            properties[name] = {"enum": [None, *values], "description": "Not supported."}
        return described

    @model_validator(mode="after")
    def _refuse_unsupported(self) -> ApiModel:
        extra = self.model_extra or {}
        for name in self.UNSUPPORTED.keys() & self.model_fields_set:
            value = getattr(self, name, None)
            extra.pop(name, None)
            if value is not None and value not in self.UNSUPPORTED[name]:
                said = "{field} is not supported"
                raise PydanticCustomError(UNSUPPORTED_FIELD, said, {"field": name})
        return self


def kind_of(default: str) -> Callable[[Any], str]:
    """Tells the members of a union apart by their `type`: the tag of "text" is "<text>".

    Args:
        default: the tag of what has no type.
    """

    def tag(value: Any) -> str:
        kind = value.get("type") if isinstance(value, dict) else None
        return default if kind is None else f"<{kind}>"

    return tag


def list_or_string(value: Any) -> str:
    """The tag, "<list>" or "<string>", of a union of these two."""
    return "<list>" if isinstance(value, list) else "<string>"


def object_or_string(value: Any) -> str:
    """The tag, "<object>" or "<string>", of a union of these two."""
    return "<object>" if isinstance(value, dict) else "<string>"


def _whole_number(value: Any) -> Any:
    """16.0 is 16, and -1 is no limit: so some clients write them."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return None if value == -1 and not isinstance(value, bool) else value


TokenLimit = Annotated[int | None, BeforeValidator(_whole_number)]


class StreamOptions(ApiModel):
    """`continuous_usage_stats` puts the usage so far into every chunk, `include_speculation` how
    its tokens came.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_speculation: bool | None = None
    include_obfuscation: bool | None = None  # harmless


class StructuredOutputsFields(ApiModel):
    """vLLM's way to write a constraint: one of the first six."""

    model_config = ConfigDict(extra="forbid")
    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "disable_any_whitespace": (False,),
        "disable_additional_properties": (False,),
        "whitespace_pattern": (),
    }

    json_: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: dict[str, Any] | str | None = None
    disable_fallback: bool | None = None  # harmless: there is one backend
    disable_any_whitespace: Any = None
    disable_additional_properties: Any = None
    whitespace_pattern: Any = None


class SamplingFields(ApiModel):
    """How tokens are chosen, the same in every API; null means the default."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    allowed_token_ids: TokenIds | None = None
    bad_words: StopStrings | None = None
    seed: int | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    skip_special_tokens: bool | None = None
    priority: Int32 | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARACTERS)] | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputsFields | None = None


class SchemaFormat(ApiModel):
    """The `json_schema` of a response format; it is enforced with and without `strict`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(ApiModel):
    """OpenAI's, and what other servers take: a bare `schema` (llama.cpp, Together, Fireworks,
    Anyscale), a `grammar` in GBNF (Fireworks), a regular expression as `pattern` (Together), and
    xgrammar's structural tags, new and old (vLLM, SGLang).
    """

    type: Literal["text", "json_object", "json_schema", "grammar", "regex", "structural_tag"]
    json_schema: SchemaFormat | None = None
    schema_: dict[str, Any] | str | None = Field(default=None, alias="schema")
    grammar: str | None = None
    pattern: str | None = None
    format: dict[str, Any] | None = None
    structures: Annotated[list[dict[str, Any]], Field(fail_fast=True)] | None = None
    triggers: Annotated[list[str], Field(fail_fast=True)] | None = None


class GenerationRequest(SamplingFields):
    """What completions and chat completions have in common."""

    model: str | None = None
    n: int | None = None
    stop: StopString | StopStrings | None = None
    include_stop_str_in_output: bool | None = None
    max_tokens: TokenLimit = None
    response_format: ResponseFormat | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    prompt_logprobs: int | None = None
    add_special_tokens: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    speculation: bool | None = None
    num_speculative_tokens: int | None = None

    # Harmless.
    user: Any = None
    metadata: Any = None
    store: Any = None
    service_tier: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(GenerationRequest):
    """`POST /v1/completions`; the shape of `prompt` is checked by `parse_prompts`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": ("",)}

    prompt: Any
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class TextPart(ApiModel):
    type: Literal["text"]
    text: str


class RefusalPart(ApiModel):
    """What an assistant said instead of an answer; it is text like any other."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ImageUrl(ApiModel):
    """Images are always read in full, so `detail` cannot be low."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"detail": ("auto", "high")}

    url: str


class ImagePart(ApiModel):
    """An image by its URL, which may hold its data."""

    type: Literal["image_url"]
    image_url: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[ImageUrl, Tag("<object>")],
        Discriminator(object_or_string),
    ]

    @property
    def url(self) -> str:
        return self.image_url if isinstance(self.image_url, str) else self.image_url.url


class VideoUrl(ApiModel):
    url: str


class VideoPart(ApiModel):
    """A video by a URL that holds its frames, `fps` of them a second (2 when left out)."""

    type: Literal["video_url"]
    video_url: Annotated[
        Annotated[str, Tag("<string>")] | Annotated[VideoUrl, Tag("<object>")],
        Discriminator(object_or_string),
    ]
    fps: float | None = None

    @property
    def url(self) -> str:
        return self.video_url if isinstance(self.video_url, str) else self.video_url.url


ContentParts = Annotated[
    list[
        Annotated[
            Annotated[TextPart, Tag("<text>")]
            | Annotated[RefusalPart, Tag("<refusal>")]
            | Annotated[ImagePart, Tag("<image_url>")]
            | Annotated[VideoPart, Tag("<video_url>")],
            Discriminator(
                kind_of("<text>"),
                custom_error_type=UNSUPPORTED_CONTENT,
                custom_error_message="only parts of type text, image_url, video_url and refusal "
                "are supported here",
            ),
        ]
    ],
    Field(fail_fast=True),
]
Content = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[ContentParts, Tag("<list>")],
    Discriminator(list_or_string),
]


def text_of(content: str | Sequence[TextPart | RefusalPart | ImagePart | VideoPart] | None) -> str:
    """A message's text, without its images and videos."""
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(part.text for part in content if isinstance(part, (TextPart, RefusalPart)))


class FunctionDefinition(ApiModel):
    """A function that the model may call; `parameters` is a JSON schema."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiModel):
    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(ApiModel):
    name: str


class NamedToolChoice(ApiModel):
    type: Literal["function"]
    function: FunctionName


ToolChoice = Literal["none", "auto", "required"] | NamedToolChoice
Tools = Annotated[
    list[
        Annotated[
            Annotated[Tool, Tag("<function>")] | Annotated[ProviderTool, Tag(PROVIDER_TAG)],
            Discriminator(tool_kind("function")),
        ]
    ],
    Field(fail_fast=True),
]


class ChatMessage(ApiModel):
    """One message. The unsupported fields are what clients echo back from a response.

    `reasoning` is another name of `reasoning_content`. `partial` says of the last message, an
    assistant's, that the answer goes on where it ends.
    """

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "function_call": (),
        "audio": (),
        "annotations": ([],),
    }

    role: Role
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    partial: bool | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    refusal: str | None = None

    @property
    def thought(self) -> str | None:
        return self.reasoning if self.reasoning_content is None else self.reasoning_content


class Thinking(ApiModel):
    """Kimi's switch."""

    type: Literal["enabled", "disabled"]


class ChatPrompt(ApiModel):
    """What the chat template renders."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)] = Field(default_factory=list)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: ReasoningEffort | None = None
    thinking: Thinking | None = None
    tools: Tools | None = None

    @property
    def continues(self) -> bool:
        """Whether the answer goes on where the last message ends."""
        is_partial = bool(self.messages) and self.messages[-1].partial
        return bool(self.continue_final_message or is_partial)


class ChatCompletionRequest(GenerationRequest, ChatPrompt):
    """`POST /v1/chat/completions`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "chat_template": (),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"], []),
        "audio": (),
        "prediction": (),
        "web_search_options": (),
        "verbosity": (),
    }

    max_completion_tokens: TokenLimit = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None


class TokenizeRequest(ChatPrompt):
    """`POST /tokenize`: a prompt, or messages with the fields of `ChatPrompt`."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"chat_template": ()}

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(ApiModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: TokenIds
