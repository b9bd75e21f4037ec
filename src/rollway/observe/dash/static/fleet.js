// A row per worker. Rows are kept and only changed cells are written: 128 of them change every two
// seconds.

import { $, el, formatClock, formatNumber, formatShare, formatUtc, isNumber, plural, setClass, setText } from "./dom.js";
import { openLog } from "./log.js";

const COLUMNS = [
  { key: "name", title: "Worker" },
  { key: "state", title: "State", metric: "rollway_workers" },
  { key: "version", title: "Version", metric: "rollway_weight_version", number: true },
  { key: "load", title: "Load", metric: "vllm:num_requests_running", number: true, hint: "requests that run, and that wait" },
  { key: "kv", title: "KV", metric: "vllm:kv_cache_usage_perc", number: true, share: true, hint: "KV cache in use" },
  { key: "hits", title: "Hits", metric: "vllm:prefix_cache_hits_total_per_second", number: true, share: true, hint: "prompt tokens found in its prefix cache" },
  { key: "restarts", title: "Restarts", metric: "rollway_restarts_total", number: true, minor: true },
  { key: "node", title: "Node", minor: true },
  { key: "role", title: "Role", minor: true },
  { key: "last_event", title: "Last event", minor: true },
];
const SERVING = new Set(["ready", "serving"]);
const ENDING = new Set(["stopping", "stopped"]); // in order, with the whole stack
const WAITING = new Set(["starting", "waiting", "restarting", "paused", "asleep", "joining"]);

let sort = { key: "name", down: false };
let shown = null;
const rows = new Map(); // name -> { tr, cells }

function setUp() {
  const head = $("fleet-table").querySelector("thead tr");
  for (const column of COLUMNS) {
    const button = el("button", { type: "button", title: column.hint ?? null, onclick: () => chooseSort(column.key) }, column.title);
    head.append(el("th", { scope: "col", class: describe(column), "data-key": column.key }, button));
  }
  head.append(el("th", { scope: "col", class: "minor" }, el("span", { class: "unseen" }, "Log")));
  $("fleet-filter").addEventListener("input", () => shown && renderFleet(shown));
  showSort();
}

const describe = (column) => [column.number ? "number" : "", column.minor ? "minor" : ""].join(" ").trim();

function chooseSort(key) {
  sort = { key, down: sort.key === key ? !sort.down : false };
  showSort();
  if (shown) renderFleet(shown);
}

function showSort() {
  for (const th of $("fleet-table").querySelectorAll("th[data-key]")) {
    const own = th.dataset.key === sort.key;
    th.setAttribute("aria-sort", own ? (sort.down ? "descending" : "ascending") : "none");
  }
}

const COLLATOR = new Intl.Collator("en", { numeric: true });

function compare(a, b) {
  const [x, y] = [a[sort.key], b[sort.key]];
  const order =
    isNumber(x) || isNumber(y)
      ? (isNumber(x) ? x : -Infinity) - (isNumber(y) ? y : -Infinity)
      : COLLATOR.compare(x ?? "", y ?? "");
  return (sort.down ? -1 : 1) * (order || 0) || COLLATOR.compare(a.name, b.name);
}

export function renderFleet(model) {
  shown = model;
  const all = model.sections.fleet;
  const words = $("fleet-filter").value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = (row) => `${row.name} ${row.node} ${row.role} ${row.state} ${row.last_event} v${row.version}`.toLowerCase();
  const list = all.filter((row) => words.every((word) => text(row).includes(word))).sort(compare);
  const newest = Math.max(...all.map((row) => row.version ?? -1));
  const body = $("fleet-table").tBodies[0];
  const names = new Set(list.map((row) => row.name));
  for (const [name, { tr }] of rows) {
    if (!names.has(name)) {
      tr.remove();
      rows.delete(name);
    }
  }
  list.forEach((row, index) => {
    let entry = rows.get(row.name);
    if (!entry) rows.set(row.name, (entry = makeRow(row, model)));
    fillRow(entry, row, newest, model);
    if (body.children[index] !== entry.tr) body.insertBefore(entry.tr, body.children[index] ?? null);
  });
  const serving = all.filter((row) => SERVING.has(row.state)).length;
  setText($("fleet-summary"), `${serving} of ${plural(all.length, "worker")} ${all.length === 1 ? "serves" : "serve"}`);
}

function makeRow(row, model) {
  const cells = {};
  const tr = el("tr", { "data-worker": row.name });
  for (const column of COLUMNS) {
    const tag = column.key === "name" ? "th" : "td";
    const cell = el(tag, { class: describe(column), scope: tag === "th" ? "row" : null, "data-metric": column.metric, "data-column": column.key });
    if (column.share) {
      cell.append(el("span", { class: "meter", "aria-hidden": "true" }, el("i")), el("span"));
    } else if (column.key === "state") {
      cell.append(el("span", { class: "state" }));
    }
    cells[column.key] = cell;
    tr.append(cell);
  }
  const button = model.sections.run.has_logs
    ? el("button", { type: "button", class: "quiet", "aria-label": `Log of ${row.name}`, onclick: () => openLog(row.name) }, "log")
    : null;
  tr.append(el("td", { class: "minor" }, button));
  return { tr, cells };
}

function fillRow({ tr, cells }, row, newest, model) {
  setText(cells.name, row.name);
  cells.name.title = `instance ${row.instance || "?"}, pid ${row.pid ?? "?"}, ${row.model}`;
  const level = SERVING.has(row.state) ? "good" : ENDING.has(row.state) ? "ended" : WAITING.has(row.state) ? "warn" : "bad";
  setClass(tr, ["good", "ended"].includes(level) ? "" : `row-${level}`);
  setClass(cells.state.firstChild, `state ${level}`);
  setText(cells.state.firstChild, row.state || "?");
  setText(cells.version, row.version === null || row.version === undefined ? "–" : `${row.version}`);
  cells.version.classList.toggle("behind", SERVING.has(row.state) && row.version !== newest);
  const waiting = row.waiting ? ` +${formatNumber(row.waiting)}` : "";
  setText(cells.load, isNumber(row.load) ? `${formatNumber(row.load)}${waiting}` : "–");
  for (const key of ["kv", "hits"]) {
    const [meter, text] = cells[key].children;
    const share = isNumber(row[key]) ? Math.min(row[key], 1) : 0;
    meter.firstChild.style.width = `${(100 * share).toFixed(0)}%`;
    setText(text, formatShare(row[key]));
  }
  setText(cells.restarts, `${row.restarts ?? 0}`);
  setText(cells.node, row.node || "here");
  setText(cells.role, row.role || "–");
  setText(cells.last_event, row.last_event ? `${row.last_event} ${formatClock(row.last_event_at)}` : "–");
  cells.last_event.title = formatUtc(row.last_event_at);
}

setUp();
