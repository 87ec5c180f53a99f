"""`ripstop coordinator`: run a job's coordinator on a machine without workers."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ripstop.cli.options.certificates import certificates, no_secret_or_certificates_warning
from ripstop.cli.options.flags import Flag, parse_flags
from ripstop.cli.options.job import JOB_FLAGS, job_allow_chaos_option, job_restart_budget_options
from ripstop.cli.options.monitoring import monitoring_notify_url_option, monitoring_straggler_options
from ripstop.cli.options.output import output_own_log_options
from ripstop.cli.options.tracing import tracing
from ripstop.model import parsers, rendezvous_conf
from ripstop.model.config import COORDINATOR_PORT, CoordinatorConfig, Timing
from ripstop.model.errors import HelpRequested, UsageError

HELP = """\
usage: ripstop coordinator --rdzv-endpoint=HOST[:PORT] [FLAGS]

Runs the coordinator of a job, without workers, until the job ends.  The nodes use the same endpoint and id.  The loss
of a training node then does not end the coordinator.

examples
  ripstop coordinator --rdzv-id=job7 --rdzv-endpoint=head:29400 \\
      --nnodes=2:4 --max-restarts=3
  ripstop run --rdzv-id=job7 --rdzv-endpoint=head:29400 --rdzv-backend=c10d \\
      --rdzv-conf=is_host=0 --nnodes=2:4 train.py

job
  --rdzv-endpoint HOST[:PORT]   address to listen on (port 29400)
  --rdzv-id NAME                the job's id (none)
  --nnodes N | MIN:MAX          number of nodes (1)
  --max-restarts N              how often the whole job may restart after a failed worker (0)
  --restart-window TIME         count only the restarts within this time (the whole run)
  --restart-backoff TIME        longest delay before a restart if workers fail again within seconds; 0: no delay (30)
  --max-infra-restarts N        how often the job may restart after hangs in one hour; not part of --max-restarts (3)
  --straggler HOW               if the other ranks wait for a slow one: report it; replace its node by a spare, if one
                                is ready; or off (report)
  --straggler-factor NUMBER     a rank is a straggler if steps take this many times as long because of it (1.5)
  --straggler-time TIME         how long a rank must be slow until it is reported (2m)
  --notify-url URL              send a message to this webhook when the job ends, hangs, has a straggler or few restarts
                                left
  --allow-chaos                 let operators inject faults into the job (ripstop chaos)

rendezvous
  --rdzv-conf KEY=VALUE,…       as for ripstop run: join_timeout, last_call_timeout, lease, rank_by, target, tls_cert,
                                tls_key, tls_ca, quarantine_failures, quarantine_window, quarantine_cooldown

output
  --log-dir DIR                 write the job's events to DIR/NAME/job-events.jsonl (no file)
  -q, --quiet                   write only warnings and errors to stderr
  --log-level LEVEL             debug, info, warning or error (info)
  --log-format FORMAT           text, or json, one object a line (text)

Defaults are in parentheses.  TIME is in seconds, or has a unit: 90s, 10m, 1h.
Every flag has an environment variable: PET_RDZV_ID=job7.
RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE: the job's secret.  OTEL_EXPORTER_OTLP_ENDPOINT: collector for traces.

Exit codes: 0 the job succeeded; 1 it failed or was stopped; 2 the command line is wrong; 128+N signal N stopped the
coordinator.
"""
FLAGS = (*JOB_FLAGS, Flag("--log-dir", "DIR"))


def main(argv: Sequence[str]) -> int:
    config = configure_coordinator(argv, os.environ)
    from ripstop.launch import coordinate

    return coordinate(config)


def configure_coordinator(argv: Sequence[str], environ: Mapping[str, str]) -> CoordinatorConfig:
    args = parse_flags(FLAGS, argv, environ)
    if "--help" in args:
        raise HelpRequested(HELP)
    if args.program:
        raise UsageError(f"{args.program[0]}: a coordinator runs no script; pass it to ripstop run")
    if "--rdzv-endpoint" not in args:
        raise UsageError("--rdzv-endpoint is missing; write --rdzv-endpoint=HOST[:PORT], the address to listen on")
    name = args.label("--rdzv-endpoint")
    endpoint = parsers.address(name, args.text("--rdzv-endpoint"), default_port=COORDINATOR_PORT)
    if endpoint.port == 0:
        raise UsageError(f"{name}={endpoint}: nodes cannot connect to port 0; write {endpoint.host}:{COORDINATOR_PORT}")
    min_nodes, max_nodes = parsers.node_range(*args.labelled("--nnodes", "1"))
    conf_name = args.label("--rdzv-conf")
    conf = parsers.key_values(conf_name, args.text("--rdzv-conf"))
    if "is_host" in conf:
        raise UsageError(
            f"{conf_name} is_host={conf['is_host']}: this command always runs the coordinator; leave is_host out"
        )
    timeouts, notes = rendezvous_conf.timing(conf_name, conf, Timing().shutdown, Timing().inprocess)
    unused = (key for key in conf if key in rendezvous_conf.HEALTH_CONF)
    notes += [f"{conf_name} {key} has no effect here: set it on the nodes" for key in unused]
    token, token_notes = parsers.parse_job_secret(environ)
    tls = certificates(conf_name, conf, notes)
    if tls is not None and tls.cert is None:
        raise UsageError(
            f"{conf_name} tls_ca={tls.ca}: a coordinator needs a certificate; add tls_cert=FILE,tls_key=FILE"
        )
    notes += token_notes if token else no_secret_or_certificates_warning(endpoint, tls)
    log_dir = args.text("--log-dir")
    return CoordinatorConfig(
        run_id=parsers.identifier(*args.labelled("--rdzv-id", "none")),
        endpoint=endpoint,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        target=rendezvous_conf.target(conf_name, conf, min_nodes, max_nodes),
        rank_by=rendezvous_conf.rank_by(conf_name, conf),
        budget=job_restart_budget_options(args, notes),
        timing=timeouts,
        stragglers=monitoring_straggler_options(args, notes),
        allow_chaos=job_allow_chaos_option(args, notes),
        log_dir=Path(log_dir) if log_dir not in ("", os.devnull) else None,
        own_log=output_own_log_options(args),
        tracing=tracing(environ, notes),
        notify_url=monitoring_notify_url_option(args),
        quarantine=rendezvous_conf.quarantine(conf_name, conf),
        token=token,
        tls=tls,
        notes=tuple(notes),
    )
