"""The playground: static files, built from `playground/` and shipped with the package."""

from __future__ import annotations

import hashlib
from pathlib import Path

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parents[1] / "playground"
PREFIX = "/playground/"

CONTENT_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}

# The page loads and calls nothing but this server, and no other page may show it in a frame.
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


def add_playground(app: FastAPI) -> None:
    """Serve the page as `/`, and its files below `/playground/`."""
    files = {path.name: _file_headers(path) for path in sorted(FOLDER.iterdir())}

    async def serve(request: Request, name: str = "index.html") -> Response:
        if name not in files:
            raise HTTPException(404)
        content, headers = files[name]
        if request.headers.get("if-none-match") == headers["ETag"]:
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers)

    async def page(request: Request) -> Response:
        return await serve(request)

    app.add_api_route("/", page, include_in_schema=False)
    app.add_api_route(f"{PREFIX}{{name}}", serve, include_in_schema=False)


def _file_headers(path: Path) -> tuple[bytes, dict[str, str]]:
    content = path.read_bytes()
    return content, {
        **SECURITY_HEADERS,
        "Content-Type": CONTENT_TYPES[path.suffix],
        # Asked for again each time, and sent only when it changed.
        "Cache-Control": "no-cache",
        "ETag": f'"{hashlib.sha256(content).hexdigest()[:32]}"',
    }
