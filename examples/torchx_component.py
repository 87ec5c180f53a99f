"""A TorchX component: `ripstop run` instead of torchrun, on any scheduler of TorchX.

    torchx run -s local_cwd examples/torchx_component.py:ripstop -j 1x2 --script train.py -- --lr 0.1

Each replica is a node and runs one agent.  On several nodes, give the replicas a secret: RIPSTOP_TOKEN, from the image
or from a secret of the scheduler.
"""

from shlex import join

import torchx
from torchx import specs


def ripstop(
    *script_args: str,
    script: str,
    j: str = "1x2",
    max_restarts: int = 3,
    image: str = torchx.IMAGE,
    cpu: int = 2,
    gpu: int = 0,
    memMB: int = 1024,  # noqa: N803 - TorchX's name
    rdzv_port: int = 29400,
) -> specs.AppDef:
    """Run a training script with ripstop.

    Args:
        script_args: arguments of the script
        script: the training script
        j: nodes and workers of each node, as NxW or MIN:MAXxW
        max_restarts: restarts of the whole job
        image: the image, with ripstop and the script
        cpu: CPUs of each node
        gpu: GPUs of each node
        memMB: memory of each node
        rdzv_port: the coordinator's port on the first node
    """
    nodes, _, workers = j.rpartition("x")
    most = int(nodes.rpartition(":")[2])
    flags = [f"--nproc-per-node={workers}", f"--max-restarts={max_restarts}"]
    if most == 1:
        flags.append("--standalone")
    else:
        host = f"$${{{specs.macros.rank0_env}:=localhost}}"  # the shell of the replica knows it
        flags += [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={host}:{rdzv_port}"]
        flags += [f"--rdzv-id={specs.macros.app_id}", f"--node-rank={specs.macros.replica_id}"]
    role = specs.Role(
        name="train",
        image=image,
        entrypoint="bash",
        args=["-c", f"exec ripstop run {' '.join(flags)} {join((script, *script_args))}"],
        num_replicas=most,
        resource=specs.Resource(cpu=cpu, gpu=gpu, memMB=memMB),
    )
    return specs.AppDef(name="ripstop", roles=[role])
