"""For JAX scripts: after `import ripstop.jax`, `jax.distributed.initialize()` needs no arguments.

JAX asks the subclasses of its `ClusterEnv` for the coordinator's address, the number of processes and the process's own
number.  Rules: (1) the class here stands first in JAX's list: inside Slurm, MPI or Kubernetes, JAX would take the
starter's variables, which describe agents and not workers; (2) outside a worker, the import changes nothing;
(3) a worker ends at SIGTERM, unless the user wants otherwise: JAX's preemption service would catch the signal and let
the worker run on, so that every restart would wait for the shutdown timeout.

JAX's coordinator is a server inside rank 0.  It listens on the port after MASTER_PORT, which the agent has reserved
(`workers/store.py`).  Imports nothing else of ripstop.
"""

import os

import jax
from jax._src.clusters import ClusterEnv  # not public, and the only way to register a cluster

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class RipstopCluster(ClusterEnv):  # type: ignore[misc]
    name = "ripstop"

    @classmethod
    def is_env_present(cls) -> bool:
        return all(name in os.environ for name in _VARIABLES)

    @classmethod
    def get_coordinator_address(
        cls, timeout_secs: int | None = None, override_coordinator_port: str | None = None
    ) -> str:
        host = os.environ["MASTER_ADDR"]
        port = override_coordinator_port or int(os.environ["MASTER_PORT"]) + 1
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    @classmethod
    def get_process_count(cls) -> int:
        return int(os.environ["WORLD_SIZE"])

    @classmethod
    def get_process_id(cls) -> int:
        return int(os.environ["RANK"])

    @classmethod
    def get_local_process_id(cls) -> int | None:
        """The only GPU that this worker uses; None: all GPUs, if it is the node's only worker."""
        return int(os.environ["LOCAL_RANK"]) if int(os.environ["LOCAL_WORLD_SIZE"]) > 1 else None


def _put_before_jax_clusters() -> None:
    types = ClusterEnv._cluster_types
    types.remove(RipstopCluster)
    types.insert(0, RipstopCluster)


def _disable_jax_preemption_service() -> None:
    if "JAX_ENABLE_PREEMPTION_SERVICE" not in os.environ and hasattr(jax.config, "jax_enable_preemption_service"):
        jax.config.update("jax_enable_preemption_service", False)


_put_before_jax_clusters()
if RipstopCluster.is_env_present():
    _disable_jax_preemption_service()
