"""The style sheet of the report, and its script for hover values and copy buttons. The contents are in `report`.

The report uses the system's font with aligned figures, in light or dark mode as the system is set, and can be printed. Without the
script, which is under 4 kB, only hover values and copy buttons are missing.
"""

from html import escape

STYLE = """
:root{color-scheme:light dark;--paper:#fdfdfc;--ink:#1c1f23;--soft:#667079;--rule:#e3e5e8;--panel:#f5f6f7;
--s0:#0b66c3;--s1:#d9730d;--s2:#14805e;--s3:#8250b8;--s4:#b8374a;--s5:#7a6a12;--s6:#4d6b8a;--s7:#b0529e;
--s8:#a3acb5}
@media (prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e4e7ea;--soft:#98a2ab;--rule:#2b3036;--panel:#1b1f23;
--s0:#5aa9f5;--s1:#f2a259;--s2:#4cc79b;--s3:#b995ec;--s4:#ee7e8c;--s5:#cdbb58;--s6:#8cadd0;--s7:#d98acb;
--s8:#5d6770}}
*{box-sizing:border-box}
body{margin:0;background:var(--paper);color:var(--ink);font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif;
font-variant-numeric:tabular-nums}
main{max-width:60rem;margin:0 auto;padding:2.5rem 1.5rem 4rem}
h1{font-size:1.7rem;line-height:1.2;font-weight:650;margin:0;letter-spacing:-.01em;overflow-wrap:anywhere}
h2{font-size:1rem;font-weight:650;margin:2.6rem 0 .8rem;padding-bottom:.35rem;border-bottom:1px solid var(--rule)}
h3{font-size:.85rem;font-weight:600;color:var(--soft);margin:.2rem 0}
p{margin:.4rem 0}.soft,figcaption{color:var(--soft)}
.facts{display:grid;grid-template-columns:repeat(auto-fit,minmax(7rem,1fr));gap:1.1rem 1rem;margin:1.6rem 0 0}
.facts dt{font-size:.78rem;color:var(--soft)}.facts dd{margin:0;font-size:1.2rem;font-weight:600;overflow-wrap:anywhere}
.facts small{display:block;font-size:.78rem;font-weight:400;color:var(--soft)}
.pair{display:grid;grid-template-columns:repeat(auto-fit,minmax(20rem,1fr));gap:1rem 1.5rem}
svg{display:block;width:100%;height:auto;overflow:visible}
.chart{cursor:crosshair}.bar{border-radius:3px;margin:.4rem 0 .9rem;overflow:hidden}
.grid,.axis,.mark{stroke:var(--rule);fill:none}.axis,.mark{stroke:var(--soft);stroke-opacity:.6}
.lead{font-size:1.25rem;line-height:1.45;margin:.7rem 0 .3rem;max-width:46rem;text-wrap:pretty}
.tick{font-size:11.5px;fill:var(--soft)}.name{font-size:12px;fill:var(--soft)}.name.x{text-anchor:end}
path.level{stroke:var(--soft);stroke-dasharray:5 4;fill:none}text.level{font-size:12px;fill:var(--soft);text-anchor:end}
.tick.y{text-anchor:end}.tick.x{text-anchor:middle}
.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.thin{stroke-width:1;stroke-opacity:.55}
.faint{stroke-width:1;stroke-opacity:.32}.band{fill-opacity:.16;stroke:none}
.at line{stroke:var(--soft);stroke-dasharray:3 3}.at rect{fill:var(--panel);stroke:var(--rule);rx:3}
.at text{font-size:12px;fill:var(--ink)}
.key{display:inline-flex;gap:1.2rem;margin:0 0 .3rem;font-size:.85rem;color:var(--soft)}
.swatch{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.45em}
table{border-collapse:collapse;width:100%;font-size:.9rem}.few{width:auto;min-width:22rem}
td,th{text-align:left;padding:.22rem 1.4rem .22rem 0;border-bottom:1px solid var(--rule);vertical-align:top;
overflow-wrap:anywhere}
th{font-weight:600;color:var(--soft);font-size:.8rem}.n{text-align:right}
.many td,.many th{overflow-wrap:normal;padding-right:.9rem}.many td.n{white-space:nowrap}.many{display:block;overflow-x:auto}
code,pre,.mono{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,"DejaVu Sans Mono",monospace;font-size:.86em}
pre{background:var(--panel);border-radius:5px;padding:.7rem .9rem;margin:.3rem 0 .9rem;white-space:pre-wrap;
overflow-wrap:anywhere}
.prompt{color:var(--soft)}.code{position:relative}.copy{position:absolute;top:.45rem;right:.5rem;font:inherit;font-size:.75rem;
color:var(--soft);background:var(--paper);border:1px solid var(--rule);border-radius:4px;padding:.1rem .55rem;cursor:pointer}
.copy:hover{color:var(--ink)}.checks{list-style:none;padding:0;margin:.8rem 0 0}.checks li{margin:.3rem 0;padding-left:1.5rem;
text-indent:-1.5rem}.checks b{display:inline-block;width:1.5rem;text-indent:0;color:var(--s2)}.checks .bad b{color:var(--s4)}
details{margin:.6rem 0}summary{cursor:pointer;color:var(--soft)}
footer{margin-top:3rem;font-size:.8rem;color:var(--soft)}
@media (max-width:560px){main{padding:1.5rem 1.1rem 3rem}.pair{grid-template-columns:1fr}.few{min-width:0;width:100%}
.facts{grid-template-columns:repeat(2,1fr)}.facts dd{font-size:1.1rem}.lead{font-size:1.1rem}td,th{padding-right:.7rem}
.wide .tick,.wide .name,.wide text.level{font-size:21px}.wide .line{stroke-width:3}
.tick,.name,text.level{font-size:13.5px}.at text{font-size:19px}}
@media print{.copy{display:none}main{max-width:none;padding:0}.at{display:none}h2,figure,pre{break-inside:avoid}}
""" + "".join(f".s{i}{{stroke:var(--s{i})}}.dots.s{i}{{fill:var(--s{i})}}.c{i}{{fill:var(--s{i})}}" for i in range(9))

SCRIPT = """
for (const svg of document.querySelectorAll("svg.chart")) {
  const at = svg.querySelector(".at"), [line, box, text] = at.children, bottom = +svg.dataset.bottom;
  const width = svg.viewBox.baseVal.width;
  const series = [...svg.querySelectorAll("[data-points]")].map(e => [e.dataset.name, JSON.parse(e.dataset.points)]);
  svg.addEventListener("pointermove", event => {
    const place = svg.getBoundingClientRect(), x = (event.clientX - place.left) / place.width * width;
    const near = series.map(([name, points]) => [name, points.reduce(
      (a, b) => Math.abs(b[2] - x) < Math.abs(a[2] - x) ? b : a)]);
    const left = near[0][1][2];
    text.textContent = near.map(([name, p], i) =>
      (i ? "" : "step " + p[0].toLocaleString("en") + "\u2003") + name + " " + p[1]
      + (i && p[0] != near[0][1][0] ? " at " + p[0].toLocaleString("en") : "")).join("\u2003");
    at.setAttribute("visibility", "visible");
    for (const [k, v] of [["x1", left], ["x2", left], ["y1", 8], ["y2", bottom]]) line.setAttribute(k, v);
    const size = text.getComputedTextLength(), start = Math.min(Math.max(left + 8, 4), width - size - 14);
    for (const [k, v] of [["x", start + 6], ["y", 23]]) text.setAttribute(k, v);
    for (const [k, v] of [["x", start], ["y", 8], ["width", size + 12], ["height", 22]]) box.setAttribute(k, v);
  });
  svg.addEventListener("pointerleave", () => at.setAttribute("visibility", "hidden"));
}
for (const box of document.querySelectorAll(".code")) {
  const button = document.createElement("button"), pre = box.querySelector("pre");
  button.className = "copy"; button.type = "button"; button.textContent = "Copy";
  button.addEventListener("click", async () => {
    try { await navigator.clipboard.writeText(pre.textContent); }
    catch { getSelection().selectAllChildren(pre); document.execCommand("copy"); }
    button.textContent = "Copied";
    setTimeout(() => button.textContent = "Copy", 1500);
  });
  box.append(button);
}
"""


def page(title: str, body: str) -> str:
    """Returns a complete HTML document. Its content security policy forbids loading anything."""
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n"
        f"<body>\n<main>\n{body}\n</main>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )
