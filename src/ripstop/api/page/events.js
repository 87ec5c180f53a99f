// The list of events, the latest first, with a filter.

import { button, el, find, replace } from "./dom.js";
import { clock, dateTime } from "./format.js";
import { CATEGORIES, category, describe } from "./model.js";

const MORE = 100;
const NO_PROGRESS = "no-progress"; // steps and checkpoints would hide the rest
const READING_PX = 40; // scrolled further down, the list waits

export class EventList {
  constructor(model, onRank) {
    this.model = model;
    this.onRank = onRank;
    this.limit = MORE;
    this.kind = NO_PROGRESS;
    this.text = "";
    this.shown = null; // the version of the events that is shown
    const kinds = el(
      "select",
      {
        "aria-label": "Kind of events",
        onchange: () => {
          this.kind = kinds.value;
          this.reset();
        },
      },
      el("option", { value: NO_PROGRESS }, "Without progress"),
      el("option", { value: "" }, "All kinds"),
      Object.entries(CATEGORIES).map(([value, text]) => el("option", { value }, text)),
    );
    const search = el("input", {
      type: "search",
      placeholder: "Search events",
      "aria-label": "Search events",
      autocomplete: "off",
      spellcheck: false,
      oninput: () => {
        this.text = search.value.toLowerCase();
        this.reset();
      },
    });
    this.news = button(
      "New events",
      () => {
        this.list.scrollTop = 0;
        this.reset();
      },
      { hidden: true, class: "chip" },
    );
    replace(find("event-tools"), this.news, kinds, search);
    this.list = find("events");
  }

  reset() {
    this.limit = MORE;
    this.shown = null;
    this.update();
  }

  update() {
    if (this.shown === this.model.version) return;
    const isReading = this.shown !== null && this.list.scrollTop > READING_PX;
    this.news.hidden = !isReading;
    if (isReading) return; // what is read does not move
    this.shown = this.model.version;
    const found = [];
    for (let i = this.model.events.length - 1; i >= 0 && found.length <= this.limit; i--) {
      const event = this.model.events[i];
      if (this.kind === NO_PROGRESS ? category(event) === "step" : this.kind && category(event) !== this.kind) continue;
      if (this.text && !`${event.kind} ${event.node} ${describe(event)}`.toLowerCase().includes(this.text)) continue;
      found.push(event);
    }
    const more = found.length > this.limit;
    const rows = found.slice(0, this.limit).map((event) => this.row(event));
    if (more)
      rows.push(
        el(
          "li",
          {},
          button("Show more", () => {
            this.limit += MORE;
            this.shown = null;
            this.update();
          }),
        ),
      );
    replace(this.list, rows.length ? rows : el("li", { class: "empty" }, "No events match."));
  }

  row(event) {
    const rank =
      event.rank >= 0 && ["worker_failed", "worker_hangs", "timers_missed"].includes(event.kind)
        ? button(`rank ${event.rank}`, () => this.onRank(event.rank), { class: "inline" })
        : null;
    return el(
      "li",
      { class: `is-${category(event)}` },
      el("time", { title: dateTime(event.at) }, clock(event.at)),
      el("span", { class: "kind" }, event.kind.replaceAll("_", " ")),
      el("span", { class: "text" }, describe(event), rank ? [" ", rank] : null),
      el("span", { class: "who" }, event.node || "coordinator"),
    );
  }
}
