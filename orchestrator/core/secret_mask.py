"""Mask that keeps secrets out of logs and all other output: their values, and their encoded forms, become `***`.

A value shorter than `SECRET_CHARS_MIN` stays: hiding every `0` would hide the text. A text is masked before it is cut.
Where the cutting side knows no secrets (a node), a part of a secret may remain at an end of a long text: then as much as the
longest secret has is hidden there.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any, AnyStr
from urllib.parse import quote, quote_plus, urlsplit

SECRET_CHARS_MIN = 4
CUT_CHARS_MIN = 200
"""From this length on a text may be a piece of a longer one. No limit of what nodes report is lower."""

_LONG_LINE = re.compile(rf"\n(.{{{CUT_CHARS_MIN},}})")

TOKEN_CHARS_MIN = 8
"""From this length on the part of an address after its host is hidden also where it occurs alone."""

CUT_MARK = "\n... its middle is left out ...\n"
"""Mark of the hook in a traceback that it has shortened."""

HIDDEN = "***"


class Mask:
    """Replaces secrets in text: whole, line by line, and escaped, base64- or URL-encoded."""

    __slots__ = ("_forms", "_least", "_parts", "_pattern", "_raw")

    def __init__(self, values: Iterable[str]) -> None:
        forms = {form for value in values for form in _forms(value) if len(form.strip()) >= SECRET_CHARS_MIN}
        # The longest first, or the end of a secret that begins with another secret would stay.
        self._forms = sorted(forms, key=lambda form: (-len(form), form))
        self._raw = [form.encode("utf-8", "surrogateescape") for form in self._forms]
        self._pattern = re.compile("|".join(map(re.escape, self._forms)))
        # A search for each of a few strings is several times faster than one for a pattern of alternatives.
        self._least = [form for form in self._forms if not any(o in form for o in self._forms if o != form)]
        self._parts = {
            form[at : at + SECRET_CHARS_MIN] for form in self._forms for at in range(len(form) - SECRET_CHARS_MIN + 1)
        }

    def apply(self, text: str) -> str:
        """Return `text` with every secret replaced by `***`, and the ends of a long text that may have parts of secrets."""
        if len(text) < CUT_CHARS_MIN:
            return self._pattern.sub(HIDDEN, text) if self._has_secret(text) else text
        return CUT_MARK.join(map(self._mask_fragment, text.split(CUT_MARK)))

    def may_change(self, text: str) -> bool:
        """Return whether `apply` may change any of the lines of `text`; much faster than `apply`."""
        if not self._forms:
            return False
        long_lines = (found[1] for found in _LONG_LINE.finditer(f"\n{text}"))
        return self._has_secret(text) or any(map(self._has_part, long_lines))

    def mask_json(self, data: Any) -> Any:
        """Return JSON data with the secrets replaced in all its texts."""
        match data:
            case str():
                return self.apply(data)
            case list():
                return [self.mask_json(item) for item in data]
            case dict():
                return {key: self.mask_json(item) for key, item in data.items()}
            case _:
                return data

    @property
    def bytes_max(self) -> int:
        """Length of the longest form of a secret."""
        return max(map(len, self._raw), default=0)

    def find_safe_cut(self, raw: bytes, at: int, least: int = 1) -> int:
        """Return the last place up to `at` where `raw` can be cut so that no secret is in both parts, nor begins with
        `least` bytes right before a cut at its end."""
        before, place = -1, at
        while place not in (0, before):
            before, place = (
                place,
                min((_find_straddling_form(raw, place, form, least) for form in self._raw), default=place),
            )
        return place

    def _has_secret(self, text: str) -> bool:
        return any(form in text for form in self._least)

    def _has_part(self, text: str) -> bool:
        return text[:SECRET_CHARS_MIN] in self._parts or text[-SECRET_CHARS_MIN:] in self._parts

    def _mask_fragment(self, text: str) -> str:
        """Replace whole secrets, and at an end that may be a part of one as much as the longest secret has."""
        if not self._has_part(text) and not self._has_secret(text):
            return text
        longest = len(self._forms[0])
        is_begun, is_cut = text[:SECRET_CHARS_MIN] in self._parts, text[-SECRET_CHARS_MIN:] in self._parts
        shown = self._pattern.sub(HIDDEN, text)
        shown = HIDDEN + shown[longest:] if is_begun else shown
        return shown[:-longest] + HIDDEN if is_cut else shown


def make_mask(values: Iterable[str], webhook: str) -> Mask:
    """Return the mask of a job's secrets and of its webhook's address, which may hold a token: the address, and the part
    after its host where that is too long for a common word. `webhook`: empty without one."""
    where = webhook.partition("://")[2]
    behind = where[len(urlsplit(webhook).netloc) :].lstrip("/")
    return Mask([*values, where if behind else "", behind if len(behind) >= TOKEN_CHARS_MIN else ""])


def redact_url(url: str) -> str:
    """Return a webhook's address without what may be a token: `https://hooks.example.com/***`."""
    parts = urlsplit(url)
    behind = url.partition("://")[2][len(parts.netloc) :]
    return f"{parts.scheme}://{parts.netloc}/{HIDDEN}" if behind.strip("/") else url


def _find_straddling_form(text: AnyStr, at: int, form: AnyStr, least: int) -> int:
    """Return where in `text` a form that continues past `at` begins, with at least `least` of it before `at`; `at`
    without one. A form that goes over the end of `text` counts."""
    begin = text.find(form[:1], max(0, at - len(form) + 1), at)
    while 0 <= begin <= at - least:
        if form.startswith(text[begin : begin + len(form)]):
            return begin
        begin = text.find(form[:1], begin + 1, at)
    return at


def _forms(value: str) -> Iterator[str]:
    """Yield the forms that a secret can take in a log."""
    if len(value.strip()) < SECRET_CHARS_MIN:
        return
    for part in {value, value.strip(), *(line.strip() for line in value.splitlines())}:
        if len(part) >= SECRET_CHARS_MIN:
            yield from _encodings(part)


def _encodings(value: str) -> Iterator[str]:
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
