// The last refits as a strip, and one of them as bars: a row per worker, a bar per step.

import { $, el, formatBytes, formatMoment, formatSeconds, isNumber, plural, setText } from "./dom.js";
import { ask } from "./api.js";

const STEPS = ["look", "preflight", "leave", "pause", "load", "flush", "verify", "open"];
const HINTS = {
  look: "who is there, and on which version",
  preflight: "check the weights and stage them; generation goes on",
  leave: "out of the routing",
  pause: "running requests end or stop",
  load: "the new weights become the served ones",
  flush: "forget the cache of the old weights",
  verify: "compare with what was published",
  open: "back into the routing",
};

let chosen = null; // the key of a refit that the reader chose; otherwise the newest
let at = null;
let detail = null;
let drawn = null;

const getStep = (name) => (STEPS.includes(name) ? name : "other");

function setUp() {
  $("refit-legend").append(
    ...STEPS.map((step) => el("span", { title: HINTS[step] }, el("i", { class: `step-${step}` }), step)),
    el("span", { title: "the engine generated nothing" }, el("i", { class: "paused" }), "generation paused"),
  );
  $("refit-strip").addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const options = [...$("refit-strip").children];
    const now = options.findIndex((option) => option.getAttribute("aria-selected") === "true");
    const next = Math.min(Math.max(now + step, 0), options.length - 1);
    if (options[next]) choose(options[next].dataset.key, next === options.length - 1);
  });
}

let model = null;

/** Show one refit, or the newest; `moment` is the time that the page shows. */
export function showRefit(key, moment) {
  chosen = key;
  at = moment;
  detail = null;
  drawn = null;
}

async function choose(key, isNewest) {
  chosen = isNewest ? null : key;
  renderRefits(model);
  if (chosen === null) return;
  const moment = at === null ? "" : `&at=${at}`;
  const answer = await ask(`/api/refit?key=${encodeURIComponent(key)}${moment}`);
  if (answer && chosen === key) {
    detail = answer;
    renderRefits(model);
  }
}

export function renderRefits(next) {
  model = next;
  const refits = [...model.sections.refits].reverse(); // oldest first, as time runs
  renderStrip(refits);
  const refit = chosen === null ? model.refit : detail;
  setText($("refit-summary"), refits.length ? `${plural(refits.length, "refit")} kept` : "no refit yet");
  if (chosen !== null && refit?.key !== chosen) return; // until it is here, the one before stays
  const key = refit ? JSON.stringify(refit) : "";
  if (key === drawn) return;
  drawn = key;
  renderFacts(refit);
  renderBars(refit);
}

function renderStrip(refits) {
  const strip = $("refit-strip");
  const longest = Math.max(...refits.map((refit) => refit.seconds ?? 0), 1e-3);
  const selected = chosen ?? refits.at(-1)?.key;
  const options = refits.map((refit) => {
    const text = `version ${refit.version}, ${refit.outcome}, ${formatSeconds(refit.seconds)}, paused ${formatSeconds(refit.paused_seconds)}`;
    const bar = el("i");
    bar.style.height = `${Math.max(8, (100 * (refit.seconds ?? longest)) / longest).toFixed(0)}%`;
    return el(
      "div",
      {
        role: "option",
        id: `refit-${refit.key}`,
        class: `outcome-${["ok", "failed", "cancelled", "running"].includes(refit.outcome) ? refit.outcome : "failed"}`,
        "aria-selected": refit.key === selected ? "true" : "false",
        "aria-label": text,
        title: text,
        "data-key": refit.key,
        onclick: () => choose(refit.key, refit === refits.at(-1)),
      },
      bar,
    );
  });
  strip.replaceChildren(...options);
  if (selected) strip.setAttribute("aria-activedescendant", `refit-${selected}`);
}

function fact(label, value, metric, level = "") {
  return el("div", {}, el("dt", {}, label), el("dd", { "data-metric": metric, class: level }, value));
}

function renderFacts(refit) {
  if (!refit) {
    $("refit-facts").replaceChildren();
    return;
  }
  const size = isNumber(refit.bytes) ? `${refit.transport || "?"}, ${formatBytes(refit.bytes)}` : refit.transport || "–";
  const slow = refit.rows.filter((row) => row.straggler).length;
  const facts = el(
    "dl",
    {},
    fact("version", `${refit.version}`, "rollway_weight_version"),
    fact("outcome", refit.outcome, "rollway_refits_total", { ok: "good", running: "", failed: "bad" }[refit.outcome] ?? "warn"),
    fact("took", formatSeconds(refit.seconds), "rollway_refit_seconds"),
    fact("generation paused", formatSeconds(refit.paused_seconds), "rollway_refit_paused_seconds"),
    fact("mode", refit.mode || "–", null),
    fact("weights by", size, "rollway_refit_bytes"),
    fact("workers", `${refit.rows.length}${slow ? `, ${slow} slow` : ""}`, "rollway_workers", slow ? "warn" : ""),
    fact("began", formatMoment(refit.began), null),
  );
  const error = refit.error ? el("p", { class: "error" }, refit.error) : null;
  $("refit-facts").replaceChildren(...[facts, error].filter(Boolean));
}

function renderBars(refit) {
  const place = $("refit-bars");
  if (!refit) {
    place.replaceChildren(el("p", { class: "empty" }, "There was no refit yet. The steps of every worker appear here while one runs."));
    return;
  }
  const last = Math.max(...refit.rows.flatMap((row) => [...row.bars.map((bar) => bar[2]), row.paused?.[1] ?? 0]), refit.outcome === "running" ? refit.span : 0, 1e-3);
  const top = place.scrollTop;
  place.replaceChildren(makeAxis(last), ...refit.rows.map((row) => makeRow(row, last)));
  place.scrollTop = top;
}

function makeAxis(last) {
  const axis = el("div", { class: "axis", "aria-hidden": "true" });
  const rough = last / 5;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  for (let t = 0; t < last * 0.97; t += step) {
    const tick = el("span", {}, formatSeconds(t));
    tick.style.left = `${((100 * t) / last).toFixed(2)}%`;
    axis.append(tick);
  }
  return el("div", { class: "track-row" }, el("span", { class: "who" }), axis, el("span", { class: "total" }));
}

function makeRow(row, last) {
  const place = (node, from, to) => {
    node.style.left = `${((100 * from) / last).toFixed(3)}%`;
    node.style.width = `${((100 * Math.max(to - from, 0)) / last).toFixed(3)}%`;
    return node;
  };
  const track = el("div", { class: "track", role: "img", "aria-label": row.bars.map(([name, a, b]) => `${name} ${formatSeconds(b - a)}`).join(", ") || "no step yet" });
  for (const [name, from, to] of row.bars) {
    const title = `${name}: ${formatSeconds(to - from)}, from ${formatSeconds(from)}`;
    const fields = { class: `step step-${getStep(name)}`, title, "data-step": name, "data-seconds": (to - from).toFixed(4) };
    track.append(place(el("i", fields), from, to));
  }
  if (row.paused) track.append(place(el("i", { class: "paused", title: `generation paused ${formatSeconds(row.paused[1] - row.paused[0])}` }), ...row.paused));
  const facts = [row.state, row.proof && `proved by ${row.proof}`, row.strategy].filter(Boolean).join(", ");
  const who = el("span", { class: "who", title: `instance ${row.instance}${facts ? `, ${facts}` : ""}` }, row.name || row.instance);
  if (row.straggler) who.append(el("em", {}, "slow"));
  const line = el("div", { class: `track-row${row.error ? " failed" : ""}`, "data-instance": row.instance }, who, track, el("span", { class: "total", "data-metric": "rollway_refit_phase_seconds" }, formatSeconds(row.busy)));
  return row.error ? el("div", {}, line, el("p", { class: "error" }, `${row.state}: ${row.error}`)) : line;
}

setUp();
