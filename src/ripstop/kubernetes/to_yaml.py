"""Kubernetes objects as YAML."""

from collections.abc import Mapping, Sequence
from typing import Any

from ripstop.model.errors import RipstopError


def to_yaml(objects: Sequence[Mapping[str, Any]]) -> str:
    """One document per object, with the fields in their given order."""
    try:
        import yaml
    except ImportError as error:
        raise RipstopError("YAML output needs PyYAML; run `pip install ripstop[kubernetes]`") from error
    text: str = yaml.safe_dump_all(objects, sort_keys=False, width=120)
    return text
