// What a person should know of the whole run; in a report, also its figures, or those of two runs.

import { $, el, formatMoment, isNumber } from "./dom.js";
import { chooseRun, report } from "./api.js";

const TITLES = { failed: "What failed", slow: "What was slow", stale: "What was stale", prevented: "What was prevented" };
const NAMES = ["A", "B"];

export function renderFindings({ findings, run }) {
  const place = $("finding-list");
  const none = isNumber(run.began) ? "Nothing failed, nothing was slow, nothing was stale." : "Nothing has been recorded that could be judged.";
  const key = JSON.stringify([findings, none]);
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  const kinds = Object.keys(TITLES).filter((kind) => findings.some((finding) => finding.kind === kind));
  const lists = kinds.map((kind) => el("div", {}, el("h3", {}, TITLES[kind]), el("ul", {}, ...findings.filter((finding) => finding.kind === kind).map(makeFinding))));
  place.replaceChildren(...(lists.length ? lists : [el("p", { class: "muted" }, none)]));
}

function makeFinding(finding) {
  const at = isNumber(finding.t) ? el("span", { class: "muted" }, ` ${formatMoment(finding.t)}`) : null;
  const lines = finding.details.map((line) => el("li", {}, line));
  const details = lines.length ? el("details", {}, el("summary", {}, "details"), el("ul", {}, ...lines)) : null;
  return el("li", { class: finding.level, "data-metric": finding.metric, title: finding.metric }, finding.text, at, details);
}

/** Show what only a report has; `show` is called when the reader chooses the other run. */
export function setUpReport(show) {
  document.body.classList.add("report");
  const texts = report.runs.map((run, index) => el("p", { class: "muted" }, `${report.runs.length > 1 ? `${NAMES[index]}: ${run.stack} ${run.run}: ` : ""}${run.text}`));
  const rows = report.differences ? report.differences.map(makeDifference) : report.runs[0].figures.map(makeFigure);
  const titles = report.differences ? ["", "A", "B", "B / A", ""] : ["", ""];
  const head = el("thead", {}, el("tr", {}, ...titles.map((title) => el("th", { class: "number" }, title))));
  $("figures").replaceChildren(...texts, el("table", {}, ...(report.differences ? [head] : []), el("tbody", {}, ...rows)));
  if (report.runs.length < 2) return;
  const options = report.runs.map((run, index) => el("option", { value: `${index}` }, `${NAMES[index]}: ${run.stack} ${run.run}`));
  const choice = el("select", { id: "run-choice", "aria-label": "Which run is shown" }, ...options);
  choice.addEventListener("change", () => show(chooseRun(Number(choice.value))));
  $("findings").querySelector(".head").append(choice);
}

const makeFigure = (figure) => el("tr", {}, el("th", { scope: "row", title: figure.metric }, figure.label), el("td", { class: "number", "data-metric": figure.metric }, figure.text));

function makeDifference(each) {
  const cell = (text) => el("td", { class: "number", "data-metric": each.metric }, text);
  const word = ["better", "worse"].includes(each.verdict) ? each.verdict : "";
  return el("tr", { class: { better: "row-good", worse: "row-warn" }[each.verdict] }, el("th", { scope: "row", title: each.metric }, each.label), cell(each.first), cell(each.second), cell(isNumber(each.ratio) ? each.ratio.toFixed(2) : "–"), el("td", {}, word));
}
