"""`dataclass` as in the standard library, but cheap to define where it is frozen and has slots.

Nearly all our data is of that kind: a start of ripstop defines some 160 such classes, and the standard decorator
compiles six methods for each, which was a third of the time from the command to the first worker.  Here one is
compiled, `__init__`; the others differ between classes by the names of the fields alone.

To a reader and to a type checker it is the standard one, options and all.
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
        own = vars(cls)
        made = dataclasses.dataclass(init=False, eq=False, repr=False, slots=True)(cls)
        fields = dataclasses.fields(made)
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
        return made

    def _getter(names):
        return attrgetter(*names) if names else lambda _: ()

    def _init(fields):
        names = {"_set": object.__setattr__, "_missing": MISSING}
        parameters, body = ["self"], []
        for field in fields:
            name, value = field.name, field.name
            if field.default is not MISSING:
                names[f"_{name}"] = field.default
                parameters.append(f"{name}=_{name}")
            elif field.default_factory is not MISSING:
                names[f"_{name}"] = field.default_factory
                parameters.append(f"{name}=_missing")
                value = f"_{name}() if {name} is _missing else {name}"
            else:
                parameters.append(name)
            body.append(f" _set(self, {name!r}, {value})")
        exec(f"def __init__({', '.join(parameters)}):\n" + ("\n".join(body) or " pass"), names)
        return names["__init__"]

    def _assign(self, name, value):
        raise FrozenInstanceError(f"cannot assign to field {name!r}")

    def _delete(self, name):
        raise FrozenInstanceError(f"cannot delete field {name!r}")

    def _reduce(self):
        return type(self), tuple(getattr(self, name) for name in self.__match_args__)

    ALIKE = {"__setattr__": _assign, "__delattr__": _delete, "__reduce__": _reduce}
