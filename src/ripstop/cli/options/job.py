"""The flags about the whole job, which `run` and `coordinator` share."""

from ripstop.cli.options.flags import HELP_FLAG, Flag, ParsedArguments, note_unused_option_flags
from ripstop.model.config import Budget, LogFormat, LogLevel, StragglerMode
from ripstop.model.parsers import duration, integer

JOB_FLAGS = (
    HELP_FLAG,
    Flag("--nnodes", "N|MIN:MAX"),
    Flag("--rdzv-id", "NAME"),
    Flag("--rdzv-endpoint", "HOST[:PORT]"),
    Flag("--rdzv-conf", "KEY=VALUE,…"),
    Flag("--max-restarts", "N"),
    Flag("--restart-window", "TIME", ours=True),
    Flag("--restart-backoff", "TIME", ours=True),
    Flag("--max-infra-restarts", "N", ours=True),
    Flag("--notify-url", "URL", ours=True),
    Flag("--straggler", "HOW", choices=tuple(mode.value for mode in StragglerMode), ours=True),
    Flag("--straggler-factor", "NUMBER", ours=True),
    Flag("--straggler-time", "TIME", ours=True),
    Flag("--quiet", short="-q", ours=True),
    Flag("--log-level", "LEVEL", choices=tuple(level.value for level in LogLevel), ours=True),
    Flag("--log-format", "FORMAT", choices=tuple(form.value for form in LogFormat), ours=True),
    Flag("--allow-chaos", ours=True),
)
MAX_RESTARTS = 1_000_000


def job_restart_budget_options(args: ParsedArguments, notes: list[str]) -> Budget:
    default = Budget()
    restarts = integer(*args.labelled("--max-restarts", "0"), minimum=0, maximum=MAX_RESTARTS)
    if restarts == 0:
        why = "without --max-restarts: there are no restarts"
        note_unused_option_flags(args, ("--restart-window", "--restart-backoff"), why, notes)
    return Budget(
        max_restarts=restarts,
        window=duration(*args.labelled("--restart-window", str(default.window))),
        backoff=duration(*args.labelled("--restart-backoff", str(default.backoff))),
        max_infra_restarts=integer(
            *args.labelled("--max-infra-restarts", str(default.max_infra_restarts)), minimum=0, maximum=MAX_RESTARTS
        ),
    )


def job_allow_chaos_option(args: ParsedArguments, notes: list[str]) -> bool:
    is_allowed = "--allow-chaos" in args
    if is_allowed:
        notes.append(f"{args.label('--allow-chaos')}: operators may inject faults into this job (ripstop chaos)")
    return is_allowed
