"""A real engine of a scripted checkpoint behind servers, and answers as clients join them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import openai
import uvicorn

from atom.entrypoints.http.metrics import ServerMetrics
from atom.entrypoints.server.app import create_app
from atom.entrypoints.server_options import ServerOptions
from atom.model_engine.arg_utils import engine_config
from atom.model_engine.async_engine import AsyncEngine


@asynccontextmanager
async def serving(
    checkpoints: tuple[Path, Path], k: int, parsers: Sequence[str]
) -> AsyncIterator[tuple[AsyncEngine, dict[str, openai.AsyncOpenAI]]]:
    """One engine behind a server for each format."""
    target, draft = checkpoints
    config = engine_config(
        model=str(target),
        method="eagle3",
        draft_model=str(draft),
        num_speculative_tokens=k,
        dtype="float32",
        kv_cache_memory="128MB",
        num_threads=1,
    )
    engine = await AsyncEngine.start(config)
    servers, tasks, clients = [], [], {}
    try:
        for name in parsers:
            options = ServerOptions(
                served_model_names=("scripted",),
                tool_call_parser=name,
                reasoning_parser="think_tags",
                enable_auto_tool_choice=True,
                sanitize_control_tokens=False,  # messages name scripts by special tokens
            )
            app = create_app(engine, options, ServerMetrics())
            sock = socket.create_server(("127.0.0.1", 0))
            port = sock.getsockname()[1]
            server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off"))
            servers.append(server)
            tasks.append(asyncio.create_task(server.serve(sockets=[sock])))
            clients[name] = openai.AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=300
            )
        yield engine, clients
    finally:
        for client in clients.values():
            await client.close()
        for server in servers:
            server.should_exit = True
        await asyncio.gather(*tasks)
        await engine.shutdown(0)


Ask = Callable[..., Awaitable[dict[str, Any]]]


async def whole_answer(client: openai.AsyncOpenAI, **request: Any) -> dict[str, Any]:
    choice = (await client.chat.completions.create(**request)).choices[0]
    calls = [call.model_dump() for call in choice.message.tool_calls or ()]
    return {
        "content": choice.message.content or "",
        "reasoning": (choice.message.model_extra or {}).get("reasoning_content") or "",
        "calls": [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in calls],
        "reason": choice.finish_reason,
    }


async def streamed(client: openai.AsyncOpenAI, **request: Any) -> dict[str, Any]:
    """The answer put together as OpenAI's documentation does it."""
    said: dict[str, Any] = {"content": "", "reasoning": "", "calls": [], "reason": None}
    async for chunk in await client.chat.completions.create(**request, stream=True):
        (choice,) = chunk.choices
        delta = choice.delta
        said["content"] += delta.content or ""
        said["reasoning"] += (delta.model_extra or {}).get("reasoning_content") or ""
        assert delta.tool_calls is None or delta.tool_calls
        for piece in delta.tool_calls or ():
            assert piece.function is not None
            if piece.id:
                assert piece.index == len(said["calls"])
                said["calls"].append((piece.id, piece.function.name, ""))
            call_id, name, arguments = said["calls"][piece.index]
            arguments += piece.function.arguments or ""
            said["calls"][piece.index] = (call_id, name, arguments)
        said["reason"] = choice.finish_reason or said["reason"]
    return said
