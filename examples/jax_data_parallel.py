"""Data-parallel training with JAX that survives kills and resizes, with checkpoints in a numpy file.

    ripstop run --standalone --nproc-per-node=2 --max-restarts=3 examples/jax_data_parallel.py --checkpoint=/tmp/jax.npz

`import ripstop.jax` lets `jax.distributed.initialize()` find the other workers.  All workers load the newest checkpoint
after it: by then all workers of the previous round have ended.  Process 0 writes a checkpoint every few steps and
renames it into place.  The data of a step depend on the step alone, so the result does not depend on the number of
workers.  A batch has 48 rows, which 1, 2, 3, 4, 6, 8 … devices divide.
"""

import argparse
import os
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import ripstop.jax  # noqa: F401 - registers ripstop with JAX
from ripstop import train

BATCH = 48
FEATURES = 16
Parameters = dict[str, jax.Array]


def main() -> None:
    args = arguments()
    jax.distributed.initialize()
    print(f"worker {jax.process_index()} is process {os.getpid()}\n", end="", flush=True)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, by_rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    loaded, first = resume(args.checkpoint)
    parameters = jax.device_put(loaded, everywhere)
    if jax.process_index() == 0:
        print(f"training from step {first} to {args.steps}, {jax.process_count()} workers", flush=True)
    for step in range(first, args.steps):
        batch = own_rows(step)
        inputs, targets = (jax.make_array_from_process_local_data(by_rows, rows) for rows in batch)
        parameters, loss = update(parameters, inputs, targets)
        train.heartbeat(step + 1)
        time.sleep(args.step_time)
        if (step + 1) % args.save_every == 0 and jax.process_index() == 0:
            save(args.checkpoint, parameters, step + 1)
            print(f"step {step + 1:4d}  loss {float(loss):.4f}  saved", flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=Path, required=True, help="the file to resume from and to write")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10, help="steps between checkpoints")
    parser.add_argument("--step-time", type=float, default=0.05, help="minimum seconds for a step")
    return parser.parse_args()


def own_rows(step: int) -> tuple[np.ndarray, np.ndarray]:
    """This process's part of the batch of a step."""
    inputs = np.random.default_rng(step).standard_normal((BATCH, FEATURES), dtype=np.float32)
    rows = slice(*(BATCH * index // jax.process_count() for index in (jax.process_index(), jax.process_index() + 1)))
    return inputs[rows], inputs[rows].sum(axis=1)


@jax.jit
def update(parameters: Parameters, inputs: jax.Array, targets: jax.Array) -> tuple[Parameters, jax.Array]:
    def loss_of(parameters: Parameters) -> jax.Array:
        hidden = jnp.tanh(inputs @ parameters["first"])
        return jnp.mean((hidden @ parameters["second"] - targets) ** 2)  # over all workers: JAX adds the collectives

    loss, gradients = jax.value_and_grad(loss_of)(parameters)
    return jax.tree.map(lambda value, gradient: value - 0.05 * gradient, parameters, gradients), loss


def resume(path: Path) -> tuple[dict[str, np.ndarray], int]:
    if not path.exists():
        random = np.random.default_rng(0)
        first = random.standard_normal((FEATURES, 32), dtype=np.float32) / 4
        return {"first": first, "second": random.standard_normal(32, dtype=np.float32) / 6}, 0
    with np.load(path) as saved:
        return {name: saved[name] for name in ("first", "second")}, int(saved["step"])


def save(path: Path, parameters: Parameters, step: int) -> None:
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        np.savez(file, step=step, **{name: np.asarray(value) for name, value in parameters.items()})
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    train.checkpoint_saved(step, str(path))


if __name__ == "__main__":
    main()
