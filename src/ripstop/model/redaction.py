"""Removes secrets from texts that operators may publish: values after names such as `token`, users of URLs.  Pure."""

import re

HIDDEN = "***"
# compiled at first use
_KEY = r"(?:api|access|private|secret)[-_]?key"
_WORDS = rf"(?:token|secret|passw(?:or)?d|pwd|passphrase|credentials?|auth(?:orization)?|{_KEY})"
_NAME = rf"(?i)(?:^|[^a-z]){_WORDS}$"
_ASSIGNMENT = rf"(?i)\b((?:[\w-]*[-_])?{_WORDS})(\s*[=:]\s*)(?:bearer\s+)?\S+"
_URL_USER = r"(?<=://)[^/@\s]+@"


def is_secret_name(name: str) -> bool:
    """Whether the name of an option or a key says that its value is secret: `--hf-token`, not `--tokenizer`."""
    return re.search(_NAME, name) is not None


def without_url_users(text: str) -> str:
    return re.sub(_URL_USER, f"{HIDDEN}@", text) if "://" in text else text


def without_secrets(text: str) -> str:
    """Without the values of assignments to secret names, and without the users of URLs."""
    return without_url_users(re.sub(_ASSIGNMENT, rf"\1\2{HIDDEN}", text))
