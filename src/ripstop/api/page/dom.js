// Makes elements.  Text from the job always becomes a text node: nothing here parses HTML.

export const find = (id) => document.getElementById(id);

/** el("p", {class: "x", onclick: f}, "text", child, …): an element with attributes, listeners and children. */
export function el(name, attributes = {}, ...children) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (key in element && key !== "list") element[key === "class" ? "className" : key] = value;
    else element.setAttribute(key === "class" ? "class" : key, value === true ? "" : value);
  }
  element.append(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
  return element;
}

export const button = (label, onclick, attributes = {}) =>
  el("button", { type: "button", onclick, ...attributes }, label);

/** Set an element's text only if it changes, so that a screen reader and a selection are not disturbed. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function replace(element, ...children) {
  element.replaceChildren(
    ...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false),
  );
}

const colors = new Map(); // reading one computes styles

/** A colour of the style sheet in the current scheme, for canvases. */
export function color(name) {
  if (!colors.has(name)) {
    const root = document.documentElement;
    root.style.outlineColor = `var(--${name})`; // a property that resolves it and shows nothing
    colors.set(name, getComputedStyle(root).outlineColor);
    root.style.outlineColor = "";
  }
  return colors.get(name);
}

/** After a change of the colour scheme. */
export const forgetColors = () => colors.clear();

/** A canvas as large as its box, in device pixels; returns its context, scaled to CSS pixels. */
export function context2d(canvas, width, height) {
  const ratio = window.devicePixelRatio || 1;
  if (canvas.width !== Math.round(width * ratio) || canvas.height !== Math.round(height * ratio)) {
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
  }
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}

const toasts = [];

/** A short message at the bottom of the page. */
export function toast(text, kind = "") {
  const element = el("p", { class: `toast ${kind}` }, text);
  find("toasts").append(element);
  toasts.push(element);
  if (toasts.length > 4) toasts.shift().remove();
  setTimeout(() => element.remove(), 8000);
}
