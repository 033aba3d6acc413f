// The playground: a conversation with one or two columns of settings, answered as streams.

import { el, events, key, keyForm, request, tokens } from "/web/api.js";

const STORE = "argosy-playground";
const $ = id => document.getElementById(id);

// Sampling settings: name in the API, label, step, bounds.
const NUMBERS = [
  ["temperature", "Temperature", 0.1, 0, 1000],
  ["top_p", "Top-p", 0.05, 0, 1],
  ["top_k", "Top-k", 1, -1, 2 ** 31 - 1],
  ["min_p", "Min-p", 0.01, 0, 1],
  ["repetition_penalty", "Repetition penalty", 0.05, 0.001, 1000],
  ["presence_penalty", "Presence penalty", 0.1, -2, 2],
  ["frequency_penalty", "Frequency penalty", 0.1, -2, 2],
  ["max_tokens", "Max tokens", 1, 1, 2 ** 31 - 1],
  ["seed", "Seed", 1, -(2 ** 53), 2 ** 53],
];
const NEUTRAL = {
  top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0, max_tokens: "context", seed: "random",
};
const NAMES = ["A", "B"];

let model = null;
let running = null;               // the AbortController of the answers under way
let state = fresh();

// turns: [{prompt, answers: one for each column: {text, parts: [{text, tokens, thought}], note, error}}]
function fresh() {
  return { compare: false, logprobs: true, settings: [{}, {}], turns: [] };
}

const columns = () => (state.compare ? [0, 1] : [0]);

function save() {
  const store = value => localStorage.setItem(STORE, JSON.stringify(value));
  try { store(state); } catch {
    // Beyond the browser's quota, about 5 MB: log-probabilities take most of it.
    const bare = ({ text, note, error }) => ({ text, parts: [{ text, tokens: [] }], note, error });
    try { store({ ...state, turns: state.turns.map(turn => ({ ...turn, answers: turn.answers.map(bare) })) }); } catch { /* full */ }
  }
}

// ---------------------------------------------------------------- settings

function showSettings() {
  $("compare").checked = state.compare;
  $("logprobs").checked = state.logprobs;
  const head = el("div", { class: "field" }, el("span"), ...columns().map(c => el("b", {}, state.compare ? NAMES[c] : "")));
  const numbers = NUMBERS.map(([name, label, step, min, max]) => row(name, label, (c, id) => el("input", {
    id, type: "number", step: name === "top_p" || name === "min_p" ? "any" : step, min, max, value: state.settings[c][name] ?? "",
    placeholder: model?.defaults[name] ?? NEUTRAL[name] ?? "", "aria-label": `${label} ${state.compare ? NAMES[c] : ""}`.trim(),
  })));
  const stop = row("stop", "Stop strings, one a line; \\n is a line break", (c, id) => area(c, id, "stop", "Stop strings"), true);
  const system = row("system", "System prompt", (c, id) => area(c, id, "system", "System prompt"), true);
  $("fields").replaceChildren(...(state.compare ? [head] : []), ...(model?.chat ? [system] : []), ...numbers, stop);
  $("fields").classList.toggle("two", state.compare);
}

function row(name, label, make, wide = false) {
  const inputs = columns().map(c => {
    const input = make(c, `${name}-${c}`);
    input.addEventListener("input", () => { state.settings[c][name] = input.value; save(); });
    return input;
  });
  return el("div", { class: wide ? "field wide" : "field" }, el("label", { for: `${name}-0` }, label), ...inputs);
}

function area(c, id, name, label) {
  const made = el("textarea", { id, rows: 2, placeholder: state.compare ? NAMES[c] : "", "aria-label": `${label} ${state.compare ? NAMES[c] : ""}`.trim() });
  made.value = state.settings[c][name] ?? "";
  return made;
}

// ---------------------------------------------------------------- requests

function body(turns, c) {
  const settings = state.settings[c];
  const found = { model: model.name, stream: true, stream_options: { include_usage: true } };
  for (const [name] of NUMBERS) if (settings[name]) found[name] = Number(settings[name]);
  const stop = (settings.stop ?? "").split("\n").filter(Boolean).map(line => line.replaceAll("\\n", "\n"));
  if (stop.length) found.stop = stop;
  const top = Math.min(5, model.logprobs);
  const prompt = turns.at(-1).prompt;
  if (!model.chat) return { ...found, prompt, ...(state.logprobs ? { logprobs: top } : {}) };
  const messages = settings.system ? [{ role: "system", content: settings.system }] : [];
  for (const turn of turns.slice(0, -1)) {
    const answer = turn.answers[c] ?? turn.answers[0];
    messages.push({ role: "user", content: turn.prompt }, { role: "assistant", content: answer?.text ?? "" });
  }
  messages.push({ role: "user", content: prompt });
  return { ...found, messages, ...(state.logprobs ? { logprobs: true, top_logprobs: top } : {}) };
}

/** Answers the last turn, in every column at once. */
async function run() {
  const turn = state.turns.at(-1);
  turn.answers = columns().map(() => ({ text: "", parts: [], note: "", error: "" }));
  const controller = running = new AbortController();
  showTurns();
  busy(true);
  await Promise.all(columns().map(c => answer(turn, c, controller.signal)));
  running = null;
  busy(false);
  // Not if it was cleared meanwhile.
  if (state.turns.includes(turn)) save();
}

async function answer(turn, c, signal) {
  const answer = turn.answers[c], view = views.get(answer);
  const began = performance.now();
  let first = null, finish = null, usage = null, waiting = [];
  const show = part => {
    answer.parts.push(part);
    follow(() => view.text.append(span(part)));
  };
  const note = () => {
    const seconds = (performance.now() - (first ?? began)) / 1000, made = usage?.completion_tokens;
    answer.note = [
      made !== undefined && `${made} tokens`,
      made > 1 && `${((made - 1) / seconds).toFixed(1)} tokens/s`,
      first !== null && `first after ${Math.round(first - began)} ms`,
      usage?.prompt_tokens_details?.cached_tokens > 0 && `${usage.prompt_tokens_details.cached_tokens} prompt tokens cached`,
      finish && { stop: "ended", length: "cut at the length limit" }[finish], signal.aborted && "stopped",
    ].filter(Boolean).join(" · ");
  };
  try {
    const path = model.chat ? "/v1/chat/completions" : "/v1/completions";
    const stream = await request(path, { body: body(state.turns, c), signal });
    for await (const event of events(stream.body)) {
      if (event.error) throw new Error(event.error.message);
      usage = event.usage ?? usage;
      const choice = event.choices[0];
      if (!choice) continue;
      const thought = choice.delta?.reasoning_content ?? "", text = choice.delta?.content ?? choice.text ?? "";
      waiting.push(...tokens(choice));
      finish = choice.finish_reason ?? finish;
      if (thought || text || waiting.length) first ??= performance.now();
      // Tokens without text of their own are part of a character, or of a stop string: they wait for the text that comes of them.
      if (!thought && !text && !(finish && waiting.length)) continue;
      answer.text += text;
      if (thought) show({ text: thought, tokens: text ? [] : waiting, thought: true });
      if (text && answer.parts.at(-1)?.thought) show({ text: "\n\n", tokens: [], thought: true });
      if (text || !thought) show({ text, tokens: waiting });
      waiting = [];
    }
  } catch (error) {
    if (!signal.aborted) answer.error = error.message;
    if (error.status === 401) askKey();
  }
  note();
  view.note.textContent = answer.note;
  view.error.textContent = answer.error;
}

function busy(is) {
  $("send").disabled = is;
  $("stop").disabled = !is;
  $("turns").setAttribute("aria-busy", is);
}

// ---------------------------------------------------------------- conversation

const views = new Map();          // answer -> its elements

function showTurns() {
  views.clear();
  follow(() => $("turns").replaceChildren(...state.turns.map(showTurn)), true);
}

function showTurn(turn, i) {
  const edit = () => {
    if (running) return;
    const text = el("textarea", { rows: 3, "aria-label": "Edited prompt" });
    text.value = turn.prompt;
    const again = () => { turn.prompt = text.value; retry(i); };
    text.addEventListener("keydown", event => onEnter(event, again));
    prompt.replaceChildren(text, el("div", { class: "row" }, button("Send", again), button("Cancel", showTurns)));
    text.focus();
  };
  const prompt = el("div", { class: "prompt" }, el("pre", {}, turn.prompt),
    el("div", { class: "row tools" }, button("Edit", edit), button("Retry", () => retry(i)), copy(() => turn.prompt)));
  const answers = turn.answers.map((answer, c) => showAnswer(turn, answer, turn.answers.length > 1 ? NAMES[c] : ""));
  return el("article", {}, prompt, el("div", { class: answers.length > 1 ? "answers two" : "answers" }, ...answers));
}

function showAnswer(turn, answer, name) {
  const text = el("pre", { class: "text", tabindex: 0, "aria-label": `Answer ${name}`.trim() });
  if (!model?.chat) text.append(el("span", { class: "given" }, turn.prompt));
  text.append(...answer.parts.map(span));
  const note = el("span", { class: "soft note" }, answer.note), error = el("p", { class: "error", role: "alert" }, answer.error);
  views.set(answer, { text, note, error });
  return el("div", { class: "answer" }, ...(name ? [el("b", {}, name)] : []), text, error,
    el("div", { class: "row tools" }, note, el("span", { class: "grow" }), copy(() => answer.text)));
}

function retry(i) {
  if (running) return;
  state.turns.length = i + 1;
  run();
}

const button = (label, act) => el("button", { type: "button", onclick: act }, label);

function copy(text) {
  const made = button("Copy", async () => {
    try { await navigator.clipboard.writeText(text()); } catch {
      // Pages without TLS have no clipboard, except on localhost.
      const area = el("textarea", {});
      area.value = text();
      document.body.append(area);
      area.select();
      document.execCommand("copy");
      area.remove();
    }
    made.textContent = "Copied";
    setTimeout(() => { made.textContent = "Copy"; }, 1500);
  });
  return made;
}

/** Changes the page, and scrolls to its end if the end was in sight. */
function follow(change, always = false) {
  const page = document.scrollingElement;
  const at = always || page.scrollHeight - page.scrollTop - page.clientHeight < 80;
  change();
  if (at) page.scrollTop = page.scrollHeight;
}

// ---------------------------------------------------------------- tokens

const parts = new WeakMap();      // span -> part

/** The text that one or more tokens made, tinted by the probability of the least likely of them. */
function span(part) {
  const thought = part.thought ? "thought" : "";
  if (!part.tokens.length) return thought ? el("span", { class: thought }, part.text) : document.createTextNode(part.text);
  const made = el("span", { class: `${part.text ? "token" : "token end"} ${thought}`.trim(), tabindex: -1 },
    part.text || part.tokens.map(one => visible(one.token)).join(""));
  made.style.setProperty("--p", Math.min(...part.tokens.map(one => Math.exp(one.logprob))));
  parts.set(made, part);
  return made;
}

const visible = token => token.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "(empty)";
const percent = logprob => `${(100 * Math.exp(logprob)).toFixed(1)} %`;

function showTip(token) {
  const part = parts.get(token), tip = $("tip");
  if (!part) return hideTip();
  tip.replaceChildren(...part.tokens.map(one => el("table", {},
    el("caption", {}, el("b", {}, visible(one.token)), ` log-prob ${one.logprob.toFixed(3)}, ${percent(one.logprob)}`),
    ...one.top.map(other => el("tr", { class: other.token === one.token ? "drawn" : null },
      el("td", {}, visible(other.token)), el("td", {}, other.logprob.toFixed(3)), el("td", {}, percent(other.logprob)))))));
  tip.hidden = false;
  const at = token.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const below = at.bottom + size.height + 8 < innerHeight;
  tip.style.left = `${Math.max(4, Math.min(at.left, innerWidth - size.width - 4))}px`;
  tip.style.top = `${below ? at.bottom + 4 : Math.max(4, at.top - size.height - 4)}px`;
  token.setAttribute("aria-describedby", "tip");
}

function hideTip() {
  $("tip").hidden = true;
}

for (const event of ["pointerover", "focusin"]) $("turns").addEventListener(event, e => showTip(e.target));
for (const event of ["pointerleave", "focusout"]) $("turns").addEventListener(event, hideTip);
addEventListener("scroll", hideTip, { passive: true });
$("turns").addEventListener("keydown", event => {
  // The answer is one stop of the Tab key; arrows go through its tokens.
  const step = { ArrowRight: "nextElementSibling", ArrowLeft: "previousElementSibling" }[event.key];
  const from = event.target;
  if (!step || !(parts.has(from) || from.classList.contains("text"))) return;
  const to = parts.has(from) ? from[step] : from.querySelector(".token");
  if (to && parts.has(to)) { event.preventDefault(); to.focus(); }
});

// ---------------------------------------------------------------- the page

function onEnter(event, act) {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  act();
}

function send() {
  const prompt = $("prompt").value;
  if (!prompt.trim() || running || !model) return;
  $("prompt").value = "";
  state.turns.push({ prompt, answers: [] });
  run();
}

async function start() {
  try {
    model = await (await request("/web/model")).json();
  } catch (error) {
    if (error.status === 401) return askKey();
    $("mode").textContent = `This server cannot be reached: ${error.message}.`;
    return;
  }
  $("model").textContent = model.name;
  document.title = `${model.name} · Argosy`;
  $("mode").textContent = model.chat
    ? `Chat, with the model's template. Context: ${model.context.toLocaleString("en")} tokens.`
    : `This model has no chat template: it continues your text, and every prompt stands alone. Context: ${
      model.context.toLocaleString("en")} tokens.`;
  // The API's own default for completions is 16 tokens. Chats end by themselves, or with the context.
  if (!model.chat) for (const settings of state.settings) settings.max_tokens ??= String(Math.min(256, Math.floor(model.context / 2)));
  showSettings();
  showTurns();
}

try { state = { ...state, ...JSON.parse(localStorage.getItem(STORE) ?? "{}") }; } catch { /* of another version */ }
$("composer").addEventListener("submit", event => { event.preventDefault(); send(); });
$("prompt").addEventListener("keydown", event => onEnter(event, send));
addEventListener("keydown", event => { if (event.key === "Escape") { running?.abort(); hideTip(); } });
$("stop").addEventListener("click", () => running?.abort());
$("clear").addEventListener("click", () => { running?.abort(); state.turns = []; save(); showTurns(); });
$("forget").addEventListener("click", () => {
  running?.abort();
  state = fresh();
  key.forget();
  localStorage.removeItem(STORE);
  showTurns();
  if (document.documentElement.dataset.key === "true") askKey(); else start();
});
$("compare").addEventListener("change", event => { state.compare = event.target.checked; save(); showSettings(); });
$("logprobs").addEventListener("change", event => { state.logprobs = event.target.checked; save(); });
$("settings").open = matchMedia("(min-width: 860px)").matches;

function route() {
  const dashboard = location.hash === "#dashboard";
  $("dashboard").hidden = !dashboard;
  $("playground").hidden = dashboard;
  for (const link of document.querySelectorAll("nav a")) {
    if ((link.hash === "#dashboard") === dashboard) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
}
addEventListener("hashchange", route);
route();
const askKey = keyForm(start);
