// The page: one stream of changes from the server, one model, one function per section that shows it.
//
//   /api/stream ──► live model ──┐
//                                ├──► render(model)      the slider chooses which
//   /api/model?at=T ──► past ────┘
//
// A report is the same page with its model in the file: no stream, and no slider.

import { $, el, formatClock, formatMoment, formatUtc, isNumber, setClass, setText } from "./dom.js";
import { ask, chooseRun, report } from "./api.js";
import { renderFindings, setUpReport } from "./findings.js";
import { renderFleet } from "./fleet.js";
import { renderRefits, showRefit } from "./refits.js";
import { drawCharts, renderRollouts } from "./charts.js";
import { drawHits, renderHits } from "./hits.js";
import { renderExactness } from "./exactness.js";
import { renderConversations } from "./conversations.js";
import { renderEvents } from "./events.js";
import { setUpLog } from "./log.js";

const MOST_EVENTS = 2000;
const SLIDER_STEPS = 1000;

const live = makeModel();
let past = null; // the model that is shown instead, when the reader looks back
let stream = null;
let isConnected = false;

function makeModel() {
  return { sections: {}, series: {}, events: [], refit: null };
}

// --- the model ---------------------------------------------------------------------------------

function applyUpdate(model, update) {
  if (update.first) Object.assign(model, makeModel());
  Object.assign(model.sections, update.sections);
  for (const [name, points] of Object.entries(update.series ?? {})) {
    const known = model.series[name];
    // Points that begin before the last known one are the whole plot, thinned by the server.
    if (!known || points.t[0] <= known.t.at(-1)) model.series[name] = points;
    else {
      known.t.push(...points.t);
      known.v.push(...points.v);
    }
  }
  if (update.events) model.events = model.events.concat(update.events).slice(-MOST_EVENTS);
  if ("refit" in update) model.refit = update.refit;
}

function readWhole(answer) {
  const model = makeModel();
  applyUpdate(model, answer);
  return model;
}

// --- the stream --------------------------------------------------------------------------------

function connect() {
  stream = new EventSource("/api/stream");
  stream.onmessage = (message) => {
    isConnected = true;
    applyUpdate(live, JSON.parse(message.data));
    if (past === null) schedule();
    else renderTime();
  };
  stream.onopen = () => {
    isConnected = true;
    schedule();
  };
  stream.onerror = () => {
    isConnected = false; // the browser tries again by itself
    renderHeader(past ?? live);
    if (stream.readyState === EventSource.CLOSED) setTimeout(connect, 3000);
  };
}

let isScheduled = false;

/** Render once per frame, however many messages come. A hidden page renders when it is seen. */
function schedule() {
  if (isScheduled) return;
  isScheduled = true;
  requestAnimationFrame(() => {
    isScheduled = false;
    render(past ?? live);
  });
}

function render(model) {
  if (!model.sections.run) return;
  renderHeader(model);
  renderTop(model.sections.top);
  renderFindings(model.sections);
  renderFleet(model);
  renderRefits(model);
  renderRollouts(model);
  renderHits(report ? model.sections.run.label : past === null ? null : past.sections.run.at);
  renderExactness(model);
  renderConversations(live.sections.exactness?.gateway);
  renderEvents(model);
  renderTime();
  document.body.dataset.ready = "yes";
}

// --- header and top line -----------------------------------------------------------------------

const PHASES = { live: "live", ended: "ended", recorded: "recorded" };

function renderHeader(model) {
  const run = model.sections.run;
  if (!run) return;
  setText($("stack"), run.stack || run.label);
  $("stack").title = `run ${run.run || "?"}, Rollway ${run.rollway || "?"}`;
  document.title = `${run.stack || run.label} · Rollway`;
  let phase = PHASES[run.phase] ?? "";
  let text = phase === "live" ? `live · ${formatClock(run.now)}` : `${phase} · ${formatMoment(run.ended ?? run.now)}`;
  if (past !== null) [phase, text] = ["past", `as it was · ${formatMoment(run.at)}`];
  if (!isConnected) [phase, text] = ["lost", "no connection"];
  setClass($("phase"), `chip ${phase}`);
  setText($("phase"), text);
  $("phase").title = formatUtc(run.now);
  const notes = [...(run.notes ?? [])];
  if (run.phase === "ended") notes.unshift("The stack has ended. What follows is its record, and it stays here.");
  if (!isConnected) notes.unshift("The dashboard does not answer. This page goes on by itself when it does.");
  if (!isNumber(run.began)) notes.unshift("Nothing has been recorded yet.");
  const key = notes.join("\n");
  if ($("notes").dataset.key !== key) {
    $("notes").dataset.key = key;
    $("notes").replaceChildren(...notes.map((note) => el("p", {}, note)));
  }
}

const WORDS = { good: "good", warn: "look", bad: "wrong", unknown: "unknown" };

function renderTop(verdicts) {
  const place = $("top");
  if (place.childElementCount !== verdicts.length) {
    place.replaceChildren(...verdicts.map((verdict) => makeAnswer(verdict.name)));
  }
  verdicts.forEach((verdict, index) => {
    const card = place.children[index];
    setClass(card, `answer ${verdict.level}`);
    const [name, word, figure, sentence, threshold] = card.querySelectorAll("[data-part]");
    setText(name, verdict.name);
    setText(word, WORDS[verdict.level] ?? verdict.level);
    setText(figure, verdict.figure);
    if (figure.dataset.metric !== verdict.metric) figure.dataset.metric = verdict.metric;
    setText(sentence, verdict.sentence);
    setText(threshold, verdict.threshold);
  });
}

function makeAnswer(name) {
  return el(
    "article",
    { "data-answer": name },
    el("div", { class: "line" }, el("h2", { "data-part": "name" }), el("span", { class: "word", "data-part": "word" })),
    el("p", { class: "big", "data-part": "figure" }),
    el("p", { "data-part": "sentence" }),
    el("p", { class: "threshold", "data-part": "threshold" }),
  );
}

// --- time --------------------------------------------------------------------------------------

function getSpan() {
  const run = live.sections.run;
  return run && isNumber(run.began) ? [run.began, Math.max(run.now, run.began + 1)] : null;
}

function renderTime() {
  const span = getSpan();
  $("slider").disabled = span === null;
  if (past === null) {
    $("slider").value = SLIDER_STEPS;
    setText($("moment"), span ? formatMoment(span[1]) : "–");
  }
  $("live").disabled = past === null;
  document.body.classList.toggle("past", past !== null);
}

let wanted = null; // the moment that the reader asked for last
let isLoading = false;

/** Show a moment; while one is loading, remember only the last that was asked for. */
async function showMoment(t) {
  wanted = t;
  setText($("moment"), formatMoment(t));
  if (isLoading) return;
  isLoading = true;
  try {
    while (wanted !== null) {
      const at = wanted;
      const answer = await ask(`/api/model?at=${at}`);
      if (!answer) throw new Error("no answer");
      const model = readWhole(answer);
      if (wanted === at) {
        past = model;
        wanted = null;
        showRefit(null, at);
        history.replaceState(null, "", `#t=${at.toFixed(1)}`);
        schedule();
      }
    }
  } catch {
    isConnected = false;
    renderHeader(past ?? live);
  } finally {
    isLoading = false;
  }
}

function showLatest() {
  if (report) return;
  wanted = null;
  past = null;
  showRefit(null, null);
  history.replaceState(null, "", location.pathname);
  schedule();
}

$("slider").addEventListener("input", () => {
  const span = getSpan();
  if (!span) return;
  const share = Number($("slider").value) / SLIDER_STEPS;
  if (share >= 1) showLatest();
  else showMoment(span[0] + share * (span[1] - span[0]));
});
$("live").addEventListener("click", showLatest);

/** Go to the moment of the address, if it has one. */
function readAddress() {
  const match = !report && /^#t=(\d{9,11}(?:\.\d+)?)$/.exec(location.hash);
  if (!match) return;
  const t = Number(match[1]);
  const span = getSpan();
  if (span) $("slider").value = Math.round((SLIDER_STEPS * (t - span[0])) / (span[1] - span[0]));
  showMoment(t);
}
addEventListener("hashchange", readAddress);

$("share").addEventListener("click", async () => {
  const run = (past ?? live).sections.run;
  const t = run?.at ?? run?.now;
  if (!isNumber(t)) return;
  const link = `${location.origin}/#t=${t.toFixed(1)}`;
  try {
    await navigator.clipboard.writeText(link);
    setText($("share"), "Copied");
  } catch {
    location.hash = `t=${t.toFixed(1)}`; // no clipboard here: the address has it
    setText($("share"), "In the address");
  }
  setTimeout(() => setText($("share"), "Link"), 2000);
});

// --- theme -------------------------------------------------------------------------------------

const THEMES = ["", "light", "dark"];
const root = document.documentElement;

function renderTheme() {
  const theme = root.dataset.theme ?? "";
  setText($("theme"), theme === "" ? "Auto" : theme === "light" ? "Light" : "Dark");
  drawCharts(); // their colours are drawn, not styled
  drawHits();
}

$("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(root.dataset.theme ?? "") + 1) % THEMES.length];
  if (next) root.dataset.theme = next;
  else delete root.dataset.theme;
  try {
    localStorage.setItem("rollway-theme", next);
  } catch {
    // It lasts as long as the page.
  }
  renderTheme();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", renderTheme);

// --- keys --------------------------------------------------------------------------------------

const KEYS = { f: "fleet", r: "refits", o: "rollouts", x: "exactness", e: "events", t: "top" };

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target.matches("input, select, textarea, dialog *")) return;
  if (KEYS[event.key]) {
    const section = $(KEYS[event.key]);
    section.scrollIntoView();
    (section.querySelector("[tabindex='0']") ?? section).focus({ preventScroll: true });
    event.preventDefault();
  } else if (event.key === "l") showLatest();
});

/** Show one run of a report. */
function showEmbedded(answer) {
  isConnected = true;
  Object.assign(live, readWhole(answer));
  showRefit(null, null);
  schedule();
}

setUpLog();
renderTheme();
if (report) {
  setUpReport(showEmbedded);
  showEmbedded(chooseRun(0));
} else {
  connect();
  readAddress();
}
