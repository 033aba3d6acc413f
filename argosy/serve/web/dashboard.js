// The dashboard: charts of /metrics, read every two seconds while the page is in sight, for ten minutes of history.

import { el, key, metrics, request } from "/web/api.js";
import { EVERY_MS, History, chart, gauge, late, mean, rate } from "/web/charts.js";

const $ = id => document.getElementById(id);

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

const history = new History("vllm:generation_tokens_total");
let reading = false;

async function read() {
  if (reading || document.hidden || (document.documentElement.dataset.key === "true" && !key.get())) return;
  reading = true;
  try {
    const text = await (await request("/metrics")).text();
    history.add({ at: Date.now(), ...metrics(text) });
    $("state").textContent = "Read every 2 s; percentiles and hits are those of the last 10 s.";
  } catch (error) {
    $("state").textContent = `No measurement: ${error.message}.`;
  } finally {
    reading = false;
  }
  if (!$("dashboard").hidden) show();
}

function show() {
  const last = history.last;
  if (!last) return;
  const count = name => (last.values[name] ?? 0).toLocaleString("en");
  const facts = [["Running", "vllm:num_requests_running"], ["Waiting", "vllm:num_requests_waiting"], ["Compilations", COMPILED],
    ["Preemptions", PREEMPTED], ["Rejections", REJECTED], ["Tokens generated", "vllm:generation_tokens_total"]];
  $("facts").replaceChildren(...facts.map(([label, name]) => el("div", {
    class: name === COMPILED && history.recent(COMPILED, ALARM_MS) > 0 ? "bad" : null,
  }, el("dt", {}, label), el("dd", {}, count(name)))));
  $("alarm").hidden = !(history.recent(COMPILED, ALARM_MS) > 0);
  const alarm = compiled(history.recent(PROMPTS, ALARM_MS), history.recent(COMPILED, ALARM_MS) - history.recent(PROMPTS, ALARM_MS));
  if ($("alarm").textContent !== alarm) $("alarm").textContent = alarm;
  $("charts").replaceChildren(...CHARTS.map(one => chart(history, $("charts"), one)));
}

/** Which requests waited for the compiler. */
function compiled(prompts, others) {
  const programs = n => `${n.toLocaleString("en")} program${n === 1 ? " was" : "s were"} compiled in the last minute`;
  const asked = `${programs(prompts)} for requests with prompt_logprobs, or with echo and logprobs, which waited for the compiler. ` +
    "The setting warm_up_prompt_logprobs compiles them before the server is ready.";
  return [prompts && asked, others && `${programs(others)} for a step of the engine: all requests waited.`].filter(Boolean).join(" ");
}

setInterval(read, EVERY_MS);
document.addEventListener("visibilitychange", read);
for (const event of ["hashchange", "resize"]) addEventListener(event, show);
read();
