"""How is a secret kept out of what is shown? Its value, and the forms it travels in, become `***`.

A value shorter than `SECRET_CHARS_MIN` is left alone: hiding every `0` would hide the text.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from urllib.parse import quote, quote_plus

SECRET_CHARS_MIN = 4
HIDDEN = "***"


class Mask:
    """Replaces secrets in text: whole, line by line, and escaped, base64- or URL-encoded."""

    __slots__ = ("_pattern",)

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values for form in _forms(value) if len(form.strip()) >= SECRET_CHARS_MIN}
        # The longest first, or the end of a secret that begins with another secret would stay.
        ordered = sorted(forms, key=lambda form: (-len(form), form))
        self._pattern = re.compile("|".join(map(re.escape, ordered))) if ordered else None

    def apply(self, text: str) -> str:
        """Return `text` with every secret replaced by `***`."""
        return text if self._pattern is None else self._pattern.sub(HIDDEN, text)


def _forms(value: str) -> Iterator[str]:
    """Yield what the secret can look like in a log."""
    if len(value.strip()) < SECRET_CHARS_MIN:
        return
    for part in {value, value.strip(), *(line.strip() for line in value.splitlines())}:
        if len(part) >= SECRET_CHARS_MIN:
            yield from _written(part)


def _written(value: str) -> Iterator[str]:
    raw = value.encode("utf-8", "surrogateescape")
    yield value
    yield raw.decode("utf-8", "replace")
    yield repr(value)[1:-1]
    yield json.dumps(value)[1:-1]
    yield json.dumps(value, ensure_ascii=False)[1:-1]
    yield quote(raw, safe="")
    yield quote(raw)
    yield quote_plus(raw)
    yield from _base64_forms(raw)


def _base64_forms(raw: bytes) -> Iterator[str]:
    """Yield the secret in base64, alone and at each of the three places it can take inside a longer text.

    Inside one (`Basic` credentials: user, colon, secret) only the characters that depend on nothing but the secret
    are known: RFC 4648 puts 6 bits into each.
    """
    yield base64.b64encode(raw).decode()
    yield base64.urlsafe_b64encode(raw).decode()
    for before_bytes in range(3):
        first = -(-8 * before_bytes // 6)
        last = 8 * (before_bytes + len(raw)) // 6
        yield base64.b64encode(bytes(before_bytes) + raw).decode()[first:last]
        yield base64.urlsafe_b64encode(bytes(before_bytes) + raw).decode()[first:last]
