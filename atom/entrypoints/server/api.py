"""The handlers of the routes of a model that generates."""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from atom.entrypoints.anthropic import api as messages_api
from atom.entrypoints.anthropic.context_edits import manage_context, prompt_size
from atom.entrypoints.anthropic.events import MessageTranslation
from atom.entrypoints.anthropic.models import VERSION_HEADER, model_info, model_page
from atom.entrypoints.anthropic.protocol import CountTokensRequest, MessagesRequest
from atom.entrypoints.chat.api import prepare_chat
from atom.entrypoints.chat.format import ChatFormat
from atom.entrypoints.chat.generation import (
    Generation,
    fingerprint_field,
    respond,
)
from atom.entrypoints.chat.images import may_hold_media
from atom.entrypoints.chat.prompt import Prompt
from atom.entrypoints.chat.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from atom.entrypoints.chat.tokenization import PromptEncoder
from atom.entrypoints.chat.translation import Translation, renamed, respond_translated
from atom.entrypoints.http.body import parse_body
from atom.entrypoints.http.errors import (
    SERVER_ERROR,
    ApiError,
    bad_request,
    json_response,
)
from atom.entrypoints.http.metrics import ServerMetrics
from atom.entrypoints.http.unknown_fields import UnknownFields
from atom.entrypoints.http.workers import Workers
from atom.entrypoints.openai.completions import CompletionFormat, prepare_completion
from atom.entrypoints.openai.responses import api as responses
from atom.entrypoints.openai.responses.events import ResponseTranslation
from atom.entrypoints.openai.responses.protocol import ResponsesRequest
from atom.entrypoints.server.base import BaseApi
from atom.entrypoints.server_options import MAX_IMAGE_BODY_BYTES
from atom.entrypoints.sglang.api import prepare_generate, respond_generate
from atom.entrypoints.sglang.protocol import GenerateRequest
from atom.model_engine.async_engine import AsyncEngine
from atom.quoting import quote
from atom.text.detokenizer import Vocabulary

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Api(BaseApi):
    """The handlers of a model that generates, and what they work with."""

    engine: AsyncEngine
    encoder: PromptEncoder
    image_workers: Workers
    vocabulary: Vocabulary
    metrics: ServerMetrics

    async def _run(self, data: bytes, work: Callable[[], Result]) -> Result:
        """In a thread of other ones where images or videos may have to be read and decoded."""
        if self.encoder.reads_images and may_hold_media(data):
            return await self.image_workers.run_in_thread(work)
        return await super()._run(data, work)

    @property
    def _max_body_bytes(self) -> int:
        if self.options.max_body_bytes is None and self.encoder.reads_images:
            return MAX_IMAGE_BODY_BYTES
        return super()._max_body_bytes

    async def completions(self, request: Request) -> Response:
        def prepare(data: bytes, unknown: UnknownFields) -> tuple[Generation, CompletionFormat]:
            body = parse_body(data, CompletionRequest, unknown)
            generation = prepare_completion(
                body, self._model(body.model), self.encoder, self.engine.sampling_defaults
            )
            return generation, CompletionFormat(body, self.encoder, self.vocabulary)

        generation, choices = await self._prepared(request, prepare)
        return await respond(request, self.engine, generation, choices, self.workers)

    async def chat_completions(self, request: Request) -> Response:
        def prepare(data: bytes, unknown: UnknownFields) -> tuple[Generation, ChatFormat]:
            body = parse_body(data, ChatCompletionRequest, unknown)
            return self._chat(body, self._model(body.model))

        generation, choices = await self._prepared(request, prepare)
        return await respond(request, self.engine, generation, choices, self.workers)

    async def generate(self, request: Request) -> Response:
        def prepare(data: bytes, unknown: UnknownFields) -> tuple[Generation, bool]:
            body = parse_body(data, GenerateRequest, unknown)
            generation = prepare_generate(
                body, self.model_names[0], self.encoder, self.engine.sampling_defaults
            )
            is_one = isinstance(body.text, str) or _is_flat(body.input_ids)
            return generation, generation.n > 1 or not is_one

        generation, is_batch = await self._prepared(request, prepare)
        return await respond_generate(request, self.engine, generation, is_batch, self.workers)

    async def responses(self, request: Request) -> Response:
        def prepare(
            data: bytes, unknown: UnknownFields
        ) -> tuple[Generation, ChatFormat, Translation]:
            body = parse_body(data, ResponsesRequest, unknown)
            fields = responses.response_fields(
                body, self._model(body.model), self.engine.sampling_defaults
            )
            chat = responses.as_chat(body, unknown)
            if chat.logprobs and (chat.tools or self.options.reasoning_format is not None):
                raise bad_request(
                    "logprobs of text among reasoning and calls are not told apart here; "
                    "/v1/chat/completions gives those of all tokens",
                    "include",
                    "unsupported_field",
                )
            prepared = self._chat(chat, self.model_names[0], responses.FIELD_NAMES)
            return *prepared, ResponseTranslation({**fields, **fingerprint_field(self.engine)})

        return await self._translated(request, prepare, responses.FIELD_NAMES)

    async def messages(self, request: Request) -> Response:
        def prepare(
            data: bytes, unknown: UnknownFields
        ) -> tuple[Generation, ChatFormat, Translation]:
            body = parse_body(data, MessagesRequest, unknown)
            model = self._model(body.model)
            managed = manage_context(body, functools.partial(self._prompt_size, unknown))
            message_id = f"msg_{uuid.uuid4().hex}"
            head = {"id": message_id, "model": model, **fingerprint_field(self.engine)}
            translation = MessageTranslation(head, managed.applied)
            chat = messages_api.as_chat(managed.body, unknown)
            prepared = self._chat(chat, self.model_names[0], messages_api.FIELD_NAMES)
            return *prepared, translation

        return await self._translated(request, prepare, messages_api.FIELD_NAMES)

    async def count_tokens(self, request: Request) -> Response:
        def count(data: bytes, unknown: UnknownFields) -> Response:
            body = parse_body(data, CountTokensRequest, unknown)
            self._model(body.model)
            size = functools.partial(self._prompt_size, unknown)
            managed = manage_context(body, size)
            counted: dict[str, Any] = {"input_tokens": size(managed.body)}
            if managed.applied is not None:
                original = prompt_size(body, size) if managed.applied else counted["input_tokens"]
                counted["context_management"] = {"original_input_tokens": original}
            return json_response(counted)

        return await self._prepared(request, count)

    def _prompt_size(self, unknown: UnknownFields, body: CountTokensRequest) -> int:
        """Tokens of a message's prompt."""
        chat = messages_api.as_chat(body, unknown)
        prompt = self.encoder.encode_chat(
            chat, add_special_tokens=False, with_tools=chat.tool_choice != "none"
        )
        return len(prompt.token_ids)

    def _chat(
        self, body: ChatCompletionRequest, model: str, field_names: Mapping[str, str] | None = None
    ) -> tuple[Generation, ChatFormat]:
        """What a chat asks of the engine, and how its choices are spelled.

        Args:
            field_names: another API's names of chat's fields.
        """
        try:
            return prepare_chat(
                body,
                model,
                self.encoder,
                self.vocabulary,
                self.options,
                self.engine.sampling_defaults,
            )
        except ApiError as error:
            raise renamed(error, field_names or {}) from None

    async def _translated(
        self,
        request: Request,
        prepare: Callable[[bytes, UnknownFields], tuple[Generation, ChatFormat, Translation]],
        field_names: Mapping[str, str],
    ) -> Response:
        """A chat, spelled by another API."""
        generation, choices, translation = await self._prepared(request, prepare)
        try:
            return await respond_translated(
                request, self.engine, generation, choices, translation, self._count_tokens
            )
        except ApiError as error:
            raise renamed(error, field_names) from None

    async def _count_tokens(self, text: str) -> int:
        encode = functools.partial(
            self.encoder.encode, text, add_special_tokens=False, param="input"
        )
        return len((await self.workers.run(len(text), encode)).token_ids)

    async def models(self, request: Request) -> Response:
        if VERSION_HEADER in request.headers:
            infos = [self._model_info(name) for name in self.model_names]
            return json_response(model_page(infos, request.query_params))
        cards = [self._model_card(name) for name in self.model_names]
        return json_response({"object": "list", "data": cards})

    async def model(self, request: Request, model_id: str) -> Response:
        if VERSION_HEADER in request.headers:
            return json_response(self._model_info(self._model(model_id)))
        return json_response(self._model_card(self._model(model_id)))

    async def tokenize(self, request: Request) -> Response:
        def answer(data: bytes, unknown: UnknownFields) -> Response:
            body = parse_body(data, TokenizeRequest, unknown)
            self._model(body.model)
            prompt = self._tokenized(body)
            token_ids = prompt.token_ids
            spelled = None
            if body.return_token_strs:
                spelled = [self.vocabulary.token_text(token_id) for token_id in token_ids]
            answer = {
                "count": len(token_ids),
                "max_model_len": self.engine.limits.max_model_len,
                "tokens": token_ids,
                "token_strs": spelled,
            }
            if prompt.images:
                answer["image_ranges"] = [image.ranges for image in prompt.images]
            return json_response(answer)

        return await self._prepared(request, answer)

    def _tokenized(self, body: TokenizeRequest) -> Prompt:
        if (body.prompt is None) == (not body.messages):
            raise bad_request("send either prompt or messages", "prompt")
        if body.prompt is None:
            adds = bool(body.add_special_tokens)
            return self.encoder.encode_chat(body, add_special_tokens=adds)
        adds = body.add_special_tokens is not False
        return self.encoder.encode(body.prompt, add_special_tokens=adds, param="prompt")

    async def detokenize(self, request: Request) -> Response:
        def answer(data: bytes, unknown: UnknownFields) -> Response:
            body = parse_body(data, DetokenizeRequest, unknown)
            self._model(body.model)
            size = self.engine.limits.vocab_size
            bad = next((token_id for token_id in body.tokens if not 0 <= token_id < size), None)
            if bad is not None:
                raise bad_request(
                    f"token id {quote(bad)} is outside the vocabulary of {size}", "tokens"
                )
            text = self.encoder.decode(body.tokens, skip_special_tokens=False)
            return json_response({"prompt": text})

        return await self._prepared(request, answer)

    async def tokenizer_info(self) -> Response:
        return json_response(self.encoder.describe())

    async def embeds_nothing(self) -> Response:
        """The answer of the routes of models that embed or score."""
        raise bad_request(
            f"{self.model_names[0]} generates text, and neither embeds nor scores: POST "
            f"/v1/chat/completions or /v1/completions",
            "model",
            "wrong_task",
        )

    async def health(self) -> Response:
        if (trouble := self.engine.trouble) is not None:
            raise ApiError(503, trouble, kind=SERVER_ERROR, code="unhealthy")
        health = self.engine.replicas.health
        if len(health) == 1:
            return json_response({"status": "ok"})
        problems = [each.problem for each in health]
        return json_response(
            {
                "status": "degraded" if any(problems) else "ok",
                "replicas": len(health),
                "healthy_replicas": problems.count(None),
                "problems": problems,
            }
        )

    async def prometheus(self) -> Response:
        content, content_type = self.metrics.expose(
            *self.engine.replicas.stats, health=self.engine.replicas.health
        )
        return Response(content, media_type=content_type)

    def _model_info(self, name: str) -> dict[str, Any]:
        return model_info(name, self.created, self.engine.limits.max_model_len)

    def _model_card(self, name: str) -> dict[str, Any]:
        card = self._card(name, self.engine.limits.max_model_len)
        return {
            **card,
            "input_modalities": self.encoder.input_modalities,
            "speculation": self._speculation(),
        }

    def _speculation(self) -> dict[str, Any] | None:
        """How drafts are proposed; None without speculation."""
        options = self.engine.config.speculative
        if options is None:
            return None
        return {
            "method": options.method,
            "num_speculative_tokens": options.num_speculative_tokens,
            "lookup": options.lookup,
        }


def _is_flat(input_ids: list[int] | list[list[int]] | None) -> bool:
    """Whether they are one prompt's."""
    return input_ids is not None and isinstance(input_ids[0], int)
