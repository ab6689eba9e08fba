"""Makes untrusted text fit for logs: a request id is whatever a client sent."""

from __future__ import annotations

MAX_SHOWN = 128  # characters of one text in a log, an error or a terminal
_CUT = "..."


def safe_text(text: object, limit: int = MAX_SHOWN) -> str:
    """`text` on one line, as at most `limit` printable characters, safe between double quotes.

    Quotes, backslashes and all non-printable characters are escaped. Non-printable are control and escape sequences,
    line separators, bidirectional controls and lone surrogates. Truncated text ends in "...".
    """
    shown: list[str] = []
    room = limit
    for character in str(text)[: limit + 1]:
        escaped = _escaped(character)
        room -= len(escaped)
        if room < 0:
            return "".join(_fitting(shown, limit - len(_CUT))) + _CUT
        shown.append(escaped)
    return "".join(shown)


def _escaped(character: str) -> str:
    if character in '"\\':
        return "\\" + character
    # Non-printable: every control and format character, including ESC, newlines and bidirectional controls.
    return (
        character if character.isprintable() else character.encode("unicode_escape").decode("ascii")
    )


def _fitting(pieces: list[str], room: int) -> list[str]:
    """The first of `pieces` that fit whole into `room` characters."""
    kept = []
    for piece in pieces:
        room -= len(piece)
        if room < 0:
            break
        kept.append(piece)
    return kept
