// What happened, newest first, with a filter.

import { $, el, formatClock, formatUtc, plural, setText } from "./dom.js";

const MOST_SHOWN = 300;
const RANKS = { info: 0, warn: 1, bad: 2 };

let model = null;
let drawn = "";

function setUp() {
  $("event-filter").addEventListener("input", () => model && renderEvents(model));
  $("event-level").addEventListener("change", () => model && renderEvents(model));
}

export function renderEvents(next) {
  model = next;
  const text = $("event-filter").value.toLowerCase();
  const level = $("event-level").value;
  const key = `${model.events.length}:${model.events.at(-1)?.id}:${model.events.at(-1)?.t}:${text}:${level}`;
  if (key === drawn) return;
  drawn = key;
  const words = text.split(/\s+/).filter(Boolean);
  const matches = model.events.filter((event) => {
    const line = `${event.event} ${event.worker} ${event.detail}`.toLowerCase();
    return (RANKS[event.level] ?? 0) >= (RANKS[level] ?? 0) && words.every((word) => line.includes(word));
  });
  const shown = matches.slice(-MOST_SHOWN).reverse();
  $("event-list").replaceChildren(...shown.map(makeEvent));
  if (!shown.length) $("event-list").append(el("li", { class: "empty" }, "No event matches."));
  const total = plural(model.events.length, "event");
  setText($("event-summary"), matches.length === model.events.length ? total : `${matches.length} of ${total}`);
}

function makeEvent(event) {
  return el(
    "li",
    { class: `event ${event.level}` },
    el("a", { href: `#t=${event.t.toFixed(1)}`, title: `${formatUtc(event.t)}: show this moment` }, formatClock(event.t)),
    el("span", { class: "kind" }, event.event || "?"),
    el("span", { class: "worker" }, event.worker),
    el("span", { class: "detail" }, event.detail),
  );
}

setUp();
