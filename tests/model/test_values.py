"""Our quick `dataclass` is the standard one, seen from outside."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ripstop
from ripstop.model import round as rounds
from ripstop.model.values import dataclass


def classes(decorator: Callable[..., Any]) -> dict[str, Any]:
    """The same few classes, made by the one decorator or the other."""

    @decorator(frozen=True, slots=True)
    class Empty:
        pass

    @decorator(frozen=True, slots=True)
    class Full:
        name: str
        count: int = 3
        items: list[int] = dataclasses.field(default_factory=list)
        secret: str = dataclasses.field(default="", repr=False)
        note: str = dataclasses.field(default="", compare=False)

    @decorator(frozen=True, slots=True)
    class Wordy:
        name: str

        def __repr__(self) -> str:
            return f"<{self.name}>"

        def __hash__(self) -> int:
            return 7

    @decorator(frozen=True, slots=True)
    class Longer(Wordy):
        size: int = 0

    @decorator(frozen=True, slots=True)
    class Counted:
        name: str
        length: int = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            object.__setattr__(self, "length", len(self.name))

    @decorator(frozen=True, slots=True)
    class Recounted(Counted):
        factor: int = 2

    @decorator(frozen=True, slots=True)
    class Fixed:
        name: str
        kind: str = dataclasses.field(default="fixed", init=False)

    @decorator(frozen=True, slots=True)
    class Named:
        more: int = dataclasses.field(default=0, kw_only=True)
        name: str

    @decorator(frozen=True, slots=True)
    class Marked:
        name: str
        _: dataclasses.KW_ONLY
        more: int = 0

    @decorator(frozen=True, slots=True)
    class Written:
        name: str
        _: "dataclasses.KW_ONLY"
        more: "int" = 0

    @decorator(frozen=True, slots=True)
    class Passing:
        name: str
        unseen: dataclasses.InitVar[int] = 0

    @decorator(frozen=True, slots=True)
    class Derived(Wordy):
        more: int = dataclasses.field(default=0, kw_only=True)

    @decorator(frozen=True, slots=True)
    class Passed(Passing):
        size: int = 0

    @decorator(frozen=True, slots=True)
    class Filled(Empty):
        name: str

    @decorator(frozen=True, slots=True)
    class Vague:  # noqa: PLW1641 - the decorator makes it
        name: str

        def __eq__(self, other: object) -> bool:
            return isinstance(other, type(self)) and other.name[:1] == self.name[:1]

    plain: list[Any] = [Empty, Full, Wordy, Longer, Filled]
    others: list[Any] = [Counted, Recounted, Fixed, Named, Marked, Written, Passing, Passed, Derived, Vague]
    return {made.__name__: made for made in plain + others}


OURS = classes(dataclass)
STANDARD = classes(dataclasses.dataclass)
CALLS = [
    ("Empty", ()),
    ("Full", ("a",)),
    ("Full", ("a", 4, [1, 2], "word", "note")),
    ("Wordy", ("a",)),
    ("Longer", ("a",)),
    ("Longer", ("a", 2)),
    ("Counted", ("abc",)),
    ("Recounted", ("abc", 3)),
    ("Fixed", ("a",)),
    ("Named", ("a",)),
    ("Marked", ("a",)),
    ("Written", ("a",)),
    ("Passing", ("a", 7)),
    ("Passed", ("a", 7, 1)),
    ("Derived", ("a",)),
    ("Filled", ("a",)),
    ("Vague", ("a",)),
]


@pytest.mark.parametrize("name", OURS)
def test_it_takes_the_same_arguments_and_has_the_same_fields(name: str) -> None:
    ours, standard = OURS[name], STANDARD[name]

    assert [(p.name, p.kind) for p in inspect.signature(ours).parameters.values()] == [
        (p.name, p.kind) for p in inspect.signature(standard).parameters.values()
    ]
    assert [field.name for field in dataclasses.fields(ours)] == [field.name for field in dataclasses.fields(standard)]
    assert (ours.__match_args__, ours.__slots__) == (standard.__match_args__, standard.__slots__)


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_its_instances_read_and_convert_the_same(name: str, arguments: tuple[Any, ...]) -> None:
    ours, standard = OURS[name](*arguments), STANDARD[name](*arguments)

    assert repr(ours) == repr(standard)
    assert dataclasses.asdict(ours) == dataclasses.asdict(standard)


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_it_compares_with_its_own_kind_by_value(name: str, arguments: tuple[Any, ...]) -> None:
    made = OURS[name]

    assert made(*arguments) == made(*arguments)
    assert made(*arguments) != STANDARD[name](*arguments)
    if arguments:
        assert made(*arguments) != dataclasses.replace(made(*arguments), name="b")


def test_a_field_that_is_not_compared_makes_no_difference() -> None:
    full = OURS["Full"]

    assert full("a", note="one") == full("a", note="another")


def test_it_is_hashed_by_value_unless_the_class_knows_better() -> None:
    assert hash(rounds.Address("h", 1)) == hash(rounds.Address("h", 1))
    assert hash(OURS["Wordy"]("a")) == 7
    with pytest.raises(TypeError, match="unhashable"):
        hash(OURS["Full"]("a"))


@pytest.mark.parametrize("name", ["Filled", "Vague", "Counted", "Passed"])
def test_it_can_be_hashed_where_the_standard_one_can(name: str) -> None:
    for made in (OURS[name], STANDARD[name]):
        assert hash(made("a")) == hash(made("a"))


def test_a_field_may_have_any_name() -> None:
    @dataclass(frozen=True, slots=True)
    class Odd:
        set: int = 1
        missing: list[int] = dataclasses.field(default_factory=list)

    assert repr(Odd(2)).endswith("Odd(set=2, missing=[])")


def test_every_instance_has_a_default_of_its_own_from_a_factory() -> None:
    full = OURS["Full"]

    assert full("a").items == []
    assert full("a").items is not full("a").items


def test_it_cannot_be_changed() -> None:
    address = rounds.Address("h", 1)

    for change in (
        lambda: setattr(address, "port", 2),
        lambda: setattr(address, "other", 2),
        lambda: delattr(address, "port"),
    ):
        with pytest.raises(dataclasses.FrozenInstanceError):
            change()
    assert address == rounds.Address("h", 1)


def test_it_survives_pickling() -> None:
    address = rounds.Address("h", 1)

    assert pickle.loads(pickle.dumps(address)) == address


@pytest.mark.parametrize("decorator", [dataclass, dataclasses.dataclass])
def test_its_state_is_all_its_fields(decorator: Callable[..., Any]) -> None:
    derived = classes(decorator)["Derived"]

    assert copy.copy(derived("a", more=4)) == derived("a", more=4)
    assert copy.copy(derived("a", more=4)).more == 4


def test_missing_and_unknown_arguments_are_refused() -> None:
    for arguments in ({}, {"host": "h", "port": 1, "more": 2}):
        with pytest.raises(TypeError, match=r"Address|__init__"):
            rounds.Address(**arguments)  # type: ignore[arg-type]


def test_other_options_are_the_standard_decorators_own() -> None:
    @dataclass(slots=True)
    class Open:
        name: str

    opened = Open("a")
    opened.name = "b"

    assert opened == Open("b")


def test_all_our_frozen_data_is_made_by_it() -> None:
    sources = {path: path.read_text() for path in Path(ripstop.__file__).parent.rglob("*.py")}
    made = {path: text for path, text in sources.items() if "@dataclass(frozen=True, slots=True)" in text}

    assert made
    assert [path for path, text in made.items() if "from ripstop.model.values import dataclass" not in text] == []
