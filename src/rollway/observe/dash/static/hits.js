// Prefix hits: a row per worker, a cell per stretch of time, the darker the more was found. A canvas,
// because 128 workers have ten thousand cells. It is fetched apart, as it changes slowly.

import { $, el, formatClock, formatShare, setText } from "./dom.js";
import { ask } from "./api.js";
import { readColor } from "./charts.js";

const EVERY_SECONDS = 10;
const LEAST_ROW = 3;
const MOST_ROW = 16;
const MOST_HEIGHT = 400;

let workers = [];
let moment; // what is shown; undefined at first
let fetchedAt = -Infinity;

/** Show the hits now, or as they were at a moment. */
export async function renderHits(at) {
  const now = performance.now() / 1000;
  if (at === moment && (at !== null || now - fetchedAt < EVERY_SECONDS)) return;
  moment = at;
  fetchedAt = now;
  try {
    const answer = await ask(at === null ? "/api/hits" : `/api/hits?at=${at}`);
    if (!answer || moment !== at) return;
    ({ workers } = answer);
  } catch {
    return; // the header says that there is no connection
  }
  drawHits();
}

export function drawHits() {
  $("hits").hidden = !workers.length;
  if (!workers.length) return;
  const canvas = $("hits-canvas");
  const row = Math.min(Math.max(MOST_HEIGHT / workers.length, LEAST_ROW), MOST_ROW);
  const [width, height] = [Math.max(canvas.parentElement.clientWidth - 88, 60), Math.ceil(row * workers.length)];
  const scale = devicePixelRatio || 1;
  [canvas.width, canvas.height] = [width * scale, height * scale];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.fillStyle = readColor("--line-1");
  const [first, last] = getSpan();
  workers.forEach((worker, index) => {
    for (const [t, share] of worker.points) {
      context.globalAlpha = 0.06 + 0.94 * share;
      const left = ((t - worker.width / 2 - first) / (last - first)) * width;
      context.fillRect(left, index * row, Math.max((worker.width / (last - first)) * width, 1), row - 0.5);
    }
  });
  drawNames(row, height);
  const means = workers.map(getMean);
  const [low, high] = [Math.min(...means), Math.max(...means)].map(formatShare);
  const text = low === high ? low : `${low} to ${high}`;
  setText($("hits-figure"), text);
  canvas.setAttribute("aria-label", `Prefix hits of ${workers.length} workers over time: ${text} in the mean`);
}

function drawNames(row, height) {
  const every = Math.max(1, Math.ceil(12 / row)); // names need a line each
  const names = workers.map((worker, index) => [worker.name, index]).filter(([, index]) => index % every === 0);
  $("hits-names").style.height = `${height}px`;
  $("hits-names").replaceChildren(...names.map(([name, index]) => {
    const label = el("span", { title: name, "data-column": "name" }, name);
    label.style.top = `${index * row + Math.max((row - 11) / 2, 0)}px`;
    return label;
  }));
}

const getMean = (worker) => worker.points.reduce((sum, [, share]) => sum + share, 0) / Math.max(worker.points.length, 1);

function getSpan() {
  const ends = workers.flatMap(({ points, width }) => [points[0][0] - width / 2, points.at(-1)[0] + width / 2]);
  const [first, last] = [Math.min(...ends), Math.max(...ends)];
  return [first, Math.max(last, first + 1)];
}

$("hits-canvas").addEventListener("mousemove", (event) => {
  const box = event.target.getBoundingClientRect();
  const worker = workers[Math.floor(((event.clientY - box.top) / box.height) * workers.length)];
  if (!worker) return;
  const [first, last] = getSpan();
  const t = first + ((event.clientX - box.left) / box.width) * (last - first);
  const cell = worker.points.find(([middle]) => Math.abs(middle - t) <= worker.width / 2);
  event.target.title = cell ? `${worker.name}: ${formatShare(cell[1])} at ${formatClock(cell[0])}` : worker.name;
});
new ResizeObserver(drawHits).observe($("hits").parentElement);
