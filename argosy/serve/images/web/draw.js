// The page of a server of images: a form, and what it draws, with images on the way.

import { el, events, keyForm, request } from "/web/api.js";

const $ = id => document.getElementById(id);
// Small images are shown larger than they are, by whole pixels.
const SHOWN = 256, PREVIEWS = 3;

let running = null;

async function about() {
  try {
    const model = await (await request("/web/model")).json();
    $("about").textContent = `${model.name}, ${model.width}x${model.height} pixels, ${model.steps} steps`;
    for (const name of ["width", "height", "steps", "guidance"]) $(name).value = model[name];
    for (const name of ["width", "height"]) $(name).step = $(name).min = model.multiple;
    $("controls").replaceChildren(...model.controls.map(controlFields));
  } catch (error) {
    if (error.status === 401) askForKey();
    else $("refused").textContent = error.message;
  }
}

$("ask").addEventListener("submit", event => {
  event.preventDefault();
  if (!running) draw();
});
$("stop").addEventListener("click", () => running?.abort());

// The control image of a ControlNet, and the number of its kind of control, where the net knows several.
function controlFields(kinds, i, all) {
  const number = all.length > 1 ? ` ${i + 1}` : "";
  const file = el("input", { type: "file", accept: "image/png,image/jpeg,image/webp", required: true });
  const fields = el("div", {}, el("label", {}, `Control image${number} `, file));
  const kind = el("input", { type: "number", min: 0, max: kinds - 1, required: true });
  if (kinds) fields.append(el("label", {}, `Kind of control${number}, 0 to ${kinds - 1} `, kind));
  return fields;
}

async function controls() {
  const nets = [...$("controls").children], kinds = nets.map(net => net.querySelector("[type=number]")?.valueAsNumber ?? null);
  if (!nets.length) return {};
  const images = await Promise.all(nets.map(net => dataUrl(net.querySelector("[type=file]").files[0])));
  return { control_image: images, ...(kinds.some(kind => kind !== null) ? { control_mode: kinds } : {}) };
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

async function asked() {
  const body = {
    prompt: $("prompt").value, n: Number($("n").value), size: `${$("width").value}x${$("height").value}`, stream: true, progress: true,
    num_inference_steps: Number($("steps").value), guidance_scale: Number($("guidance").value),
    // The page names the seed, so that an image can be drawn again.
    seed: $("seed").value === "" ? crypto.getRandomValues(new Uint32Array(1))[0] : Number($("seed").value),
  };
  if ($("negative").value) body.negative_prompt = $("negative").value;
  body.partial_images = Math.min(PREVIEWS, Math.max(0, body.num_inference_steps - 1));
  return Object.assign(body, await controls());
}

async function draw() {
  const figures = [];
  running = new AbortController();
  $("refused").textContent = "";
  $("state").textContent = "Waiting.";
  for (const [id, hidden] of [["stop", false], ["progress", false]]) $(id).hidden = hidden;
  $("draw").disabled = true;
  try {
    const body = await asked();
    const answer = await request("/v1/images/generations", { body, signal: running.signal });
    let left = body.n;
    for await (const one of events(answer.body)) {
      if (one.type === "error") throw new Error(one.error.message);
      if (one.type.endsWith(".progress")) {
        $("progress").value = one.done / one.evaluations;
        $("state").textContent = `${one.done} of ${one.evaluations}`;
        continue;
      }
      const done = one.type.endsWith(".completed");
      const figure = figures[one.index] ??= added(`${body.prompt} · seed ${body.seed}${body.n > 1 ? `, image ${one.index + 1}` : ""}`);
      await show(figure, one.b64_json, done);
      left -= done;
      if (!left) break;
    }
    $("state").textContent = "";
  } catch (error) {
    figures.filter(Boolean).filter(one => one.querySelector(".unfinished")).forEach(one => one.remove());
    if (error.name === "AbortError") $("state").textContent = "Stopped.";
    else {
      $("state").textContent = "";
      $("refused").textContent = error.message;
      if (error.status === 401) askForKey();
    }
  } finally {
    running = null;
    $("stop").hidden = $("progress").hidden = true;
    $("progress").value = 0;
    $("draw").disabled = false;
  }
}

function added(caption) {
  const figure = el("figure", {}, el("canvas", { role: "img", "aria-label": caption }), el("figcaption", {}, caption));
  $("images").prepend(figure);
  return figure;
}

async function show(figure, base64, done) {
  const bytes = Uint8Array.from(atob(base64), letter => letter.charCodeAt(0));
  const image = await createImageBitmap(new Blob([bytes], { type: "image/png" }));
  const canvas = figure.querySelector("canvas");
  [canvas.width, canvas.height] = [image.width, image.height];
  const times = Math.max(1, Math.floor(SHOWN / Math.max(image.width, image.height)));
  canvas.style.width = `${image.width * times}px`;
  canvas.classList.toggle("unfinished", !done);
  canvas.getContext("2d").drawImage(image, 0, 0);
}

const askForKey = keyForm(about);
