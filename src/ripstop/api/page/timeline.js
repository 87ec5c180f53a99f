// The timeline: rounds as bars, the pause before each (its recovery), the world size, and marks for what happened.
// Drag pans, Ctrl and the wheel zoom, a click selects; the keys are + - 0, the arrows, and [ ] for the items.

import { button, color, context2d, el, find, replace } from "./dom.js";
import { clock, dateTime, duration, plural } from "./format.js";
import { describe } from "./model.js";

const LANES = { rounds: 22, world: 70, marks: 118 }; // the lanes' tops
const HEIGHT = 160;
const LEFT = 66;
const MIN_SPAN_S = 2;

export const PHASES = {
  detect: "phase-detect",
  decide: "phase-decide",
  stop: "phase-stop",
  wait: "phase-wait",
  start: "phase-start",
};
const MARKS = {
  failure: ["bad", "failure"],
  hang: ["hang", "hang"],
  operator: ["accent", "operator"],
  resize: ["resize", "resize"],
  node: ["muted", "node"],
  checkpoint: ["ok", "checkpoint"],
  end: ["ink", "end"],
};

export class Timeline {
  constructor(model, onRank) {
    this.model = model;
    this.onRank = onRank;
    this.view = null; // [from, to]; null: the whole job
    this.selected = null;
    this.items = []; // what is drawn: {x, y, w, h, item}
    this.canvas = el("canvas", {
      tabindex: 0,
      role: "img",
      class: "timeline",
      "aria-label":
        "Timeline of rounds and events. Keys: plus and minus zoom, arrows move, brackets select, 0 shows all.",
      onkeydown: (event) => this.onKey(event),
      onpointerdown: (event) => this.onPointer(event),
      onpointermove: (event) => this.onHover(event),
    });
    this.canvas.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    replace(find("timeline"), this.canvas);
    replace(
      find("timeline-tools"),
      button("−", () => this.zoom(2), { "aria-label": "Zoom out", title: "Zoom out (−)" }),
      button("+", () => this.zoom(0.5), { "aria-label": "Zoom in", title: "Zoom in (+)" }),
      button("10 min", () => this.last(600), { title: "The last 10 minutes" }),
      button("All", () => this.fit(), { title: "The whole job (0)" }),
    );
    const legend = [
      ["round", "running"],
      ["phase-stop", "recovery"],
      ["bad", "failure"],
      ["hang", "hang"],
      ["accent", "operator"],
      ["resize", "resize"],
      ["ok", "checkpoint"],
    ];
    replace(
      find("timeline-legend"),
      legend.map(([name, text]) => el("li", {}, el("i", { class: `swatch ${name}` }), text)),
    );
    new ResizeObserver(() => this.draw()).observe(find("timeline"));
  }

  // view ----------------------------------------------------------------------------------------------------------------

  extent() {
    const first = this.model.events.length
      ? Math.min(this.model.events[0].at, ...[...this.model.rounds.values()].slice(0, 1).map((r) => r.formed))
      : this.model.now() - 60;
    const end = this.model.closed ? this.model.closed.at : this.model.now();
    const span = Math.max(end - first, MIN_SPAN_S);
    return [first - span * 0.01, end + span * 0.02];
  }

  range() {
    return this.view ?? this.extent();
  }

  fit() {
    this.view = null;
    this.draw();
  }

  last(seconds) {
    const end = this.extent()[1];
    this.view = [end - seconds, end];
    this.draw();
  }

  zoom(factor, around = 0.5) {
    const [from, to] = this.range();
    const span = Math.max(MIN_SPAN_S, (to - from) * factor);
    const [first, last] = this.extent();
    if (span >= last - first) return this.fit();
    const middle = from + (to - from) * around;
    this.view = [middle - span * around, middle + span * (1 - around)];
    this.draw();
  }

  pan(share) {
    const [from, to] = this.range();
    const [first, last] = this.extent();
    const shift = Math.max(first - from, Math.min(last - to, (to - from) * share));
    this.view = [from + shift, to + shift];
    this.draw();
  }

  // drawing -------------------------------------------------------------------------------------------------------------

  draw() {
    const width = find("timeline").clientWidth;
    if (!width) return;
    const context = context2d(this.canvas, width, HEIGHT);
    const [from, to] = this.range();
    const x = (at) => LEFT + ((at - from) / (to - from)) * (width - LEFT - 8);
    this.x = x;
    this.items = [];
    const muted = color("muted");
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = muted;
    for (const [name, top] of Object.entries({
      Rounds: LANES.rounds + 12,
      Ranks: LANES.world + 16,
      Events: LANES.marks + 8,
    }))
      context.fillText(name, 0, top);
    this.drawTicks(context, from, to, width);
    context.save();
    context.beginPath();
    context.rect(LEFT, 0, width - LEFT, HEIGHT);
    context.clip();
    this.drawRounds(context, x, to);
    this.drawWorld(context, x, to);
    this.drawMarks(context, x, width);
    context.restore();
  }

  drawTicks(context, from, to, width) {
    const steps = [0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 14400, 43200, 86400, 172800, 604800];
    const wanted = (to - from) / Math.max(2, (width - LEFT) / 110);
    const step = steps.find((value) => value >= wanted) ?? Math.ceil(wanted / 604800) * 604800;
    context.strokeStyle = color("line");
    context.fillStyle = color("muted");
    context.textAlign = "center";
    for (let at = Math.ceil(from / step) * step; at < to; at += step) {
      const at_x = Math.round(this.x(at)) + 0.5;
      context.beginPath();
      context.moveTo(at_x, 16);
      context.lineTo(at_x, HEIGHT);
      context.stroke();
      const text = step >= 86400 ? dateTime(at).slice(5, 10) : step >= 60 ? clock(at).slice(0, 5) : clock(at);
      if (at_x > LEFT + 12 && at_x < width - 24) context.fillText(text, at_x, 7);
    }
    context.textAlign = "left";
  }

  drawRounds(context, x, to) {
    const rounds = [...this.model.rounds.values()];
    const now = this.model.closed?.at ?? this.model.now();
    rounds.forEach((round, index) => {
      const next = rounds[index + 1];
      const start = round.started ?? round.formed;
      const end = round.ended ?? next?.formed ?? now;
      const left = x(start),
        right = Math.max(x(end), x(start) + 2);
      if (right < LEFT || left > x(to)) return;
      const bad = ["application", "infrastructure", "node_lost"].includes(round.cause);
      const before = rounds[index - 1];
      const pauseFrom = before ? (before.ended ?? round.formed) : round.formed;
      this.drawRecovery(context, x, pauseFrom, start, round);
      context.fillStyle = color(round.ended === null && !this.model.closed ? "round-live" : "round");
      rounded(context, left, LANES.rounds, right - left, 24, 4);
      if (round.firstStep && x(round.firstStep) - left > 1) {
        context.fillStyle = color("round-warm");
        rounded(context, left, LANES.rounds, Math.min(x(round.firstStep), right) - left, 24, 4);
      }
      if (round.ended !== null && bad) {
        context.fillStyle = color("bad");
        context.fillRect(Math.max(left, right - 3), LANES.rounds, Math.min(3, right - left), 24);
      }
      if (this.isSelected("round", round.number)) outline(context, left, LANES.rounds, right - left, 24);
      const visible = Math.min(right, this.canvas.clientWidth - 8) - Math.max(left, LEFT);
      context.fillStyle = color("on-round");
      const label = visible > 64 ? `Round ${round.number}` : visible > 18 ? String(round.number) : "";
      if (label) context.fillText(label, Math.max(left, LEFT) + 7, LANES.rounds + 12.5);
      this.items.push({
        x: left,
        y: LANES.rounds,
        w: right - left,
        h: 24,
        item: { type: "round", id: round.number, at: start, round },
      });
    });
  }

  /** The pause before a round, by phase, if they are known and wide enough. */
  drawRecovery(context, x, from, to, round) {
    const left = x(from),
      width = Math.max(x(to) - left, round.recovery ? 3 : 0);
    if (width <= 0) return;
    const y = LANES.rounds + 28;
    if (round.recovery && width > 8) {
      const parts = Object.entries(PHASES).map(([phase, style]) => [style, round.recovery[phase]]);
      const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0) || 1;
      let at = left;
      for (const [name, seconds] of parts) {
        context.fillStyle = color(name);
        context.fillRect(at, y, (width * seconds) / total, 8);
        at += (width * seconds) / total;
      }
    } else {
      context.fillStyle = color(round.recovery ? "phase-stop" : "round-warm");
      context.fillRect(left - (width <= 3 ? 1.5 : 0), y, width, 8);
    }
    this.items.push({
      x: left - 4,
      y: y - 2,
      w: width + 8,
      h: 12,
      item: { type: "round", id: round.number, at: from, round },
    });
  }

  drawWorld(context, x, to) {
    const rounds = [...this.model.rounds.values()].filter((round) => round.world);
    const most = Math.max(1, ...rounds.map((round) => round.world));
    const base = LANES.world + 32;
    const now = this.model.closed?.at ?? this.model.now();
    rounds.forEach((round, index) => {
      const from = round.started ?? round.formed,
        end = round.ended ?? rounds[index + 1]?.formed ?? now;
      const height = Math.max(3, (round.world / most) * 30);
      context.fillStyle = color("world");
      context.fillRect(x(from), base - height, Math.max(1, x(end) - x(from)), height);
      context.fillStyle = color("world-line");
      context.fillRect(x(from), base - height, Math.max(1, x(end) - x(from)), 1.5);
      const visible = Math.min(x(end), this.canvas.clientWidth - 8) - Math.max(x(from), LEFT);
      const changed = index === 0 || rounds[index - 1].world !== round.world;
      if (changed && visible > 34) {
        context.fillStyle = color("ink");
        context.fillText(String(round.world), Math.max(x(from), LEFT) + 5, base - Math.min(height - 2, 20) + 7);
      }
    });
  }

  drawMarks(context, x, width) {
    const y = LANES.marks + 10;
    let last = {}; // the last drawn position of each kind: marks that would cover each other are drawn once
    for (const mark of this.model.marks) {
      const at = x(mark.at);
      if (at < LEFT - 6 || at > width + 6) continue;
      const [name] = MARKS[mark.kind];
      const selected = this.isSelected("mark", mark.event.number);
      if (!selected && at - (last[mark.kind] ?? -99) < 3) continue;
      last[mark.kind] = at;
      context.fillStyle = color(name);
      shape(context, mark.kind, at, y + (mark.kind === "checkpoint" ? 16 : 0));
      const box = mark.kind === "checkpoint" ? [at - 5, y + 12, 10, 8] : [at - 8, y - 9, 16, 18];
      if (selected) outline(context, ...box);
      const item = { type: "mark", id: mark.event.number, at: mark.at, mark };
      this.items.push({ x: box[0], y: box[1], w: box[2], h: box[3], item });
    }
  }

  // selection -----------------------------------------------------------------------------------------------------------

  isSelected(type, id) {
    return this.selected?.type === type && this.selected.id === id;
  }

  select(item) {
    this.selected = item;
    this.showDetail();
    this.draw();
  }

  showDetail() {
    const place = find("timeline-detail"),
      item = this.selected;
    place.hidden = !item;
    if (!item) return;
    const close = button("×", () => this.select(null), { class: "icon", "aria-label": "Close the details" });
    if (item.type === "mark") {
      const { event, label } = item.mark;
      const rank = event.rank !== undefined ? button(`Open rank ${event.rank}`, () => this.onRank(event.rank)) : null;
      replace(
        place,
        el("h3", {}, label),
        el("p", {}, dateTime(event.at), " · ", event.node || "coordinator"),
        el("p", {}, describe(event)),
        rank,
        close,
      );
      return;
    }
    const round = this.model.rounds.get(item.id) ?? item.round;
    const until = round.ended ?? this.model.closed?.at ?? this.model.now();
    const facts = [
      ["Formed", `${dateTime(round.formed)}: ${round.why || "found by a new coordinator"}`],
      ["Size", `${plural(round.nodes, "node")}, ${plural(round.world, "rank")}`],
      ["Ran", duration(until - (round.started ?? round.formed))],
      round.ended === null
        ? ["Ended", this.model.closed ? "with the job" : "runs now"]
        : [
            "Ended",
            `${dateTime(round.ended)}: ${round.cause ? `${round.cause}: ` : ""}${round.endWhy || "with the job"}`,
          ],
      ...round.failures.slice(0, 4).map((failure) => ["Failure", describe(failure)]),
    ];
    replace(
      place,
      el("h3", {}, `Round ${round.number}`),
      close,
      el(
        "dl",
        { class: "facts" },
        facts.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]),
      ),
      round.recovery ? recoveryBar(round.recovery) : null,
    );
  }

  near(event) {
    const box = this.canvas.getBoundingClientRect();
    const px = event.clientX - box.left,
      py = event.clientY - box.top;
    const hits = this.items.filter(
      ({ x, y, w, h }) => px >= x - 2 && px <= x + w + 2 && py >= y - 3 && py <= y + h + 3,
    );
    return hits.sort((a, b) => a.w - b.w)[0]?.item ?? null;
  }

  onHover(event) {
    const item = this.near(event);
    this.canvas.style.cursor = item ? "pointer" : "grab";
    this.canvas.title = !item ? "" : item.type === "mark" ? `${clock(item.at)} ${item.mark.label}` : `Round ${item.id}`;
  }

  onPointer(down) {
    const item = this.near(down);
    const start = down.clientX,
      view = this.range(),
      width = this.canvas.clientWidth - LEFT - 8;
    let moved = false;
    const move = (event) => {
      if (Math.abs(event.clientX - start) < 4 && !moved) return;
      moved = true;
      const [first, last] = this.extent();
      let shift = ((start - event.clientX) / width) * (view[1] - view[0]);
      shift = Math.max(first - view[0], Math.min(last - view[1], shift));
      if (this.view || shift) this.view = [view[0] + shift, view[1] + shift];
      this.draw();
    };
    const up = () => {
      this.canvas.removeEventListener("pointermove", move);
      if (!moved) this.select(item);
    };
    this.canvas.setPointerCapture(down.pointerId);
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", up, { once: true });
  }

  onWheel(event) {
    if (!event.ctrlKey && !event.metaKey) return; // the page scrolls
    event.preventDefault();
    const share =
      (event.clientX - this.canvas.getBoundingClientRect().left - LEFT) / (this.canvas.clientWidth - LEFT - 8);
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.max(0, Math.min(1, share)));
  }

  onKey(event) {
    const keys = {
      "+": () => this.zoom(0.5),
      "=": () => this.zoom(0.5),
      "-": () => this.zoom(2),
      0: () => this.fit(),
      ArrowLeft: () => this.pan(-0.2),
      ArrowRight: () => this.pan(0.2),
      "[": () => this.step(-1),
      "]": () => this.step(1),
      Escape: () => this.select(null),
    };
    if (!keys[event.key] || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    keys[event.key]();
  }

  step(direction) {
    const items = this.items
      .map(({ item }) => item)
      .filter(({ mark }) => mark?.kind !== "checkpoint")
      .sort((a, b) => a.at - b.at);
    const unique = items.filter(
      (item, i) => items.findIndex((other) => other.type === item.type && other.id === item.id) === i,
    );
    const at = unique.findIndex(
      (item) => this.selected && item.type === this.selected.type && item.id === this.selected.id,
    );
    const next =
      unique[
        at < 0 ? (direction > 0 ? 0 : unique.length - 1) : Math.max(0, Math.min(unique.length - 1, at + direction))
      ];
    if (next) this.select(next);
  }
}

function recoveryBar({ node, ...recovery }) {
  const parts = Object.keys(PHASES).map((phase) => [phase, recovery[phase]]);
  const total = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
  const bar = el(
    "div",
    { class: "phases" },
    parts
      .filter(([, seconds]) => seconds > 0)
      .map(([name, seconds]) => {
        const part = el("span", { class: PHASES[name] });
        part.style.flexGrow = seconds / (total || 1);
        return part;
      }),
  );
  return el(
    "div",
    {},
    el("p", {}, `Recovery took ${duration(total)} on the slowest node, ${node}:`),
    bar,
    el(
      "ul",
      { class: "legend" },
      parts.map(([name, seconds]) =>
        el("li", {}, el("i", { class: `swatch ${PHASES[name]}` }), `${name} ${duration(seconds)}`),
      ),
    ),
  );
}

function rounded(context, x, y, w, h, r) {
  context.beginPath();
  context.roundRect(x, y, Math.max(w, 1), h, Math.min(r, w / 2));
  context.fill();
}

function outline(context, x, y, w, h) {
  context.strokeStyle = color("ink");
  context.lineWidth = 2;
  context.strokeRect(x - 1, y - 1, w + 2, h + 2);
  context.lineWidth = 1;
}

function shape(context, kind, x, y) {
  context.beginPath();
  if (kind === "failure")
    [
      [-6, -6],
      [6, -6],
      [0, 6],
    ].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
  else if (kind === "operator")
    [
      [0, -7],
      [7, 0],
      [0, 7],
      [-7, 0],
    ].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
  else if (kind === "checkpoint") context.rect(x - 1, y - 4, 2, 8);
  else if (kind === "end") context.rect(x - 1.5, y - 9, 3, 18);
  else if (kind === "resize")
    [
      [-3, -7],
      [6, 0],
      [-3, 7],
    ].forEach(([dx, dy]) => context.lineTo(x + dx, y + dy));
  else context.arc(x, y, kind === "hang" ? 6 : 3.5, 0, 7);
  context.fill();
}
