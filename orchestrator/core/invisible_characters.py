"""Invisible and harmful characters, shown as escapes: those that a terminal would obey, or that make text look
different from what it is.

Names, paths and log lines may come from another machine, or from a person who poses as someone else.
"""

from __future__ import annotations

import re

_HIDDEN = (
    r"\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\u3164\ufeff\uffa0"
    r"\ufff0-\ufffb\ud800-\udfff\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Characters that show nothing, or change the order of others (Unicode's Cf and its like, UAX #9). The joiners U+200C and
U+200D and the variation selectors are not among them: scripts and emoji are written with them."""

_INVISIBLE = re.compile(f"[{_HIDDEN}]")
_HARMFUL = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_HIDDEN}]")


def escape_harmful(text: str) -> str:
    """Return text with an escape in place of each character that a terminal would obey or not show."""
    return _HARMFUL.sub(_escape, text)


def escape_invisible(text: str) -> str:
    """Return text with an escape in place of each character that shows nothing, or changes the order of others."""
    return _INVISIBLE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return ascii(match.group())[1:-1]
