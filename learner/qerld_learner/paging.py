"""Pages of lists: what a request asks for."""

from __future__ import annotations

from .errors import InvalidRequestError, Violation


def page(page_size: int, page_token: str) -> tuple[int | None, int]:
    """Return below which number a page begins (None: at the newest) and how many entries it has.

    Raises `InvalidRequestError` for a size beyond 1000, or a token that no answer had.
    """
    if page_size < 0 or page_size > 1000:
        text = f"must be in [0, 1000], got {page_size}; ask for more pages"
        raise InvalidRequestError([Violation("page_size", text)])
    if page_token and not (page_token.isdecimal() and len(page_token) < 19):
        text = f"must be a next_page_token of an earlier answer, got {page_token[:40]!r}; leave it empty to begin"
        raise InvalidRequestError([Violation("page_token", text)])
    return int(page_token) if page_token else None, page_size or 100
