"""`ripstop coordinator`: a job's coordinator by itself, on a machine that is not part of the job."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ripstop.cli.options.flags import Flag, read
from ripstop.cli.options.job import JOB_FLAGS, budget, certificates, open_door, tracing_if_asked
from ripstop.model.config import COORDINATOR_PORT, CoordinatorConfig, Timing
from ripstop.model.errors import UsageError
from ripstop.model.parsers import (
    HEALTH_CONF,
    address,
    identifier,
    job_secret,
    key_values,
    node_range,
    quarantine,
    rank_by,
    target,
    timing,
)

HELP = """\
usage: ripstop coordinator --rdzv-endpoint=HOST[:PORT] [FLAGS]

Runs a job's coordinator without workers, until the job is over.  The nodes name the same endpoint and id:

  ripstop coordinator --rdzv-id=job7 --rdzv-endpoint=head:29400 --nnodes=2:4 --max-restarts=3
  ripstop run --rdzv-backend=c10d --rdzv-conf=is_host=0 --rdzv-id=job7 --rdzv-endpoint=head:29400 --nnodes=2:4 train.py

  --rdzv-endpoint HOST[:PORT]   where to listen, and nowhere else (port 29400 if none is given)
  --rdzv-id NAME                the job's name (none)
  --nnodes N | MIN:MAX          how many nodes the job has (1)
  --max-restarts N              failures that are healed, in the whole job (0)
  --restart-window TIME         count them in any such time, and not in the whole run
  --restart-backoff TIME        longest pause before a restart when rounds keep dying young (30)
  --max-infra-restarts N        hangs that are healed in any hour, counted apart (3)
  --rdzv-conf KEY=VALUE,…       as for ripstop run: join_timeout, last_call_timeout, lease, rank_by, target, tls_cert,
                                tls_key, tls_ca, quarantine_failures, quarantine_window, quarantine_cooldown
  --log-dir DIR                 keep what happens in the job in DIR/NAME/job-events.jsonl (nowhere)

TIME is seconds, or has a unit: 90s, 10m, 1h.  Every flag can be given as a variable: PET_RDZV_ID=job7.
RIPSTOP_TOKEN or RIPSTOP_TOKEN_FILE: the job's secret.  OTEL_EXPORTER_OTLP_ENDPOINT: a collector for traces.
"""


FLAGS = (*JOB_FLAGS, Flag("--log-dir", "DIR"))


def main(argv: Sequence[str]) -> int:
    if (config := configure(argv, os.environ)) is None:
        print(HELP, end="")
        return 0
    from ripstop.launch import coordinate

    return coordinate(config)


def configure(argv: Sequence[str], environ: Mapping[str, str]) -> CoordinatorConfig | None:
    """The configuration that these words mean, None when they ask for help."""
    given = read(FLAGS, argv, environ)
    if "--help" in given:
        return None
    if given.program:
        raise UsageError(f"{given.program[0]}: a coordinator runs no program; give the script to ripstop run")
    if "--rdzv-endpoint" not in given:
        raise UsageError("--rdzv-endpoint is missing: a coordinator must know where to listen; write HOST[:PORT]")
    name = given.label("--rdzv-endpoint")
    endpoint = address(name, given.text("--rdzv-endpoint", ""), default_port=COORDINATOR_PORT)
    if endpoint.port == 0:
        raise UsageError(f"{name}={endpoint}: nodes cannot find port 0; write {endpoint.host}:{COORDINATOR_PORT}")
    min_nodes, max_nodes = node_range(given.label("--nnodes"), given.text("--nnodes", "1"))
    conf_name = given.label("--rdzv-conf")
    conf = key_values(conf_name, given.text("--rdzv-conf", ""))
    if "is_host" in conf:
        raise UsageError(f"{conf_name} is_host={conf['is_host']}: a coordinator always is the host; leave is_host out")
    waits, notes = timing(conf_name, conf, shutdown=Timing().shutdown)
    notes += [f"{conf_name} {key} has no effect here: it is about nodes" for key in conf if key in HEALTH_CONF]
    token, about_token = job_secret(environ)
    tls = certificates(conf_name, conf, notes)
    if tls is not None and tls.cert is None:
        raise UsageError(
            f"{conf_name} tls_ca={tls.ca}: a coordinator shows a certificate; add tls_cert=FILE,tls_key=FILE"
        )
    notes += about_token if token else open_door(endpoint, tls)
    log_dir = given.text("--log-dir", "")
    return CoordinatorConfig(
        run_id=identifier(given.label("--rdzv-id"), given.text("--rdzv-id", "none")),
        endpoint=endpoint,
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        target=target(conf_name, conf, min_nodes, max_nodes),
        rank_by=rank_by(conf_name, conf),
        budget=budget(given, notes),
        timing=waits,
        log_dir=Path(log_dir) if log_dir not in ("", os.devnull) else None,
        tracing=tracing_if_asked(environ, notes),
        quarantine=quarantine(conf_name, conf),
        token=token,
        tls=tls,
        notes=tuple(notes),
    )
