"""`dataclass` as in the standard library, but cheap to define where it is frozen and has slots.

Nearly all our data is of that kind: a start of ripstop defines some 160 such classes, and the standard decorator
compiles six methods for each, which was a third of the time from the command to the first worker.  Here one is
compiled, `__init__`; the others differ between classes by the names of the fields alone.

To a reader and to a type checker it is the standard one, options and all: a class that asks for more than this is left
to the standard decorator.  More are other options, a `__post_init__` or `__eq__`, and fields that `__init__` does
not take in their order (`init=False`, `kw_only`, `InitVar`), its own or inherited.
"""

TYPE_CHECKING = False  # not from `typing`, which takes milliseconds to import

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
else:
    import dataclasses
    from dataclasses import MISSING, FrozenInstanceError
    from operator import attrgetter

    def dataclass(cls=None, /, *, frozen=False, slots=False, **options):
        """What `dataclasses.dataclass` makes of a class, whatever the options."""
        if not (frozen and slots) or options:
            return dataclasses.dataclass(cls, frozen=frozen, slots=slots, **options)
        return _frozen if cls is None else _frozen(cls)

    def _frozen(cls):
        own, inherits = dict(vars(cls)), hasattr(cls, "__dataclass_fields__")
        made = dataclasses.dataclass(init=False, eq=False, repr=False, slots=True, frozen=inherits)(cls)
        fields = dataclasses.fields(made)
        if not _is_plain(made, fields):
            _undo(cls, own)
            return dataclasses.dataclass(frozen=True, slots=True)(cls)
        values = _getter([field.name for field in fields if field.compare])
        shown = [field.name for field in fields if field.repr]

        def equal(self, other):
            return values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented

        def hashed(self):
            return hash(values(self))

        def written(self):
            return f"{type(self).__qualname__}({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

        methods = {"__init__": _init(fields), "__eq__": equal, "__hash__": hashed, "__repr__": written}
        for name, method in (methods | ALIKE).items():
            if name not in own:
                setattr(made, name, method)
        made.__dataclass_params__.frozen = True  # others that inherit from it must be, too
        return made

    def _is_plain(made, fields):
        """Whether `__init__` takes the fields in their order and does no more, and equality is by the fields."""
        if hasattr(made, "__post_init__") or "__eq__" in vars(made):
            return False
        if len(fields) < len(made.__dataclass_fields__):
            return False  # some are told to `__init__` alone
        return all(field.init and not field.kw_only for field in fields)

    def _undo(cls, own):
        """Make a class again what it was before it became a dataclass with slots, which is another class."""
        for name in vars(cls).keys() - own.keys():
            delattr(cls, name)
        for name, value in own.items():
            if vars(cls).get(name) is not value:
                setattr(cls, name, value)

    def _getter(names):
        return attrgetter(*names) if names else lambda _: ()

    def _init(fields):
        names = {"__dataclass_set": object.__setattr__, "__dataclass_missing": MISSING}  # no field is called so
        parameters, body = ["self"], []
        for field in fields:
            name, value = field.name, field.name
            if field.default is not MISSING:
                names[f"_{name}"] = field.default
                parameters.append(f"{name}=_{name}")
            elif field.default_factory is not MISSING:
                names[f"_{name}"] = field.default_factory
                parameters.append(f"{name}=__dataclass_missing")
                value = f"_{name}() if {name} is __dataclass_missing else {name}"
            else:
                parameters.append(name)
            body.append(f" __dataclass_set(self, {name!r}, {value})")
        exec(f"def __init__({', '.join(parameters)}):\n" + ("\n".join(body) or " pass"), names)
        return names["__init__"]

    def _assign(self, name, value):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def _delete(self, name):
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _state(self):
        return [getattr(self, field.name) for field in dataclasses.fields(self)]

    def _restore(self, state):
        for field, value in zip(dataclasses.fields(self), state, strict=True):
            object.__setattr__(self, field.name, value)

    ALIKE = {"__setattr__": _assign, "__delattr__": _delete, "__getstate__": _state, "__setstate__": _restore}
