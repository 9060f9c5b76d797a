"""The playground as tests open it: its server's answers, and what a person does first."""

from __future__ import annotations

from typing import Any

KEY = "secret"
TEXT = "The sky is blue because air scatters short waves the most. Naïve? 日本語 😀 no."
# Of each forward: drafts, accepted ones, source.
STEPS = [
    *[(3, 3, "eagle3"), (3, 1, "eagle3"), (2, 0, "lookup")],
    *[(2, 2, "lookup"), (2, 1, "suffix"), (0, 0, "eagle3")],
]


def send(page: Any, text: str = "Why is the sky blue?") -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def finished(page: Any) -> Any:
    """The last answer, once it has ended."""
    page.locator(".assistant").last.locator("footer .actions").wait_for()
    return page.locator(".assistant").last
