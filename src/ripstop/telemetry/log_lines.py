"""The log line of each event.  Pure."""

from ripstop.model import events
from ripstop.model.events import Event

MAX_LISTED = 5  # names in one line

LOG_LINES: dict[type[Event], str] = {
    events.NodeJoined: "node={0.name} joined from {0.host} workers={0.slots}",
    events.NodeRejected: "node={0.name} rejected: {0.why}",
    events.NodeLeaving: "node={0.name} is leaving: {0.why}",
    events.NodeGone: "node={0.name} {0.why}",
    events.NodeHealthy: "node={0.name} is healthy again",
    events.NodeQuarantined: "node={0.name} is in quarantine for {0.seconds:g} s: {0.why}",
    events.NodeReleased: "node={0.name} is out of quarantine",
    events.UnhealthyNodeRetained: "node={0.name} keeps its place: {0.why}",
    events.RankRequestDenied: (
        "round={0.round} node={0.name} has node rank {0.rank}, not the requested {0.requested_rank}: {0.why}"
    ),
    events.RoundFound: "round={0.round} was reported by an agent; waiting for its {0.nodes} nodes",
    events.RoundResumed: "round={0.round} continues: all {0.nodes} nodes have rejoined",
    events.HangDiagnosed: "round={0.round} hangs: {0.why}",
    events.StragglerDetected: "round={0.round} straggler: {0.why}",
    events.StragglerEnded: "round={0.round} node={0.name} has no straggler any more: {0.why}",
    events.JobClosing: "closing: {0.why}",
    events.JobClosed: "closed: {0.outcome}: {0.why}",
    events.StateReplicated: "round={0.round} state={0.state} commit={0.commit} has copies on other nodes",
    events.OperatorAction: "{0.action} by {0.by}: {0.result}",
    events.CheckpointSaved: "round={0.round} rank={0.rank} checkpoint step={0.step} path={0.path}",
    events.StateRestored: (
        "round={0.round} rank={0.rank} restored step={0.step} from={0.source} seconds={0.seconds:.2f}"
    ),
    events.WorkerFailed: "round={0.round} rank={0.rank} pid={0.pid} failed: {0.why}",
    events.TimersMissed: "round={0.round} rank={0.rank} pid={0.pid} {0.why}",
    events.WorkersStopping: "round={0.round} stopping: {0.why}",
    events.StandbyDiscarded: "standby of local_rank={0.local_rank}: {0.why}",
    events.AgentMessage: "{0.text}",
}


def log_line(event: Event) -> str:
    """The event's log line, with `key=value` where possible; empty if the line of another event covers it."""
    match event:
        case events.NodeUnhealthy(name, problems):
            return f"node={name} is unhealthy: {'; '.join(problems)}"
        case events.RoundFormed(round, nodes, world, store, _, why):
            return f"round={round} nodes={len(nodes)} world={world} store={store} why={why!r}"
        case events.ScaleRequested(nodes, accepted, why):
            return f"scale to {nodes} nodes" + ("" if accepted else f" rejected: {why}")
        case events.WarmedUp(start, preloaded, seconds, why, left_out):
            what = f" preloaded={_names_in_log_line(preloaded, ',')}" if preloaded else ""
            without = f" left_out={_names_in_log_line(left_out, '; ')!r}" if left_out else ""
            return f"start={start}{what} seconds={seconds:.2f}{without}" + (f" why={why!r}" if why else "")
        case events.StandbysReady(ready, memory, gpu_memory, seconds, until):
            ahead = f" ahead={until.count('elastic')}" if "elastic" in until else ""
            used = f"memory={sum(memory) >> 20}M gpu_memory={sum(gpu_memory) >> 20}M"
            return f"standbys={len(ready)}{ahead} ready seconds={seconds:.2f} {used}"
        case events.WorkersStarted(round, first, world, restarts, pids, seconds, pause, why, standbys, run_ahead):
            ranks = f"ranks={first}-{first + len(pids) - 1} world={world} restarts={restarts}"
            paused = f" pause_ms={pause * 1e3:.0f}" if pause else ""
            taken = f" standbys={standbys}" if standbys else ""
            taken += f" ahead={run_ahead}" if run_ahead else ""
            return f"round={round} {ranks} spawn_ms={seconds * 1e3:.0f}{taken}{paused} why={why!r}"
        case events.WorkerHangs(round, rank, pid, seconds, sign, where):
            at = f", {where}" if where else ""
            return f"round={round} rank={rank} pid={pid} hangs: {sign} for {seconds:.0f} s{at}"
    return LOG_LINES.get(type(event), "").format(event)


def _names_in_log_line(texts: tuple[str, ...], separator: str) -> str:
    more = len(texts) - MAX_LISTED
    return separator.join((*texts[:MAX_LISTED], *((f"{more} more",) if more > 0 else ())))
