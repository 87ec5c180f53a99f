"""Parse a command line into flags with text values.  The values themselves are parsed elsewhere.  Pure.

Rules, the same as torchrun's: (1) a flag is written with dashes or underscores, in full or as any unambiguous prefix,
as `--flag value`, `--flag=value`, `-f value` or `-fvalue`; the last one wins.  (2) The first argument that is not a
flag is the program. All arguments after it belong to the program. One `--` may stand before or after the program. (3) A
flag that is absent takes its value from the environment variable `PET_` + its name; an empty variable counts as unset.

One rule of ripstop's own: (4) a prefix that fits one of torchrun's flags never means a flag that only ripstop has, so
torchrun's command lines keep their meaning.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ripstop.model.errors import UsageError
from ripstop.model.parsers import boolean


class Flag(Struct, frozen=True):
    """One flag.  `metavar` names its value in the help; "" for a switch.

    `choices` are the values that a shell offers: all of them, or the most common ones.  `ours`: torchrun has no flag of
    this name.  Every flag but --help has a variable.
    """

    name: str
    metavar: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    ours: bool = False

    @property
    def forms(self) -> tuple[str, ...]:
        """Its short form, if it has one, and its name."""
        return tuple(filter(None, (self.short, self.name)))

    @property
    def variable(self) -> str:
        return "PET_" + self.name.removeprefix("--").replace("-", "_").upper()


HELP_FLAG = Flag("--help", short="-h")


class ParsedArguments(Struct, frozen=True):
    """The flags with their texts, and the program with its arguments.

    `sources` names the variable or file of each value that is not from the command line.  `switched_off` are the
    switches that a variable turns off.
    """

    texts: Mapping[str, str]
    sources: Mapping[str, str]
    program: tuple[str, ...]
    switched_off: frozenset[str] = frozenset()

    def __contains__(self, name: str) -> bool:
        return name in self.texts

    def text(self, name: str, default: str = "") -> str:
        return self.texts.get(name, default)

    def label(self, name: str) -> str:
        """The name for error messages: the variable or the key in a file if the value comes from there."""
        return self.sources.get(name, name)

    def labelled(self, name: str, default: str = "") -> tuple[str, str]:
        """The label and the text, as the parsers in `model/parsers.py` take them."""
        return self.label(name), self.text(name, default)

    def quoted(self, name: str) -> str:
        """The flag and its value for error messages."""
        return f"{self.label(name)}={self.text(name)}"

    def program_words_after_flags(self) -> tuple[str, ...]:
        """The program and its arguments for another command line; `--` comes first if it could be taken for a flag."""
        is_ambiguous = self.program[0].startswith("-") or self.program[1:2] == ("--",)
        return ("--", *self.program) if is_ambiguous else self.program

    def with_defaults(self, texts: Mapping[str, str], source: str, program: tuple[str, ...]) -> "ParsedArguments":
        """A copy that has these values for absent flags, and this program if there is none."""
        added = {name: text for name, text in texts.items() if name not in self.texts and name not in self.switched_off}
        sources = {name: f"{source} {name.removeprefix('--')}" for name in added}
        return ParsedArguments(
            {**self.texts, **added}, {**self.sources, **sources}, self.program or program, self.switched_off
        )


def note_unused_option_flags(args: ParsedArguments, flags: Sequence[str], why: str, notes: list[str]) -> None:
    notes.extend(f"{args.label(flag)} has no effect {why}" for flag in flags if flag in args)


def parse_flags(flags: Sequence[Flag], argv: Sequence[str], environ: Mapping[str, str]) -> ParsedArguments:
    texts, program = _split_flags(flags, argv)
    sources: dict[str, str] = {}
    switched_off: set[str] = set()
    for flag in flags:
        value = environ.get(flag.variable, "") if flag.name != "--help" else ""
        if flag.name in texts or not value:
            continue
        if flag.metavar or boolean(flag.variable, value):
            texts[flag.name] = value
            sources[flag.name] = flag.variable
        else:
            switched_off.add(flag.name)
    return ParsedArguments(texts, sources, program, frozenset(switched_off))


def parse_flags_and_positionals(flags: Sequence[Flag], argv: Sequence[str]) -> tuple[ParsedArguments, tuple[str, ...]]:
    """Parse flags and positional arguments in any order, without a program and without environment variables."""
    texts: dict[str, str] = {}
    positional: list[str] = []
    rest = tuple(argv)
    while rest:
        args = parse_flags(flags, rest, {})
        texts |= args.texts
        positional += args.program[:1]
        rest = args.program[1:]
    return ParsedArguments(texts, {}, ()), tuple(positional)


def _split_flags(flags: Sequence[Flag], argv: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    texts: dict[str, str] = {}
    rest = list(argv)
    while rest:
        argument = rest.pop(0)
        if argument == "--":
            return texts, tuple(rest)
        if not argument.startswith("-") or argument == "-":
            return texts, (argument, *(rest[1:] if rest[:1] == ["--"] else rest))
        flag, value = _match_flag(flags, argument)
        if not flag.metavar and value is not None:
            raise UsageError(f"{argument}: {flag.name} takes no value; write {flag.name} alone")
        if flag.metavar and value is None:
            if not rest or _looks_like_a_flag(rest[0]):
                raise UsageError(f"{flag.name} needs a value; write {flag.name}={flag.metavar}")
            value = rest.pop(0)
        texts[flag.name] = value or ""
    return texts, ()


def _match_flag(flags: Sequence[Flag], argument: str) -> tuple[Flag, str | None]:
    if not argument.startswith("--"):
        for flag in flags:
            if flag.short and argument.startswith(flag.short) and (flag.metavar or argument == flag.short):
                return flag, argument.removeprefix(flag.short).removeprefix("=") or None
        raise _unknown_flag(flags, argument)
    name, equals, value = argument.partition("=")
    name = name.replace("_", "-")
    by_prefix = [flag for flag in flags if flag.name.startswith(name)]
    exact = [flag for flag in by_prefix if flag.name == name]
    matching = exact or [flag for flag in by_prefix if not flag.ours] or by_prefix  # rule 4
    match matching:
        case [flag]:
            return flag, value if equals else None
        case []:
            raise _unknown_flag(flags, argument)
    raise UsageError(f"{argument}: ambiguous: {' or '.join(flag.name for flag in matching)}; write the flag in full")


def _unknown_flag(flags: Iterable[Flag], argument: str) -> UsageError:
    from difflib import get_close_matches  # slow to import, and only needed after a mistake

    name = argument.partition("=")[0].replace("_", "-")
    close = get_close_matches(name, [flag.name for flag in flags], n=1)
    return UsageError(f"{argument}: unknown flag; {f'did you mean {close[0]}?' if close else '--help lists the flags'}")


def _looks_like_a_flag(argument: str) -> bool:
    """Whether it starts with a dash and is not a negative number."""
    return argument.startswith("-") and len(argument) > 1 and not argument[1:].replace(".", "", 1).isdigit()
