"""The routes of models that embed or score, as clients use them."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pooling_checkpoints as checkpoints
import pytest
from transformers import BertConfig, BertForSequenceClassification, BertModel

from atom.entrypoints.http.metrics import ServerMetrics
from atom.entrypoints.server.pooling_api import POOLING_BODIES
from atom.entrypoints.server.pooling_app import create_pooling_app
from atom.entrypoints.server.serve import _banner, _create_app, _start
from atom.entrypoints.server_options import OptionError, ServerOptions
from atom.model_engine.arg_utils import engine_config
from atom.pooling.async_engine import AsyncPoolingEngine
from atom.pooling.engine import PoolingEngine
from atom.pooling.source import pooling_source

SIZES = {"vocab_size": 19, "max_position_embeddings": 102, "pad_token_id": 0}
OPTIONS = ServerOptions(served_model_names=("tiny",))
FOX, DOG = "the quick brown fox", "a lazy dog"


def write_embedder(folder: Path) -> None:
    config = BertConfig(**checkpoints.SIZES, **SIZES, is_matryoshka=True)
    tokenizer = checkpoints.word_tokenizer(with_types=True)
    checkpoints.write_model(folder, BertModel, config, tokenizer)
    checkpoints.write_modules(folder, checkpoints.MEAN)
    settings = {"prompts": {"query": "over "}, "default_prompt_name": None}
    checkpoints.write_json(folder / "config_sentence_transformers.json", settings)


def write_scorer(folder: Path) -> None:
    config = BertConfig(**checkpoints.SIZES, **SIZES, num_labels=1)
    tokenizer = checkpoints.word_tokenizer(with_types=True)
    checkpoints.write_model(folder, BertForSequenceClassification, config, tokenizer)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingEngine]:
    yield from running(write_embedder, tmp_path_factory.mktemp("embedder"))


@pytest.fixture(scope="module")
def scorer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PoolingEngine]:
    yield from running(write_scorer, tmp_path_factory.mktemp("scorer"))


def running(write: Callable[[Path], None], folder: Path) -> Iterator[PoolingEngine]:
    write(folder)
    engine = checkpoints.create_engine(folder)
    yield engine
    engine.shutdown()


def serving(engine: PoolingEngine) -> httpx.AsyncClient:
    app = create_pooling_app(AsyncPoolingEngine(engine), OPTIONS)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.fixture
async def client(embedder: PoolingEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(embedder) as client:
        yield client


@pytest.fixture
async def ranking(scorer: PoolingEngine) -> AsyncIterator[httpx.AsyncClient]:
    async with serving(scorer) as client:
        yield client


async def test_a_server_starts_what_the_files_say(tmp_path: Path) -> None:
    write_scorer(tmp_path)
    config = engine_config(model=str(tmp_path), device="cpu", num_threads=1)
    engine = await _start(config, OPTIONS, None, ServerMetrics())
    assert isinstance(engine, AsyncPoolingEngine)
    assert "scores pairs of texts; 100 tokens" in _banner("http://test", OPTIONS, engine)
    transport = httpx.ASGITransport(_create_app(engine, OPTIONS, ServerMetrics()))
    async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
        await post(client, "/rerank", query=FOX, documents=[DOG])
    await engine.shutdown(0)
    source = pooling_source(config)
    with pytest.raises(OptionError, match="--chat-template is for models that generate"):
        await _start(config, ServerOptions(chat_template="{{ messages }}"), source, ServerMetrics())


async def post(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def vectors(client: httpx.AsyncClient, value: Any, **body: Any) -> np.ndarray:
    answer = await post(client, "/v1/embeddings", input=value, **body)
    assert [each["index"] for each in answer["data"]] == list(range(len(answer["data"])))
    return np.array([each["embedding"] for each in answer["data"]])


async def test_the_openai_client(client: httpx.AsyncClient) -> None:
    """It asks for base64 and returns numbers."""
    api = openai.AsyncOpenAI(
        base_url="http://test/v1", api_key="none", http_client=client, max_retries=0
    )
    answer = await api.embeddings.create(model="tiny", input=[FOX, DOG], user="me")
    plain = await api.embeddings.create(model="tiny", input=[FOX, DOG], encoding_format="float")
    assert [each.embedding for each in answer.data] == [each.embedding for each in plain.data]
    assert (answer.model, answer.object, answer.data[1].object) == ("tiny", "list", "embedding")
    assert len(answer.data[0].embedding) == 48
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 6 + 5
    short = await api.embeddings.create(model="tiny", input=FOX, dimensions=6)
    assert np.linalg.norm(short.data[0].embedding) == pytest.approx(1)
    with pytest.raises(openai.NotFoundError):
        await api.embeddings.create(model="other", input=FOX)
    with pytest.raises(openai.BadRequestError, match="embeds texts, and generates none"):
        await api.chat.completions.create(model="tiny", messages=[])
    assert [model.id async for model in api.models.list()] == ["tiny"]


async def test_shapes_of_inputs(client: httpx.AsyncClient) -> None:
    """Text, texts, tokens, lists of tokens, and a prompt by its name."""
    tokens = [1, 4, 5, 6, 7, 2]
    both = await vectors(client, [FOX, DOG])
    assert np.abs(both[0] - both[1]).max() > 1e-2
    for value in (FOX, tokens, [tokens], [FOX]):
        (vector,) = await vectors(client, value)
        assert np.abs(vector - both[0]).max() < 1e-6
    asked = await vectors(client, FOX, prompt_name="query")
    assert np.abs(asked - await vectors(client, f"over {FOX}")).max() < 1e-6
    answer = await post(client, "/v1/embeddings", input=FOX, encoding_format="base64")
    decoded = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert np.abs(decoded - both[0]).max() < 1e-6


@pytest.mark.parametrize("name", ["use_activation", "normalize"])
async def test_a_request_says_whether_vectors_have_length_1(
    client: httpx.AsyncClient, name: str
) -> None:
    usual = await vectors(client, [FOX, DOG])
    assert np.allclose(await vectors(client, [FOX, DOG], **{name: True}), usual, atol=0)
    plain = await vectors(client, [FOX, DOG], **{name: False})
    lengths = np.linalg.norm(plain, axis=1, keepdims=True)
    assert np.abs(lengths - 1).min() > 0.1
    np.testing.assert_allclose(plain / lengths, usual, atol=1e-6)
    short = await vectors(client, FOX, dimensions=6, **{name: False})
    np.testing.assert_allclose(short[0], plain[0, :6], atol=1e-6)


async def test_as_many_inputs_as_openai_takes(client: httpx.AsyncClient) -> None:
    many = await vectors(client, [FOX, DOG] * 1024)
    pair = await vectors(client, [FOX, DOG])
    assert many.shape == (2048, 48)
    assert np.abs(many - pair[np.arange(2048) % 2]).max() < 1e-6


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": ""}, "input is empty"),
        ({"input": [FOX, ""]}, "input[1] is empty"),
        ({"input": []}, "input must be a string"),
        ({"input": [FOX, 3]}, "input must be a string"),
        ({"input": [[1, 4], []]}, "input[1] holds no tokens"),
        ({"input": [1, 19]}, "token id 19 is outside the vocabulary of 19"),
        ({"input": [-1]}, "token id -1 is outside the vocabulary of 19"),
        ({"input": [FOX] * 2049}, "input has 2049 items; at most 2048 are taken"),
        ({"input": "fox " * 99}, "maximum context length is 100 tokens, and input has 101"),
        ({"input": [4] * 101}, "maximum context length is 100 tokens"),
        ({"input": FOX, "truncate_prompt_tokens": 101}, "truncate_prompt_tokens must be -1 or"),
        ({"input": FOX, "truncate_prompt_tokens": 1}, "leaves no room for a text"),
        ({"input": FOX, "dimensions": 10**30}, "may have 1 to 48"),
        ({"input": FOX, "dimensions": 0}, "may have 1 to 48"),
        ({"input": FOX, "dimensions": 49}, "may have 1 to 48"),
        ({"input": FOX, "encoding_format": "bytes"}, "encoding_format"),
        ({"input": FOX, "prompt_name": "q"}, "is none of the model's, which are: query"),
        (
            {"input": FOX, "normalize": False, "use_activation": True},
            "normalize contradicts use_activation",
        ),
        ({"input": FOX, "use_activation": "no"}, "use_activation"),
        ({}, "input is missing"),
    ],
)
async def test_wrong_inputs(client: httpx.AsyncClient, body: Any, message: str) -> None:
    response = await client.post("/v1/embeddings", json=body)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


async def test_cut_inputs(client: httpx.AsyncClient) -> None:
    """Texts keep their frame, tokens are cut as they are."""
    cut = await vectors(client, "fox " * 99, truncate_prompt_tokens=5)
    assert np.abs(cut - await vectors(client, "fox fox fox")).max() < 1e-6
    cut = await vectors(client, [4, 5, 6, 7], truncate_prompt_tokens=2)
    assert np.abs(cut - await vectors(client, [4, 5])).max() < 1e-6


async def test_scores_and_ranking_by_vectors(client: httpx.AsyncClient) -> None:
    fox, dog = await vectors(client, [FOX, DOG])
    answer = await post(client, "/v1/score", text_1=FOX, text_2=[DOG, FOX])
    found = [each["score"] for each in answer["data"]]
    assert found == [pytest.approx(fox @ dog, abs=1e-5), pytest.approx(1)]
    assert answer["usage"] == {"prompt_tokens": 6 + 5 + 6, "total_tokens": 6 + 5 + 6}
    answer = await post(client, "/rerank", query=FOX, documents=[DOG, {"text": FOX}], top_n=1)
    assert answer["results"] == [
        {"index": 1, "relevance_score": pytest.approx(1), "document": {"text": FOX}}
    ]


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_ranking(ranking: httpx.AsyncClient, path: str) -> None:
    """In vLLM's and Jina's shape, and without documents in Cohere's."""
    documents = [FOX, DOG, "seven wizards brew beer"]
    answer = await post(ranking, path, model="tiny", query="a fox", documents=documents)
    scores = (await post(ranking, "/score", text_1="a fox", text_2=documents))["data"]
    order = sorted(range(3), key=lambda index: -scores[index]["score"])
    assert [each["index"] for each in answer["results"]] == order
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]]["score"], abs=1e-6)
        echo = None if path == "/v2/rerank" else {"text": documents[each["index"]]}
        assert each.get("document") == echo
    asked = await post(
        ranking, path, query="a fox", documents=documents, return_documents=path == "/v2/rerank"
    )
    assert ("document" in asked["results"][0]) == (path == "/v2/rerank")
    assert answer["usage"]["total_tokens"] == sum(len(d.split()) + 5 for d in documents)
    whole = await post(ranking, path, query="a fox", documents=documents, max_tokens_per_doc=10**30)
    assert whole["results"] == answer["results"]
    cut = await post(ranking, path, query="a fox", documents=documents, max_tokens_per_doc=2)
    first = await post(
        ranking, path, query="a fox", documents=[" ".join(d.split()[:2]) for d in documents]
    )
    assert [r["relevance_score"] for r in cut["results"]] == pytest.approx(
        [r["relevance_score"] for r in first["results"]], abs=1e-6
    )


async def test_scores_of_pairs(ranking: httpx.AsyncClient) -> None:
    """One for all or each its own, under each pair of names, with and without the sigmoid."""
    answer = await post(ranking, "/v1/score", queries=[FOX, DOG], documents=[DOG, FOX])
    logits = await post(
        ranking, "/v1/score", data_1=[FOX, DOG], data_2=[DOG, FOX], use_activation=False
    )
    for probability, logit in zip(answer["data"], logits["data"], strict=True):
        assert probability["score"] == pytest.approx(1 / (1 + np.exp(-logit["score"])), abs=1e-6)
    assert answer["data"][0]["score"] != answer["data"][1]["score"]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/score", {"text_1": FOX}, "send either text_1 and text_2 or"),
        ("/v1/score", {"text_1": [FOX] * 2, "text_2": [DOG] * 3}, "text_1 has 2 texts"),
        ("/v1/score", {"text_1": FOX, "text_2": ["a", ""]}, "text_2[1] is empty"),
        ("/v1/score", {"text_1": FOX, "text_2": []}, "text_2 is empty"),
        ("/v1/rerank", {"query": FOX, "documents": []}, "documents is empty"),
        ("/v1/rerank", {"query": "", "documents": [DOG]}, "query is empty"),
        ("/v1/rerank", {"query": FOX, "documents": [DOG], "top_n": -1}, "top_n must be"),
        (
            "/v1/rerank",
            {"query": FOX, "documents": [DOG], "truncate_prompt_tokens": 2},
            "leaves no room for a text",
        ),
        ("/v1/rerank", {"query": FOX, "documents": [3]}, "documents[0]"),
        ("/v1/rerank", {"query": FOX, "documents": ["fox " * 99]}, "maximum context length"),
        ("/v1/rerank", {"query": FOX, "documents": [DOG], "instruction": "x"}, "no instruction"),
        ("/v1/embeddings", {"input": FOX}, "scores pairs of texts, and embeds none"),
        ("/v1/completions", {"prompt": FOX}, "scores pairs of texts, and generates none"),
    ],
)
async def test_what_a_scorer_refuses(
    ranking: httpx.AsyncClient, path: str, body: Any, message: str
) -> None:
    response = await ranking.post(path, json=body)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]


async def counted(client: httpx.AsyncClient) -> float:
    found = re.search(r"^atom:prompt_tokens_total (.*)$", (await client.get("/metrics")).text, re.M)
    assert found is not None
    return float(found[1])


async def test_what_there_is_besides(client: httpx.AsyncClient) -> None:
    card = (await client.get("/v1/models/tiny")).json()
    assert (card["task"], card["dimension"], card["max_model_len"]) == ("embed", 48, 100)
    assert (await client.get("/health")).json() == {"status": "ok"}
    tokens = await post(client, "/tokenize", prompt=FOX, return_token_strs=True)
    assert tokens["tokens"] == [1, 4, 5, 6, 7, 2]
    assert tokens["token_strs"] == ["[CLS]", *FOX.split(), "[SEP]"]
    bare = await post(client, "/tokenize", prompt=FOX, add_special_tokens=False)
    assert (bare["count"], bare["max_model_len"], bare["token_strs"]) == (4, 100, None)
    assert (await post(client, "/detokenize", tokens=bare["tokens"]))["prompt"] == FOX
    outside = await client.post("/detokenize", json={"tokens": [19]})
    assert "outside the vocabulary of 19" in outside.json()["error"]["message"]
    before, _, after = [await counted(client), await vectors(client, FOX), await counted(client)]
    assert after == before + 6
    document = json.loads((await client.get("/openapi.json")).content)
    assert POOLING_BODIES.keys() <= document["paths"].keys()
    assert "/v1/completions" not in document["paths"]
    refused = await client.post("/v1/messages", json={})
    assert refused.json()["error"]["type"] == "invalid_request_error"
    warned = await client.post("/v1/embeddings", json={"input": FOX, "mood": "odd"})
    assert warned.headers["x-atom-ignored-fields"] == "mood"
