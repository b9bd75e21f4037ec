// Conversations of a gateway: the newest sessions, and one of them token by token, in the colour of the
// version that sampled each. They are fetched when somebody looks, and again when the gateway has counted on.

import { $, el, isNumber, plural, setText } from "./dom.js";
import { ask } from "./api.js";

const COLORS = 6;

let chosen = null;
let counted = ""; // the gateway's counts when the sessions were fetched last
let shownTurns = 0;

/** Fetch what is new, if somebody looks and the gateway's counts of sessions and turns have changed. */
export function renderConversations(gateway) {
  const counts = `${gateway?.sessions} ${gateway?.turns}`;
  if (counts === counted) return;
  counted = counts;
  if ($("conversations").open) loadSessions();
}

function setUp() {
  $("conversations").addEventListener("toggle", () => $("conversations").open && loadSessions());
  $("session-list").addEventListener("keydown", (event) => {
    const step = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (step === undefined) return;
    event.preventDefault();
    const options = [...$("session-list").children];
    const now = options.findIndex((option) => option.getAttribute("aria-selected") === "true");
    options[Math.min(Math.max(now + step, 0), options.length - 1)]?.click();
  });
}

async function loadSessions() {
  const answer = await ask("/api/sessions");
  if (!answer) return;
  const { is_known: isKnown, has_hidden: hasHidden, sessions, left_out: leftOut, trouble } = answer;
  let note = leftOut ? `and ${plural(leftOut, "older session")}` : "";
  if (!sessions.length) note = "The gateway of this stack has recorded no session.";
  if (hasHidden) note = "Sessions of a gateway with tokens are shown by rollway dash --token.";
  if (trouble) note = trouble;
  if (!isKnown) note = "This run does not name a gateway's store: give it with rollway dash --journal FILE.";
  setText($("session-note"), note);
  $("session-list").replaceChildren(...sessions.map(makeOption));
  const session = sessions.find((each) => each.name === chosen);
  if (session && session.turns !== shownTurns) choose(chosen);
}

function makeOption(session) {
  const versions = session.versions.length ? ` · versions ${session.versions.join(", ")}` : "";
  const forks = session.forks ? ` · ${plural(session.forks, "fork")}` : "";
  const text = `${plural(session.turns, "turn")} · ${plural(session.tokens, "token")}${versions}${forks}`;
  return el(
    "div",
    { role: "option", "aria-selected": session.name === chosen ? "true" : "false", onclick: () => choose(session.name) },
    el("b", { "data-column": "name" }, session.name || "(no name)"),
    el("span", { class: "muted", "data-metric": "rollway_gateway_turns_total" }, text),
  );
}

async function choose(name) {
  chosen = name;
  for (const option of $("session-list").children) {
    option.setAttribute("aria-selected", option.querySelector("b").textContent === (name || "(no name)") ? "true" : "false");
  }
  const session = await ask(`/api/session?name=${encodeURIComponent(name)}`);
  if (chosen !== name) return;
  if (!session) {
    $("session").replaceChildren(el("p", { class: "empty" }, "This session cannot be shown any more."));
    return;
  }
  shownTurns = session.turns.length + session.left_out;
  // Turns that stand there stay, with what the reader has unfolded.
  const shown = new Map([...$("session").querySelectorAll(".turn")].map((turn) => [turn.dataset.turn, turn]));
  const turns = session.turns.map((turn, index) => shown.get(turn.id) ?? makeTurn(turn, index));
  const rest = session.left_out ? el("p", { class: "muted" }, `${plural(session.left_out, "turn")} more`) : null;
  $("session").replaceChildren(...[...turns, rest].filter(Boolean));
}

function makeTurn(turn, index) {
  const version = isNumber(turn.version) ? `version ${turn.version}` : "no version";
  const facts = [`turn ${index + 1}`, version, turn.worker && `worker ${turn.worker}`, turn.finish, turn.model].filter(Boolean).join(" · ");
  const title = (id, logprob) => `token ${id}${isNumber(logprob) ? `, log-prob ${logprob}` : ""}, ${version}`;
  const color = isNumber(turn.version) ? `version-${turn.version % COLORS}` : "";
  const tokens = turn.tokens.map(([id, logprob]) => el("span", { class: `token ${color}`, title: title(id, logprob) }, id));
  const prompt = el("details", {}, el("summary", {}, plural(turn.prompt_tokens, "prompt token")), el("p", { class: "ids muted" }, turn.prompt.join(" ")));
  const cut = turn.sampled - turn.tokens.length;
  return el(
    "article",
    { class: "turn", "data-turn": turn.id },
    el("h3", {}, facts),
    turn.forked ? el("p", { class: "warn" }, `fork: ${turn.forked}`) : null,
    prompt,
    el("p", { class: "ids" }, ...tokens, cut > 0 ? el("span", { class: "muted" }, ` ${plural(cut, "token")} more`) : null),
  );
}

setUp();
