// Everything here is an addition: sorting, filters, search, values at marks, downloads. The page says it all without.
"use strict";
const all = (selector, root = document) => [...root.querySelectorAll(selector)];
const made = (tag, properties, ...children) => {
  const element = Object.assign(document.createElement(tag), properties);
  element.append(...children);
  return element;
};

// Sorting by a click on a column's heading.
for (const table of all("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = made("button", { type: "button", title: "Sort by " + head.textContent }, head.textContent);
    head.replaceChildren(button);
    button.addEventListener("click", () => {
      const falling = head.getAttribute("aria-sort") === "ascending";
      heads.forEach(other => other.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", falling ? "descending" : "ascending");
      const key = row => row.cells[column].dataset.key ?? row.cells[column].textContent;
      const rows = [...table.tBodies[0].rows];
      rows.sort((a, b) => {
        const [x, y] = [key(a), key(b)];
        if (x === "" || y === "") return (x === "") - (y === "");
        const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
        return falling ? -order : order;
      });
      table.tBodies[0].append(...rows);
    });
  });
}

// What is known of each result: label, and a value for each filter. Rows name their results by number.
const known = JSON.parse(document.getElementById("known").textContent);
const numbers = row => (row.dataset.of ?? "").split(" ").filter(text => text !== "").map(Number);
const logs = document.getElementById("logs");
const logRows = logs ? all("tbody tr", logs) : [];  // in the order of the study's runs, by which marks name theirs
const resolved = new Map();
function resultsOf(name) {  // names of long results are cut in the middle, by "…"
  if (!resolved.has(name)) {
    const [head, tail] = name.split("…");
    const fits = label => label === name || (tail !== undefined && label.startsWith(head) && label.endsWith(tail));
    resolved.set(name, known.results.flatMap((result, number) => (fits(result.label) || fits(result.name) ? [number] : [])));
  }
  return resolved.get(name);
}
const texts = new WeakMap();  // what marks say, taken from their <title> so that the browser does not show it as well
function said(mark) {
  if (!texts.has(mark)) texts.set(mark, mark.lastElementChild?.localName === "title" ? mark.lastElementChild.textContent : "");
  return texts.get(mark);
}
const marks = () => all("figure svg use, figure svg path").filter(mark => mark.lastElementChild?.localName === "title" || texts.get(mark));
const resultsAt = mark => (mark.dataset.run ? numbers(logRows[mark.dataset.run]) : resultsOf(said(mark).split("\n")[0]));

// Filters and search.
const chosen = Object.fromEntries(known.filters.map(name => [name, ""]));
const search = made("input", { type: "search", id: "search", autocomplete: "off" });
const shown = made("output", {});
const passes = number => known.filters.every(name => chosen[name] === "" || known.results[number][name] === chosen[name]);
const filtered = () => known.filters.some(name => chosen[name] !== "");
function apply() {
  const terms = search.value.toLowerCase().split(/\s+/).filter(term => term);
  const found = element => terms.every(term => element.textContent.toLowerCase().includes(term));
  let [visible, total] = [0, 0];
  for (const row of all("#results ~ * tbody tr, .picture tbody tr, #logs tbody tr, .differing tbody tr")) {
    const of = numbers(row);
    const heading = row.closest("[data-heading]")?.dataset.heading.toLowerCase() ?? "";
    const text = () => heading + " " + row.textContent.toLowerCase();
    row.hidden = (of.length > 0 && !of.some(passes)) || !(terms.length === 0 || terms.every(term => text().includes(term)));
    total += 1;
    visible += !row.hidden;
  }
  for (const block of all(".ranking")) block.hidden = !all("tbody tr", block).some(row => !row.hidden);
  for (const section of all(".picture")) section.hidden = terms.length > 0 && !found(section);
  for (const item of all("ul.issues li")) item.hidden = !found(item);
  for (const term of all("dl.answers dt")) term.hidden = term.nextElementSibling.hidden = !(found(term) || found(term.nextElementSibling));
  for (const mark of marks()) {
    const of = filtered() ? resultsAt(mark) : [];
    mark.classList.toggle("dim", of.length > 0 && !of.some(passes));
  }
  shown.textContent = filtered() || terms.length ? `${visible} of ${total} rows` : "";
}
const controls = made("form", { className: "controls", role: "search" }, made("label", {}, "Search", search));
controls.addEventListener("submit", event => event.preventDefault());
for (const name of known.filters) {
  const values = [...new Set(known.results.map(result => result[name]))].sort();
  if (values.length < 2) continue;
  const select = made("select", { id: "filter-" + name }, new Option("all", ""), ...values.map(value => new Option(value)));
  select.addEventListener("change", () => { chosen[name] = select.value; apply(); });
  controls.append(made("label", {}, name, select));
}
const reset = made("button", { type: "reset" }, "show all");
controls.addEventListener("reset", () => setTimeout(() => { known.filters.forEach(name => { chosen[name] = ""; }); apply(); }));
controls.append(reset, shown);
let waiting;
search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(apply, 120); });
document.querySelector("nav").after(controls);

// Values of a mark where the pointer rests, or where a finger taps; from a mark to its logs by a click.
const tip = made("div", { className: "tip", role: "status", hidden: true });
document.body.append(tip);
function show(mark) {
  const text = said(mark);
  if (mark.lastElementChild?.localName === "title") mark.lastElementChild.remove();
  const box = mark.getBoundingClientRect();
  const run = mark.dataset.run ? "\n" + logRows[mark.dataset.run].cells[0].textContent : "";
  tip.textContent = text + run + (logs && resultsAt(mark).length ? `\n(click: its log${run ? "" : "s"})` : "");
  tip.hidden = false;
  const left = Math.min(box.right + 8, document.documentElement.clientWidth - tip.offsetWidth - 8);
  tip.style.left = Math.max(4, left) + scrollX + "px";
  tip.style.top = Math.max(4, box.top - tip.offsetHeight - 6) + scrollY + "px";
}
const markAt = event => {
  const mark = event.target.closest?.("figure svg use, figure svg path");
  return mark && said(mark) ? mark : null;
};
document.addEventListener("pointerover", event => {
  const mark = markAt(event);
  if (!mark) { tip.hidden = true; return; }
  mark.classList.toggle("named", resultsAt(mark).length > 0);
  show(mark);
});
document.addEventListener("click", event => {
  const mark = markAt(event);
  const of = mark && logs ? resultsAt(mark) : [];
  if (!of.length) return;
  const run = mark.dataset.run ? logRows[mark.dataset.run] : null;
  const rows = run ? [run] : logRows.filter(row => numbers(row).some(number => of.includes(number)));
  if (!rows.length) return;
  logs.closest("details").open = true;
  for (const row of logRows) row.classList.toggle("hit", rows.includes(row));
  rows.forEach(row => { row.hidden = false; });
  rows[0].scrollIntoView({ block: "center" });
  tip.hidden = true;
});

// A figure as a file, in the colours of the light page, on white.
function drawing(svg) {
  const copy = svg.cloneNode(true);
  const [, , width, height] = svg.getAttribute("viewBox").split(" ").map(Number);
  copy.setAttribute("width", width);
  copy.setAttribute("height", height);
  copy.setAttribute("style", "color: #1b1f25; background: #ffffff");
  all("title", copy).slice(1).forEach(title => title.remove());
  all(".dim", copy).forEach(mark => mark.classList.remove("dim"));
  return [new Blob([new XMLSerializer().serializeToString(copy)], { type: "image/svg+xml" }), width, height];
}
function offer(blob, name) {
  const link = made("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
async function raster(svg) {
  const [blob, width, height] = drawing(svg);
  const image = new Image();
  const scale = Math.min(3, 16000 / Math.max(width, height));
  image.src = URL.createObjectURL(blob);
  await image.decode();
  const canvas = made("canvas", { width: width * scale, height: height * scale });
  const context = canvas.getContext("2d");
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  return new Promise(resolve => canvas.toBlob(resolve, "image/png"));
}
for (const files of all(".files")) {
  const svg = files.closest("section").querySelector("figure svg");
  const button = (text, work) => {
    const element = made("button", { type: "button" }, text);
    element.addEventListener("click", work);
    files.append(element);
  };
  button("figure as SVG", () => offer(drawing(svg)[0], files.dataset.name + ".svg"));
  button("figure as PNG", async () => offer(await raster(svg), files.dataset.name + ".png"));
}
