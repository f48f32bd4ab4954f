"use strict";
// What the pages share. All text from the program is set through textContent, so that none of it is ever parsed as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();

function element(tag, text, name) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (name) made.className = name;
  return made;
}

// The pen of a canvas, in CSS pixels, and its width and height.
function canvas(id) {
  const c = $(id), ratio = window.devicePixelRatio || 1, box = c.getBoundingClientRect();
  c.width = Math.max(1, Math.round(box.width * ratio));
  c.height = Math.max(1, Math.round(box.height * ratio));
  const pen = c.getContext("2d");
  pen.scale(ratio, ratio);
  return [pen, box.width, box.height];
}

// A table: click a header to sort, type words into the field `filter` to filter. At most MOST rows are shown. A column is
// a name, the value of a row, how the value is shown (as text or an element), whether it is a number, and a class.
// `rowClass` names a row's class,
// and `onRow` is called with a new row of the table and what it shows.
const MOST = 500;

function sortable(table, filter, shown, columns, rows, { falling = true, rowClass = () => "", onRow = () => {} } = {}) {
  let sortedBy = 0;
  const texts = rows.map((row) => columns.map((c) => String(c[1](row))).join(" ").toLowerCase());

  function fill() {
    const words = $(filter).value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = rows.filter((_, k) => words.every((w) => texts[k].includes(w)));
    const key = columns[sortedBy][1];
    found.sort((a, b) => (key(a) < key(b) ? -1 : key(a) > key(b) ? 1 : 0) * (falling ? -1 : 1));
    const body = document.createDocumentFragment();
    for (const row of found.slice(0, MOST)) {
      const tr = element("tr", undefined, rowClass(row));
      for (const [, value, show, number, name] of columns) {
        const td = element("td", undefined, [number ? "n" : "", name || ""].join(" ").trim());
        td.append(show ? show(value(row), row) : value(row));
        tr.append(td);
      }
      onRow(tr, row);
      body.append(tr);
    }
    $(table).tBodies[0].replaceChildren(body);
    $(shown).textContent = `${found.length} of ${rows.length}` + (found.length > MOST ? `, the first ${MOST} are shown` : "");
    document.querySelectorAll(`#${table} th`).forEach((th, k) =>
      th.setAttribute("aria-sort", k !== sortedBy ? "none" : falling ? "descending" : "ascending"));
  }

  const head = element("tr");
  columns.forEach(([name, , , number], k) => {
    const th = element("th", undefined, number ? "n" : ""), button = element("button", name);
    button.type = "button";
    button.addEventListener("click", () => { falling = k === sortedBy ? !falling : Boolean(number); sortedBy = k; fill(); });
    th.append(button);
    head.append(th);
  });
  $(table).tHead.append(head);
  $(filter).addEventListener("input", fill);
  fill();
}
