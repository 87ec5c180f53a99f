"""`torch.distributed.elastic.agent.server`: an agent as an object to extend, with any torch-style rendezvous handler.

    group       what an agent runs, and how it went: data                           torch's `.api`
    simple      the agent: rendezvous, start, watch, restart; every step a hook     `.api`
    local       the one whose workers are processes of this machine                 `.local_elastic_agent`

It is here for programs that bring a `RendezvousHandler` or override the documented hooks; `elastic_launch` and
`ripstop run` use our own engine instead.
"""

from ripstop.compat.agent.group import DEFAULT_ROLE, RunResult, Worker, WorkerGroup, WorkerSpec, WorkerState
from ripstop.compat.agent.health_check import (
    TORCHELASTIC_HEALTH_CHECK_PORT,
    HealthCheckServer,
    create_healthcheck_server,
)
from ripstop.compat.agent.local import TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT, LocalElasticAgent
from ripstop.compat.agent.simple import ElasticAgent, SimpleElasticAgent, _get_fq_hostname
from ripstop.compat.agent.watchdog import TORCHELASTIC_ENABLE_FILE_TIMER, TORCHELASTIC_TIMER_FILE

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
