"""What a round's workers are started with: environment, program, files and bindings; and the standbys of a node."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import Struct

from ripstop.diagnostics.stack_dump import DUMP_SIGNAL
from ripstop.logs.directory import RoundLogs
from ripstop.model.config import RunConfig, Script, StragglerMode
from ripstop.model.fault_injection import EXIT_SIGNAL
from ripstop.model.round import Place
from ripstop.workers.environment import STANDBY, local_environment, worker_environment
from ripstop.workers.spawner import ProcessSpec, Spawner, WorkerSpawner

if TYPE_CHECKING:
    from ripstop.workers.standby import Standbys


class WorkerSpecs(Struct, frozen=True):
    """`socket` is the path on which workers report to the agent."""

    config: RunConfig
    environ: Mapping[str, str]
    socket: str

    def environment(self, place: Place, local_rank: int, error_file: Path) -> dict[str, str]:
        return worker_environment(
            self.environ,
            place,
            local_rank,
            run_id=self.config.run_id,
            role=self.config.role,
            max_restarts=self.config.budget.max_restarts,
            error_file=error_file,
            earlier_restarts=self.config.earlier_restarts,
            signals=self.config.signals,
            virtual_local_rank=self.config.virtual_local_rank,
            timer_pipe=self.config.timer_pipe,
            socket=self.socket,
            finds_stragglers=self.config.stragglers.mode is not StragglerMode.OFF,
        )

    def process(self, place: Place, local_rank: int, logs: RoundLogs, recorder: str) -> ProcessSpec:
        """`recorder` is the path at which the worker serves its flight recorder; empty: it does not."""
        env = self.environment(place, local_rank, logs.error_file(local_rank))
        env |= logs.environment(local_rank)
        binding = self.config.bindings[local_rank] if self.config.bindings else None
        needs_stacks = self.config.hang_timeout or self.config.timer_pipe
        stacks = (DUMP_SIGNAL, logs.stack_file(local_rank)) if needs_stacks else None
        outputs = logs.stdout(local_rank), logs.stderr(local_rank)
        exit_signal = EXIT_SIGNAL if self.config.allow_chaos else 0
        return ProcessSpec(env, self.config.entry, *outputs, binding, stacks, recorder, local_rank, exit_signal)

    def standby(self, place: Place, local_rank: int, directory: Path) -> ProcessSpec:
        """The worker that a standby shadows while it runs the script: without its store and its log files."""
        env = self.environment(place, local_rank, directory / "error.json") | {STANDBY: "1", "MASTER_PORT": "0"}
        output = directory / "output.log"
        return ProcessSpec(env, self.config.entry, output, output, local_rank=local_rank)


def open_standbys_with_specs(
    config: RunConfig,
    spawner: WorkerSpawner,
    environ: Mapping[str, str],
    record: Callable[..., None],
    shadowed_spec: Callable[[int], ProcessSpec],
) -> "Standbys | None":
    """`shadowed_spec`: the worker of the current round that the standby of this local rank shadows."""
    if not config.standby.count or not isinstance(spawner, Spawner):
        return None
    from ripstop.workers.standby import Place as StandbyPlace
    from ripstop.workers.standby import Standbys

    places = [
        StandbyPlace(
            local_environment(environ, config.slots, rank, virtual_local_rank=config.virtual_local_rank),
            config.bindings[rank] if config.bindings else None,
        )
        for rank in range(config.standby.count)
    ]
    script = Path(config.entry.path) if isinstance(config.entry, Script) else None
    return Standbys(spawner, config.standby, places, record, script, shadowed_spec)
