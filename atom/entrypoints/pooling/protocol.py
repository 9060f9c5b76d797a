"""The bodies of requests to models that embed or score."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag

from atom.entrypoints.chat.protocol import ApiModel, list_or_string

Texts = Annotated[
    Annotated[str, Tag("<string>")]
    | Annotated[Annotated[list[str], Field(fail_fast=True)], Tag("<list>")],
    Discriminator(list_or_string),
]


class EmbeddingRequest(ApiModel):
    """`POST /v1/embeddings`; the shape of `input` is checked by `parse_inputs`.

    Attributes:
        prompt_name: sentence-transformers' name of a text of the checkpoint, put before each text.
        use_activation: whether vectors get length 1; None for what the checkpoint says.
        normalize: vLLM's older name of the same.
    """

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "priority": (0,),
    }

    input: Any
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    prompt_name: str | None = None
    use_activation: bool | None = None
    normalize: bool | None = None


class TextTokenizeRequest(ApiModel):
    """`POST /tokenize`, without chats."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"messages": ([],), "tools": ([],)}

    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class ScoreRequest(ApiModel):
    """`POST /v1/score`: one text or as many as the others, under vLLM's names of either time."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {"priority": (0,)}

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    model: str | None = None
    user: str | None = None
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None


class DocumentText(ApiModel):
    text: str


Document = Annotated[
    Annotated[str, Tag("<string>")] | Annotated[DocumentText, Tag("<object>")],
    Discriminator(lambda value: "<string>" if isinstance(value, str) else "<object>"),
]


class RerankRequest(ApiModel):
    """`POST /v1/rerank`, as vLLM, Jina and Cohere have it."""

    UNSUPPORTED: ClassVar[dict[str, tuple[Any, ...]]] = {
        "priority": (0,),
        "rank_fields": (["text"],),
        "max_chunks_per_doc": (),
    }

    query: str
    documents: Annotated[list[Document], Field(fail_fast=True)]
    model: str | None = None
    user: str | None = None
    top_n: int | None = None
    return_documents: bool | None = None
    max_tokens_per_doc: int | None = None
    instruction: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None


EMBEDDING_ROUTES: dict[str, type[ApiModel]] = {"/v1/embeddings": EmbeddingRequest}
SCORE_ROUTES: dict[str, type[ApiModel]] = {"/v1/score": ScoreRequest, "/score": ScoreRequest}
RERANK_ROUTES: dict[str, type[ApiModel]] = {
    "/v1/rerank": RerankRequest,
    "/v2/rerank": RerankRequest,
    "/rerank": RerankRequest,
}
POOLING_ROUTES = {**EMBEDDING_ROUTES, **SCORE_ROUTES, **RERANK_ROUTES}
