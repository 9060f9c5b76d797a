"""The body of `POST /generate`, SGLang's native API."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from atom.entrypoints.chat.protocol import (
    ApiModel,
    Int32,
    LogitBias,
    StopString,
    StopStrings,
    StopTokenIds,
    TokenIds,
    TokenLimit,
)

DEFAULT_MAX_NEW_TOKENS = 128


class GenerateSampling(ApiModel):
    """`max_new_tokens` null or -1 is up to the end of the context."""

    max_new_tokens: TokenLimit = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: LogitBias | None = None
    stop: StopString | StopStrings | None = None
    stop_token_ids: StopTokenIds | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: int | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None


class GenerateRequest(ApiModel):
    """`POST /generate`: one prompt, or several, as text or as token ids.

    `rid` names the request in its answer. `image_data` goes with one prompt, which has the model's
    placeholder for each image: URLs, or files in base64.
    """

    text: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)] | None = None
    image_data: str | Annotated[list[str], Field(fail_fast=True)] | None = None
    sampling_params: GenerateSampling = Field(default_factory=GenerateSampling)
    stream: bool | None = None
    rid: str | None = None
    priority: Int32 | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
