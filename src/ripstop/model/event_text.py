"""Log lines for events.  Pure."""

from ripstop.model import events
from ripstop.model.events import Event


def log_line(event: Event) -> str:
    """The event's log line, with `key=value` where possible; empty if the line of another event covers it."""
    match event:
        case events.NodeJoined(name, host, slots):
            return f"node={name} joined from {host} with {slots} slots"
        case events.NodeRejected(name, why):
            return f"node={name} rejected: {why}"
        case events.NodeLeaving(name, why):
            return f"node={name} is leaving: {why}"
        case events.NodeGone(name, why):
            return f"node={name} {why}"
        case events.NodeUnhealthy(name, problems):
            return f"node={name} is unhealthy: {'; '.join(problems)}"
        case events.NodeHealthy(name):
            return f"node={name} is healthy again"
        case events.NodeQuarantined(name, why, seconds):
            return f"node={name} is in quarantine for {seconds:g} s: {why}"
        case events.NodeReleased(name):
            return f"node={name} is out of quarantine"
        case events.UnhealthyNodeRetained(name, why):
            return f"node={name} keeps its place: {why}"
        case events.RoundFormed(round, nodes, world, store, _, why):
            return f"round={round} nodes={len(nodes)} world={world} store={store} why={why!r}"
        case events.RankRequestDenied(round, name, requested, rank, why):
            return f"round={round} node={name} has node rank {rank}, not the requested {requested}: {why}"
        case events.RoundFound(round, nodes):
            return f"round={round} was reported by an agent; waiting for its {nodes} nodes"
        case events.RoundResumed(round, nodes):
            return f"round={round} continues: all {nodes} nodes have rejoined"
        case events.HangDiagnosed(round, why=why):
            return f"round={round} hangs: {why}"
        case events.ScaleRequested(nodes, accepted, why):
            return f"scale to {nodes} nodes" + ("" if accepted else f" rejected: {why}")
        case events.JobClosing(_, why):
            return f"closing: {why}"
        case events.JobClosed(outcome, why):
            return f"closed: {outcome}: {why}"
        case events.OperatorAction(action, by, result):
            return f"{action} by {by}: {result}"
        case events.WarmedUp(start, preloaded, seconds, why):
            what = f" preloaded={','.join(preloaded)}" if preloaded else ""
            return f"start={start}{what} seconds={seconds:.2f}" + (f" why={why!r}" if why else "")
        case events.WorkersStarted(round, first, world, restarts, pids, seconds, pause, why):
            ranks = f"ranks={first}-{first + len(pids) - 1} world={world} restarts={restarts}"
            paused = f" pause_ms={pause * 1e3:.0f}" if pause else ""
            return f"round={round} {ranks} spawn_ms={seconds * 1e3:.0f}{paused} why={why!r}"
        case events.CheckpointSaved(round, rank, step, path):
            return f"round={round} rank={rank} checkpoint step={step} path={path}"
        case events.WorkerFailed(round, rank, pid, why):
            return f"round={round} rank={rank} pid={pid} failed: {why}"
        case events.TimersMissed(round, rank, pid, why):
            return f"round={round} rank={rank} pid={pid} {why}"
        case events.WorkerHangs(round, rank, pid, seconds, sign, where):
            return f"round={round} rank={rank} pid={pid} hangs: {sign} for {seconds:.0f} s" + (
                f", {where}" if where else ""
            )
        case events.WorkersStopping(round, why):
            return f"round={round} stopping: {why}"
        case events.AgentMessage(text):
            return text
        case _:
            return ""
