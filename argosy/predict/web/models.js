// The page of a server of bundles: its models and versions, charts of /metrics, and a form to call a signature.

import { el, key, keyForm, metrics, request } from "/web/api.js";
import { EVERY_MS, History, chart, gauge, late, rate, ratio } from "/web/charts.js";

const $ = id => document.getElementById(id);
const SECONDS = "argosy_request_duration_seconds", ROWS = "argosy_batch_rows";
const CHARTS = [
  ["Requests", "a second", { answered: rate("nv_inference_request_success_total"), failed: rate("nv_inference_request_failure_total") }],
  ["Latency", "s", { p50: late(SECONDS, 0.5), p95: late(SECONDS, 0.95) }],
  ["Rows of a batch", "", { mean: ratio(`${ROWS}_sum`, `${ROWS}_count`), p95: late(ROWS, 0.95) }],
  ["Waiting", "requests", { waiting: gauge("nv_inference_pending_request_count") }],
];
// Values of an output that are shown.
const MOST_VALUES = 256;

const history = new History("nv_inference_exec_count_total");
let reading = false, models = [];

async function read() {
  if (reading || document.hidden || (document.documentElement.dataset.key === "true" && !key.get())) return;
  reading = true;
  try {
    const [text, stats, found] = await Promise.all([
      request("/metrics").then(answer => answer.text()),
      request("/v2/models/stats").then(answer => answer.json()),
      request("/web/models").then(answer => answer.json()),
    ]);
    history.add({ at: Date.now(), ...metrics(text) });
    showModels(found, stats.model_stats);
    $("charts").replaceChildren(...CHARTS.map(one => chart(history, $("charts"), one)));
    $("state").textContent = "Read every 2 s; the charts' percentiles and means are those of the last 10 s, the table's of all time.";
  } catch (error) {
    $("state").textContent = `No measurement: ${error.message}.`;
    if (error.status === 401) askForKey();
  } finally {
    reading = false;
  }
}

// ---------------------------------------------------------------- what there is

function showModels(found, stats) {
  const number = value => (Number.isFinite(value) ? value.toLocaleString("en", { maximumSignificantDigits: 3, useGrouping: true }) : "");
  const rows = found.map(one => {
    const of = stats.find(other => other.name === one.name && other.version === one.version);
    const cells = of ? [
      of.inference_stats.success.count.toLocaleString("en"), of.inference_stats.fail.count.toLocaleString("en"),
      number(of.inference_count / of.execution_count), number(of.inference_stats.queue.ns / of.inference_stats.queue.count / 1e6),
      number(of.inference_stats.compute_infer.ns / of.execution_count / 1e6),
    ] : ["", "", "", "", ""];
    const state = el("td", { class: one.ready ? null : "bad", title: one.reason || null }, one.ready ? "ready" : one.reason || "not ready");
    return el("tr", {}, el("td", {}, one.name), el("td", {}, one.version), state, ...cells.map(cell => el("td", { class: "number" }, cell)));
  });
  $("models").tBodies[0].replaceChildren(...rows);
  const ready = found.filter(one => one.ready);
  $("about").textContent = `${ready.length} of ${found.length} version${found.length === 1 ? "" : "s"} ready`;
  if (JSON.stringify(ready) === JSON.stringify(models)) return;
  models = ready;
  const chosen = $("version").value;
  $("version").replaceChildren(...models.map(one => el("option", {}, `${one.name} ${one.version}`)));
  if (models.some(one => `${one.name} ${one.version}` === chosen)) $("version").value = chosen;
  $("try").hidden = !models.length;
  if (models.length && $("version").value !== chosen) showSignatures();
}

const model = () => models[Math.max(0, $("version").selectedIndex)];
const signature = () => model().signatures[Math.max(0, $("signature").selectedIndex)];

function showSignatures() {
  $("signature").replaceChildren(...model().signatures.map(one => el("option", {}, one.name)));
  showFields();
}

function showFields() {
  const of = signature();
  $("described").textContent = of.description;
  $("fields").replaceChildren(...of.inputs.map((input, i) => {
    const about = input.file ? "image files, in base64, one a line"
      : input.datatype === "BYTES" ? "texts, one a line" : `${input.datatype} [${input.shape.join(", ")}]`;
    const area = el("textarea", { id: `input-${i}`, rows: 2, spellcheck: "false" });
    area.value = written(input, of.example[input.name]);
    return el("div", { class: "input" }, el("label", { for: `input-${i}` }, el("b", {}, input.name), ` ${about}`), area,
      ...(input.file ? [picker(area)] : []));
  }));
  for (const id of ["outputs", "refused", "took"]) $(id).replaceChildren();
}

/** A button that puts the chosen image files into a field. */
function picker(area) {
  const chosen = el("input", { type: "file", accept: "image/*", multiple: "" });
  chosen.addEventListener("change", async () => {
    const read = file => new Promise((done, failed) => {
      const reader = new FileReader();
      reader.onload = () => done(reader.result.slice(reader.result.indexOf(",") + 1));
      reader.onerror = () => failed(reader.error);
      reader.readAsDataURL(file);
    });
    area.value = (await Promise.all([...chosen.files].map(read))).join("\n");
  });
  return chosen;
}

function written(input, value) {
  if (value === undefined) return "";
  return input.datatype === "BYTES" ? [value].flat().join("\n") : JSON.stringify(value);
}

// ---------------------------------------------------------------- a call

/** What a field says, as a tensor of the protocol; null: it is empty. */
function tensor(input, text) {
  if (!text.trim()) return null;
  const head = { name: input.name, datatype: input.datatype };
  if (input.datatype === "BYTES") {
    const data = text.split("\n");
    return { ...head, shape: [data.length], data };
  }
  let value;
  try { value = JSON.parse(text); } catch { throw new Error(`${input.name}: a number, or lists of numbers as JSON, such as [[1, 2]]`); }
  const shape = [];
  for (let one = value; Array.isArray(one); one = one[0]) shape.push(one.length);
  return { ...head, shape, data: Array.isArray(value) ? value : [value] };
}

async function run(event) {
  event.preventDefault();
  const of = signature(), { name, version } = model();
  $("refused").textContent = "";
  try {
    const inputs = of.inputs.map((input, i) => tensor(input, $(`input-${i}`).value)).filter(one => one !== null);
    const begin = performance.now();
    const answer = await request(`/v2/models/${encodeURIComponent(name)}/versions/${version}/infer`, {
      body: { inputs, parameters: { signature: of.name } },
    });
    const found = await answer.json();
    $("took").textContent = `${(performance.now() - begin).toFixed(1)} ms`;
    $("outputs").replaceChildren(...found.outputs.map(shown));
  } catch (error) {
    $("outputs").replaceChildren();
    $("took").textContent = "";
    $("refused").textContent = error.message;
  }
}

function shown(output) {
  const head = el("p", {}, el("b", {}, output.name), el("span", { class: "soft" }, ` ${output.datatype} [${output.shape.join(", ")}]`));
  const [count, height, width, colors] = output.shape;
  if (output.datatype === "UINT8" && output.shape.length === 4 && colors === 3) {
    const size = height * width * 3;
    return el("div", {}, head, ...Array.from({ length: count }, (_, i) => picture(output.data.slice(i * size, (i + 1) * size), height, width)));
  }
  const more = output.data.length - MOST_VALUES;
  const text = output.data.slice(0, MOST_VALUES).map(value => (typeof value === "string" ? value : String(+value.toPrecision?.(6) || value)));
  const end = more > 0 ? ` … and ${more.toLocaleString("en")} more` : "";
  return el("div", {}, head, el("pre", {}, text.join(output.datatype === "BYTES" ? "\n" : ", ") + end));
}

/** An image of colors, row by row. */
function picture(colors, height, width) {
  const canvas = el("canvas", { height, width });
  const pixels = new Uint8ClampedArray(height * width * 4).fill(255);
  colors.forEach((color, i) => { pixels[4 * Math.floor(i / 3) + i % 3] = color; });
  canvas.getContext("2d").putImageData(new ImageData(pixels, width, height), 0, 0);
  return canvas;
}

$("version").addEventListener("change", showSignatures);
$("signature").addEventListener("change", showFields);
$("inputs").addEventListener("submit", run);
setInterval(read, EVERY_MS);
document.addEventListener("visibilitychange", read);
const askForKey = keyForm(read);
