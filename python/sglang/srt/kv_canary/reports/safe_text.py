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


def printable_text(text: str) -> str:
    """`text` on one line with all non-printable characters escaped. For text that was made safe before, if honestly."""
    return text if text.isprintable() else "".join(map(_printable, text))


def _escaped(character: str) -> str:
    return "\\" + character if character in '"\\' else _printable(character)


def _printable(character: str) -> str:
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
