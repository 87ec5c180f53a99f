"""`ripstop completion SHELL`: print a script with which a shell completes ripstop's commands, flags and values.

The script is generated from the flags.  After the training script's name it completes file names.  Pure.
"""

from collections.abc import Iterable, Sequence
from importlib import import_module

from ripstop.cli import COMMANDS, JOB_COMMANDS
from ripstop.cli.options.flags import Flag
from ripstop.model.errors import HelpRequested, UsageError

HELP = """\
usage: ripstop completion bash|zsh|fish

Prints a script with which your shell completes ripstop's commands, flags and values.

examples
  eval "$(ripstop completion bash)"     in ~/.bashrc
  eval "$(ripstop completion zsh)"      in ~/.zshrc, after compinit
  ripstop completion fish > ~/.config/fish/completions/ripstop.fish

Exit codes: 0 done; 2 the shell is unknown.
"""
SHELLS = ("bash", "zsh", "fish")

BASH = """\
_ripstop() {
    local cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]} flags with_value subcommands word i
    [[ $cur == = ]] && cur=
    [[ $prev == = ]] && prev=${COMP_WORDS[COMP_CWORD-2]}
    COMPREPLY=()
    if ((COMP_CWORD == 1)); then
        COMPREPLY=($(compgen -W '@COMMANDS@' -- "$cur"))
        return
    fi
    case ${COMP_WORDS[1]} in
@BASH_FLAGS@
        completion) COMPREPLY=($(compgen -W '@SHELLS@' -- "$cur")); return ;;
        *) return ;;
    esac
    if ((COMP_CWORD == 2)) && [[ -n $subcommands && $cur != -* ]]; then
        COMPREPLY=($(compgen -W "$subcommands" -- "$cur"))
        return
    fi
    for ((i = 2; i < COMP_CWORD; i++)); do
        word=${COMP_WORDS[i]}
        [[ $word == -* ]] && word=${word//_/-}
        if [[ $with_value == *" $word "* ]]; then
            [[ ${COMP_WORDS[i+1]} == = ]] && ((i++))
            ((i++))
        elif [[ ${COMP_WORDS[1]} == run && $word != -* && $word != = ]]; then
            return  # arguments of the script
        fi
    done
    if [[ $with_value == *" ${prev//_/-} "* ]]; then
        case ${prev//_/-} in
@BASH_CHOICES@
        esac
    elif [[ $cur == -* ]]; then
        COMPREPLY=($(compgen -W "$flags" -- "${cur//_/-}"))
    fi
}
complete -o bashdefault -o default -F _ripstop ripstop
"""

ZSH = """\
_ripstop() {
    local context state line
    typeset -A opt_args
    _arguments -C '1:command:(@COMMANDS@)' '*::argument:->arguments'
    [[ $state == arguments ]] || return
    case $line[1] in
        run) _arguments -S -A '-*' \\
@ZSH_RUN@
            '1:script:_files' '*::argument:_files' ;;
@ZSH_OTHERS@
        completion) _arguments '1:shell:(@SHELLS@)' ;;
    esac
}
compdef _ripstop ripstop
"""

FISH = """\
complete -c ripstop -n __fish_use_subcommand -f -a '@COMMANDS@'
complete -c ripstop -n '__fish_seen_subcommand_from completion' -f -a '@SHELLS@'
@FISH_FLAGS@
"""


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        raise HelpRequested(HELP)
    if len(argv) > 1 or argv[0] not in SHELLS:
        raise UsageError(f"completion {' '.join(argv)}: unknown shell; write {', '.join(SHELLS)}")
    print(completion_script(argv[0]), end="")
    return 0


def completion_script(shell: str) -> str:
    flags = completion_flags()
    with_values = {flag.name: flag for own in flags.values() for flag in own if flag.metavar}
    text = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell]
    for name, value in {
        "COMMANDS": " ".join(COMMANDS),
        "SHELLS": " ".join(SHELLS),
        "BASH_FLAGS": "\n".join(_bash_completion_of_command(command, own) for command, own in flags.items()),
        "BASH_CHOICES": "\n".join(map(_bash_completion_of_values, with_values.values())),
        "ZSH_RUN": _zsh_completion(flags["run"]),
        "ZSH_OTHERS": "\n".join(
            f"        {command}) _arguments -S \\\n"
            f"{_zsh_completion(own, completion_subcommands(command))}\n            && : ;;"
            for command, own in flags.items()
            if command != "run"
        ),
        "FISH_FLAGS": "\n".join(_fish_completion(command, own) for command, own in flags.items()),
    }.items():
        text = text.replace(f"@{name}@", value)
    return text


def completion_flags() -> dict[str, tuple[Flag, ...]]:
    """The flags of each command that has flags."""
    found: dict[str, tuple[Flag, ...]] = {}
    for name in COMMANDS:
        if name not in ("completion", "version"):
            module = import_module(f"ripstop.cli.commands.{JOB_COMMANDS.get(name, name)}")
            found[name] = module.COMMANDS[name].flags if name in JOB_COMMANDS else module.FLAGS
    return found


def completion_subcommands(command: str) -> tuple[str, ...]:
    """The commands of a command such as `ripstop kube`."""
    if command in JOB_COMMANDS:
        return ()
    names: tuple[str, ...] = getattr(import_module(f"ripstop.cli.commands.{command}"), "COMMANDS", ())
    return names


def _bash_completion_of_command(command: str, flags: Sequence[Flag]) -> str:
    names = " ".join(name for flag in flags for name in flag.forms)
    with_value = " ".join(name for flag in flags if flag.metavar for name in flag.forms)
    own = " ".join(completion_subcommands(command))
    return f"        {command}) flags='{names}' with_value=' {with_value} ' subcommands='{own}' ;;"


def _bash_completion_of_values(flag: Flag) -> str:
    pattern = "|".join(flag.forms)
    if flag.metavar in ("FILE", "DIR"):
        return f"            {pattern}) COMPREPLY=() ;;"  # bash completes file names by default
    return f"            {pattern}) COMPREPLY=($(compgen -W '{' '.join(flag.choices)}' -- \"$cur\")) ;;"


def _zsh_completion(flags: Iterable[Flag], names: Sequence[str] = ()) -> str:
    lines = [f"'1:command:({' '.join(names)})' '*:argument:_files'"] if names else []
    for flag in flags:
        for name in flag.forms:
            ending = "=" if name.startswith("--") else "+"
            match flag.metavar:
                case "":
                    lines.append(f"'*{name}'")
                case "FILE" | "DIR":
                    lines.append(f"'*{name}{ending}:{flag.metavar}:_files'")
                case _:
                    lines.append(f"'*{name}{ending}:value:({' '.join(flag.choices)})'")
    return " \\\n".join(f"            {line}" for line in lines) + " \\"


def _fish_completion(command: str, flags: Iterable[Flag]) -> str:
    names = " ".join(completion_subcommands(command))
    first = f"__fish_seen_subcommand_from {command}; and not __fish_seen_subcommand_from {names}"
    lines = [f"complete -c ripstop -n '{first}' -f -a '{names}'"] if names else []
    for flag in flags:
        parts = [f"complete -c ripstop -n '__fish_seen_subcommand_from {command}' -l {flag.name.removeprefix('--')}"]
        if flag.short:
            parts.append(f"-s {flag.short.removeprefix('-')}")
        if flag.metavar in ("FILE", "DIR"):
            parts.append("-r -F")
        elif flag.metavar:
            parts.append("-x" + (f" -a '{' '.join(flag.choices)}'" if flag.choices else ""))
        lines.append(" ".join(parts))
    return "\n".join(lines)
