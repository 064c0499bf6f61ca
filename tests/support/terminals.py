"""Names and texts that steer a terminal, and a terminal that keeps what is written to it."""

import io
import unicodedata

BIDI = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"  # Unicode's Bidi_Control
HOSTILE = f"\x1b[2J\x1b]0;title\x07 \x9b31m\r{BIDI}\u2028\udc80"  # ends a title, a name, a message


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def steering(text: str) -> list[str]:
    """What of a text could steer a terminal; a line feed and a tab do not."""
    return [
        char for char in text if char not in "\n\t" and (unicodedata.category(char) in ("Cc", "Cs") or char in BIDI)
    ]
