// What the page knows of the job: its status, its events, and what follows from them.  No DOM, no requests.
// All collections are bounded, so that a page can stay open for weeks.

const MAX_EVENTS = 10_000;
const MAX_ROUNDS = 2_000;
const MAX_MARKS = 5_000;
const SILENT_S = 15; // or SILENT_STEPS step times, if that is longer
const SILENT_STEPS = 10;
export const STRAGGLER = 1.5; // times the median step time
const RECENT_S = 300;

/** The states of a rank, the worst first. */
export const STATES = {
  failed: "failed",
  hung: "hangs",
  silent: "silent",
  straggler: "straggler",
  starting: "starting",
  running: "running",
  done: "done",
};

export const CATEGORIES = {
  failure: "Failures",
  round: "Rounds",
  node: "Nodes",
  operator: "Operators",
  step: "Progress",
  other: "Other",
};

const CATEGORY = {
  worker_failed: "failure",
  worker_hangs: "failure",
  hang_diagnosed: "failure",
  straggler_detected: "failure",
  timers_missed: "failure",
  budget_charged: "failure",
  budget_refunded: "failure",
  node_unhealthy: "failure",
  node_quarantined: "failure",
  round_formed: "round",
  round_ended: "round",
  round_found: "round",
  round_resumed: "round",
  recovered: "round",
  workers_started: "round",
  workers_stopping: "round",
  workers_stopped: "round",
  workers_succeeded: "round",
  job_closing: "round",
  job_closed: "round",
  node_joined: "node",
  node_rejected: "node",
  node_leaving: "node",
  node_gone: "node",
  node_healthy: "node",
  node_released: "node",
  unhealthy_node_retained: "node",
  rank_request_denied: "node",
  warmed_up: "node",
  agent_ended: "node",
  operator_action: "operator",
  fault_injected: "operator",
  fault_ended: "operator",
  scale_requested: "operator",
  first_step: "step",
  steps_done: "step",
  checkpoint_saved: "step",
};

export const category = (event) =>
  event.kind === "node_gone" && event.lost ? "failure" : CATEGORY[event.kind] || "other";

export class Model {
  constructor() {
    this.status = null;
    this.statusAt = 0; // by this machine's clock
    this.usage = null;
    this.gpus = new Map(); // by node
    this.history = null;
    this.link = "connecting";
    this.linkError = "";
    this.clockOffset = 0; // the coordinator's clock minus ours
    this.events = []; // in the order received
    this.seen = new Set();
    this.rounds = new Map();
    this.marks = []; // of the timeline
    this.flags = new Map(); // ranks of the current round: "failed" or "hung", and why
    this.ranks = [];
    this.median = null; // step time
    this.ownMedian = null; // of the times that ranks need without waiting for others
    this.closed = null; // the event job_closed
    this.lastFailure = null;
    this.lastLost = 0;
    this.version = 0; // grows with every change of the events
  }

  now() {
    return Date.now() / 1000 + this.clockOffset;
  }

  // events ------------------------------------------------------------------------------------------------------------

  /** Add events; those that are known, from before a reconnection, are skipped.  Returns the new ones. */
  add(events) {
    const fresh = [];
    for (const event of events) {
      const key = `${event.node} ${event.seq} ${event.at}`;
      if (this.seen.has(key)) continue;
      this.seen.add(key);
      this.events.push(event);
      fresh.push(event);
      this.apply(event);
    }
    if (this.events.length > MAX_EVENTS * 1.2) this.trim();
    if (fresh.length) this.version += 1;
    if (this.flagged) this.rebuildRanks();
    this.flagged = false;
    return fresh;
  }

  trim() {
    for (const event of this.events.splice(0, this.events.length - MAX_EVENTS)) {
      this.seen.delete(`${event.node} ${event.seq} ${event.at}`);
    }
    if (this.marks.length > MAX_MARKS) this.marks.splice(0, this.marks.length - MAX_MARKS);
    while (this.rounds.size > MAX_ROUNDS) this.rounds.delete(this.rounds.keys().next().value);
  }

  forget() {
    [this.rounds, this.marks, this.closed, this.lastFailure, this.lastLost] = [new Map(), [], null, null, 0];
  }

  round(number, at) {
    let round = this.rounds.get(number);
    if (!round) {
      round = {
        number,
        formed: at,
        ended: null,
        started: null,
        firstStep: null,
        cause: "",
        why: "",
        endWhy: "",
        nodes: 0,
        world: 0,
        failures: [],
        recovery: null,
      };
      this.rounds.set(number, round);
    }
    return round;
  }

  mark(kind, event, label) {
    this.marks.push({ kind, at: event.at, label, event });
  }

  apply(event) {
    switch (event.kind) {
      case "round_formed": {
        if (this.closed && event.at > this.closed.at) this.forget(); // another job at the same address
        const before = this.rounds.get(event.round - 1);
        const round = this.round(event.round, event.at);
        Object.assign(round, { formed: event.at, why: event.why, nodes: event.nodes.length, world: event.world_size });
        if (before && before.world && before.world !== round.world)
          this.mark("resize", event, `${before.world} → ${round.world} ranks`);
        this.flags.clear();
        break;
      }
      case "round_ended": {
        const round = this.round(event.round, event.at);
        Object.assign(round, { ended: event.at, cause: event.cause, endWhy: event.why });
        break;
      }
      case "workers_started": {
        const round = this.round(event.round, event.at);
        round.started = Math.max(round.started ?? 0, event.at);
        break;
      }
      case "recovered": {
        const round = this.round(event.round, event.at);
        const { detect, decide, stop, wait = 0, start } = event;
        const old = round.recovery;
        if (!old || recoverySeconds(event) > recoverySeconds(old))
          round.recovery = { detect, decide, stop, wait, start, at: event.at, node: event.node };
        break;
      }
      case "first_step": {
        const round = this.round(event.round, event.at);
        if (round.firstStep === null || event.at < round.firstStep) round.firstStep = event.at;
        break;
      }
      case "worker_failed":
        this.round(event.round, event.at).failures.push(event);
        this.flag(event, "failed", event.why);
        this.lastFailure = event;
        this.mark("failure", event, `rank ${event.rank} failed`);
        break;
      case "worker_hangs":
        this.round(event.round, event.at).failures.push(event);
        this.flag(event, "hung", `${event.sign} for ${Math.round(event.seconds)} s`);
        this.lastFailure = event;
        this.mark("hang", event, `rank ${event.rank} hangs`);
        break;
      case "node_gone":
        this.mark(event.lost ? "failure" : "node", event, `node ${event.name} ${event.lost ? "lost" : "left"}`);
        if (event.lost) this.lastLost = event.at;
        break;
      case "node_joined":
        this.mark("node", event, `node ${event.name} joined`);
        break;
      case "node_quarantined":
      case "node_unhealthy":
        this.mark(
          "failure",
          event,
          `node ${event.name} ${event.kind === "node_unhealthy" ? "unhealthy" : "quarantined"}`,
        );
        break;
      case "operator_action":
        this.mark("operator", event, `${event.action} by ${event.by}`);
        break;
      case "fault_injected":
        this.mark("operator", event, describe(event));
        break;
      case "checkpoint_saved":
        this.mark("checkpoint", event, `checkpoint of step ${event.step}`);
        break;
      case "round_resumed":
        this.mark("node", event, "the coordinator was replaced; the round continues");
        break;
      case "job_closed":
        if (!event.node) {
          this.closed = event;
          const last = [...this.rounds.values()].at(-1);
          if (last && last.ended === null) last.ended = event.at;
          this.mark("end", event, `job ${event.outcome}`);
        }
    }
  }

  flag(event, state, why) {
    const current = Math.max(0, ...this.rounds.keys());
    if (event.round !== current) return;
    this.flags.set(event.rank, { state, why });
    this.flagged = true;
  }

  // status and usage --------------------------------------------------------------------------------------------------

  setStatus(status) {
    this.status = status;
    this.statusAt = Date.now() / 1000;
    this.rebuildRanks();
  }

  setUsage(usage) {
    this.usage = usage;
    this.gpus = new Map();
    usage.gpus.node.forEach((node, i) => {
      const { index, utilisation, memory_used, memory_total, temperature, power } = usage.gpus;
      const gpu = {
        index: index[i],
        utilisation: utilisation[i],
        used: memory_used[i],
        total: memory_total[i],
        temperature: temperature[i],
        power: power[i],
      };
      if (this.gpus.has(node)) this.gpus.get(node).push(gpu);
      else this.gpus.set(node, [gpu]);
    });
    this.clockOffset = usage.at - Date.now() / 1000;
    this.rebuildRanks();
  }

  /** One record a rank, from the status and the latest usage. */
  rebuildRanks() {
    const { status, usage } = this;
    if (!status) return;
    const at = new Map();
    const columns = usage && usage.round === status.round ? usage.ranks : null;
    columns?.rank.forEach((rank, index) => at.set(rank, index));
    const times = columns ? columns.step_time.filter((time) => time !== null).sort((a, b) => a - b) : [];
    this.median = times.length ? times[times.length >> 1] : null;
    const own = columns ? columns.rank.map((_, i) => columns.own_time?.[i] ?? columns.step_time[i]) : [];
    const owned = own.filter((time) => time !== null).sort((a, b) => a - b);
    this.ownMedian = owned.length ? owned[(owned.length - 1) >> 1] : null;
    const stragglers = new Set((status.stragglers ?? []).flatMap((found) => found.ranks));
    const silentAfter = Math.max(SILENT_S, SILENT_STEPS * (this.median || 0));
    const ranks = [];
    for (const node of status.nodes) {
      if (node.first_rank < 0) continue;
      for (let local = 0; local < node.slots; local++) {
        const number = node.first_rank + local;
        const index = at.get(number);
        const has = index !== undefined;
        const record = {
          rank: number,
          local,
          node: node.name,
          host: node.host,
          nodeState: node.state,
          role: node.role,
          pid: node.pids[local] ?? null,
          step: has ? columns.step[index] : null,
          stepTime: has ? columns.step_time[index] : null,
          ownTime: has ? own[index] : null,
          age: has ? columns.age[index] : null,
          memory: has ? columns.memory[index] : null,
          cpu: has ? columns.cpu[index] : null,
          state: "running",
          why: "",
        };
        const flag = this.flags.get(number);
        if (flag) [record.state, record.why] = [flag.state, flag.why];
        else if (node.state === "done") record.state = "done";
        else if (record.pid === null) record.state = "starting";
        else if (record.age !== null && record.age > silentAfter) {
          record.state = "silent";
          record.why = `no heartbeat for ${Math.round(record.age)} s`;
        } else if (stragglers.has(number) || (this.median && record.stepTime > STRAGGLER * this.median)) {
          record.state = "straggler";
          record.why = `${(record.ownTime / this.ownMedian).toFixed(1)} times the median step time`;
        }
        ranks.push(record);
      }
    }
    this.ranks = ranks.sort((a, b) => a.rank - b.rank);
  }

  gpusOf(node) {
    return this.gpus.get(node) ?? [];
  }

  stepsPerSecond() {
    return this.median ? 1 / this.median : null;
  }

  latestStep() {
    const steps = this.ranks.map((rank) => rank.step).filter((step) => step !== null);
    return steps.length ? steps.reduce((a, b) => Math.max(a, b)) : null;
  }

  // is it fine? -------------------------------------------------------------------------------------------------------

  /** The level (ok, warn, bad, idle), the answer, the reason, and problems with the ranks they concern. */
  verdict() {
    const { status } = this;
    if (this.closed || status?.phase === "closed") return this.endVerdict();
    if (this.link !== "live" && this.link !== "connecting") {
      const known = status ? `The last known phase is ${status.phase}.` : "";
      return verdict(
        "idle",
        "No connection",
        `The page cannot reach the coordinator: ${this.linkError || "no reply"}. It keeps trying. ${known}`,
      );
    }
    if (!status) return verdict("idle", "Connecting", "Waiting for the job's status.");
    if (status.phase === "closing") return verdict("bad", "Ending", status.why);
    if (status.phase === "recovering")
      return verdict(
        "warn",
        "Coordinator replaced",
        `Training goes on; waiting for the nodes to reconnect. ${status.why}`,
      );
    if (status.phase === "gathering")
      return verdict(status.round ? "warn" : "idle", status.round ? "Recovering" : "Waiting for nodes", status.why);
    return this.runningVerdict();
  }

  endVerdict() {
    const outcome = this.closed?.outcome || "closed";
    const good = outcome === "succeeded";
    return verdict(
      good ? "ok" : "bad",
      good ? "Finished" : `Job ${outcome}`,
      this.closed?.why || this.status?.why || "",
    );
  }

  runningVerdict() {
    const { status } = this;
    const problems = [];
    const list = (state, text) => {
      const found = this.ranks.filter((rank) => rank.state === state);
      if (found.length)
        problems.push({
          level: state === "straggler" ? "warn" : "bad",
          state,
          ranks: found.map((r) => r.rank),
          text: text(found),
        });
    };
    const who = (found) => (found.length === 1 ? `Rank ${found[0].rank}` : `${found.length} ranks`);
    list("failed", (found) => `${who(found)} failed`);
    list("hung", (found) => `${who(found)} ${found.length === 1 ? "hangs" : "hang"}`);
    list("silent", (found) => `${who(found)}: no heartbeat for ${Math.round(Math.max(...found.map((r) => r.age)))} s`);
    list("straggler", (found) =>
      found.length === 1
        ? `Rank ${found[0].rank} takes ${(found[0].ownTime / this.ownMedian).toFixed(1)} times the median step time`
        : `${found.length} ranks take more than ${STRAGGLER} times the median step time`,
    );
    for (const node of status.nodes)
      if (["unhealthy", "quarantined", "absent"].includes(node.state) || node.unfit)
        problems.push({ level: "warn", node: node.name, text: `Node ${node.name}: ${node.unfit || node.state}` });
    const left = status.max_restarts - status.charged;
    if (left <= 0 && status.max_restarts > 0)
      problems.push({ level: "warn", text: "The restart budget is spent: the next failure ends the job" });
    const bad = problems.some((problem) => problem.level === "bad");
    const heading = problems.length === 1 ? "One problem:" : `${problems.length} problems:`;
    if (bad) return verdict("bad", "Needs attention", heading, problems);
    if (problems.length) return verdict("warn", "Running with problems", heading, problems);
    const failedAt = Math.max(this.lastFailure?.at ?? 0, this.lastLost);
    const since = this.now() - failedAt;
    if (failedAt && since < RECENT_S)
      return verdict(
        "ok",
        "Running again",
        `Recovered from a failure ${Math.round(since)} s ago: ${status.why}.`,
        problems,
      );
    const reporting = this.ranks.filter((rank) => rank.step !== null).length;
    const steps = reporting
      ? `All ${reporting === this.ranks.length ? "" : `${reporting} reporting `}ranks make steps.`
      : "The training script reports no steps.";
    return verdict("ok", "Running fine", steps, problems);
  }
}

/** Jobs of older versions send no `wait`. */
const recoverySeconds = ({ detect, decide, stop, wait = 0, start }) => detect + decide + stop + wait + start;

const verdict = (level, answer, reason, problems = []) => ({ level, answer, reason, problems });

// events as text --------------------------------------------------------------------------------------------------------

const TEXTS = {
  node_joined: (e) => `node ${e.name} joined from ${e.host} with ${e.slots} slots`,
  node_rejected: (e) => `node ${e.name} rejected: ${e.why}`,
  node_leaving: (e) => `node ${e.name} is leaving: ${e.why}`,
  node_gone: (e) => `node ${e.name} ${e.why}`,
  node_unhealthy: (e) => `node ${e.name} is unhealthy: ${e.problems.join("; ")}`,
  node_healthy: (e) => `node ${e.name} is healthy again`,
  node_quarantined: (e) => `node ${e.name} is in quarantine for ${e.seconds} s: ${e.why}`,
  node_released: (e) => `node ${e.name} is out of quarantine`,
  unhealthy_node_retained: (e) => `node ${e.name} keeps its place: ${e.why}`,
  round_formed: (e) => `round ${e.round}: ${e.nodes.length} nodes, ${e.world_size} ranks: ${e.why}`,
  round_ended: (e) => `round ${e.round} ended (${e.cause}): ${e.why}`,
  round_found: (e) => `round ${e.round} was found; waiting for its ${e.nodes} nodes`,
  round_resumed: (e) => `round ${e.round} continues: all ${e.nodes} nodes have rejoined`,
  budget_charged: (e) => `restart budget: ${e.used} of ${e.limit} used: ${e.why}`,
  budget_refunded: (e) => `restart budget: charge of round ${e.round} taken back, node ${e.name} was lost`,
  hang_diagnosed: (e) => `round ${e.round} hangs: ${e.why}`,
  straggler_detected: (e) => `straggler: ${e.why}`,
  straggler_ended: (e) => `no straggler on node ${e.name} any more: ${e.why}`,
  scale_requested: (e) => `scale to ${e.nodes} nodes${e.accepted ? "" : ` rejected: ${e.why}`}`,
  job_closing: (e) => `closing (${e.outcome}): ${e.why}`,
  job_closed: (e) => `closed (${e.outcome}): ${e.why}`,
  operator_action: (e) => `${e.action} by ${e.by}: ${e.result}`,
  fault_injected: (e) =>
    `injected fault ${e.fault}${e.rank >= 0 ? ` of rank ${e.rank}` : ""} (pid ${e.pid})${e.seconds ? ` for ${e.seconds} s` : ""}`,
  fault_ended: (e) => `injected fault ${e.fault} is over${e.why ? `: ${e.why}` : ""}`,
  warmed_up: (e) => `workers can start (${e.start}) after ${e.seconds.toFixed(2)} s`,
  workers_started: (e) => `round ${e.round}: ranks ${e.first_rank}–${e.first_rank + e.pids.length - 1} run: ${e.why}`,
  recovered: (e) => `round ${e.round} recovered in ${(recoverySeconds(e) * 1000).toFixed(0)} ms`,
  first_step: (e) => `round ${e.round}: first step ${e.step} after ${e.seconds.toFixed(2)} s`,
  steps_done: (e) => `round ${e.round}: steps ${e.first} to ${e.last} in ${e.seconds.toFixed(1)} s`,
  checkpoint_saved: (e) => `rank ${e.rank} saved step ${e.step}${e.path ? ` to ${e.path}` : ""}`,
  worker_failed: (e) => `rank ${e.rank} (pid ${e.pid}) failed: ${e.why}`,
  worker_hangs: (e) =>
    `rank ${e.rank} (pid ${e.pid}) hangs: ${e.sign} for ${Math.round(e.seconds)} s${e.where ? `, ${e.where}` : ""}`,
  timers_missed: (e) => `rank ${e.rank}: ${e.why}`,
  workers_succeeded: (e) => `round ${e.round}: all workers of this node exited 0`,
  workers_stopping: (e) => `round ${e.round}: stopping: ${e.why}`,
  workers_stopped: (e) => `round ${e.round}: stopped in ${e.seconds.toFixed(2)} s`,
  agent_message: (e) => e.text,
  agent_ended: (e) => `agent exits with code ${e.code}: ${e.why}`,
};

/** An event's text; an unknown kind shows its fields. */
export function describe(event) {
  try {
    if (TEXTS[event.kind]) return TEXTS[event.kind](event);
  } catch {
    // a newer version's field has another type
  }
  const { number, v, seq, at, node, kind, ...fields } = event;
  return Object.entries(fields)
    .map(([name, value]) => `${name}=${value}`)
    .join(" ");
}
