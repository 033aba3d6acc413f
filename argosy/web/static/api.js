// Requests to this server, and how its answers are read. Nothing here touches the page, except `el`.

const KEY = "argosy-key";

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: value => sessionStorage.setItem(KEY, value),
  forget: () => sessionStorage.removeItem(KEY),
};

/**
 * The form for the API key. `open` is called at once, or when there is a key to open with. Returns what asks for a key again, after a
 * refusal.
 */
export function keyForm(open) {
  const form = document.getElementById("key"), value = document.getElementById("key-value");
  const ask = () => {
    key.forget();
    form.hidden = false;
    value.focus();
  };
  form.addEventListener("submit", event => {
    event.preventDefault();
    key.set(value.value);
    value.value = "";
    form.hidden = true;
    open();
  });
  if (document.documentElement.dataset.key === "true" && !key.get()) ask();
  else open();
  return ask;
}

/** An element. Children that are no elements become text, so nothing from a model is ever read as HTML. */
export function el(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [attribute, value] of Object.entries(attributes)) {
    if (attribute.startsWith("on")) made.addEventListener(attribute.slice(2), value);
    else if (value !== null && value !== false) made.setAttribute(attribute, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** A request with the API key. Throws an Error with the server's message, and the `status`, if it is refused. */
export async function request(path, { body, signal } = {}) {
  const headers = key.get() ? { authorization: `Bearer ${key.get()}` } : {};
  if (body) headers["content-type"] = "application/json";
  const answer = await fetch(path, { method: body ? "POST" : "GET", headers, body: body && JSON.stringify(body), signal });
  if (answer.ok) return answer;
  const told = await answer.json().catch(() => null);
  throw Object.assign(new Error(told?.error?.message ?? told?.error ?? `the server answered ${answer.status}`), { status: answer.status });
}

/** The documents of a stream of server-sent events, until `[DONE]`. Throws if the stream breaks off before it. */
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new Error("the connection was lost");
      const lines = (text + value).split("\n");
      text = lines.pop();
      for (const line of lines) {
        if (!line.startsWith("data:")) continue;
        const data = line.slice(5).trim();
        if (data === "[DONE]") return;
        yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

/** The tokens of a choice as [{token, logprob, top: [{token, logprob}]}], the likeliest first, in either API's shape. */
export function tokens(choice) {
  const found = choice.logprobs;
  const sorted = top => top.sort((a, b) => b.logprob - a.logprob);
  if (found?.content) {
    return found.content.map(one => ({
      token: one.token, logprob: one.logprob,
      top: sorted(one.top_logprobs.map(({ token, logprob }) => ({ token, logprob }))),
    }));
  }
  return (found?.tokens ?? []).map((token, i) => ({
    token, logprob: found.token_logprobs[i],
    top: sorted(Object.entries(found.top_logprobs[i] ?? {}).map(([token, logprob]) => ({ token, logprob }))),
  }));
}

/**
 * Prometheus' text format: {values: {name: sum over labels}, buckets: {name: [[upper bound, cumulative count]]}, series: {name: number
 * of label sets}}. With several copies of a model each has a series of its own.
 */
export function metrics(text) {
  const values = {}, buckets = {}, series = {};
  for (const line of text.split("\n")) {
    const [, name, labels, number] = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/.exec(line) ?? [];
    if (!name) continue;
    if (name.endsWith("_bucket")) {
      const le = /(?:^|,)le="([^"]*)"/.exec(labels)[1], bound = le === "+Inf" ? Infinity : Number(le);
      const all = (buckets[name.slice(0, -7)] ??= []), same = all.find(([other]) => other === bound);
      if (same) same[1] += Number(number);
      else all.push([bound, Number(number)]);
    } else {
      values[name] = (values[name] ?? 0) + Number(number);
      series[name] = (series[name] ?? 0) + 1;
    }
  }
  return { values, buckets, series };
}

/**
 * A quantile of what was observed between two readings of a histogram, interpolated within its bucket as Prometheus does.
 * The first and the last bucket have no width to interpolate: there it is the bound, and `sign` says on which side the value lies.
 * Null if nothing was observed.
 */
export function quantile(q, before, now) {
  const counts = now.map(([bound, count], i) => [bound, count - (before?.[i]?.[1] ?? 0)]);
  const total = counts.at(-1)?.[1] ?? 0;
  if (!(total > 0)) return null;
  const i = counts.findIndex(([, count]) => count >= q * total);
  const [bound, count] = counts[i];
  if (i === 0) return { value: bound, sign: "≤ " };
  const [low, under] = counts[i - 1];
  if (bound === Infinity) return { value: low, sign: "> " };
  return { value: low + (bound - low) * (q * total - under) / (count - under), sign: "" };
}
