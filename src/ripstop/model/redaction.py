"""Removes secrets from texts that operators may publish: values after names such as `token`, users of URLs.  Pure.

Rules: (1) in doubt, too much is removed; (2) the time is linear in the length of the text: a match starts at a fixed
word, or once per option, and a value always matches.
"""

import re

HIDDEN = "***"
# compiled at first use
_KEY = r"(?:api|access|private|secret)[-_]?key"
_WORDS = rf"(?:token|secret|passw(?:or)?d|pwd|passphrase|credentials?|auth(?:orization)?|{_KEY})"
_SCHEME = r"(?:bearer|basic|digest|negotiate|apikey|token)\s+"
_VALUE = r"""(?:b?"(?:[^"\\\n]|\\.)*"?|b?'(?:[^'\\\n]|\\.)*'?|\S+)"""  # a quote may have no end: texts are truncated
_NAME = rf"(?i){_WORDS}$"
_ASSIGNMENT = rf"""(?i)({_WORDS}\\*["']?\s*[=:]+>?\s*)(?:{_SCHEME})?{_VALUE}"""
_OPTION = rf"(?i)(?<![\w.-])(--?[\w.-]*{_WORDS}\s+)(?!--[a-z]){_VALUE}"
_BEARER = rf"(?i)\b(bearer\s+)(?!token\b){_VALUE}"
_URL_USER = r"(?<=://)[^/?#\s]+@"


def is_secret_name(name: str) -> bool:
    """Whether the name of an option or a key says that its value is secret: `--hf-token`, not `--tokenizer`."""
    return re.search(_NAME, name) is not None


def without_url_users(text: str) -> str:
    return re.sub(_URL_USER, f"{HIDDEN}@", text) if "://" in text else text


def without_secrets(text: str) -> str:
    """Without the values of secret names (`name=value`, `"name": "value"`, `--name value`) and the users of URLs."""
    text = without_url_users(text)
    for pattern in (_ASSIGNMENT, _OPTION, _BEARER):
        text = re.sub(pattern, rf"\1{HIDDEN}", text)
    return text
