function time(s) {
  if (s >= 1) return s.toPrecision(3) + " s";
  return s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " µs";
}

// The table of collectives. A click on a row shows the rest of what is known.
function stacked(...parts) {
  const box = element("div");
  for (const [text, name] of parts) if (text) box.append(element("div", text, name));
  return box;
}

const place = (c) => (c.file ? c.file.split("/").pop() + ":" + c.line : c.class);
const moved = (c) => c.move.replace("->", "→");
const COLUMNS = [
  ["Exposed", (c) => c.exposed, time, true, "heat"],
  ["Measured", (c) => (c.measured ? c.measured.exposed : -1), (s) => (s < 0 ? "–" : time(s)), true],
  ["Bytes", (c) => c.bytes, (n) => n.toLocaleString("en"), true],
  ["Collective", (c) => [c.op, c.reduce_op, "over", c.axis, moved(c), c.frame, c.direction, c.how].filter(Boolean).join(" "),
    (_, c) => stacked([`${c.op}${c.reduce_op ? " " + c.reduce_op : ""} over ${c.axis}`], [moved(c)], [c.frame + " " + c.direction, "dim"])],
  ["Where", (c) => [c.module, place(c), c.code].join(" "),
    (_, c) => stacked([c.module], [place(c), "dim"], [c.code, "code"])],
  ["To write", (c) => (c.remedies.length ? c.remedies[0].text : ""),
    (_, c) => stacked(...(c.remedies[0] && c.remedies[0].write
      ? [[c.remedies[0].write, "code"], ["saves " + time(c.remedies[0].saves), "dim"]] : [[c.remedies.length ? "none" : ""]]))],
];
const DETAILS = [
  ["Estimated", (c) => `${time(c.exposed)} of ${time(c.seconds)} exposed`],
  ["Measured", (c) => (c.measured ? `${time(c.measured.exposed)} exposed, of ${time(c.measured.seconds)}` : "")],
  ["Requested", (c) => c.how], ["Line", (c) => (c.file ? `${c.file}:${c.line}` : c.class)],
  ["Type", (c) => c.dtype + " " + JSON.stringify(c.shapes)], ["Read by", (c) => c.readers.join(", ")],
  ["Passes", (c) => c.passes.join(", ")],
  ["Ranks", (c) => (c.ranks.length > 8 ? c.ranks.length + " ranks" : c.ranks.join(" "))],
  ["Bytes as a formula", (c) => (c.formula ? c.formula.bytes : "")],
];

function link(c) {
  const a = element("a", "Its place in the timeline", "go");
  a.href = "#timeline";
  Object.assign(a.dataset, { frame: c.frame, direction: c.direction, number: c.number });
  return a;
}

function more(c) {
  const tr = element("tr", undefined, "more"), td = element("td"), list = element("dl");
  for (const [name, value] of DETAILS) if (value(c)) list.append(element("dt", name), element("dd", value(c)));
  c.remedies.forEach((r, k) => list.append(element("dt", k ? "" : "Remedies"), element("dd", r.text)));
  td.colSpan = COLUMNS.length;
  td.append(list, link(c));
  tr.append(td);
  return tr;
}

function opens(tr, c) {
  const toggle = () => {
    const open = tr.getAttribute("aria-expanded") === "true";
    if (open) tr.nextSibling.remove();
    else tr.after(more(c));
    tr.setAttribute("aria-expanded", String(!open));
  };
  tr.tabIndex = 0;
  tr.setAttribute("aria-expanded", "false");
  tr.addEventListener("click", toggle);
  tr.addEventListener("keydown", (event) => { if (event.key === "Enter") toggle(); });
}

const rows = data.frames.flatMap((f) => f.collectives.map((c) => ({ ...c, frame: f.name })));
sortable("table", "filter", "shown", COLUMNS, rows, { rowClass: (c) => (c.exposed > 0 ? "waits" : ""), onRow: opens });

// The timeline: bars that share a pixel are drawn once, so that drawing does not slow down with the length of a graph.
const graphs = data.frames.flatMap((f) => Object.entries(f.graphs).map(([d, g]) => ({ name: f.name + " " + d, f, d, ...g })));
let graph = graphs[0], from = 0, to = 1, chosen = -1;
graphs.forEach((g, k) => $("which").append(new Option(g.name, String(k))));

const LANES = [["computation", 12, "compute"], ["communication", 78, "comm"]], TALL = 46;

function bars(pen, spans, x, width, y, tall, paint) {
  pen.fillStyle = color(paint);
  let last = -1;
  for (const [a, b] of spans) {
    const left = x(a), right = Math.max(x(b), left + 1);
    if (right < 0 || left > width || right <= last) continue;
    pen.fillRect(Math.max(left, last), y, right - Math.max(left, last), tall);
    last = right;
  }
}

function draw() {
  if (!graph) return;
  const [pen, width, height] = canvas("lanes");
  const whole = graph.seconds || 1e-9, x = (s) => ((s / whole - from) / (to - from)) * width;
  LANES.forEach(([name, y, paint], lane) => {
    bars(pen, graph.spans.filter((s) => s[1] === lane).map((s) => [s[2], s[3]]), x, width, y, TALL, paint);
    pen.fillStyle = color("dim");
    pen.font = "11px system-ui";
    pen.fillText(name, 4, y - 2);
  });
  bars(pen, graph.spans.filter((s) => s[4] > 0).map((s) => [s[3] - s[4], s[3]]), x, width, LANES[1][1] + TALL - 12, 12, "exposed");
  const one = graph.spans.find((s) => s[1] && s[5] === chosen);
  if (one) {
    pen.strokeStyle = color("fg");
    pen.lineWidth = 2;
    pen.strokeRect(x(one[2]), LANES[1][1], Math.max(2, x(one[3]) - x(one[2])), TALL);
  }
  pen.fillStyle = color("dim");
  for (let k = 0; k <= 4; k++) pen.fillText(time((from + ((to - from) * k) / 4) * whole), Math.min(width - 52, (width * k) / 4 + 2), height - 6);
  drawMemory(x);
}

function drawMemory(x) {
  const [pen, width, height] = canvas("memory");
  const most = Math.max(1, ...graph.memory.map((m) => m[1]));
  pen.fillStyle = color("compute");
  pen.globalAlpha = 0.5;
  pen.beginPath();
  pen.moveTo(x(0), height);
  let y = height, column = -1, top = height;
  for (const [s, bytes] of graph.memory) { // of the values that share a pixel, draw the largest
    const now = height - (bytes / most) * (height - 18), at = Math.floor(x(s));
    if (at !== column) {
      pen.lineTo(at, y);
      [column, top] = [at, now];
    }
    top = Math.min(top, now);
    pen.lineTo(at, top);
    pen.lineTo(at + 1, top);
    pen.lineTo(at + 1, now);
    y = now;
  }
  pen.lineTo(x(graph.seconds), y);
  pen.lineTo(x(graph.seconds), height);
  pen.fill();
  pen.globalAlpha = 1;
  pen.fillStyle = color("fg");
  pen.font = "11px system-ui";
  pen.fillText("peak " + most.toLocaleString("en") + " bytes", 4, 12);
}

function say(span) {
  if (!span) return;
  const c = graph.f.collectives.find((k) => k.direction === graph.d && k.number === span[5] && span[1]);
  const who = c ? `, ${c.bytes.toLocaleString("en")} bytes over ${c.axis}, ${c.move || "?"}, ${c.how}, ${c.module || ""} ${place(c)}` +
    (c.measured ? `; measured ${time(c.measured.seconds)}, ${time(c.measured.exposed)} exposed` : "") : "";
  $("about").textContent = `${span[0]}: ${time(span[3] - span[2])} from ${time(span[2])}` +
    (span[4] > 0 ? `, ${time(span[4])} of it exposed` : "") + who;
}

function zoom(factor, at = 0.5) {
  const middle = from + (to - from) * at, half = Math.min(1, (to - from) * factor);
  from = Math.max(0, Math.min(1 - half, middle - half * at));
  to = from + half;
  draw();
}

function move(part) {
  const step = (to - from) * part, shift = Math.max(-from, Math.min(1 - to, step));
  from += shift;
  to += shift;
  draw();
}

function choose(step) {
  const sent = graph.spans.filter((s) => s[1]);
  if (!sent.length) return;
  const k = sent.findIndex((s) => s[5] === chosen);
  const next = sent[(k + step + sent.length) % sent.length] || sent[0];
  chosen = next[5];
  say(next);
  draw();
}

// Show a collective: its graph, with the collective in the middle of a twentieth of it or more.
function go(frame, direction, number) {
  const k = graphs.findIndex((g) => g.name === frame + " " + direction);
  const span = k < 0 ? undefined : graphs[k].spans.find((s) => s[1] && s[5] === number);
  if (!span) return;
  $("which").value = String(k);
  graph = graphs[k];
  chosen = number;
  const whole = graph.seconds || 1e-9, wide = Math.min(1, Math.max(0.05, (4 * (span[3] - span[2])) / whole));
  from = Math.max(0, Math.min(1 - wide, (span[2] + span[3]) / 2 / whole - wide / 2));
  to = from + wide;
  draw();
  say(span);
  $("timeline").scrollIntoView();
  $("lanes").focus({ preventScroll: true });
}

document.addEventListener("click", (event) => {
  const a = event.target.closest("a.go");
  if (!a) return;
  event.preventDefault();
  event.stopPropagation();
  go(a.dataset.frame, a.dataset.direction, Number(a.dataset.number));
});

const KEYS = {
  "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2), "0": () => { from = 0; to = 1; draw(); },
  ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), n: () => choose(1), p: () => choose(-1),
};
$("lanes").addEventListener("keydown", (event) => {
  if (KEYS[event.key]) { KEYS[event.key](); event.preventDefault(); }
});
$("lanes").addEventListener("wheel", (event) => {
  if (!event.ctrlKey && !event.shiftKey) return;
  event.preventDefault();
  zoom(event.deltaY > 0 ? 1.25 : 0.8, event.offsetX / $("lanes").clientWidth);
}, { passive: false });
$("lanes").addEventListener("mousemove", (event) => {
  if (!graph) return;
  const at = (from + (event.offsetX / $("lanes").clientWidth) * (to - from)) * graph.seconds;
  const lane = event.offsetY < LANES[1][1] - 10 ? 0 : 1;
  say(graph.spans.find((s) => s[1] === lane && s[2] <= at && at <= s[3]));
});
$("in").addEventListener("click", () => zoom(0.5));
$("out").addEventListener("click", () => zoom(2));
$("all").addEventListener("click", KEYS["0"]);
$("which").addEventListener("change", () => { graph = graphs[Number($("which").value)]; chosen = -1; KEYS["0"](); });
window.addEventListener("resize", draw);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();

// The graphs: only the visible lines are in the DOM.
const HIGH = 18;
let lines = [], isDiff = false, stages = [];
data.frames.forEach((f, k) => $("frame").append(new Option(f.name, String(k))));

function sight() {
  const box = $("code"), first = Math.max(0, Math.floor(box.scrollTop / HIGH) - 20);
  const last = Math.min(lines.length, Math.ceil((box.scrollTop + box.clientHeight) / HIGH) + 20);
  const made = document.createDocumentFragment();
  for (const line of lines.slice(first, last)) {
    const kind = !isDiff ? "" : line[0] === "+" ? "plus" : line[0] === "-" ? "minus" : line[0] === "@" ? "hunk" : "";
    made.append(element("div", line || " ", kind));
  }
  $("lines").style.top = first * HIGH + "px";
  $("lines").replaceChildren(made);
}

function show() {
  const stage = stages[Number($("stage").value)];
  lines = stage ? stage.lines : [];
  isDiff = Boolean(stage && stage.diff);
  $("space").style.height = lines.length * HIGH + "px";
  $("code").scrollTop = 0;
  $("length").textContent = `${lines.length.toLocaleString("en")} lines` + (isDiff ? " of changes" : "");
  sight();
}

function frameChosen() {
  const f = data.frames[Number($("frame").value)];
  stages = f ? f.stages : [];
  $("stage").replaceChildren(...stages.map((s, k) => new Option(s.title + (s.diff ? " (changes)" : ""), String(k))));
  $("modules").replaceChildren(...(f ? f.layers : []).map((row) => {
    const tr = element("tr");
    tr.append(element("td", row.module), element("td", row.gives), element("td", row.sends.join("\n")));
    return tr;
  }));
  show();
}

function step(by) {
  const select = $("stage");
  select.selectedIndex = Math.max(0, Math.min(select.length - 1, select.selectedIndex + by));
  show();
}
$("frame").addEventListener("change", frameChosen);
$("stage").addEventListener("change", show);
$("previous").addEventListener("click", () => step(-1));
$("next").addEventListener("click", () => step(1));
$("code").addEventListener("scroll", () => requestAnimationFrame(sight));
frameChosen();
document.documentElement.dataset.ready = String(Math.round(performance.now()));
