"""`torch.distributed.elastic.agent.server` and its `.api`: an agent class to extend, with any rendezvous handler.

`group` has the data classes (`WorkerSpec`, `WorkerGroup`, `RunResult`), `simple` the agent's loop with its hooks, and
`local` (torch's `.local_elastic_agent`) the agent whose workers are local processes.  `health_check` (torch's
`.health_check_server`) answers probes.  These classes are for programs that bring their own `RendezvousHandler` or
override the documented hooks; `elastic_launch` and `ripstop run` use ripstop's engine.
"""

from ripstop.cli.options.monitoring import ENABLE_TIMERS as TORCHELASTIC_ENABLE_FILE_TIMER
from ripstop.compat.agent.group import DEFAULT_ROLE, RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from ripstop.compat.agent.health_check import (
    TORCHELASTIC_HEALTH_CHECK_PORT,
    HealthCheckServer,
    create_healthcheck_server,
)
from ripstop.compat.agent.local import TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, LocalElasticAgent
from ripstop.compat.agent.simple import ElasticAgent, SimpleElasticAgent, _get_fq_hostname
from ripstop.workers.environment import TIMER_FILE as TORCHELASTIC_TIMER_FILE

__all__ = [
    "DEFAULT_ROLE",
    "TORCHELASTIC_ENABLE_FILE_TIMER",
    "TORCHELASTIC_HEALTH_CHECK_PORT",
    "TORCHELASTIC_TIMER_FILE",
    "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT",
    "ElasticAgent",
    "HealthCheckServer",
    "LocalElasticAgent",
    "RunResult",
    "SimpleElasticAgent",
    "Worker",
    "WorkerGroup",
    "WorkerSpec",
    "WorkerState",
    "_get_fq_hostname",
    "create_healthcheck_server",
]
