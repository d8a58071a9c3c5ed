// Everything here is an addition: sorting, filters, search, charts, values at marks, downloads. Without it the page has
// every score, answer and table.
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

// What is known of each result: label, and a value for each filter. Rows and marks name their results by number.
const known = JSON.parse(document.getElementById("known").textContent);
const numbers = row => (row.dataset.of ?? "").split(" ").filter(text => text !== "").map(Number);
const logs = document.getElementById("logs");
const logRows = logs ? all("tbody tr", logs) : [];

// Filters and search. The address keeps the filters, so that a link shows the same view.
const chosen = Object.fromEntries(known.filters.map(name => [name, ""]));
const search = made("input", { type: "search", id: "search", autocomplete: "off" });
const shown = made("output", {});
const selects = {};
const passes = number => known.filters.every(name => chosen[name] === "" || known.results[number][name] === chosen[name]);
const filtered = () => known.filters.some(name => chosen[name] !== "");
const kept = of => of.length === 0 || of.some(passes);
function apply() {
  const terms = search.value.toLowerCase().split(/\s+/).filter(term => term);
  const found = element => terms.every(term => element.textContent.toLowerCase().includes(term));
  let [visible, total] = [0, 0];
  for (const row of all("#results ~ * tbody tr, .view tbody tr, #logs tbody tr, .differing tbody tr")) {
    const heading = row.closest("[data-heading]")?.dataset.heading.toLowerCase() ?? "";
    const text = () => heading + " " + row.textContent.toLowerCase();
    row.hidden = !kept(numbers(row)) || !(terms.length === 0 || terms.every(term => text().includes(term)));
    total += 1;
    visible += !row.hidden;
  }
  for (const block of all(".ranking")) block.hidden = !all("tbody tr", block).some(row => !row.hidden);
  for (const section of all("section.figure")) section.hidden = terms.length > 0 && !found(section);
  for (const item of all("ul.issues li")) item.hidden = !found(item);
  for (const term of all("dl.answers dt")) term.hidden = term.nextElementSibling.hidden = !(found(term) || found(term.nextElementSibling));
  shown.textContent = filtered() || terms.length ? `${visible} of ${total} rows` : "";
  drawn.clear();
  for (const view of inSight) draw(view);
}
function choose(name, value) {
  chosen[name] = selects[name].value = value;
  const parts = known.filters.filter(each => chosen[each] !== "").map(each => `${each}=${encodeURIComponent(chosen[each])}`);
  history.replaceState(null, "", parts.length ? "#" + parts.join("&") : location.pathname + location.search);
  apply();
}
function readAddress() {
  for (const part of location.hash.slice(1).split("&")) {
    const [name, value] = part.split("=");
    if (value !== undefined && name in selects) chosen[name] = selects[name].value = decodeURIComponent(value);
  }
}
const controls = made("form", { className: "controls", role: "search" }, made("label", {}, "Search", search));
controls.addEventListener("submit", event => event.preventDefault());
for (const name of known.filters) {
  const values = [...new Set(known.results.map(result => result[name]))].sort();
  if (values.length < 2) continue;
  selects[name] = made("select", { id: "filter-" + name }, new Option("all", ""), ...values.map(value => new Option(value)));
  selects[name].addEventListener("change", () => choose(name, selects[name].value));
  controls.append(made("label", {}, name, selects[name]));
}
controls.addEventListener("reset", () => setTimeout(() => {
  known.filters.forEach(name => { chosen[name] = ""; });
  history.replaceState(null, "", location.pathname + location.search);
  apply();
}));
controls.append(made("button", { type: "reset" }, "show all"), shown);
let waiting;
search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(apply, 120); });
document.querySelector("nav").after(controls);
// A click on a system in a table of scores chooses it everywhere; another click shows all again.
for (const row of all(".ranking tbody tr")) {
  const of = numbers(row);
  if (of.length !== 1 || !selects.system) continue;
  const button = made("button", { type: "button", title: "Show only this system" }, row.cells[0].textContent);
  row.cells[0].replaceChildren(button);
  const system = known.results[of[0]].system;
  button.addEventListener("click", () => choose("system", chosen.system === system ? "" : system));
}

// Charts. Each is drawn when it comes into sight, with those rows of its data whose results the filters keep.
const drawn = new Map();  // view: what vega-embed returned
const inSight = new Set();
const PADDING = 90;  // pixels beside the frame of a chart: names and ticks of its axis
function fitted(view) {  // the specification for the room that there is, or null if no row is left
  const spec = JSON.parse(view.querySelector("figure script").textContent);
  const left = name => spec.datasets[name].filter(row => kept(row._of ?? []));
  for (const name of Object.keys(spec.datasets)) spec.datasets[name] = left(name);
  const names = part => [part.data?.name, ...(part.layer ?? []).flatMap(names)].filter(name => name);
  const holds = part => names(part).some(name => spec.datasets[name].length > 0);
  const room = view.querySelector(".chart").clientWidth;
  if (spec.concat) {
    spec.concat = spec.concat.filter(holds);
    if (!spec.concat.length) return null;
    spec.columns = Math.max(1, Math.min(spec.columns, Math.floor(room / (spec.concat[0].width + PADDING))));
    for (const part of spec.concat) part.width = Math.min(part.width, room - PADDING);
    return spec;
  }
  if (spec.width) spec.width = Math.min(spec.width, room - PADDING);
  return holds(spec) ? spec : null;
}
async function draw(view) {
  if (drawn.has(view)) return;
  drawn.set(view, null);
  const place = view.querySelector(".chart");
  const spec = fitted(view);
  if (spec === null) {
    place.replaceChildren(made("p", { className: "missing" }, "Nothing of this figure is in the selection."));
    return;
  }
  if (place.clientWidth < 500) {  // a phone: short names, legends in two columns
    spec.config.axis.labelLimit = 110;
    spec.config.legend.columns = 2;
    spec.config.legend.labelLimit = 120;
  }
  const made = await vegaEmbed(place, spec, { actions: false, renderer: "svg", tooltip: false });
  drawn.set(view, made);
  const rowOf = item => item?.datum?._row ?? item?.datum?.datum?._row;
  made.view.addEventListener("mouseover", (event, item) => show(view, rowOf(item), event));
  made.view.addEventListener("mouseout", () => { tip.hidden = true; });
  made.view.addEventListener("click", (event, item) => pick(view, item));
  reachable(view, place);
}
const sight = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) { inSight.add(target); draw(target); } else inSight.delete(target);
  }
}, { rootMargin: "400px" });

// One view of a figure at a time: the others behind a row of buttons.
for (const section of all("section.figure")) {
  const views = all(".view", section);
  views.forEach(view => sight.observe(view));
  if (views.length < 2) continue;
  const bar = made("div", { className: "tabs", role: "tablist" });
  const buttons = views.map(view => {
    const button = made("button", { type: "button" }, view.dataset.title);
    button.setAttribute("role", "tab");
    button.setAttribute("aria-controls", view.id);
    button.addEventListener("click", () => open(view));
    return button;
  });
  bar.append(...buttons);
  section.querySelector("h2").after(bar);
  const open = shown => views.forEach((view, place) => {
    view.classList.toggle("behind", view !== shown);
    buttons[place].setAttribute("aria-selected", view === shown);
  });
  section.openView = open;
  open(views[0]);
}
function follow() {  // a link to a view opens it
  const view = document.getElementById(decodeURIComponent(location.hash.slice(1)));
  const section = view?.closest("section.figure");
  if (view?.classList.contains("view")) { section.openView?.(view); view.scrollIntoView(); }
}
addEventListener("hashchange", follow);

// Values of a mark where the pointer rests: the texts of its row of the table.
const tip = made("div", { className: "tip", role: "status", hidden: true });
document.body.append(tip);
function rowOf(view, number) {  // rows may have been sorted since
  view.rows ??= all("tbody tr", view);
  return view.rows[number];
}
function said(view, number) {
  const row = rowOf(view, number);
  const heads = all("thead th", view);
  return [...row.cells].map((cell, place) => [heads[place].textContent, cell.textContent])
    .filter(([, text]) => text !== "–").map(([head, text]) => `${head}: ${text}`).join("\n");
}
function show(view, number, event) {
  if (number === undefined) { tip.hidden = true; return; }
  tip.textContent = said(view, number);
  tip.hidden = false;
  const at = { x: event.clientX ?? event.touches?.[0]?.clientX ?? 0, y: event.clientY ?? event.touches?.[0]?.clientY ?? 0 };
  tip.style.left = scrollX + Math.max(4, Math.min(at.x + 14, document.documentElement.clientWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = scrollY + Math.max(4, Math.min(at.y + 14, innerHeight - tip.offsetHeight - 8)) + "px";
}
// A click on a name in a legend chooses it, if it is a system or a round; a click on a mark lists its logs beside the figure.
function pick(view, item) {
  const datum = item?.datum;
  const name = datum?.value;
  const filter = known.filters.find(each => selects[each] && known.results.some(result => result[each] === name));
  if (filter) choose(filter, chosen[filter] === name ? "" : name);
  else if (datum?._row !== undefined) detail(view, datum._row);
}
function detail(view, number) {
  view.querySelector(".about")?.remove();
  const of = numbers(rowOf(view, number));
  const rows = logRows.filter(row => numbers(row).some(each => of.includes(each)));
  const links = rows.slice(0, 12).map(row => {
    const link = made("a", { href: "#logs" }, row.cells[0].textContent);
    link.addEventListener("click", () => {
      logs.closest("details").open = true;
      for (const each of logRows) each.classList.toggle("hit", each === row);
      row.hidden = false;
      setTimeout(() => row.scrollIntoView({ block: "center" }));
    });
    return made("li", {}, link);
  });
  if (rows.length > 12) links.push(made("li", {}, `and ${rows.length - 12} more logs`));
  const close = made("button", { type: "button" }, "close");
  const box = made("aside", { className: "about" }, made("p", { className: "values" }, said(view, number)), made("ul", {}, ...links), close);
  close.addEventListener("click", () => box.remove());
  view.querySelector("figure").append(box);
}
// From the keyboard: one stop for a chart, arrows from mark to mark, Enter for its logs.
function reachable(view, place) {
  const marks = all("[role=graphics-symbol]", place).filter(mark => mark.__data__?.datum?._row !== undefined);
  marks.forEach((mark, at) => {
    mark.setAttribute("tabindex", at === 0 ? "0" : "-1");
    mark.setAttribute("aria-label", said(view, mark.__data__.datum._row).replaceAll("\n", ", "));
    mark.addEventListener("focus", () => {
      const box = mark.getBoundingClientRect();
      show(view, mark.__data__.datum._row, { clientX: box.right, clientY: box.top });
    });
    mark.addEventListener("blur", () => { tip.hidden = true; });
    mark.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step) {
        const next = marks[(at + step + marks.length) % marks.length];
        mark.setAttribute("tabindex", "-1");
        next.setAttribute("tabindex", "0");
        next.focus();
      } else if (event.key === "Enter") detail(view, mark.__data__.datum._row);
      else return;
      event.preventDefault();
    });
  });
}

// A chart as a file, and its numbers.
function offer(blob, name) {
  const link = made("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}
const LIGHT = "<style>svg { color: #1b1f25; background: #ffffff }</style>";
async function picture(view, form) {
  await draw(view);
  const svg = (await drawn.get(view).view.toSVG()).replace(/<svg[^>]*>/, head => head + LIGHT);
  const blob = new Blob([svg], { type: "image/svg+xml" });
  if (form === "svg") return blob;
  const image = new Image();
  image.src = URL.createObjectURL(blob);
  await image.decode();
  const canvas = made("canvas", { width: 2 * image.width, height: 2 * image.height });
  const context = canvas.getContext("2d");
  context.fillStyle = "#ffffff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(image, 0, 0, canvas.width, canvas.height);
  URL.revokeObjectURL(image.src);
  return new Promise(resolve => canvas.toBlob(resolve, "image/png"));
}
function csv(view) {
  const quoted = text => (/[",\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text);
  const rows = all("tr", view.querySelector("table")).filter(row => !row.hidden);
  const value = cell => cell.dataset.key ?? (cell.textContent === "–" ? "" : cell.textContent);
  return rows.map(row => [...row.cells].map(cell => quoted(value(cell))).join(",")).join("\n") + "\n";
}
for (const files of all(".view .files")) {
  const view = files.closest(".view");
  const button = (text, work) => {
    const element = made("button", { type: "button" }, text);
    element.addEventListener("click", work);
    files.append(element);
  };
  for (const form of ["svg", "png"]) {
    button(`chart as ${form.toUpperCase()}`, async () => offer(await picture(view, form), `${view.id}.${form}`));
  }
  button("shown rows as CSV", () => offer(new Blob([csv(view)], { type: "text/csv" }), `${view.id}.csv`));
}
addEventListener("beforeprint", () => all(".view").forEach(view => draw(view)));

readAddress();
if (filtered()) apply();
follow();
