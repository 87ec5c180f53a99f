"""The base of records that hold a secret: their repr hides it, so that no log line or traceback shows it."""

from msgspec import Struct

SECRET_FIELDS = frozenset({"headers", "password", "token"})


class Redacted(Struct, frozen=True):
    """A record whose repr leaves out `SECRET_FIELDS`."""

    def __repr__(self) -> str:
        shown = (f"{name}={getattr(self, name)!r}" for name in self.__struct_fields__ if name not in SECRET_FIELDS)
        return f"{type(self).__name__}({', '.join(shown)})"
