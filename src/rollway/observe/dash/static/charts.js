// Series over time by uPlot, and the trainer's steps as stacked bars, which uPlot has not.

import { $, el, formatClock, formatNumber, formatSeconds, formatShare, isNumber, plural, setText } from "./dom.js";

const PERCENTILES = ["p50", "p95", "p99"];
const COLORS = ["--line-1", "--line-2", "--line-3"];
const percentiles = (series, metric) => PERCENTILES.map((p) => ({ series: `${series}_${p}`, label: p, metric: `${metric}_${p}` }));

const ROLLOUTS = [
  { title: "Tokens per second", lines: [{ series: "tokens_per_second", metric: "rollway_tokens_per_second" }], fill: true },
  { title: "Prompt tokens from cache", lines: [{ series: "cached", metric: "rollway_cached_share" }], format: formatShare, range: [0, 1], fill: true },
  { title: "Time of a rollout", lines: percentiles("latency", "rollway_rollout_seconds"), format: formatSeconds },
  { title: "Time to first token", lines: percentiles("first_token", "rollway_first_token_seconds"), format: formatSeconds },
  { title: "Tokens of a rollout", lines: percentiles("lengths", "rollway_rollout_tokens") },
  {
    title: "Requests in the workers",
    lines: [
      { series: "running", label: "running", metric: "vllm:num_requests_running" },
      { series: "waiting", label: "waiting", metric: "vllm:num_requests_waiting" },
    ],
  },
  { title: "KV cache in use", lines: [{ series: "kv", metric: "vllm:kv_cache_usage_perc" }], format: formatShare, range: [0, 1], fill: true },
  {
    title: "Retries and cuts",
    lines: [
      { series: "retries", label: "retries", metric: "rollway_retries_total" },
      { series: "cut", label: "cuts", metric: "rollway_rollouts_cut_total" },
    ],
  },
  {
    title: "Refits",
    lines: [
      { series: "refit_seconds", label: "whole", metric: "rollway_refit_seconds" },
      { series: "refit_pause", label: "paused", metric: "rollway_refit_paused_seconds" },
    ],
    format: formatSeconds,
  },
];
export const SPREAD = { title: "Spread of versions", lines: [{ series: "spread", metric: "rollway_version_spread" }], range: [0, 2], stepped: true };

const PARTS = ["generate", "train", "publish", "wait", "paused"];
const GAP_SECONDS = 30;
const HEIGHT = 140;

const charts = []; // every chart of the page
let latest = null;

/** Make a chart in a place; `updateChart` fills it. */
export function makeChart(place, config) {
  const figures = config.lines.map((line) => el("b", { "data-metric": line.metric }));
  const legend = el("span", { class: "figure" });
  config.lines.forEach((line, index) => {
    const dot = line.label ? el("i", { class: `dot dot-${index + 1}` }) : null;
    legend.append(el("span", {}, ...[dot, line.label ? `${line.label} ` : null, figures[index]].filter(Boolean)));
  });
  const box = el("div", { class: "plot", role: "img", "aria-label": config.title });
  place.append(el("figure", { class: "chart" }, el("figcaption", {}, el("span", {}, config.title), legend), box));
  const chart = { config, box, figures, plot: null, key: "" };
  charts.push(chart);
  new ResizeObserver(() => chart.plot?.setSize({ width: Math.max(box.clientWidth, 60), height: HEIGHT })).observe(box);
  return chart;
}

const probe = el("span", { class: "unseen" });
document.body.append(probe);

/** Return a colour of the style as a canvas takes it: not as `light-dark(…)`. */
export function readColor(name) {
  probe.style.color = `var(${name})`;
  return getComputedStyle(probe).color;
}

const fade = (color) => color.replace(/^rgb\((.*)\)$/, "rgba($1, 0.13)");

function makePlot(chart, data) {
  const { config } = chart;
  const format = config.format ?? formatNumber;
  const grid = { stroke: readColor("--grid"), width: 1 };
  const axis = { stroke: readColor("--muted"), grid, ticks: { show: false }, font: "11px system-ui, sans-serif" };
  const options = {
    width: Math.max(chart.box.clientWidth, 60),
    height: HEIGHT,
    padding: [8, 8, 0, 0],
    legend: { show: false },
    cursor: { points: { size: 6 }, drag: { x: true, y: false }, sync: { key: "rollway" } },
    scales: { x: { range: (plot, low, high) => (plot.data[0].length === 1 ? [low - 5, low + 5] : [low, high]) }, y: { range: (_, low, high) => getRange(config, low, high) } },
    axes: [
      { ...axis, space: 70, size: 24, values: (_, times) => formatTimes(times) },
      { ...axis, size: 52, space: 30, values: (_, values) => values.map((value) => format(value)) },
    ],
    series: [{}, ...config.lines.map((line, index) => makeLine(config, index))],
    hooks: { setCursor: [(plot) => showFigures(chart, plot.data, plot.cursor.idx)] },
  };
  chart.plot = new uPlot(options, data, chart.box);
}

/** The time of day, with seconds only where the ticks need them. */
function formatTimes(times) {
  const isClose = times.length > 1 && times[1] - times[0] < 60;
  return times.map((t) => (isClose ? formatClock(t) : formatClock(t).slice(0, 5)));
}

function makeLine(config, index) {
  const color = readColor(COLORS[index]);
  return {
    stroke: color,
    width: 1.5,
    fill: config.fill ? fade(color) : undefined,
    paths: config.stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
    points: { show: (plot) => plot.data[0].length === 1 }, // a line of one point is not seen
    spanGaps: false,
  };
}

function getRange(config, low, high) {
  const top = isNumber(high) ? high * 1.08 : 1;
  if (config.range) return [config.range[0], Math.max(config.range[1], top > config.range[1] * 1.1 ? top : 0)];
  return [0, top > 0 ? top : 1];
}

function showFigures(chart, data, index) {
  const format = chart.config.format ?? formatNumber;
  chart.figures.forEach((figure, number) => {
    const values = data[number + 1];
    const value = isNumber(index) ? values[index] : values.findLast?.(isNumber);
    setText(figure, format(value));
  });
}

/** Put lines of one chart on common times, with a gap where nothing was measured for a while. */
function align(lines, series) {
  const parts = lines.map((line) => series[line.series] ?? { t: [], v: [] });
  const times = [...new Set(parts.flatMap((part) => part.t))].sort((a, b) => a - b);
  const whole = [];
  const usual = times.length > 1 ? (times.at(-1) - times[0]) / (times.length - 1) : 0;
  times.forEach((t, index) => {
    if (index && t - times[index - 1] > Math.max(GAP_SECONDS, 6 * usual)) whole.push((t + times[index - 1]) / 2);
    whole.push(t);
  });
  return [whole, ...parts.map((part) => {
    const values = new Map(part.t.map((t, index) => [t, part.v[index]]));
    return whole.map((t) => values.get(t) ?? null);
  })];
}

export function updateChart(chart, series) {
  const key = chart.config.lines.map(({ series: name }) => `${series[name]?.t.length ?? 0}:${series[name]?.t.at(-1) ?? ""}`).join();
  if (chart.key === key && chart.plot) return;
  chart.key = key;
  const data = align(chart.config.lines, series);
  chart.box.classList.toggle("bare", !data[0].length);
  if (chart.plot) chart.plot.setData(data);
  else makePlot(chart, data);
  showFigures(chart, data, null);
}

/** Draw every chart anew, in the colours of now. */
export function drawCharts() {
  for (const chart of charts) {
    chart.plot?.destroy();
    chart.plot = null;
    chart.key = "";
  }
  if (latest) for (const chart of charts) updateChart(chart, latest.series);
}

let own = null;

export function renderRollouts(model) {
  latest = model;
  own ??= ROLLOUTS.map((config) => makeChart($("rollout-charts"), config));
  for (const chart of own) updateChart(chart, model.series);
  renderSummary(model.sections.rollouts);
  renderSteps(model.sections.trainer);
}

function renderSummary(rollouts) {
  const { totals = {}, retries = {} } = rollouts;
  const causes = Object.entries(retries).map(([cause, count]) => `${count} ${cause}`).join(", ");
  const figures = [
    ["rollway_rollouts_total", plural(totals.count ?? 0, "rollout")],
    ["rollway_tokens_total", `${formatNumber(totals.tokens ?? 0)} tokens`],
    ["rollway_rollouts_cut_total", `${totals.cut ?? 0} cut`],
    ["rollway_rollouts_continued_total", `${totals.continued ?? 0} continued`],
    ["rollway_retries_total", causes ? `retries: ${causes}` : "no retries"],
  ];
  const key = JSON.stringify(figures);
  const place = $("rollout-summary");
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  place.replaceChildren(...figures.flatMap(([metric, text], index) => [index ? " · " : "", el("span", { "data-metric": metric }, text)]));
}

function renderSteps(steps) {
  const place = $("steps");
  const key = `${steps.length}:${steps.at(-1)?.t}`;
  if (place.dataset.key === key) return;
  place.dataset.key = key;
  if (!$("step-legend").childElementCount) {
    $("step-legend").append(...[...PARTS, "rest"].map((part) => el("span", { "data-metric": "rollway_step_part_seconds" }, el("i", { class: `part-${part}` }), part)));
  }
  if (!steps.length) {
    place.replaceChildren(el("p", { class: "empty" }, "No trainer has reported a step: see rollway.observe.step."));
    setText($("step-figure"), "");
    return;
  }
  const longest = Math.max(...steps.map((step) => step.seconds), 1e-3);
  place.replaceChildren(...steps.map((step) => makeStep(step, longest)));
  setText($("step-figure"), `step ${steps.at(-1).step}: ${formatSeconds(steps.at(-1).seconds)}`);
}

function makeStep(step, longest) {
  const known = PARTS.reduce((sum, part) => sum + (step.parts[part] ?? 0), 0);
  const parts = [...PARTS.map((part) => [part, step.parts[part] ?? 0]), ["rest", Math.max(step.seconds - known, 0)]];
  const title = [`step ${step.step}: ${formatSeconds(step.seconds)}`, ...parts.filter(([, s]) => s > 0).map(([part, s]) => `${part} ${formatSeconds(s)}`)].join("\n");
  const column = el("div", { class: "stack", title });
  for (const [part, seconds] of parts) {
    if (seconds <= 0) continue;
    const bar = el("i", { class: `part-${part}` });
    bar.style.height = `${((100 * seconds) / longest).toFixed(2)}%`;
    column.append(bar);
  }
  return column;
}
