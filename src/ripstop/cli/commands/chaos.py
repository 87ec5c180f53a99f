"""`ripstop chaos`: inject faults into a running job, and measure how long it takes to heal."""

import json
import random
from pathlib import Path

from ripstop.cli.chaos.plan import parse_plan
from ripstop.cli.chaos.results import Result, chaos_has_passed, chaos_summary, render_chaos_result, render_chaos_summary
from ripstop.cli.job_client import JOB_FLAGS, JOB_HELP, JobClientCommandLine, JobCommand
from ripstop.cli.options.flags import Flag
from ripstop.model.errors import UsageError
from ripstop.model.fault_injection import FaultKind
from ripstop.model.parsers import integer, read_file

HELP = f"""\
usage: ripstop chaos --plan FILE [--seed N] [--report FILE] [FLAGS]

Injects faults into a running job, one at a time, and prints how long the job took to heal from each.  The job must have
been started with --allow-chaos on every node.  The exit code is 1 if the job did not heal from every fault.

examples
  ripstop chaos --plan=faults.toml --seed=7 --report=chaos.json

experiment
  --plan FILE                 the faults, as TOML (below)
  --seed N                    order, times and targets; the same seed makes the same schedule (a random one, printed)
  --report FILE               also write the results as JSON

the plan, a TOML file
  every = "20s"               mean time between two faults (30s)
  count = 10                  number of faults (each [[fault]] once)
  heal_within = "60s"         a fault that takes longer is not healed (120s)
  [[fault]]
  kind = "worker-kill"        {", ".join(list(FaultKind)[:5])},
                              {", ".join(list(FaultKind)[5:])}
  rank = 3                    of a worker- kind: the rank ("any")
  node = "gpu1"               of another kind: the node; "coordinator": the coordinator's node ("any": any other)
  duration = "10s"            of a stop, slow, oom or fill: how long it lasts (10s)
  percent = 50                of worker-slow: the share of time in which the worker is stopped (50)
  size = "64M"                of disk-fill: space that is taken in the log directory (64M)
{JOB_HELP}"""


def chaos(command: JobClientCommandLine) -> int:
    args = command.args
    if "--plan" not in args:
        raise UsageError("--plan is missing; write ripstop chaos --plan=FILE; --help shows what is in the file")
    name = args.text("--plan")
    try:
        plan = parse_plan(name, read_file(name).decode())
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"--plan={name}: cannot be read: {why}; name a TOML file") from None
    seed = integer("--seed", args.text("--seed", str(random.randrange(10_000))), minimum=0, maximum=2**31 - 1)
    report = Path(args.text("--report")) if "--report" in args else None
    if report is not None and not report.absolute().parent.is_dir():
        raise UsageError(f"--report={report}: {report.absolute().parent} is not a directory; make it first")
    from ripstop.cli.chaos.driver import drive_experiment

    def show(result: Result) -> None:
        if not command.as_json:
            print(render_chaos_result(result), flush=True)

    command.find_job().get("/faults")  # an error if the job or one of its nodes does not allow faults
    if not command.as_json:
        print(f"seed {seed}, {plan.count} faults", flush=True)
    results = drive_experiment(command.find_job, plan, seed, show)
    summary = chaos_summary(results, seed)
    if report is not None:
        report.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    command.print(render_chaos_summary(results), summary)
    return 0 if chaos_has_passed(results) else 1


FLAGS = (*JOB_FLAGS, Flag("--plan", "FILE"), Flag("--seed", "N"), Flag("--report", "FILE"))
COMMANDS = {"chaos": JobCommand(chaos, HELP, FLAGS)}
