"""A server that a proxy shows under a path."""

from __future__ import annotations

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send


class RootPathMiddleware:
    """Routes `/llm/v1/models` as `/v1/models`; proxies that cut `/llm` off themselves work, too."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["path"] == self._root_path:
                # The page's addresses are relative to the folder.
                await RedirectResponse(f"{self._root_path}/")(scope, receive, send)
                return
            if scope["path"].startswith(f"{self._root_path}/"):
                scope = {**scope, "path": scope["path"].removeprefix(self._root_path)}
        await self._app(scope, receive, send)
