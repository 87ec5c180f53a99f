"""Log lines for events.  Pure."""

from ripstop.model.events import (
    AgentMessage,
    CheckpointSaved,
    Event,
    HangDiagnosed,
    JobClosed,
    JobClosing,
    NodeGone,
    NodeHealthy,
    NodeJoined,
    NodeLeaving,
    NodeQuarantined,
    NodeRejected,
    NodeReleased,
    NodeUnhealthy,
    OperatorAction,
    RankRequestDenied,
    RoundFormed,
    RoundFound,
    RoundResumed,
    ScaleRequested,
    TimersMissed,
    UnhealthyNodeRetained,
    WarmedUp,
    WorkerFailed,
    WorkerHangs,
    WorkersStarted,
    WorkersStopping,
)


def log_line(event: Event) -> str:
    """The event's log line, with `key=value` where possible; empty if the line of another event covers it."""
    match event:
        case NodeJoined(name, host, slots):
            return f"node={name} joined from {host} with {slots} slots"
        case NodeRejected(name, why):
            return f"node={name} rejected: {why}"
        case NodeLeaving(name, why):
            return f"node={name} is leaving: {why}"
        case NodeGone(name, why):
            return f"node={name} {why}"
        case NodeUnhealthy(name, problems):
            return f"node={name} is unhealthy: {'; '.join(problems)}"
        case NodeHealthy(name):
            return f"node={name} is healthy again"
        case NodeQuarantined(name, why, seconds):
            return f"node={name} is in quarantine for {seconds:g} s: {why}"
        case NodeReleased(name):
            return f"node={name} is out of quarantine"
        case UnhealthyNodeRetained(name, why):
            return f"node={name} keeps its place: {why}"
        case RoundFormed(round, nodes, world, store, _, why):
            return f"round={round} nodes={len(nodes)} world={world} store={store} why={why!r}"
        case RankRequestDenied(round, name, requested, rank, why):
            return f"round={round} node={name} has node rank {rank}, not the requested {requested}: {why}"
        case RoundFound(round, nodes):
            return f"round={round} was reported by an agent; waiting for its {nodes} nodes"
        case RoundResumed(round, nodes):
            return f"round={round} continues: all {nodes} nodes have rejoined"
        case HangDiagnosed(round, why=why):
            return f"round={round} hangs: {why}"
        case ScaleRequested(nodes, accepted, why):
            return f"scale to {nodes} nodes" + ("" if accepted else f" rejected: {why}")
        case JobClosing(_, why):
            return f"closing: {why}"
        case JobClosed(outcome, why):
            return f"closed: {outcome}: {why}"
        case OperatorAction(action, by, result):
            return f"{action} by {by}: {result}"
        case WarmedUp(start, preloaded, seconds, why):
            what = f" preloaded={','.join(preloaded)}" if preloaded else ""
            return f"start={start}{what} seconds={seconds:.2f}" + (f" why={why!r}" if why else "")
        case WorkersStarted(round, first, world, restarts, pids, seconds, pause, why):
            ranks = f"ranks={first}-{first + len(pids) - 1} world={world} restarts={restarts}"
            paused = f" pause_ms={pause * 1e3:.0f}" if pause else ""
            return f"round={round} {ranks} spawn_ms={seconds * 1e3:.0f}{paused} why={why!r}"
        case CheckpointSaved(round, rank, step, path):
            return f"round={round} rank={rank} checkpoint step={step} path={path}"
        case WorkerFailed(round, rank, pid, why):
            return f"round={round} rank={rank} pid={pid} failed: {why}"
        case TimersMissed(round, rank, pid, why):
            return f"round={round} rank={rank} pid={pid} {why}"
        case WorkerHangs(round, rank, pid, seconds, sign, where):
            return f"round={round} rank={rank} pid={pid} hangs: {sign} for {seconds:.0f} s" + (
                f", {where}" if where else ""
            )
        case WorkersStopping(round, why):
            return f"round={round} stopping: {why}"
        case AgentMessage(text):
            return text
        case _:
            return ""
