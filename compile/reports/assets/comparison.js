// The page of a comparison. Points are numbered in the order of execution of B; null is a difference that was not judged.
const points = data.points.map((p, k) => ({
  ...p, k, difference: p.difference === null ? NaN : Number(p.difference), allowed: p.allowed === null ? NaN : Number(p.allowed),
}));
const readers = points.map(() => []);
for (const p of points) for (const k of p.inputs) readers[k].push(p.k);

const judged = (p) => !Number.isNaN(p.difference);
const found = (p) => p.findings.length > 0;
const ratio = (p) => (!judged(p) ? -1 : p.difference === 0 ? 0 : p.difference / p.allowed);
const state = (p) => (found(p) ? "finding" : !judged(p) ? "not judged" : !p.certain ? "not certainly the same" : "explained");
const named = (p) => `${p.op}${p.number > 0 ? ` (result ${p.number})` : ""}${p.module ? " in " + p.module : ""}`;

function short(x) {
  if (Number.isNaN(x) || x < 0) return "–";
  return x === 0 ? "0" : x === Infinity ? "∞" : x.toExponential(1);
}

// The drawing: relative differences on a logarithmic scale, above lanes for zeros and for what was not judged.
const TOP = 30, LANE = 16, LEFT = 46;
const logs = (of) => points.map(of).filter((x) => x > 0 && x < Infinity).map(Math.log10);
const low = Math.floor(least([-8, ...extremes(logs((p) => p.difference)), ...extremes(logs((p) => p.allowed))]));
const high = Math.ceil(most([0, ...extremes(logs((p) => p.difference))])) + 1; // bounds above it say nothing
let from = 0, to = 1, chosen = -1;

function least(values) {
  return values.reduce((a, b) => Math.min(a, b));
}

function most(values) {
  return values.reduce((a, b) => Math.max(a, b));
}

function extremes(values) { // of many values, which a call could not take as arguments
  return values.length ? [least(values), most(values)] : [];
}

function places() {
  const box = $("steps").getBoundingClientRect(), width = box.width - LEFT, bottom = box.height - 2 * LANE;
  const x = (k) => LEFT + (((k + 0.5) / Math.max(points.length, 1) - from) / (to - from)) * width;
  const y = (v) => {
    if (Number.isNaN(v)) return bottom + 1.5 * LANE;
    if (v === 0) return bottom + 0.5 * LANE;
    return v === Infinity ? TOP : TOP + 8 + (1 - (Math.log10(v) - low) / (high - low)) * (bottom - TOP - 12);
  };
  return { x, y, width: box.width, bottom, wide: width / (points.length * (to - from)) };
}

function background(pen, at) {
  const last = data.bands[data.bands.length - 1];
  pen.font = "11px system-ui";
  data.bands.forEach((band, k) => {
    const left = Math.max(at.x(band.from - 0.5), LEFT), right = Math.min(at.x(band.to - 0.5), at.width);
    if (right <= left) return;
    pen.fillStyle = color(k % 2 ? "bg" : "soft");
    pen.fillRect(left, 0, right - left, at.bottom + 2 * LANE);
    pen.fillStyle = color("dim");
    const names = [...(last.step ? [`step ${band.step} ${band.part}`] : []), band.part];
    const name = names.find((n) => right - left > pen.measureText(n).width + 8);
    if (name) pen.fillText(name, left + 4, 12);
  });
  pen.strokeStyle = color("line");
  pen.fillStyle = color("dim");
  pen.textAlign = "right";
  pen.beginPath();
  const every = Math.ceil((high - low) / 10);
  for (let power = low; power <= high; power += every) {
    const y = Math.round(at.y(10 ** power)) + 0.5;
    pen.moveTo(LEFT, y);
    pen.lineTo(at.width, y);
    pen.fillText(`1e${power}`, LEFT - 4, y + 4);
  }
  pen.moveTo(LEFT, at.bottom + 0.5);
  pen.lineTo(at.width, at.bottom + 0.5);
  pen.stroke();
  pen.fillText("0", LEFT - 4, at.bottom + 0.5 * LANE + 4);
  pen.fillText("?", LEFT - 4, at.bottom + 1.5 * LANE + 4);
  if (points.some((p) => p.difference === Infinity)) pen.fillText("∞", LEFT - 4, TOP + 4);
  pen.textAlign = "left";
}

function dot(pen, at, p) {
  const size = found(p) ? 5 : Math.max(1.6, Math.min(3, at.wide));
  pen.beginPath();
  pen.arc(at.x(p.k), at.y(p.difference), size, 0, 7);
  pen.fillStyle = pen.strokeStyle = color(found(p) ? "exposed" : state(p) === "explained" ? "compute" : "dim");
  if (found(p) || state(p) === "explained") pen.fill();
  else pen.stroke();
}

function draw() {
  const [pen, width] = canvas("steps"), at = places();
  background(pen, at);
  const seen = points.filter((p) => at.x(p.k) >= LEFT - 4 && at.x(p.k) <= width + 4);
  pen.fillStyle = color("bound");
  const tick = Math.max(2, Math.min(at.wide, 14));
  for (const p of seen) if (p.allowed > 0 && p.allowed < 10 ** high) pen.fillRect(at.x(p.k) - tick / 2, at.y(p.allowed) - 0.75, tick, 1.5);
  for (const p of seen) if (!found(p)) dot(pen, at, p);
  for (const p of seen) if (found(p)) dot(pen, at, p);
  if (points[chosen]) {
    pen.strokeStyle = color("fg");
    pen.lineWidth = 2;
    pen.beginPath();
    pen.arc(at.x(chosen), at.y(points[chosen].difference), 8, 0, 7);
    pen.stroke();
  }
}

function nearest(x, y) {
  const at = places();
  let best = null, least = 30 ** 2;
  for (const p of points) {
    const far = (at.x(p.k) - x) ** 2 + (at.y(p.difference) - y) ** 2;
    if (far < least) [best, least] = [p, far];
  }
  return best;
}

function say(p) {
  if (!p) return;
  $("about").textContent = `${named(p)}, ${p.phase}, step ${p.step}: ${short(p.difference)} of its norm, bound ${short(p.allowed)}, ${state(p)}`;
}

// Details. A value is chosen by the address, so that the browser's way back works.
function link(k) {
  const made = element("a", `${named(points[k])}, ${points[k].phase}: ${short(points[k].difference)}`, found(points[k]) ? "hot" : "");
  made.href = `#value-${k}`;
  return made;
}

function list(entries) {
  const made = element("ul");
  for (const entry of entries) {
    const li = element("li");
    li.append(entry);
    made.append(li);
  }
  return made;
}

const MOST_READERS = 12;

function details(p) {
  const rows = [
    ["Module", p.module || "–"], ["Operator", p.op + (p.number > 0 ? `, result ${p.number}` : "")], ["Line", p.line || "–"],
    ["Phase", `${p.phase}, step ${p.step}, number ${p.order} in the order of execution`], ["Type on a rank", p.type],
    ["In A", p.a || "–"], ["In B", p.b],
    ["Difference", `${short(p.difference)} of its norm` + (p.norm === undefined ? "" : `, which is ${p.norm} in A`)],
    ["Bound", p.allowed === Infinity ? "none: nothing is known of its inputs" : `${short(p.allowed)} of its norm`],
    ["Judged", state(p)],
  ];
  if (p.reading) rows.push(["Plain tensors", `read as ${p.reading}`]);
  for (const f of p.findings) {
    rows.push(["Finding", `${f.title}${f.run === "A" ? ", in A" : ""}`], ["Where", f.where]);
    if (f.said) rows.push(["Looks like", f.said]);
  }
  if (p.between && p.between.length) rows.push(["Between", list(p.between)]);
  rows.push(["Inputs", p.inputs.length ? list(p.inputs.map(link)) : "none that both runs have"]);
  const more = readers[p.k].length - MOST_READERS;
  if (readers[p.k].length)
    rows.push(["Read by", list([...readers[p.k].slice(0, MOST_READERS).map(link), ...(more > 0 ? [`and ${more} more`] : [])])]);
  const made = element("dl");
  for (const [name, content] of rows) {
    const dd = element("dd", undefined, name === "Finding" ? "hot" : "");
    dd.append(content);
    made.append(element("dt", name), dd);
  }
  return made;
}

function choose(k, scroll) {
  if (!points[k]) return;
  chosen = k;
  say(points[k]);
  const head = element("h3", named(points[k]));
  $("chosen").replaceChildren(head, details(points[k]));
  const part = (k + 0.5) / points.length;
  if (part < from || part > to) move((part - (from + to) / 2) / (to - from));
  draw();
  if (scroll) $("details").scrollIntoView({ block: "nearest" });
}

function addressed() {
  const match = /^#value-(\d+)$/.exec(location.hash);
  if (match) choose(Number(match[1]), true);
}

function zoom(factor, at = 0.5) {
  const middle = from + (to - from) * at, size = Math.min(1, (to - from) * factor);
  from = Math.max(0, Math.min(1 - size, middle - size * at));
  to = from + size;
  draw();
}

function move(part) {
  const shift = Math.max(-from, Math.min(1 - to, (to - from) * part));
  from += shift;
  to += shift;
  draw();
}

function next() {
  const k = data.findings.find((f) => f > chosen) ?? data.findings[0];
  if (k !== undefined) choose(k, false);
}

const KEYS = {
  "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => { from = 0; to = 1; draw(); }, f: next,
  ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2),
  n: () => choose(Math.min(chosen + 1, points.length - 1), false), p: () => choose(Math.max(chosen - 1, 0), false),
};
$("steps").addEventListener("keydown", (event) => {
  if (KEYS[event.key]) { KEYS[event.key](); event.preventDefault(); }
});
$("steps").addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.shiftKey) return;
  event.preventDefault();
  zoom(event.deltaY + event.deltaX > 0 ? 1.25 : 0.8, (event.offsetX - LEFT) / ($("steps").clientWidth - LEFT));
}, { passive: false });
$("steps").addEventListener("mousemove", (event) => say(nearest(event.offsetX, event.offsetY)));
$("steps").addEventListener("click", (event) => {
  const p = nearest(event.offsetX, event.offsetY);
  if (p) history.pushState(null, "", `#value-${p.k}`), choose(p.k, false);
});
$("in").addEventListener("click", () => zoom(0.5));
$("out").addEventListener("click", () => zoom(2));
$("all").addEventListener("click", KEYS["0"]);
$("next").addEventListener("click", next);
window.addEventListener("hashchange", addressed);
window.addEventListener("popstate", addressed);
window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);

// The tables.
sortable("table", "filter", "shown", [
  ["Order", (p) => p.order, undefined, true], ["Difference", (p) => (judged(p) ? p.difference : -1), short, true],
  ["Bound", (p) => p.allowed, short, true], ["Difference / bound", ratio, short, true, "heat"], ["Judged", state],
  ["Operator", (p) => p.op], ["Module", (p) => p.module], ["Phase", (p) => p.phase], ["Step", (p) => p.step, undefined, true],
  ["Line", (p) => p.line], ["Type on a rank", (p) => p.type], ["In A", (p) => p.a], ["In B", (p) => p.b],
], points, {
  falling: false,
  rowClass: (p) => (found(p) ? "waits" : ""),
  onRow: (tr, p) => {
    const made = element("a", String(p.order));
    made.href = `#value-${p.k}`;
    tr.cells[0].replaceChildren(made);
  },
});
sortable("tableAlone", "filterAlone", "shownAlone", [
  ["Run", (p) => p.run], ["Order", (p) => p.order, undefined, true], ["Operator", (p) => p.op], ["Module", (p) => p.module],
  ["Phase", (p) => p.phase], ["Step", (p) => p.step, undefined, true], ["Line", (p) => p.line], ["Type on a rank", (p) => p.type],
  ["Distributed", (p) => p.b],
], data.alone, { falling: false });

draw();
addressed();
if (chosen < 0 && data.findings.length) choose(data.findings[0], false);
document.documentElement.dataset.ready = String(Math.round(performance.now()));
