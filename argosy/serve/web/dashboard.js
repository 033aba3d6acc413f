// The dashboard: charts of /metrics, read every two seconds while the page is in sight, for ten minutes of history.

import { el, key, metrics, quantile, request } from "/web/api.js";

const EVERY_MS = 2000, HISTORY_MS = 600_000, WINDOW_MS = 10_000;
const SVG = "http://www.w3.org/2000/svg";
const $ = id => document.getElementById(id);

// A reading: {at, values, buckets, series}. What is drawn is a function of (now, the reading before, the one `WINDOW_MS` before), which
// gives a number, {value, sign}, or null for none. The earlier readings are null at first, and after the page was out of sight.
const gauge = (name, times = 1) => now => now.values[name] * times;
const mean = (name, times = 1) => now => now.values[name] * times / now.series[name];
const rate = name => (now, last) => last && 1000 * (now.values[name] - last.values[name]) / (now.at - last.at);
const late = (name, q) => (now, last, past) => past && quantile(q, past.buckets[name], now.buckets[name]);
const hits = (now, last, past) => {
  if (!past) return null;
  const grew = name => now.values[`vllm:prefix_cache_${name}_total`] - past.values[`vllm:prefix_cache_${name}_total`];
  return grew("queries") > 0 ? 100 * grew("hits") / grew("queries") : null;
};
const FIRST = "vllm:time_to_first_token_seconds", BETWEEN = "vllm:inter_token_latency_seconds";
const COMPILED = "argosy:compilations_total", PROMPTS = "argosy:prompt_logprobs_compilations_total", ALARM_MS = 60_000;
const PREEMPTED = "vllm:num_preemptions_total", REJECTED = "vllm:admission_rejections_total";
const CHARTS = [
  ["Throughput", "tokens/s", { prompt: rate("vllm:prompt_tokens_total"), generated: rate("vllm:generation_tokens_total") }],
  ["Time to first token", "s", { p50: late(FIRST, 0.5), p95: late(FIRST, 0.95) }],
  ["Time between tokens", "s", { p50: late(BETWEEN, 0.5), p95: late(BETWEEN, 0.95) }],
  ["Requests", "", { running: gauge("vllm:num_requests_running"), waiting: gauge("vllm:num_requests_waiting") }],
  ["Cache in use", "%", { pages: mean("vllm:kv_cache_usage_perc", 100) }, 100],
  ["Prefix cache hits", "% of prompt tokens", { hits }, 100],
  ["Since the server started", "", {
    compilations: gauge(COMPILED), preemptions: gauge(PREEMPTED), rejections: gauge(REJECTED),
  }],
];

let readings = [], reading = false;

async function read() {
  if (reading || document.hidden || (document.documentElement.dataset.key === "true" && !key.get())) return;
  reading = true;
  try {
    const text = await (await request("/metrics")).text();
    add({ at: Date.now(), ...metrics(text) });
    $("state").textContent = "Read every 2 s; percentiles and hits are those of the last 10 s.";
  } catch (error) {
    $("state").textContent = `No measurement: ${error.message}.`;
  } finally {
    reading = false;
  }
  if (!$("dashboard").hidden) show();
}

function add(reading) {
  const total = "vllm:generation_tokens_total";
  // Another run of the server: its counters begin at 0 again.
  if (readings.length && reading.values[total] < readings.at(-1).values[total]) readings = [];
  readings = [...readings.filter(one => reading.at - one.at <= HISTORY_MS), reading];
}

/** A series as [time, {value, sign} or null]. */
function points(series) {
  let from = 0;
  return readings.map((now, i) => {
    const last = readings[i - 1], near = last && now.at - last.at <= 3 * EVERY_MS;
    if (!near) from = i;
    while (now.at - readings[from].at > WINDOW_MS && from < i - 1) from++;
    const found = near ? series(now, last, readings[from]) : series(now, null, null);
    const value = typeof found === "number" ? { value: found, sign: "" } : found;
    return [now.at, value && Number.isFinite(value.value) ? value : null];
  });
}

function show() {
  const last = readings.at(-1);
  if (!last) return;
  const count = name => (last.values[name] ?? 0).toLocaleString("en");
  const facts = [["Running", "vllm:num_requests_running"], ["Waiting", "vllm:num_requests_waiting"], ["Compilations", COMPILED],
    ["Preemptions", PREEMPTED], ["Rejections", REJECTED], ["Tokens generated", "vllm:generation_tokens_total"]];
  $("facts").replaceChildren(...facts.map(([label, name]) => el("div", {
    class: name === COMPILED && recent(COMPILED) > 0 ? "bad" : null,
  }, el("dt", {}, label), el("dd", {}, count(name)))));
  $("alarm").hidden = !(recent(COMPILED) > 0);
  const alarm = compiled(recent(PROMPTS), recent(COMPILED) - recent(PROMPTS));
  if ($("alarm").textContent !== alarm) $("alarm").textContent = alarm;
  $("charts").replaceChildren(...CHARTS.map(chart));
}

/** How much a counter has grown in the last minute. */
function recent(name) {
  const last = readings.at(-1), from = readings.find(one => last.at - one.at <= ALARM_MS);
  return (last.values[name] ?? 0) - (from.values[name] ?? 0);
}

/** Which requests waited for the compiler. */
function compiled(prompts, others) {
  const programs = n => `${n.toLocaleString("en")} program${n === 1 ? " was" : "s were"} compiled in the last minute`;
  const asked = `${programs(prompts)} for requests with prompt_logprobs, or with echo and logprobs, which waited for the compiler. ` +
    "The setting warm_up_prompt_logprobs compiles them before the server is ready.";
  return [prompts && asked, others && `${programs(others)} for a step of the engine: all requests waited.`].filter(Boolean).join(" ");
}

const number = value => value.toLocaleString("en", { maximumSignificantDigits: 3, useGrouping: value >= 10_000 });

function chart([title, unit, series, most]) {
  const lines = Object.entries(series).map(([name, of]) => [name, points(of)]);
  const top = Math.max(0, ...lines.flatMap(([, line]) => line.map(([, one]) => one?.value ?? 0)));
  const [shown, scale] = unit === "s" && top < 1 ? ["ms", 1000] : [unit, 1];
  const limit = most ?? nice(top * scale);
  const write = one => (one ? `${one.sign}${number(one.value * scale)}` : "none");
  const now = lines.map(([name, line]) => [name, write(line.at(-1)[1])]);
  const key = now.map(([name, value], i) => el("span", {}, el("i", { class: `swatch s${i}` }), `${name} `, el("b", {}, value)));
  const label = `${title}: ${now.map(pair => pair.join(" ")).join(", ")} ${shown}`.trim();
  return el("figure", {}, el("figcaption", {}, el("h2", {}, title), el("span", { class: "soft" }, shown)),
    el("div", { class: "legend" }, ...key), drawn(lines, limit, scale, label));
}

function drawn(lines, limit, scale, label) {
  const width = parseFloat(getComputedStyle($("charts")).gridTemplateColumns) || 320, height = 150, left = 44, right = 8, top = 8, bottom = 22;
  const end = readings.at(-1).at;
  // At first the time axis is one minute, then as long as the history.
  const span = Math.min(HISTORY_MS, Math.max(60_000, 60_000 * Math.ceil((end - readings[0].at) / 60_000)));
  const x = at => left + (width - left - right) * (1 - (end - at) / span);
  const y = value => height - bottom - (height - top - bottom) * Math.min(1, value / limit);
  const make = (name, attributes, ...children) => {
    const made = document.createElementNS(SVG, name);
    for (const [attribute, value] of Object.entries(attributes)) made.setAttribute(attribute, value);
    made.append(...children);
    return made;
  };
  const parts = [];
  for (const share of [0, 0.5, 1]) {
    const at = y(limit * share);
    parts.push(make("line", { class: "grid", x1: left, x2: width - right, y1: at, y2: at }),
      make("text", { class: "tick", x: left - 6, y: at + 4, "text-anchor": "end" }, number(limit * share)));
  }
  for (const [share, anchor] of [[1, "start"], [0.5, "middle"], [0, "end"]]) {
    const ago = span * share / 1000, words = ago === 0 ? "now" : ago % 60 ? `−${ago} s` : `−${ago / 60} min`;
    parts.push(make("text", { class: "tick", x: x(end - span * share), y: height - 6, "text-anchor": anchor }, words));
  }
  lines.forEach(([, line], i) => {
    let path = "", pen = "M";
    for (const [at, one] of line) {
      if (one && end - at <= span) path += `${pen}${x(at).toFixed(1)} ${y(one.value * scale).toFixed(1)}`;
      pen = one ? "L" : "M";
    }
    // A line of length 0 makes a lone point a dot.
    parts.push(make("path", { class: `line s${i}`, d: path.replace(/M([^ML]+)(?=M|$)/g, "M$1h0") }));
  });
  return make("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": label }, ...parts);
}

/** The end of an axis: an even number with few digits, since half of it is written too. */
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [2, 4, 6, 8, 10].map(times => times * power).find(bound => bound >= value);
}

setInterval(read, EVERY_MS);
document.addEventListener("visibilitychange", read);
for (const event of ["hashchange", "resize"]) addEventListener(event, show);
read();
