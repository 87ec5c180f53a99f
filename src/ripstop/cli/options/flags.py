"""Command line words to text values; what the values mean is not known here.

Rules, the same as torchrun's: a flag may be written with dashes or underscores, in full or by any beginning that fits
no other flag, `--flag value` or `--flag=value`, `-f value` or `-fvalue`; the last one wins.  The first word that is no
flag is the program, and everything after it is the program's, word for word.  A `--` may stand on either side of the
program, once.  A flag that is not given takes the variable `PET_` + its name, an empty variable counting as not set.

One of our own: a beginning that fits a flag of torchrun's does not mean one that only we have, so that a command line
which torchrun takes keeps its meaning.

Pure.
"""

from collections.abc import Iterable, Mapping, Sequence

from msgspec import Struct

from ripstop.model.errors import UsageError
from ripstop.model.parsers import boolean


class Flag(Struct, frozen=True):
    """One flag; `metavar` is what its value is called in the help, "" for a switch.

    `choices` are the values that a shell should offer: all there are, or the most common ones.  `ours`: torchrun has
    none of this name.
    """

    name: str
    metavar: str = ""
    short: str = ""
    choices: tuple[str, ...] = ()
    from_environment: bool = True
    ours: bool = False

    @property
    def variable(self) -> str:
        return "PET_" + self.name.removeprefix("--").replace("-", "_").upper()


class Given(Struct, frozen=True):
    """What the user wrote: the text of every flag, where it was written, and the program with its arguments."""

    texts: Mapping[str, str]
    written: Mapping[str, str]
    program: tuple[str, ...]
    off: frozenset[str] = frozenset()  # switches that a variable turns off

    def __contains__(self, name: str) -> bool:
        return name in self.texts

    def text(self, name: str, default: str) -> str:
        return self.texts.get(name, default)

    def label(self, name: str) -> str:
        """The flag as an error should name it: the variable, where the value came from one."""
        return self.written.get(name, name)

    def behind(self, texts: Mapping[str, str], source: str, program: tuple[str, ...]) -> "Given":
        """The same, with these values for what was not given, from a source that errors should name."""
        added = {name: text for name, text in texts.items() if name not in self.texts and name not in self.off}
        labels = {name: f"{source} {name.removeprefix('--')}" for name in added}
        return Given({**self.texts, **added}, {**self.written, **labels}, self.program or program, self.off)


def read(flags: Sequence[Flag], argv: Sequence[str], environ: Mapping[str, str]) -> Given:
    texts, program = _words(flags, argv)
    written: dict[str, str] = {}
    off: set[str] = set()
    for flag in flags:
        value = environ.get(flag.variable, "") if flag.from_environment else ""
        if flag.name in texts or not value:
            continue
        if flag.metavar or boolean(flag.variable, value):
            texts[flag.name] = value
            written[flag.name] = flag.variable
        else:
            off.add(flag.name)
    return Given(texts, written, program, frozenset(off))


def read_mixed(flags: Sequence[Flag], argv: Sequence[str]) -> tuple[Given, tuple[str, ...]]:
    """Flags and words in any order, where no program follows; the environment has no say."""
    texts: dict[str, str] = {}
    words: list[str] = []
    left = tuple(argv)
    while left:
        given = read(flags, left, {})
        texts |= given.texts
        words += given.program[:1]
        left = given.program[1:]
    return Given(texts, {}, ()), tuple(words)


def _words(flags: Sequence[Flag], argv: Sequence[str]) -> tuple[dict[str, str], tuple[str, ...]]:
    texts: dict[str, str] = {}
    left = list(argv)
    while left:
        word = left.pop(0)
        if word == "--":
            return texts, tuple(left)
        if not word.startswith("-") or word == "-":
            return texts, (word, *(left[1:] if left[:1] == ["--"] else left))
        flag, value = _match(flags, word)
        if not flag.metavar and value is not None:
            raise UsageError(f"{word}: {flag.name} takes no value; write {flag.name} alone")
        if flag.metavar and value is None:
            if not left or _looks_like_a_flag(left[0]):
                raise UsageError(f"{flag.name} needs a value; write {flag.name}={flag.metavar}")
            value = left.pop(0)
        texts[flag.name] = value or ""
    return texts, ()


def _match(flags: Sequence[Flag], word: str) -> tuple[Flag, str | None]:
    if not word.startswith("--"):
        for flag in flags:
            if flag.short and word.startswith(flag.short) and (flag.metavar or word == flag.short):
                return flag, word.removeprefix(flag.short).removeprefix("=") or None
        raise _unknown(flags, word)
    name, equals, value = word.partition("=")
    name = name.replace("_", "-")
    begun = [flag for flag in flags if flag.name.startswith(name)]
    fitting = [flag for flag in begun if flag.name == name] or [flag for flag in begun if not flag.ours] or begun
    match fitting:
        case [flag]:
            return flag, value if equals else None
        case []:
            raise _unknown(flags, word)
    raise UsageError(f"{word}: could be {' or '.join(flag.name for flag in fitting)}; write more of it")


def _unknown(flags: Iterable[Flag], word: str) -> UsageError:
    from difflib import get_close_matches  # costs more than all of this module, and only mistakes need it

    name = word.partition("=")[0].replace("_", "-")
    close = get_close_matches(name, [flag.name for flag in flags], n=1)
    return UsageError(f"{word}: there is no such flag; {f'did you mean {close[0]}?' if close else '--help lists them'}")


def _looks_like_a_flag(word: str) -> bool:
    """A word that begins with a dash is a flag, unless it is a negative number."""
    return word.startswith("-") and len(word) > 1 and not word[1:].replace(".", "", 1).isdigit()
