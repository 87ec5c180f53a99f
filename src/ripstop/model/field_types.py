"""Field types with the bounds that a decoder checks.  Records that travel, or are read from files, use them.  Pure."""

from typing import Annotated, TypeVar

from msgspec import Meta

MAX_ITEMS = 4096  # elements of one list in a message

T = TypeVar("T")
Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]  # a larger integer could not be encoded again
RoundNumber = Annotated[int, Meta(ge=0, le=2**53)]  # a later round can still be counted and encoded
Items = Annotated[tuple[T, ...], Meta(max_length=MAX_ITEMS)]
