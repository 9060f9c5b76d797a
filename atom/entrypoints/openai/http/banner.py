"""What the log says when the server starts to take requests."""

from __future__ import annotations

from atom.config import SpeculativeOptions
from atom.entrypoints.openai.http.options import ServerOptions
from atom.version import __version__


def banner(url: str, options: ServerOptions, speculative: SpeculativeOptions | None) -> list[str]:
    """Lines: which version speculates how, and where a browser and clients go.

    Args:
        url: where the server listens.
    """
    lines = [f"atom {__version__}, {_describe(speculative)}"]
    if not options.uds:
        root = f"{url}{options.root_path}"
        places = [f"playground {root}/"] if options.ui else []
        places += [f"OpenAI API {root}/v1", f"metrics {root}/metrics"]
        keys = "; an API key is needed" if options.api_keys else ""
        lines.append(", ".join(places) + keys)
    return lines


def _describe(speculative: SpeculativeOptions | None) -> str:
    if speculative is None:
        return "without speculation"
    method = speculative.method + (" and lookup" if speculative.lookup else "")
    return f"speculation: {method}, up to {speculative.num_speculative_tokens} drafts per forward"
