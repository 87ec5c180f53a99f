// The page of a job: reads it through the API, and shows it.  The other modules show one part each.

import { askForToken, drain, restart, scale, stop } from "./actions.js";
import { followEvents, get, loadToken } from "./api.js";
import { button, el, find, forgetColors, replace, setText } from "./dom.js";
import { EventList } from "./events.js";
import { age, count, duration, percent, plural, rate } from "./format.js";
import { Model } from "./model.js";
import { Plots } from "./plots.js";
import { RankPanel } from "./rank_panel.js";
import { Ranks } from "./ranks.js";
import { showAllStacks } from "./stacks.js";
import { Timeline } from "./timeline.js";

const STATUS_MS = 5000; // and after every event that changes it
const USAGE_MS = 2000;
const USAGE_OF_LARGE_JOBS_MS = 5000;
const LARGE_JOB_NODES = 256;
const HISTORY_MS = 10000;
const DRAW_MS = 80;
const CHANGES_STATUS = /^(round_|node_|workers_|worker_|job_|scale_|budget_)/;

const model = new Model();
const panel = new RankPanel(model);
const openRank = (rank) => {
  find("dialog").open && find("dialog").close();
  panel.open(rank);
};
const timeline = new Timeline(model, openRank);
const ranks = new Ranks(model, openRank);
const plots = new Plots(model);
const eventList = new EventList(model, openRank);

// reading the job -----------------------------------------------------------------------------------------------------

let tokenTried = false;
let enterToken = null; // opens the dialog again

function retry() {
  tokenTried = true;
  enterToken = null;
  start();
}

function start() {
  followEvents({
    onEvents(events) {
      const fresh = model.add(events);
      if (fresh.some((event) => CHANGES_STATUS.test(event.kind))) status.soon();
      if (fresh.length) draw();
    },
    onState(state, text = "", code = 0) {
      model.link = state;
      model.linkError = text;
      if (state === "live") {
        tokenTried = false;
        for (const reader of [status, usage, history]) reader.soon();
      }
      if (code === 401) {
        enterToken = () => askForToken(text, tokenTried, retry);
        enterToken();
      }
      draw();
    },
  });
}

/** Reads a path again and again: every `interval()` ms while the page is visible, and soon after `soon()`. */
class Reader {
  constructor(path, interval, onReply) {
    [this.path, this.interval, this.onReply] = [path, interval, onReply];
    this.timer = 0;
    this.isReading = false;
    this.isDue = false; // read once more after this reply
  }

  soon(ms = 30) {
    if (this.isReading) {
      this.isDue = true;
      return;
    }
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.read(), ms);
  }

  async read() {
    if (model.link !== "live" || document.hidden) return; // a connection, or the visible page, starts it again
    this.isReading = true;
    try {
      this.onReply(await get(this.path));
      draw();
    } catch {
      // the stream of events reports a lost connection; a node that is busy replies next time
    }
    this.isReading = false;
    this.soon(this.isDue ? 30 : this.interval());
    this.isDue = false;
  }
}

const isLarge = () => (model.status?.nodes.length ?? 0) > LARGE_JOB_NODES;
const status = new Reader(
  "/status",
  () => STATUS_MS,
  (reply) => {
    model.setStatus(reply);
    if (usageRound !== reply.round) usage.soon();
  },
);
let usageRound = 0;
const usage = new Reader(
  "/usage",
  () => (isLarge() ? USAGE_OF_LARGE_JOBS_MS : USAGE_MS),
  (reply) => {
    usageRound = reply.round;
    model.setUsage(reply);
  },
);
const history = new Reader(
  "/history",
  () => HISTORY_MS,
  (reply) => (model.history = reply),
);

document.addEventListener("visibilitychange", () => {
  if (!document.hidden) for (const reader of [status, usage, history]) reader.soon();
});

// showing it ----------------------------------------------------------------------------------------------------------

let frame = 0;
let drawnAt = 0;
let lastHistory = null;

/** Draw at the next frame, but not again within `DRAW_MS`. */
function draw() {
  frame ||= setTimeout(
    () =>
      requestAnimationFrame(() => {
        frame = 0;
        drawnAt = performance.now();
        render();
      }),
    Math.max(0, drawnAt + DRAW_MS - performance.now()),
  );
}

function render() {
  renderHeader();
  renderTiles();
  timeline.draw();
  if (timeline.selected?.type === "round") timeline.showDetail();
  ranks.update();
  eventList.update();
  renderNodes();
  panel.update();
  if (model.history && model.history !== lastHistory) {
    lastHistory = model.history;
    plots.update();
  }
}

function renderHeader() {
  const name = model.status?.run_id ?? "";
  if (name) {
    setText(find("job"), name);
    document.title = `${model.verdict().answer} · ${name} · ripstop`;
  }
  const link = find("link");
  const texts = { live: "live", connecting: "connecting", lost: "reconnecting", denied: "no access" };
  setText(link, model.closed && model.link !== "live" ? "ended" : texts[model.link]);
  link.className = `link ${model.closed && model.link !== "live" ? "ended" : model.link}`;
  const found =
    model.link === "denied"
      ? { level: "idle", answer: "No access", reason: model.linkError, problems: [], needsToken: Boolean(enterToken) }
      : model.verdict();
  find("verdict").className = `verdict ${found.level}`;
  setText(find("answer"), found.answer);
  setText(find("reason"), found.reason);
  document.body.classList.toggle("no-access", model.link === "denied");
  renderProblems(found);
  for (const action of find("actions").querySelectorAll("[data-needs]"))
    action.disabled = !model.status || model.link !== "live" || Boolean(model.closed);
}

let problemsKey = "";

function renderProblems({ problems, needsToken = false }) {
  const key = JSON.stringify([problems, needsToken]);
  if (key === problemsKey) return;
  problemsKey = key;
  if (needsToken) {
    replace(
      find("problems"),
      el(
        "li",
        { class: "plain" },
        button("Enter the token", () => enterToken?.(), { class: "primary" }),
      ),
    );
    return;
  }
  replace(
    find("problems"),
    problems.slice(0, 6).map(({ text, level, ranks: concerned }) =>
      el(
        "li",
        { class: level },
        text,
        (concerned ?? [])
          .slice(0, 3)
          .map((rank) => button(`Open rank ${rank}`, () => openRank(rank), { class: "inline" })),
      ),
    ),
  );
}

function renderTiles() {
  const { status: job, usage: used } = model;
  if (!job) return;
  const seconds = job.seconds + (model.closed ? 0 : Date.now() / 1000 - model.statusAt);
  const members = job.nodes.filter((node) => node.first_rank >= 0).length;
  const others = job.nodes.length - members;
  const step = model.latestStep();
  const left = Math.max(0, job.max_restarts - job.charged);
  const saved = used?.checkpoint_at;
  const tiles = [
    ["Phase", job.phase, `for ${age(seconds)}`],
    ["Round", count(job.round), job.restarts ? `${plural(job.restarts, "restart")} so far` : "no restarts"],
    ["Ranks", count(job.world_size), `on ${plural(members, "node")}${others ? `, ${count(others)} more` : ""}`],
    ["Goodput", percent(job.goodput), job.goodput === null ? "no steps reported" : "time in kept steps"],
    ["Steps per second", rate(model.stepsPerSecond()), step === null ? "no steps reported" : `at step ${count(step)}`],
    [
      "Last checkpoint",
      saved ? age(model.now() - saved) : "–",
      saved ? `ago, of step ${count(used.checkpoint_step)}` : "none reported",
    ],
    ["Restarts left", count(left), `of ${count(job.max_restarts)}`],
  ];
  const place = find("tiles");
  if (place.children.length !== tiles.length)
    replace(
      place,
      tiles.map(([name]) =>
        el("div", { class: "tile" }, el("dt", {}, name), el("dd", { class: "value" }), el("dd", { class: "note" })),
      ),
    );
  tiles.forEach(([, value, note], index) => {
    const [, big, small] = place.children[index].children;
    setText(big, value);
    setText(small, note);
  });
  place.children[6].classList.toggle("warn", left === 0 && job.max_restarts > 0);
}

let nodesKey = "";
let nodesOf = null; // the status and the usage that are shown

function renderNodes() {
  if (nodesOf?.[0] === model.status && nodesOf[1] === model.usage) return;
  nodesOf = [model.status, model.usage];
  const nodes = model.status?.nodes ?? [];
  const shown = nodes.slice(0, 500);
  const missing = new Set(model.usage?.missing ?? []);
  const rows = shown.map((node) => ({
    ...node,
    pids: 0,
    missing: missing.has(node.name),
    gpus: model.gpusOf(node.name).length,
  }));
  const key = JSON.stringify(rows);
  if (key === nodesKey) return;
  nodesKey = key;
  setText(
    find("node-count"),
    `${count(nodes.length)}${shown.length < nodes.length ? `, the first ${shown.length} shown` : ""}`,
  );
  const head = ["Node", "Host", "State", "Ranks", "GPUs", ""].map((text) =>
    el("th", { scope: "col" }, text || el("span", { class: "visually-hidden" }, "Actions")),
  );
  const body = rows.map((node) =>
    el(
      "tr",
      {},
      el("th", { scope: "row" }, node.name),
      el("td", {}, node.host),
      el(
        "td",
        {},
        el("span", { class: `badge ${node.state}` }, node.state),
        node.unfit ? el("small", {}, ` ${node.unfit}`) : null,
        node.missing ? el("small", {}, " no sample") : null,
      ),
      el(
        "td",
        { class: "number" },
        node.first_rank < 0
          ? "–"
          : node.slots === 1
            ? String(node.first_rank)
            : `${node.first_rank}–${node.first_rank + node.slots - 1}`,
      ),
      el("td", { class: "number" }, node.gpus ? String(node.gpus) : "–"),
      el(
        "td",
        {},
        button("Drain", () => drain(model, node.name), { class: "small", "aria-label": `Drain node ${node.name}` }),
      ),
    ),
  );
  replace(find("nodes"), el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)));
}

// actions and theme ---------------------------------------------------------------------------------------------------

function toggleTheme() {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  try {
    localStorage.setItem("ripstop-theme", root.dataset.theme);
  } catch {
    // storage is disabled: the choice lasts until a reload
  }
  repaint();
}

function repaint() {
  forgetColors();
  plots.redraw();
  ranks.changed();
  draw();
}

const needsJob = { "data-needs": "job", disabled: true };
replace(
  find("actions"),
  button("Stacks", () => showAllStacks(openRank), { ...needsJob, title: "The stacks of all workers; changes nothing" }),
  button("Restart", () => restart(model), needsJob),
  button("Scale", () => scale(model), needsJob),
  button("Stop", () => stop(model), { ...needsJob, class: "danger-outline" }),
  button("◐", toggleTheme, { class: "icon", "aria-label": "Light or dark", title: "Light or dark" }),
);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);
document.addEventListener("keydown", (event) => {
  if (event.key !== "/" || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
  event.preventDefault();
  find("rank-filter").focus();
});
setInterval(() => document.hidden || draw(), 1000); // ages grow
loadToken();
start();
