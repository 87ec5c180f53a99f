"""Makes any text safe to show in a page: as text, never as markup.  Pure."""

import re
from html import escape

from ripstop.model.text_formatting import format_clean_text, truncate

_DIRECTIONS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")  # they could reorder what is shown


def safe(text: str, max_chars: int = 4000) -> str:
    """Escaped for element content and quoted attributes, without colours and control characters."""
    shown = _DIRECTIONS.sub(lambda found: f"\\u{ord(found[0]):04x}", format_clean_text(truncate(text, max_chars)))
    return escape(shown, quote=True)
