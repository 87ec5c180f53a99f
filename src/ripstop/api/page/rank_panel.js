// The panel of one rank: where it runs, what it does and uses, its log, its stack and its collectives.

import { drain } from "./actions.js";
import { get } from "./api.js";
import { button, el, find, replace } from "./dom.js";
import { age, bytes, clock, duration, percent } from "./format.js";
import { LogView } from "./log_view.js";
import { STATES, describe } from "./model.js";
import { renderStack } from "./stacks.js";

const TABS = { overview: "Overview", log: "Log", stack: "Stack" };

export class RankPanel {
  constructor(model) {
    this.model = model;
    this.rank = null;
    this.tab = "overview";
    this.cpu = null; // the last CPU time: [pid, seconds, at]
    this.panel = find("panel");
    this.panel.addEventListener("keydown", (event) => event.key === "Escape" && this.close());
  }

  open(rank, tab = this.tab) {
    if (this.rank === null) this.opener = document.activeElement;
    this.log?.stop();
    [this.rank, this.cpu, this.stack] = [rank, null, null];
    const tabs = el(
      "div",
      { class: "tabs", role: "tablist", "aria-label": "Parts of the rank" },
      Object.entries(TABS).map(([name, text]) =>
        button(text, () => this.show(name), {
          role: "tab",
          id: `tab-${name}`,
          "aria-controls": "panel-body",
          onkeydown: (event) => this.onTabKey(event),
        }),
      ),
    );
    this.title = el("h2", { id: "panel-title", tabindex: -1 }, `Rank ${rank}`);
    this.body = el("div", { id: "panel-body", role: "tabpanel", tabindex: 0 });
    replace(
      this.panel,
      el(
        "div",
        { class: "head" },
        this.title,
        button("‹", () => this.step(-1), { class: "icon", "aria-label": "Previous rank" }),
        button("›", () => this.step(1), { class: "icon", "aria-label": "Next rank" }),
        button("×", () => this.close(), { class: "icon", "aria-label": "Close the panel" }),
      ),
      tabs,
      this.body,
    );
    this.panel.hidden = false;
    document.body.classList.add("has-panel");
    this.show(tab);
    this.title.focus({ preventScroll: true });
  }

  close() {
    this.log?.stop();
    this.rank = null;
    this.panel.hidden = true;
    document.body.classList.remove("has-panel");
    this.opener?.focus?.();
  }

  step(by) {
    const ranks = this.model.ranks.map((rank) => rank.rank);
    const next = ranks[ranks.indexOf(this.rank) + by];
    if (next !== undefined) this.open(next);
  }

  onTabKey(event) {
    const names = Object.keys(TABS);
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    this.show(names[(names.indexOf(this.tab) + by + names.length) % names.length]);
    find(`tab-${this.tab}`).focus();
  }

  show(tab) {
    if (tab !== "log") {
      this.log?.stop();
      this.log = null;
    }
    this.tab = tab;
    for (const name of Object.keys(TABS)) {
      find(`tab-${name}`).setAttribute("aria-selected", String(name === tab));
      find(`tab-${name}`).tabIndex = name === tab ? 0 : -1;
    }
    this.body.setAttribute("aria-labelledby", `tab-${tab}`);
    this.body.className = `body on-${tab}`;
    this.parts = null;
    if (tab === "log") {
      this.log = new LogView(this.rank);
      replace(this.body, this.log.element);
    } else if (tab === "stack") this.showStack();
    else this.update();
  }

  /** Called when the model may have changed.  The buttons stay, and with them the focus. */
  update() {
    if (this.rank === null || this.tab !== "overview") return;
    const { model } = this;
    if (this.parts && this.shown[0] === model.ranks && this.shown[1] === model.version) return;
    this.shown = [model.ranks, model.version];
    const rank = this.model.ranks.find((record) => record.rank === this.rank);
    if (!rank) {
      replace(this.body, el("p", { class: "empty" }, `There is no rank ${this.rank} in the current round.`));
      this.parts = null;
      return;
    }
    if (this.parts?.node !== rank.node) this.makeParts(rank);
    const { ownMedian } = this.model;
    const against =
      rank.ownTime !== null && ownMedian ? ` (${(rank.ownTime / ownMedian).toFixed(2)} × the median)` : "";
    const facts = [
      [
        "State",
        [el("i", { class: `swatch state-${rank.state}` }), STATES[rank.state], rank.why ? `: ${rank.why}` : ""],
      ],
      ["Node", rank.node],
      ["Host", rank.host],
      ["Pid", String(rank.pid ?? "not reported")],
      ["Local rank", String(rank.local)],
      ["Step", String(rank.step ?? "not reported")],
      ["Step time", rank.stepTime === null ? "not reported" : duration(rank.stepTime) + against],
      ["Heartbeat", rank.age === null ? "none" : `${age(rank.age)} ago`],
      ["Memory", bytes(rank.memory)],
      ["CPU", this.cpuShare(rank)],
    ];
    replace(
      this.parts.facts,
      facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]),
    );
    replace(this.parts.gpus, this.gpus(rank));
    const events = this.model.events
      .filter((event) => event.rank === this.rank)
      .slice(-6)
      .reverse();
    replace(
      this.parts.events,
      events.length
        ? el(
            "ol",
            { class: "events small" },
            events.map((event) => el("li", {}, el("time", {}, clock(event.at)), el("span", {}, describe(event)))),
          )
        : el("p", { class: "hint" }, "None."),
    );
  }

  makeParts(rank) {
    this.parts = { node: rank.node, facts: el("dl", { class: "facts" }), gpus: el("div"), events: el("div") };
    replace(
      this.body,
      this.parts.facts,
      el("h3", {}, "GPU"),
      this.parts.gpus,
      el("h3", {}, "Its latest events"),
      this.parts.events,
      el(
        "div",
        { class: "buttons" },
        button("Take a stack", () => this.show("stack")),
        button("Read the log", () => this.show("log")),
        button(`Drain node ${rank.node}`, () => drain(this.model, rank.node), { class: "danger-outline" }),
      ),
    );
  }

  gpus(rank) {
    const gpus = this.model.gpusOf(rank.node);
    const slots = this.model.ranks.filter((other) => other.node === rank.node).length;
    const own = gpus.length >= slots ? gpus.slice(rank.local, rank.local + 1) : gpus; // else nobody knows which is whose
    if (!own.length) return el("p", { class: "hint" }, "No GPU is reported. ripstop[gpu] reads them.");
    return el(
      "dl",
      { class: "facts" },
      own.map((gpu) => [
        el("dt", {}, `GPU ${gpu.index}`),
        el(
          "dd",
          {},
          `${percent(gpu.utilisation)} busy, ${bytes(gpu.used)} of ${bytes(gpu.total)}, ${gpu.temperature ?? "–"} °C, ${gpu.power === null ? "–" : Math.round(gpu.power)} W`,
        ),
      ]),
    );
  }

  cpuShare(rank) {
    const at = this.model.usage?.at;
    if (rank.cpu === null) return "not reported";
    const before = this.cpu;
    if (!before || before[0] !== rank.pid) this.cpu = [rank.pid, rank.cpu, at];
    else if (at > before[2] + 1)
      [this.cpu, this.share] = [[rank.pid, rank.cpu, at], (rank.cpu - before[1]) / (at - before[2])];
    const share =
      this.cpu[0] === rank.pid && this.share !== undefined && before?.[0] === rank.pid
        ? `${Math.round(this.share * 100)} % of a core, `
        : "";
    return `${share}${duration(rank.cpu)} in all`;
  }

  async showStack() {
    const { rank } = this;
    const place = el("div", {}, el("p", {}, "Taking the stack …"));
    const again = button("Take it again", () => this.show("stack"));
    replace(
      this.body,
      el("div", { class: "tools" }, again, el("span", { class: "count" }, `taken at ${clock(Date.now() / 1000)}`)),
      place,
    );
    try {
      const { stacks, unanswered } = await get(`/stacks?rank=${rank}`);
      if (!stacks.length) throw new Error(unanswered[0]?.why ?? "no reply");
      replace(place, renderStack(stacks[0]));
    } catch (error) {
      replace(place, el("p", { class: "error", role: "alert" }, error.message));
    }
  }
}
