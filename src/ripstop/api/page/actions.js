// The buttons that change the job, the dialog that says what will happen, and the dialog for the token.

import { ApiError, post, setToken } from "./api.js";
import { button, el, find, replace, toast } from "./dom.js";
import { age, plural } from "./format.js";

/** Open the page's dialog; `content` gets a function that closes it. */
export function openDialog(title, content, kind = "") {
  const dialog = find("dialog");
  if (dialog.open) dialog.close();
  dialog.className = kind;
  const close = () => dialog.close();
  replace(dialog, el("h2", { id: "dialog-title" }, title), ...content(close));
  dialog.showModal();
  return dialog;
}

/** Ask before a command: `effects` say what will happen. */
function confirm({ title, effects, verb, fields = [], danger = false, path, body }) {
  openDialog(title, (close) => {
    const error = el("p", { class: "error", role: "alert", hidden: true });
    const go = el("button", { type: "submit", class: danger ? "danger" : "primary" }, verb);
    const submit = async (event) => {
      event.preventDefault();
      go.disabled = true;
      try {
        const reply = await post(path, body());
        close();
        toast(`Done: ${reply.done}.`);
      } catch (problem) {
        error.textContent = problem instanceof ApiError ? problem.message : `no reply: ${problem.message}`;
        error.hidden = false;
        go.disabled = false;
      }
    };
    return [
      el(
        "form",
        { onsubmit: submit },
        ...fields,
        el("p", { class: "lead" }, "What will happen:"),
        el(
          "ul",
          { class: "effects" },
          effects.map((effect) => el("li", {}, effect)),
        ),
        error,
        el("div", { class: "buttons end" }, button("Cancel", close), go),
      ),
    ];
  });
}

const lostSteps = (model) => {
  const at = model.usage?.checkpoint_at;
  return at
    ? `Steps since the last checkpoint, ${age(model.now() - at)} ago, are repeated.`
    : "Steps that the training script has not saved are repeated.";
};

export function restart(model) {
  const { round, world_size, nodes } = model.status;
  const members = nodes.filter((node) => node.first_rank >= 0).length;
  confirm({
    title: "Restart all workers?",
    verb: "Restart",
    path: "/restart",
    body: () => ({}),
    effects: [
      `All ${plural(world_size, "worker")} on ${plural(members, "node")} get SIGTERM, and after their shutdown timeout SIGKILL.`,
      `They start again as round ${round + 1}, with the same ranks.`,
      lostSteps(model),
      "It does not count against the restart budget.",
    ],
  });
}

export function drain(model, name) {
  const { nodes, min_nodes } = model.status;
  const node = nodes.find((other) => other.name === name);
  const inRound = node && node.first_rank >= 0;
  const staying = nodes.filter((other) => other.name !== name && other.state !== "leaving").length;
  confirm({
    title: `Drain node ${name}?`,
    verb: "Drain the node",
    danger: true,
    path: "/drain",
    body: () => ({ node: name }),
    effects: [
      inRound
        ? `Node ${name} stops its ${plural(node.slots, "worker")} and leaves the job; its agent exits with code 0.`
        : `Node ${name} has no ranks in this round; it leaves the job.`,
      staying < min_nodes
        ? `The job needs ${plural(min_nodes, "node")} and would have ${staying}, so it will reject this.`
        : inRound
          ? `The other nodes, and spares, continue in a new round: all workers restart. ${plural(staying, "node")} will be left.`
          : "The round is not interrupted.",
      ...(inRound ? [lostSteps(model)] : []),
    ],
  });
}

export function scale(model) {
  const { target, min_nodes, max_nodes, nodes } = model.status;
  const input = el("input", {
    type: "number",
    id: "scale-nodes",
    min: min_nodes,
    max: max_nodes,
    value: target,
    required: true,
  });
  confirm({
    title: "Scale the job",
    verb: "Scale",
    path: "/scale",
    body: () => ({ nodes: Number(input.value) }),
    fields: [el("p", {}, el("label", { for: "scale-nodes" }, `Number of nodes, ${min_nodes} to ${max_nodes} `), input)],
    effects: [
      `The job now has ${plural(nodes.filter((node) => node.first_rank >= 0).length, "node")} in the round and ${plural(nodes.length, "node")} in all.`,
      "With fewer, surplus nodes become spares, and all workers restart in a smaller round.",
      "With more, the job takes spares, and new nodes when they join.",
      lostSteps(model),
    ],
  });
}

export function stop(model) {
  const why = el("input", { type: "text", id: "stop-why", maxlength: 200, autocomplete: "off" });
  const { world_size, nodes, run_id } = model.status;
  confirm({
    title: `End job ${run_id}?`,
    verb: "End the job",
    danger: true,
    path: "/stop",
    body: () => ({ why: why.value }),
    fields: [el("p", {}, el("label", { for: "stop-why" }, "Reason, for the report "), why)],
    effects: [
      `All ${plural(world_size, "worker")} on ${plural(nodes.length, "node")} get SIGTERM, and after their shutdown timeout SIGKILL.`,
      "Every agent prints a report and exits with code 1.",
      "The job cannot be continued from here: start it again.",
    ],
  });
}

/** Ask for the token; `retry` is called when one was entered. */
export function askForToken(reason, wasTried, retry) {
  const dialog = openDialog("This job asks for its token", (close) => {
    const input = el("input", {
      type: "password",
      id: "token",
      autocomplete: "off",
      required: true,
      spellcheck: false,
    });
    const submit = (event) => {
      event.preventDefault();
      setToken(input.value.trim());
      close();
      retry();
    };
    return [
      el(
        "form",
        { onsubmit: submit },
        el("p", {}, "Print it where the job's secret is known:"),
        el("pre", { class: "command" }, "ripstop token --job=JOB"),
        wasTried ? el("p", { class: "error", role: "alert" }, `Not accepted: ${reason}`) : null,
        el("p", {}, el("label", { for: "token" }, "Token "), input),
        el("p", { class: "hint" }, "It is kept for this tab only, and never becomes part of an address."),
        el("div", { class: "buttons end" }, el("button", { type: "submit", class: "primary" }, "Open the job")),
      ),
    ];
  });
  dialog.querySelector("input").focus();
  return dialog;
}
