// Stacks of workers: of one in its panel, of all in a dialog, where equal stacks are shown once.

import { openDialog } from "./actions.js";
import { get } from "./api.js";
import { button, el, replace } from "./dom.js";
import { plural, ranges } from "./format.js";

/** One worker's stack and its collectives. */
export function renderStack(stack) {
  const facts = [
    stack.source && `by ${stack.source}`,
    stack.state && `state ${stack.state}`,
    stack.wchan && `in the kernel at ${stack.wchan}`,
  ].filter(Boolean);
  return [
    el("p", { class: "hint" }, facts.join(" · ")),
    el("pre", { class: "stack", tabindex: 0 }, stack.stack || "No Python stack was found."),
    el("h3", {}, "Collectives"),
    stack.collectives?.length
      ? collectivesTable(stack.collectives)
      : el("p", { class: "hint" }, stack.recorder || "Not recorded: start the job with --hang-timeout to record them."),
  ];
}

function collectivesTable(collectives) {
  const rows = collectives.map(({ group, label, entered, pending, op, size, p2p }) =>
    el(
      "tr",
      {},
      el("td", {}, label || group),
      el("td", {}, p2p ? `${op} (p2p)` : op),
      el("td", {}, size),
      el("td", { class: "number" }, String(entered)),
      el("td", { class: "number" }, pending ? `waits in ${pending}` : "none"),
    ),
  );
  const head = ["Group", "Operation", "Size", "Entered", "Pending"].map((text) => el("th", { scope: "col" }, text));
  return el("div", { class: "scroll" }, el("table", {}, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}

export async function showAllStacks(onRank) {
  const body = el("div", { class: "all-stacks" }, el("p", {}, "Asking all nodes …"));
  openDialog(
    "Stacks of all workers",
    (close) => [body, el("div", { class: "buttons end" }, button("Close", close))],
    "wide",
  );
  try {
    const { stacks, unanswered } = await get("/stacks");
    const groups = new Map();
    for (const stack of stacks) {
      const key = stack.stack.replace(/^(thread) \d+/gm, "$1") || `(none; kernel: ${stack.wchan || "unknown"})`;
      groups.set(key, [...(groups.get(key) ?? []), stack]);
    }
    const ordered = [...groups].sort((a, b) => a[1].length - b[1].length); // the smallest groups first
    replace(
      body,
      el(
        "p",
        {},
        `${plural(stacks.length, "worker")}, ${plural(ordered.length, "different stack")}; the rarest first.`,
      ),
      unanswered.map(({ node, why }) => el("p", { class: "error" }, `Node ${node}: ${why}`)),
      ordered.slice(0, 100).map(([text, members], index) => {
        const ranks = members.map((stack) => stack.rank);
        return el(
          "details",
          { open: index < 3 },
          el(
            "summary",
            {},
            el("b", {}, plural(ranks.length, "worker")),
            ` · rank ${ranges(ranks)} · ${lastFrame(text)}`,
          ),
          ranks.length <= 4
            ? el(
                "div",
                { class: "buttons" },
                ranks.map((rank) => button(`Open rank ${rank}`, () => onRank(rank))),
              )
            : null,
          el("pre", { class: "stack", tabindex: 0 }, text),
        );
      }),
    );
  } catch (error) {
    replace(body, el("p", { class: "error", role: "alert" }, error.message));
  }
}

function lastFrame(text) {
  const lines = text.trim().split("\n");
  return (lines.find((line) => /\(.+:\d+\)|line \d+/.test(line)) ?? lines[0] ?? "").trim().slice(0, 120);
}
