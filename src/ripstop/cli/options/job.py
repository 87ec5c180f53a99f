"""The flags about the job as a whole, which `run` and `coordinator` share."""

from collections.abc import Mapping

from ripstop.cli.options.flags import Flag, Given
from ripstop.model.config import Budget, Tls, Tracing
from ripstop.model.parsers import duration, integer, tls

HELP = Flag("--help", short="-h", from_environment=False)
JOB_FLAGS = (
    HELP,
    Flag("--nnodes", "N|MIN:MAX"),
    Flag("--rdzv-id", "NAME"),
    Flag("--rdzv-endpoint", "HOST[:PORT]"),
    Flag("--rdzv-conf", "KEY=VALUE,…"),
    Flag("--max-restarts", "N"),
    Flag("--restart-window", "TIME", ours=True),
    Flag("--restart-backoff", "TIME", ours=True),
    Flag("--max-infra-restarts", "N", ours=True),
)
MOST_RESTARTS = 1_000_000


def budget(given: Given, notes: list[str]) -> Budget:
    default = Budget()
    restarts = integer(
        given.label("--max-restarts"), given.text("--max-restarts", "0"), minimum=0, maximum=MOST_RESTARTS
    )
    if restarts == 0:
        idle = (flag for flag in ("--restart-window", "--restart-backoff") if flag in given)
        notes.extend(f"{given.label(flag)} has no effect without --max-restarts: no failure is healed" for flag in idle)
    return Budget(
        max_restarts=restarts,
        window=duration(given.label("--restart-window"), given.text("--restart-window", str(default.window))),
        backoff=duration(given.label("--restart-backoff"), given.text("--restart-backoff", str(default.backoff))),
        max_infra_restarts=integer(
            given.label("--max-infra-restarts"),
            given.text("--max-infra-restarts", str(default.max_infra_restarts)),
            minimum=0,
            maximum=MOST_RESTARTS,
        ),
    )


def certificates(name: str, conf: Mapping[str, str], notes: list[str]) -> Tls | None:
    """The job's certificates, found good; `name` is what the user calls `--rdzv-conf`."""
    found, about = tls(name, conf)
    notes.extend(about)
    if found is not None:
        from ripstop.transport.tls import check_certificates  # ssl: only where there is something to encrypt

        check_certificates(name, found)
    return found


def open_door(endpoint: object, tls: Tls | None) -> list[str]:
    """The word for a job without a secret: anyone may join, unless certificates keep them out."""
    if tls is not None and tls.ca is not None:
        return []
    return [
        f"no RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE: whoever can reach {endpoint} can join this job and end it; "
        "set the same secret on all nodes (openssl rand -hex 32)"
    ]


def tracing_if_asked(environ: Mapping[str, str], notes: list[str], *, coordinated: bool = True) -> Tracing | None:
    """Where the job's traces go: as `tracing` says, whose import a job without an endpoint is spared."""
    if not any(environ.get(f"OTEL_EXPORTER_OTLP_{of}ENDPOINT") for of in ("", "TRACES_")):
        return None
    from ripstop.cli.options.tracing import tracing

    return tracing(environ, notes, coordinated=coordinated)
