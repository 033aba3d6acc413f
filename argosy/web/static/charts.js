// Charts of /metrics: readings of ten minutes, and lines drawn from them.

import { el, quantile } from "/web/api.js";

export const EVERY_MS = 2000;
const HISTORY_MS = 600_000, WINDOW_MS = 10_000;
const SVG = "http://www.w3.org/2000/svg";

// A reading: {at, values, buckets, series}. What is drawn is a function of (now, the reading before, the one `WINDOW_MS` before), which
// gives a number, {value, sign}, or null for none. The earlier readings are null at first, and after the page was out of sight.
export const gauge = (name, times = 1) => now => now.values[name] * times;
export const mean = (name, times = 1) => now => now.values[name] * times / now.series[name];
export const rate = name => (now, last) => last && 1000 * growth(now, last, name) / (now.at - last.at);
export const late = (name, q) => (now, last, past) => past && now.buckets[name] ? quantile(q, past.buckets[name], now.buckets[name]) : null;
export const ratio = (over, under) => (now, last, past) => past && growth(now, past, under) > 0 ? growth(now, past, over) / growth(now, past, under) : null;

/** How much a counter grew between two readings; one that is missing is at 0. */
function growth(now, before, name) {
  return (now.values[name] ?? 0) - (before.values[name] ?? 0);
}

/** The readings of the last ten minutes. `total` is a counter that only a new run of the server begins again. */
export class History {
  constructor(total) {
    this.total = total;
    this.readings = [];
  }

  get last() { return this.readings.at(-1); }

  get first() { return this.readings[0]; }

  add(reading) {
    if (this.last && reading.values[this.total] < this.last.values[this.total]) this.readings = [];
    this.readings = [...this.readings.filter(one => reading.at - one.at <= HISTORY_MS), reading];
  }

  /** A series as [time, {value, sign} or null]. */
  points(series) {
    let from = 0;
    const readings = this.readings;
    return readings.map((now, i) => {
      const last = readings[i - 1], near = last && now.at - last.at <= 3 * EVERY_MS;
      if (!near) from = i;
      while (now.at - readings[from].at > WINDOW_MS && from < i - 1) from++;
      const found = near ? series(now, last, readings[from]) : series(now, null, null);
      const value = typeof found === "number" ? { value: found, sign: "" } : found;
      return [now.at, value && Number.isFinite(value.value) ? value : null];
    });
  }

  /** How much a counter has grown in so many milliseconds. */
  recent(name, ms) {
    return growth(this.last, this.readings.find(one => this.last.at - one.at <= ms), name);
  }
}

const number = value => value.toLocaleString("en", { maximumSignificantDigits: 3, useGrouping: value >= 10_000 });

/**
 * A figure: its title, unit, series by name, and the end of its axis where that is fixed.
 *
 * @param where the element whose columns the figure fills.
 */
export function chart(history, where, [title, unit, series, most]) {
  const lines = Object.entries(series).map(([name, of]) => [name, history.points(of)]);
  const top = Math.max(0, ...lines.flatMap(([, line]) => line.map(([, one]) => one?.value ?? 0)));
  const [shown, scale] = unit === "s" && top < 1 ? ["ms", 1000] : [unit, 1];
  const limit = most ?? nice(top * scale);
  const write = one => (one ? `${one.sign}${number(one.value * scale)}` : "none");
  const now = lines.map(([name, line]) => [name, write(line.at(-1)[1])]);
  const key = now.map(([name, value], i) => el("span", {}, el("i", { class: `swatch s${i}` }), `${name} `, el("b", {}, value)));
  const label = `${title}: ${now.map(pair => pair.join(" ")).join(", ")} ${shown}`.trim();
  return el("figure", {}, el("figcaption", {}, el("h2", {}, title), el("span", { class: "soft" }, shown)),
    el("div", { class: "legend" }, ...key), drawn(history, where, lines, limit, scale, label));
}

function drawn(history, where, lines, limit, scale, label) {
  const width = parseFloat(getComputedStyle(where).gridTemplateColumns) || 320, height = 150, left = 44, right = 8, top = 8, bottom = 22;
  const end = history.last.at;
  // At first the time axis is one minute, then as long as the history.
  const span = Math.min(HISTORY_MS, Math.max(60_000, 60_000 * Math.ceil((end - history.first.at) / 60_000)));
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
