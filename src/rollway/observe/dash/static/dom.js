// Small helpers. Text from outside only ever becomes text: nothing here takes markup.

export const $ = (id) => document.getElementById(id);

/** Make an element; `fields` are attributes, children are nodes or text. */
export function el(tag, fields = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, fields = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(fields)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** Set text only if it differs: an unchanged node costs no layout, and keeps a selection. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setClass(node, name) {
  if (node.className !== name) node.className = name;
}

// --- figures ---------------------------------------------------------------------------------

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

export function formatNumber(value, digits = 3) {
  if (!isNumber(value)) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9, digits)} G`;
  if (size >= 1e6) return `${trim(value / 1e6, digits)} M`;
  if (size >= 1e4) return `${trim(value / 1e3, digits)} k`;
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return trim(value, digits);
}

function trim(value, digits) {
  const text = value.toPrecision(digits);
  if (text.includes("e")) return String(Math.round(value));
  return text.includes(".") ? text.replace(/\.?0+$/, "") : text;
}

export const formatShare = (value) => (isNumber(value) ? `${Math.round(value * 100)}%` : "–");

export function formatSeconds(value) {
  if (!isNumber(value)) return "–";
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${trim(value * 1e3, 3)} ms`;
  if (value < 120) return `${trim(value, 3)} s`;
  if (value < 7200) return `${(value / 60).toFixed(1)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export const formatBytes = (value) => (isNumber(value) ? `${formatNumber(value)}B` : "–");

const CLOCK = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const DAY = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric" });

/** The time of day where the reader is. Ages are taken from the run's own clock, never from this one. */
export const formatClock = (t) => (isNumber(t) ? CLOCK.format(new Date(t * 1000)) : "–");
export const formatMoment = (t) => (isNumber(t) ? `${DAY.format(new Date(t * 1000))} ${formatClock(t)}` : "–");
export const formatUtc = (t) => (isNumber(t) ? new Date(t * 1000).toISOString().replace("T", " ").slice(0, 19) + " UTC" : "");

export const plural = (count, noun) => `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
