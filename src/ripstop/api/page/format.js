// Numbers, times and sets of ranks as text.

const number = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
export const count = (value) => number.format(value);

export function plural(value, noun) {
  return `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
}

/** 0.21 s, 45 s, 12 min, 3 h 20 min, 2 d 4 h */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 0) seconds = 0;
  if (seconds < 0.0995) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${seconds.toFixed(seconds < 1 ? 2 : 1)} s`;
  if (seconds < 120) return `${Math.floor(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 120) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return minutes % 60 ? `${hours} h ${minutes % 60} min` : `${hours} h`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

/** As `duration`, in whole seconds: for values that count up. */
export const age = (seconds) => (seconds < 10 ? `${Math.max(0, Math.floor(seconds))} s` : duration(seconds));

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) [value, unit] = [value / 1024, unit + 1];
  return `${value >= 100 || unit === 0 ? Math.round(value) : value.toFixed(1)} ${units[unit]}`;
}

export const percent = (share) =>
  share === null || share === undefined ? "–" : `${(share * 100).toFixed(share > 0.995 || share === 0 ? 0 : 1)} %`;

export function rate(perSecond) {
  if (!perSecond) return "–";
  return perSecond >= 100 ? count(perSecond) : perSecond >= 1 ? perSecond.toFixed(1) : perSecond.toPrecision(2);
}

const pad = (value) => String(value).padStart(2, "0");

export function clock(at) {
  const time = new Date(at * 1000);
  return `${pad(time.getHours())}:${pad(time.getMinutes())}:${pad(time.getSeconds())}`;
}

export function dateTime(at) {
  const time = new Date(at * 1000);
  return `${time.getFullYear()}-${pad(time.getMonth() + 1)}-${pad(time.getDate())} ${clock(at)}`;
}

/** [0, 1, 2, 5] as "0–2, 5" */
export function ranges(ranks) {
  const found = [];
  for (const rank of [...ranks].sort((a, b) => a - b)) {
    const last = found.at(-1);
    if (last && rank === last[1] + 1) last[1] = rank;
    else found.push([rank, rank]);
  }
  return found
    .map(([first, last]) => (first === last ? first : last === first + 1 ? `${first}, ${last}` : `${first}–${last}`))
    .join(", ");
}

// Escape sequences of terminals, and control characters except tab.
const ANSI = /\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\-_])/g;
const CONTROL = /[\x00-\x08\x0b-\x1f\x7f-\x9f]/g;

/** A line of a log as it would look at a terminal: without colours, the part after the last carriage return. */
export function plainLine(line) {
  const visible = line.replace(ANSI, "").replace(/\r+$/, "");
  return visible.slice(visible.lastIndexOf("\r") + 1).replace(CONTROL, "·");
}
