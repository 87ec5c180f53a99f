"""The commands that control a running job: `ripstop restart`, `drain`, `scale` and `stop`."""

from ripstop.cli.job_client import JOB_FLAGS, JOB_HELP, JobClient, JobClientCommandLine, JobCommand
from ripstop.cli.options.flags import Flag
from ripstop.model.config import MAX_NODES
from ripstop.model.errors import UsageError
from ripstop.model.parsers import integer

RESTART_HELP = f"""\
usage: ripstop restart [FLAGS]

Restarts all workers of a job in a new round, on the same nodes.  This is not charged to --max-restarts.

examples
  ripstop restart
{JOB_HELP}"""
DRAIN_HELP = f"""\
usage: ripstop drain NODE [FLAGS]

Removes a node.  The node stops its workers and leaves the job.  The other nodes continue.  NODE is a name that
`ripstop status` shows, or an unambiguous prefix of one.

examples
  ripstop drain gpu4
{JOB_HELP}"""
SCALE_HELP = f"""\
usage: ripstop scale N [FLAGS]

Sets the number of nodes that the job uses, within its --nnodes=MIN:MAX.  If more nodes train now, some become
spares.  If fewer train now, spares begin to train, and so do nodes that join later.

examples
  ripstop scale 8
{JOB_HELP}"""
STOP_HELP = f"""\
usage: ripstop stop [--why TEXT] [FLAGS]

Ends a job on all its nodes.  Workers get SIGTERM, and SIGKILL after their --shutdown-timeout.  Agents print a report
and exit with code 1.

examples
  ripstop stop --why="wrong learning rate"

end
  --why TEXT                  the reason, for the report
{JOB_HELP}"""


def restart(command: JobClientCommandLine) -> None:
    _send_control_request(command, command.find_job(), "/restart")


def drain(command: JobClientCommandLine) -> None:
    if not command.positional:
        raise UsageError("NODE is missing; write ripstop drain NODE; ripstop status lists the nodes")
    prefix, job = command.positional[0], command.find_job()
    names = [node["name"] for node in job.get("/members")["members"]]
    matching = [name for name in names if name.startswith(prefix)]
    if len(matching) > 1 and prefix not in names:
        raise UsageError(f"{prefix}: ambiguous: {' or '.join(matching)}; write more of the name")
    _send_control_request(command, job, "/drain", node=matching[0] if len(matching) == 1 else prefix)


def scale(command: JobClientCommandLine) -> None:
    if not command.positional:
        raise UsageError("N, the number of nodes, is missing; write ripstop scale N")
    nodes = integer("N", command.positional[0], minimum=1, maximum=MAX_NODES)
    _send_control_request(command, command.find_job(), "/scale", nodes=nodes)


def stop(command: JobClientCommandLine) -> None:
    _send_control_request(command, command.find_job(), "/stop", why=command.args.text("--why"))


def _send_control_request(command: JobClientCommandLine, job: JobClient, path: str, **body: str | int) -> None:
    reply = job.post(path, **body)
    command.print(reply["done"], reply)


COMMANDS = {
    "restart": JobCommand(restart, RESTART_HELP),
    "drain": JobCommand(drain, DRAIN_HELP, max_positional=1),
    "scale": JobCommand(scale, SCALE_HELP, max_positional=1),
    "stop": JobCommand(stop, STOP_HELP, (*JOB_FLAGS, Flag("--why", "TEXT"))),
}
