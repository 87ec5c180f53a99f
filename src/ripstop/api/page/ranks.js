// The ranks: a grid on a canvas, which works from 1 to thousands of ranks, or a table of the same ranks.

import { button, color, context2d, el, find, replace, setText } from "./dom.js";
import { age, bytes, count, duration } from "./format.js";
import { STATES } from "./model.js";

const MODES = { state: "State", step: "Step time", age: "Heartbeat age", memory: "Memory" };
const SIZES = [
  [96, 46],
  [34, 34],
  [30, 30],
  [26, 26],
  [22, 22],
  [18, 18],
  [16, 16],
  [14, 14],
  [12, 12],
  [10, 10],
  [9, 9],
  [8, 8],
  [7, 7],
  [6, 6],
]; // width, height
const MAX_WIDE_CELLS = 64;
const MAX_HEIGHT = 380;
const BLOCK = 8; // ranks of a node in one row
const PAGE = 100; // rows of the table
const LABEL = 15; // height of a node's name
const MAX_LABELS = 64;
const SCALE = ["scale-0", "scale-1", "scale-2", "scale-3", "scale-4"];
const SCALE_TEXT = {
  step: ["≤ 0.8×", "median", "1.25×", "1.5×", "≥ 2×"],
  age: ["< 1 s", "5 s", "15 s", "30 s", "> 60 s"],
  memory: ["low", "", "", "", "high"],
};

export class Ranks {
  constructor(model, onOpen) {
    this.model = model;
    this.onOpen = onOpen;
    this.mode = "state";
    this.asTable = false;
    this.query = "";
    this.states = new Set(); // shown; empty: all
    this.cursor = 0; // the rank that the keyboard is at
    this.page = 0;
    this.sort = ["rank", 1];
    this.cells = [];
    this.canvas = el("canvas", {
      tabindex: 0,
      class: "grid",
      role: "img",
      onkeydown: (event) => this.onKey(event),
      onclick: (event) => this.onClick(event),
      onpointermove: (event) => this.onHover(event),
      onpointerleave: () => (this.tip.hidden = true),
      onfocus: () => this.announce(),
      onblur: () => this.draw(),
    });
    this.tip = el("div", { class: "tip", hidden: true });
    this.said = el("p", { class: "visually-hidden", role: "status" });
    this.scale = el("ul", { class: "legend" });
    this.box = el("div", { class: "grid-box" }, this.canvas, this.tip, this.said);
    this.table = el("div", { class: "scroll" });
    this.search = el("input", {
      type: "search",
      id: "rank-filter",
      placeholder: "12, 8-15, node, pid, state",
      "aria-label": "Filter ranks",
      autocomplete: "off",
      spellcheck: false,
      oninput: () => {
        this.query = this.search.value;
        this.page = 0;
        this.render();
      },
    });
    const modes = el(
      "select",
      {
        id: "rank-mode",
        onchange: () => {
          this.mode = modes.value;
          this.render();
        },
      },
      Object.entries(MODES).map(([value, text]) => el("option", { value }, text)),
    );
    this.toggle = button(
      "Table",
      () => {
        this.asTable = !this.asTable;
        this.render();
      },
      { "aria-pressed": "false" },
    );
    replace(find("rank-tools"), this.search, el("label", { for: "rank-mode" }, "Colour "), modes, this.toggle);
    new ResizeObserver(() => this.draw()).observe(find("rank-view"));
  }

  // filter --------------------------------------------------------------------------------------------------------------

  matches() {
    const words = this.query.toLowerCase().split(/\s+/).filter(Boolean).map(wordTest);
    const { states } = this;
    return this.model.ranks.filter(
      (rank) => (!states.size || states.has(rank.state)) && words.every((test) => test(rank)),
    );
  }

  showOnly(state) {
    if (this.states.has(state)) this.states.delete(state);
    else this.states.add(state);
    this.page = 0;
    this.render();
  }

  // drawing -------------------------------------------------------------------------------------------------------------

  /** Called when the model may have changed. */
  update() {
    if (this.model.ranks !== this.drawn) this.render();
  }

  changed() {
    this.drawn = null;
  }

  render() {
    const { ranks } = this.model;
    this.drawn = ranks;
    this.shown = this.matches();
    const all = this.shown.length === ranks.length;
    setText(
      find("rank-count"),
      all ? `${count(ranks.length)}` : `${count(this.shown.length)} of ${count(ranks.length)}`,
    );
    this.renderStates();
    const view = find("rank-view");
    this.toggle.setAttribute("aria-pressed", String(this.asTable));
    if (this.asTable) {
      if (view.firstChild !== this.table) replace(view, this.table);
      this.renderTable();
    } else {
      if (view.firstChild !== this.box) replace(view, this.box, this.scale);
      this.draw();
    }
  }

  renderStates() {
    const counts = {};
    for (const rank of this.model.ranks) counts[rank.state] = (counts[rank.state] || 0) + 1;
    const key = JSON.stringify([counts, [...this.states]]);
    if (this.statesKey === key) return;
    this.statesKey = key;
    const active = document.activeElement?.dataset?.state;
    const shown = Object.keys(STATES).filter((state) => counts[state] || this.states.has(state));
    const chips = shown.map((state) =>
      button(
        [el("i", { class: `swatch state-${state}` }), `${STATES[state]} `, el("b", {}, count(counts[state] || 0))],
        () => this.showOnly(state),
        { class: "chip", "aria-pressed": String(this.states.has(state)) },
      ),
    );
    chips.forEach((chip, i) => (chip.dataset.state = shown[i]));
    replace(find("rank-states"), chips);
    if (active) chips.find((chip) => chip.dataset.state === active)?.focus();
  }

  draw() {
    if (this.asTable || !this.shown) return;
    const width = find("rank-view").clientWidth;
    if (!width) return;
    const { ranks } = this.model;
    if (!ranks.length) {
      context2d(this.canvas, width, 40).fillStyle = color("muted");
      const context = this.canvas.getContext("2d");
      context.font = "14px system-ui, sans-serif";
      context.fillText("No ranks now: no round runs.", 2, 24);
      this.cells = [];
      return;
    }
    const layout = this.layout(ranks, width);
    const context = context2d(this.canvas, width, layout.height);
    const shown = this.shown.length === ranks.length ? null : new Set(this.shown.map((rank) => rank.rank));
    const paint = this.painter();
    this.cells = layout.cells;
    context.textAlign = "center";
    context.textBaseline = "middle";
    const { size, wide } = layout;
    this.size = [wide, size];
    const font = wide > size ? "600 13px" : `600 ${Math.max(8, Math.floor(size * 0.36))}px`;
    for (const cell of this.cells) {
      const { rank, x, y } = cell;
      const dim = shown && !shown.has(rank.rank);
      context.globalAlpha = dim ? 0.13 : 1;
      const [fill, ink] = paint(rank);
      context.fillStyle = fill;
      if (size >= 10) {
        context.beginPath();
        context.roundRect(x, y, wide, size, Math.min(6, size / 5));
        context.fill();
      } else context.fillRect(x, y, size, size);
      context.font = `${font} system-ui, sans-serif`;
      if (wide > size) {
        context.fillStyle = ink;
        context.fillText(String(rank.rank), x + wide / 2, y + 16);
        context.font = "11px system-ui, sans-serif";
        context.fillText(this.caption(rank), x + wide / 2, y + 33);
      } else if (size >= 22) {
        context.fillStyle = ink;
        context.fillText(String(rank.rank), x + size / 2, y + size / 2 + 0.5);
      } else if (!dim && size >= 10 && ["failed", "hung", "silent"].includes(rank.state)) {
        context.fillStyle = ink; // not by colour alone
        context.fillText(rank.state === "failed" ? "×" : "!", x + size / 2, y + size / 2 + 0.5);
      }
    }
    context.globalAlpha = 1;
    this.drawLabels(context, layout);
    this.drawCursor(context);
    this.renderScale();
    const worst = this.model.ranks.filter((rank) => !["running", "done", "starting"].includes(rank.state)).length;
    this.canvas.setAttribute(
      "aria-label",
      `${count(ranks.length)} ranks, ${worst ? `${count(worst)} with problems` : "none with problems"}. Arrow keys move, Enter opens a rank. The button Table shows them as a table.`,
    );
  }

  /** The position of each rank: the ranks of a node are a block; the largest cells that fit. */
  layout(ranks, width) {
    const blocks = [];
    for (const rank of ranks) {
      if (blocks.at(-1)?.[0].node === rank.node) blocks.at(-1).push(rank);
      else blocks.push([rank]);
    }
    const slots = blocks.reduce((most, block) => Math.max(most, block.length), 1);
    const across = Math.min(slots, BLOCK);
    for (const [wide, size] of SIZES) {
      if (wide > size && ranks.length > MAX_WIDE_CELLS) continue;
      const gap = size >= 14 ? 3 : size >= 9 ? 2 : 1;
      const named = blocks.length <= MAX_LABELS && size >= 18;
      const space = slots > 1 ? Math.max(gap, Math.round(size / 2)) : gap;
      const blockWidth = across * (wide + gap) - gap;
      if (wide > size && blockWidth > width) continue;
      const minWidth = named ? Math.max(blockWidth, 92) : blockWidth;
      const inRow = Math.max(1, Math.floor((width + space) / (minWidth + space)));
      const rows = Math.ceil(slots / across);
      const blockHeight = rows * (size + gap) - gap + (named ? LABEL : 0);
      const height =
        Math.ceil(blocks.length / inRow) * (blockHeight + (slots > 1 || named ? Math.max(gap, space / 1.5) : gap));
      if (height > MAX_HEIGHT && size !== SIZES.at(-1)[1]) continue;
      const stepY = blockHeight + (slots > 1 || named ? Math.max(gap, space / 1.5) : gap);
      const cells = [],
        labels = [];
      blocks.forEach((block, index) => {
        const left = (index % inRow) * (minWidth + space),
          top = Math.floor(index / inRow) * stepY;
        if (named) labels.push({ text: block[0].node, x: left, y: top + 6, width: minWidth });
        block.forEach((rank, i) =>
          cells.push({
            rank,
            x: left + (i % across) * (wide + gap),
            y: top + (named ? LABEL : 0) + Math.floor(i / across) * (size + gap),
          }),
        );
      });
      return { wide, size, cells, labels, height: Math.max(height, size) + 2 };
    }
  }

  drawLabels(context, { labels }) {
    context.font = "11px system-ui, sans-serif";
    context.textAlign = "left";
    context.fillStyle = color("muted");
    for (const { text, x, y, width } of labels) context.fillText(shorten(context, text, width), x, y);
  }

  drawCursor(context) {
    if (document.activeElement !== this.canvas) return;
    const cell = this.cells[this.cursor];
    if (!cell) return;
    context.strokeStyle = color("ink");
    context.lineWidth = 2;
    context.strokeRect(cell.x - 1.5, cell.y - 1.5, this.size[0] + 3, this.size[1] + 3);
  }

  /** The second line of a wide cell. */
  caption(rank) {
    if (!["running", "straggler"].includes(rank.state)) return STATES[rank.state];
    if (this.mode === "age") return rank.age === null ? "no heartbeat" : `${age(rank.age)} ago`;
    if (this.mode === "memory") return bytes(rank.memory);
    return rank.stepTime === null ? STATES[rank.state] : `${duration(rank.stepTime)}/step`;
  }

  /** A function from a rank to its fill and its ink. */
  painter() {
    const onDark = color("on-cell"),
      onLight = color("on-light-cell"),
      onStraggler = color("on-straggler");
    const inks = { running: onLight, starting: onLight, done: onLight, straggler: onStraggler };
    const states = Object.fromEntries(Object.keys(STATES).map((state) => [state, color(`state-${state}`)]));
    if (this.mode === "state") return (rank) => [states[rank.state], inks[rank.state] ?? onDark];
    const unknown = color("cell-unknown"),
      fills = SCALE.map(color);
    const { ownMedian, ranks } = this.model;
    const most = Math.max(...ranks.map((rank) => rank.memory || 0)),
      least = Math.min(...ranks.map((rank) => rank.memory ?? Infinity));
    const level = {
      step: (rank) =>
        rank.ownTime === null || !ownMedian
          ? null
          : [0.9, 1.15, 1.4, 1.8].filter((limit) => rank.ownTime / ownMedian > limit).length,
      age: (rank) => (rank.age === null ? null : [1, 5, 15, 30].filter((limit) => rank.age > limit).length),
      memory: (rank) =>
        rank.memory === null ? null : Math.min(4, Math.floor(((rank.memory - least) / Math.max(1, most - least)) * 5)),
    }[this.mode];
    return (rank) => {
      const found = level(rank);
      return found === null
        ? [unknown, onLight]
        : [fills[found], found > 3 ? onDark : found > 2 ? onStraggler : onLight];
    };
  }

  renderScale() {
    const texts = SCALE_TEXT[this.mode];
    this.scale.hidden = !texts;
    if (!texts || this.scaleMode === this.mode) return;
    this.scaleMode = this.mode;
    replace(
      this.scale,
      texts.map((text, i) => el("li", {}, el("i", { class: `swatch ${SCALE[i]}` }), text)),
      el("li", {}, el("i", { class: "swatch cell-unknown" }), "not reported"),
    );
  }

  // the table -----------------------------------------------------------------------------------------------------------

  renderTable() {
    const [name, direction] = this.sort;
    const columns = {
      rank: "Rank",
      node: "Node",
      state: "State",
      pid: "Pid",
      step: "Step",
      stepTime: "Step time",
      age: "Heartbeat",
      memory: "Memory",
    };
    const order = Object.keys(STATES);
    const value = (rank) => (name === "state" ? order.indexOf(rank.state) : (rank[name] ?? Infinity));
    const rows = [...this.shown].sort(
      (a, b) => (value(a) < value(b) ? -1 : value(a) > value(b) ? 1 : a.rank - b.rank) * direction,
    );
    const pages = Math.max(1, Math.ceil(rows.length / PAGE));
    this.page = Math.min(this.page, pages - 1);
    const focused = document.activeElement?.dataset?.key;
    const head = Object.entries(columns).map(([key, text]) => {
      const sorted = key === name ? (direction > 0 ? "ascending" : "descending") : null;
      const sort = button(
        text,
        () => {
          this.sort = [key, key === name ? -direction : 1];
          this.renderTable();
        },
        { class: "sort" },
      );
      sort.dataset.key = `sort-${key}`;
      return el("th", { scope: "col", "aria-sort": sorted }, sort);
    });
    const body = rows.slice(this.page * PAGE, (this.page + 1) * PAGE).map((rank) => {
      const open = button(String(rank.rank), () => this.onOpen(rank.rank), {
        class: "inline",
        "aria-label": `Open rank ${rank.rank}`,
      });
      open.dataset.key = `rank-${rank.rank}`;
      return el(
        "tr",
        {},
        el("th", { scope: "row" }, open),
        el("td", {}, rank.node),
        el("td", {}, el("i", { class: `swatch state-${rank.state}` }), STATES[rank.state]),
        ...[
          rank.pid ?? "–",
          rank.step ?? "–",
          duration(rank.stepTime),
          rank.age === null ? "–" : age(rank.age),
          bytes(rank.memory),
        ].map((text) => el("td", { class: "number" }, String(text))),
      );
    });
    const turn = (by) => () => {
      this.page += by;
      this.renderTable();
    };
    const pager =
      pages > 1
        ? el(
            "div",
            { class: "buttons" },
            button("Previous", turn(-1), { disabled: this.page === 0 }),
            el("span", {}, `Page ${this.page + 1} of ${pages}`),
            button("Next", turn(1), { disabled: this.page === pages - 1 }),
          )
        : null;
    replace(this.table, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, body)), pager);
    if (focused) this.table.querySelector(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  // pointer and keyboard ------------------------------------------------------------------------------------------------

  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left,
      y = event.clientY - box.top;
    const [width, height] = this.size ?? [0, 0];
    return this.cells.findIndex(
      (cell) => x >= cell.x - 1 && x <= cell.x + width + 1 && y >= cell.y - 1 && y <= cell.y + height + 1,
    );
  }

  onHover(event) {
    const index = this.at(event);
    this.tip.hidden = index < 0;
    this.canvas.style.cursor = index < 0 ? "default" : "pointer";
    if (index < 0) return;
    const { rank, x, y } = this.cells[index];
    replace(
      this.tip,
      el("b", {}, `Rank ${rank.rank}`),
      ` ${STATES[rank.state]}`,
      el("br"),
      rank.node,
      el("br"),
      facts(rank),
      rank.why ? [el("br"), rank.why] : null,
    );
    const width = this.canvas.clientWidth;
    this.tip.style.left = `${Math.max(0, Math.min(x, width - 260))}px`;
    this.tip.style.top = `${y + this.size[1] + 6}px`;
  }

  onClick(event) {
    const index = this.at(event);
    if (index < 0) return;
    this.cursor = index;
    this.tip.hidden = true;
    this.onOpen(this.cells[index].rank.rank);
  }

  onKey(event) {
    const last = this.cells.length - 1;
    const row = (direction) => {
      const here = this.cells[this.cursor];
      const sameColumn = this.cells
        .map((cell, i) => [cell, i])
        .filter(([cell]) => Math.abs(cell.x - here.x) < 3 && (cell.y - here.y) * direction > 0);
      return direction > 0 ? sameColumn[0]?.[1] : sameColumn.at(-1)?.[1];
    };
    const moves = {
      ArrowRight: () => this.cursor + 1,
      ArrowLeft: () => this.cursor - 1,
      ArrowDown: () => row(1),
      ArrowUp: () => row(-1),
      Home: () => 0,
      End: () => last,
    };
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (this.cells[this.cursor]) this.onOpen(this.cells[this.cursor].rank.rank);
    } else if (moves[event.key] && last >= 0) {
      event.preventDefault();
      this.cursor = Math.max(0, Math.min(last, moves[event.key]() ?? this.cursor));
      this.announce();
    }
  }

  announce() {
    this.draw();
    const rank = this.cells[this.cursor]?.rank;
    if (rank) setText(this.said, `Rank ${rank.rank}, ${STATES[rank.state]}, node ${rank.node}, ${facts(rank)}`);
  }
}

function facts(rank) {
  const found = [];
  if (rank.step !== null) found.push(`step ${rank.step}`);
  if (rank.stepTime !== null) found.push(`${duration(rank.stepTime)} a step`);
  if (rank.age !== null) found.push(`heartbeat ${age(rank.age)} ago`);
  return found.join(", ") || "reports nothing";
}

/** A test for one word of a filter: a rank, a range of ranks, or a part of a node, host, pid or state. */
function wordTest(word) {
  const range = /^(\d+)-(\d+)$/.exec(word);
  if (range) return ({ rank }) => rank >= Number(range[1]) && rank <= Number(range[2]);
  if (/^\d+$/.test(word)) return ({ rank, pid }) => rank === Number(word) || pid === Number(word);
  return (rank) =>
    rank.node.toLowerCase().includes(word) ||
    rank.host.toLowerCase().includes(word) ||
    STATES[rank.state].startsWith(word);
}

function shorten(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let length = text.length;
  while (length > 1 && context.measureText(`…${text.slice(-length)}`).width > width) length -= 1;
  return `…${text.slice(-length)}`;
}
