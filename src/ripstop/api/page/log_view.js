// A worker's output, followed live, with search.  Keeps the latest lines only; long lines are cut.

import { stream } from "./api.js";
import { button, el, replace, setText } from "./dom.js";
import { count, plainLine } from "./format.js";

const MAX_LINES = 5000;
const MAX_LINE_CHARS = 4000;
const TAIL = 500;
const BOTTOM_PX = 30; // this near the end, the view follows

export class LogView {
  constructor(rank) {
    this.rank = rank;
    this.lines = []; // elements
    this.rest = ""; // of an unfinished line
    this.skipping = false; // the end of a line that is too long
    this.pending = [];
    this.needle = "";
    this.hit = -1;
    this.follows = true;
    this.source = el(
      "select",
      { "aria-label": "Output stream", onchange: () => this.start() },
      el("option", { value: "stderr" }, "stderr"),
      el("option", { value: "stdout" }, "stdout"),
    );
    this.search = el("input", {
      type: "search",
      placeholder: "Search the log",
      "aria-label": "Search the log",
      autocomplete: "off",
      spellcheck: false,
      oninput: () => this.find(this.search.value),
      onkeydown: (event) => event.key === "Enter" && this.jump(event.shiftKey ? -1 : 1),
    });
    this.only = el("input", {
      type: "checkbox",
      id: "log-only",
      onchange: () => this.text.classList.toggle("only", this.only.checked),
    });
    this.state = el("span", { class: "count", role: "status" });
    this.bottom = button("To the end", () => this.toEnd(), { hidden: true });
    this.text = el("div", {
      class: "log",
      tabindex: 0,
      role: "log",
      "aria-label": `Output of rank ${rank}`,
      "aria-live": "off",
      onscroll: () => this.onScroll(),
    });
    this.element = el(
      "div",
      { class: "log-view" },
      el(
        "div",
        { class: "tools" },
        this.source,
        this.search,
        el("label", { class: "check" }, this.only, " only matches"),
        this.state,
        this.bottom,
      ),
      this.text,
    );
    this.start();
  }

  async start() {
    this.stop();
    const control = (this.control = new AbortController());
    this.lines = [];
    [this.rest, this.skipping, this.pending] = ["", false, []];
    replace(this.text);
    setText(this.state, "reading");
    try {
      await stream(`/logs/${this.rank}?stream=${this.source.value}&tail=${TAIL}&follow=true`, {
        accept: "text/plain",
        signal: control.signal,
        onOpen: () => this.say(),
        onText: (text) => this.add(text),
      });
      this.ended = "the log ended";
    } catch (error) {
      if (control.signal.aborted) return;
      this.ended = error.message;
      if (!this.lines.length) replace(this.text, el("p", { class: "empty" }, error.message));
    }
    setText(this.state, this.lines.length ? "disconnected" : "");
    this.bottom.hidden = true;
  }

  stop() {
    this.control?.abort();
  }

  add(text) {
    let data = this.rest + text;
    if (this.skipping) {
      const end = data.indexOf("\n");
      if (end < 0) return;
      [data, this.skipping] = [data.slice(end + 1), false];
    }
    const lines = data.split("\n");
    this.rest = lines.pop();
    if (this.rest.length > MAX_LINE_CHARS) {
      lines.push(this.rest);
      [this.rest, this.skipping] = ["", true];
    }
    this.pending.push(...lines);
    if (this.pending.length > MAX_LINES) this.pending.splice(0, this.pending.length - MAX_LINES);
    this.frame ??= requestAnimationFrame(() => this.flush());
  }

  flush() {
    this.frame = null;
    const added = this.pending.splice(0).map((line) => this.line(line));
    this.lines.push(...added);
    this.text.append(...added);
    for (const old of this.lines.splice(0, Math.max(0, this.lines.length - MAX_LINES))) old.remove();
    if (this.follows) this.text.scrollTop = this.text.scrollHeight;
    this.say();
  }

  line(text) {
    const cut = text.length > MAX_LINE_CHARS;
    const element = el("div", { class: "line" });
    element.plain = plainLine(cut ? text.slice(0, MAX_LINE_CHARS) : text) + (cut ? " … (cut)" : "");
    this.fill(element);
    return element;
  }

  /** The line's text, with the matches of the search marked. */
  fill(element) {
    const { plain } = element;
    const parts = [];
    if (this.needle) {
      const lower = plain.toLowerCase();
      let from = 0;
      for (let at = lower.indexOf(this.needle); at >= 0 && parts.length < 200; at = lower.indexOf(this.needle, from)) {
        parts.push(plain.slice(from, at), el("mark", {}, plain.slice(at, at + this.needle.length)));
        from = at + this.needle.length;
      }
      parts.push(plain.slice(from));
    } else parts.push(plain);
    element.classList.toggle("match", parts.length > 1);
    replace(element, parts.length > 1 || plain ? parts : ["\u200b"]);
  }

  find(text) {
    this.needle = text.toLowerCase();
    this.hit = -1;
    this.text.querySelector(".current")?.classList.remove("current");
    for (const line of this.lines) {
      const had = line.classList.contains("match");
      if (had || (this.needle && line.plain.toLowerCase().includes(this.needle))) this.fill(line);
    }
    this.jump(1); // to the latest match
    this.say();
  }

  jump(direction) {
    const hits = this.lines.filter((line) => line.classList.contains("match"));
    if (!hits.length) return;
    this.hit = this.hit < 0 && direction > 0 ? hits.length - 1 : (this.hit - direction + hits.length) % hits.length; // the latest first
    this.text.querySelector(".current")?.classList.remove("current");
    hits[this.hit].classList.add("current");
    this.follows = false;
    hits[this.hit].scrollIntoView({ block: "center" });
  }

  say() {
    const lines = `${count(this.lines.length)} lines`;
    const hits = this.needle ? this.lines.filter((line) => line.classList.contains("match")).length : 0;
    setText(this.state, this.needle ? `${count(hits)} of ${lines} match` : lines);
  }

  onScroll() {
    const { scrollTop, scrollHeight, clientHeight } = this.text;
    this.follows = scrollHeight - scrollTop - clientHeight < BOTTOM_PX;
    this.bottom.hidden = this.follows;
  }

  toEnd() {
    this.follows = true;
    this.text.scrollTop = this.text.scrollHeight;
  }
}
