// Mismatch by version on a logarithmic scale, the spread of versions, and what was prevented.

import { $, el, formatNumber, plural, setText, svg } from "./dom.js";
import { SPREAD, makeChart, updateChart } from "./charts.js";

const [LOW, HIGH] = [1e-7, 1];

let spread = null;
let plot = null;
let figure = null;

function setUp() {
  figure = el("b", { "data-metric": "rollway_mismatch_k3" });
  plot = el("div", { class: "plot mismatch", role: "img", "aria-label": "Mismatch k3 of each version" });
  $("exact-charts").append(
    el("figure", { class: "chart" }, el("figcaption", {}, el("span", {}, "Mismatch k3 by version"), el("span", { class: "figure" }, figure)), plot),
  );
}

export function renderExactness(model) {
  const exactness = model.sections.exactness;
  spread ??= makeChart($("exact-charts"), SPREAD);
  updateChart(spread, model.series);
  renderMismatch(exactness.mismatch, exactness.bounds);
  renderFacts(exactness);
}

function renderFacts(exactness) {
  const newest = exactness.mismatch.at(-1);
  const forks = Object.entries(exactness.forks);
  const facts = [
    ["newest version", newest ? `${newest.version}` : "–", "rollway_weight_version"],
    ["k3", formatNumber(newest?.k3), "rollway_mismatch_k3"],
    ["k1", formatNumber(newest?.k1), "rollway_mismatch_k1"],
    ["largest difference", formatNumber(newest?.max), "rollway_mismatch_max"],
    ["spread of versions", exactness.spread === null ? "–" : `${exactness.spread}`, "rollway_version_spread"],
    ["answers not believed", exactness.not_believed.toLocaleString("en"), "rollway_answers_not_believed_total"],
    ["forks", forks.length ? forks.map(([reason, count]) => `${count} ${reason}`).join(", ") : "none", "rollway_forks_total"],
    ["gateway", plural(exactness.gateway.sessions, "session"), "rollway_gateway_sessions"],
    ["turns", exactness.gateway.turns.toLocaleString("en"), "rollway_gateway_turns_total"],
  ];
  const key = JSON.stringify(facts);
  const place = $("exact-facts");
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  const entries = facts.map(([label, text, metric]) => el("div", {}, el("dt", {}, label), el("dd", { "data-metric": metric }, text)));
  place.replaceChildren(el("dl", {}, ...entries));
  setText($("exact-summary"), exactness.not_believed ? `${plural(exactness.not_believed, "answer")} of uncertain version discarded` : "");
}

function renderMismatch(rows, [good, bad]) {
  const key = JSON.stringify(rows);
  if (plot.dataset.key === key) return;
  plot.dataset.key = key;
  setText(figure, rows.length ? formatNumber(rows.at(-1).k3) : "–");
  if (!rows.length) {
    plot.replaceChildren(el("p", { class: "empty" }, "The trainer has compared no log-probs yet."));
    return;
  }
  const [width, height, left, bottom] = [400, 140, 44, 20];
  const place = (k3) => {
    const share = (Math.log10(Math.min(Math.max(k3, LOW), HIGH)) - Math.log10(LOW)) / (Math.log10(HIGH) - Math.log10(LOW));
    return 6 + (1 - share) * (height - bottom - 10);
  };
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none" });
  const labels = el("div", { class: "scale", "aria-hidden": "true" });
  for (const k3 of [1e-6, 1e-4, good, bad, 1]) {
    const kind = k3 === good ? "line-warn" : k3 === bad ? "line-bad" : "line";
    root.append(svg("line", { x1: left, x2: width, y1: place(k3), y2: place(k3), class: kind }));
    const label = el("span", { class: kind }, k3 === 1 ? "1" : k3.toExponential(0));
    label.style.top = `${((100 * place(k3)) / height).toFixed(1)}%`;
    labels.append(label);
  }
  const gap = (width - left) / rows.length;
  rows.forEach((row, index) => {
    const level = row.k3 < good ? "good" : row.k3 < bad ? "warn" : "bad";
    const bar = svg("rect", { x: left + gap * (index + 0.15), width: gap * 0.7, y: place(row.k3), height: Math.max(height - bottom - place(row.k3), 1), class: `bar-${level}`, "data-metric": "rollway_mismatch_k3" });
    bar.append(svg("title", {}, `version ${row.version}: k3 ${formatNumber(row.k3)}, ${row.tokens.toLocaleString("en")} tokens`));
    root.append(bar);
  });
  const ends = el("div", { class: "ends", "aria-hidden": "true" }, el("span", {}, `version ${rows[0].version}`), el("span", {}, `${rows.at(-1).version}`));
  plot.replaceChildren(root, labels, ends);
}

setUp();
