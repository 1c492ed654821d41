"""What does a page do where a pointer is: show the values of a chart at a step.

The page is whole without it. Left and right arrow keys move through the points of a
chart that has the focus. All texts are set as text, never as HTML.
"""

from jaxpar.show.chart import WIDTH

STYLE = """
.cross { position: absolute; top: 0; bottom: 0; width: 1px; pointer-events: none;
  background: currentColor; opacity: 0.5; }
.tip { position: absolute; top: 0.25rem; z-index: 1; pointer-events: none;
  background: Canvas; border: var(--line); border-radius: 6px; font-size: 0.8rem;
  padding: 0.25rem 0.5rem; width: max-content; max-width: min(20rem, 80vw);
  box-shadow: 0 2px 8px #0004;
  font-variant-numeric: tabular-nums; white-space: pre-line; }
.tip div { display: flex; align-items: baseline; white-space: nowrap; }
.tip .dots { margin: 0 0.55rem 0 0.2rem; }
.tip div b { margin-left: auto; padding-left: 0.75rem; }
"""

SCRIPT = (
    f"const WIDTH = {WIDTH};"
    + """
const plots = [...document.querySelectorAll(".plot")].map(box => {
  const lines = [...box.querySelectorAll("path[data-x]")].map(path => ({
    name: path.dataset.name, kind: path.getAttribute("class"),
    steps: path.dataset.x.split(" ").map(Number), values: path.dataset.y.split(" "),
    across: path.getAttribute("d").match(/[ML]-?\\d+/g).map(m => Number(m.slice(1)))
  }));
  const longest = lines.reduce((a, b) =>
    b.across.length > a.across.length ? b : a, lines[0]);
  return {box, lines, longest, flags: [...box.querySelectorAll(".flag")]};
});
const add = (parent, tag, kind, text) => {
  const made = document.createElement(tag);
  made.className = kind;
  if (text !== undefined) made.textContent = text;
  return parent.appendChild(made);
};
const nearest = (across, at) => {
  let low = 0, high = across.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (across[middle] <= at) low = middle; else high = middle;
  }
  return Math.abs(across[low] - at) <= Math.abs(across[high] - at) ? low : high;
};
const clear = () => document.querySelectorAll(".cross, .tip").forEach(e => e.remove());
function show(plot, at) {
  clear();
  const found = plot.lines.map(line => ({line, i: nearest(line.across, at)}));
  const distance = f => Math.abs(f.line.across[f.i] - at);
  const best = found.reduce((a, b) => distance(b) < distance(a) ? b : a);
  const place = best.line.across[best.i] / WIDTH;
  for (const other of plots)
    add(other.box, "div", "cross").style.left = 100 * place + "%";
  const tip = add(plot.box, "div", "tip");
  add(tip, "b", "", "step " + best.line.steps[best.i].toLocaleString("en"));
  for (const {line, i} of found) {
    if (Math.abs(line.across[i] - best.line.across[best.i]) > WIDTH / 50) continue;
    const row = add(tip, "div", "");
    add(row, "i", line.kind);
    add(row, "span", "", line.name);
    add(row, "b", "", line.values[i]);
  }
  for (const flag of plot.flags)
    if (Math.abs(parseFloat(flag.style.left) / 100 - place) < 0.012)
      add(tip, "span", "", flag.title + "\\n");
  const width = plot.box.clientWidth, own = tip.offsetWidth;
  const left = place < 0.5 ? width * place + 8 : width * place - own - 8;
  tip.style.left = Math.max(-50, Math.min(left, width - own + 10)) + "px";
  plot.at = best.line.across[best.i];
}
for (const plot of plots.filter(plot => plot.lines.length)) {
  plot.box.addEventListener("pointermove", event => {
    const box = plot.box.getBoundingClientRect();
    show(plot, (event.clientX - box.left) / box.width * WIDTH);
  });
  plot.box.addEventListener("pointerleave", clear);
  plot.box.addEventListener("blur", clear);
  plot.box.addEventListener("keydown", event => {
    const move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!move) return;
    event.preventDefault();
    const across = plot.longest.across;
    const now = plot.at === undefined ? across.length - 1 : nearest(across, plot.at);
    show(plot, across[Math.min(Math.max(now + move, 0), across.length - 1)]);
  });
}
"""
)
