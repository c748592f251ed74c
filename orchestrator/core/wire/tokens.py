"""Token of a job: random bits in hex, by which its processes prove that they belong to it. An empty token would admit all."""

from __future__ import annotations

import re

TOKEN_BYTES = 32

_FORM = re.compile(f"[0-9a-f]{{{2 * TOKEN_BYTES}}}")


def is_token(text: str) -> bool:
    """Return whether a text has a token's form: one that is empty or torn proves nothing."""
    return _FORM.fullmatch(text) is not None
