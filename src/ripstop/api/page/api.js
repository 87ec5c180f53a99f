// Requests to the job's API, with the token that the user entered.  The token is kept for this tab only, is sent in a
// header, and is never part of an address: `ripstop page` passes it in the fragment, which is removed at once.

const PREFIX = "api/v1";
const STORED = "ripstop-token";
const REPLY_MS = 30_000;
const SILENCE_MS = 40_000; // the server sends a comment every 15 s

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

let token = "";

export function loadToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  if (given) {
    history.replaceState(null, "", location.pathname);
    setToken(given);
    return;
  }
  try {
    token = sessionStorage.getItem(STORED) || "";
  } catch {
    token = ""; // storage is disabled: the token is lost at a reload
  }
}

export function setToken(value) {
  token = value;
  try {
    sessionStorage.setItem(STORED, value);
  } catch {
    // see above
  }
}

async function send(path, options = {}) {
  const headers = { ...(options.headers || {}) };
  if (token) headers.Authorization = `Bearer ${token}`;
  const response = await fetch(`${PREFIX}${path}`, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  let text = `the job replied HTTP ${response.status}`;
  try {
    text = (await response.json()).error || text;
  } catch {
    // not a reply of the job
  }
  throw new ApiError(response.status, text);
}

export const get = async (path) => (await send(path, { signal: AbortSignal.timeout(REPLY_MS) })).json();

export async function post(path, body = {}) {
  const response = await send(path, {
    method: "POST",
    signal: AbortSignal.timeout(REPLY_MS),
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  return response.json();
}

/** Read a text stream until it ends; `onText` gets pieces of it. */
export async function stream(path, { accept, signal, onOpen, onText, silenceMs = 0 }) {
  const silence = new AbortController();
  const either = AbortSignal.any ? AbortSignal.any([signal, silence.signal]) : signal;
  let timer = 0;
  const restart = () => {
    clearTimeout(timer);
    if (silenceMs) timer = setTimeout(() => silence.abort(), silenceMs);
  };
  try {
    const response = await send(path, { headers: { Accept: accept }, signal: either });
    onOpen?.();
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      restart();
      const { done, value } = await reader.read();
      if (done) return;
      onText(value);
    }
  } finally {
    clearTimeout(timer);
  }
}

/** Follow the job's events forever; reconnects, and reads all events again then, because the coordinator may be new. */
export async function followEvents({ onEvents, onState }) {
  let pause = 500;
  for (;;) {
    let rest = "";
    try {
      await stream("/events", {
        accept: "text/event-stream",
        signal: new AbortController().signal,
        silenceMs: SILENCE_MS,
        onOpen() {
          pause = 500;
          onState("live");
        },
        onText(text) {
          const blocks = (rest + text).split("\n\n");
          rest = blocks.pop();
          onEvents(blocks.flatMap(eventsOf));
        },
      });
      onState("lost", "the stream ended");
    } catch (error) {
      onState(error.status === 401 || error.status === 403 ? "denied" : "lost", error.message, error.status);
      if (error.status === 401 || error.status === 403) return; // the page asks for a token, and starts again
    }
    await new Promise((resolve) => setTimeout(resolve, pause));
    pause = Math.min(pause * 1.6, 5000);
  }
}

function eventsOf(block) {
  const data = block
    .split("\n")
    .filter((line) => line.startsWith("data:"))
    .map((line) => line.slice(5))
    .join("\n");
  if (!data) return [];
  try {
    return [JSON.parse(data)];
  } catch {
    return []; // a damaged event is skipped, as in event files
  }
}
