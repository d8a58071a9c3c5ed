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
const rowsOf = new Map(all(".view").map(view => [view, all("tbody tr", view)]));  // as they are before any sorting

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
  const holds = text => terms.every(term => text.toLowerCase().includes(term));
  const found = element => holds(element.textContent);
  let [visible, total] = [0, 0];
  for (const row of all("#results ~ * tbody tr, .view tbody tr, #logs tbody tr, .differing tbody tr")) {
    const heading = row.closest("[data-heading]")?.dataset.heading ?? "";
    row.hidden = !kept(numbers(row)) || (terms.length > 0 && !holds(heading + " " + row.textContent));
    total += 1;
    visible += !row.hidden;
  }
  for (const block of all(".ranking")) block.hidden = !all("tbody tr", block).some(row => !row.hidden);
  for (const section of all("section.figure")) {
    section.hidden = terms.length > 0 && !holds(all("h2, h3, p, figcaption, table", section).map(e => e.textContent).join(" "));
  }
  for (const item of all("ul.issues li")) item.hidden = !found(item);
  for (const term of all("dl.answers dt")) term.hidden = term.nextElementSibling.hidden = !(found(term) || found(term.nextElementSibling));
  shown.textContent = filtered() || terms.length ? `${visible} of ${total} rows` : "";
}
function follow() {  // after a choice: tables at once, charts in sight next, the others when there is time
  apply();
  for (const chart of drawn.values()) chart.finalize();
  drawn.clear();
  inSight.forEach(draw);
  whenIdle(drawNext);
}
function address(at) {
  const parts = known.filters.filter(name => chosen[name] !== "").map(name => [name, chosen[name]]).concat(at ? [["at", at]] : []);
  return parts.length ? "#" + parts.map(([name, value]) => `${name}=${encodeURIComponent(value)}`).join("&") : location.pathname + location.search;
}
function choose(name, value) {
  chosen[name] = selects[name].value = value;
  history.replaceState(history.state, "", address());
  follow();
}
function readAddress() {
  const hash = location.hash.slice(1);
  const parts = new URLSearchParams(hash);
  if (hash === "" || hash.includes("=")) {
    const before = JSON.stringify(chosen);
    for (const [name, select] of Object.entries(selects)) {
      select.value = parts.get(name) ?? "";
      if (select.selectedIndex < 0) select.value = "";
      chosen[name] = select.value;
    }
    if (JSON.stringify(chosen) !== before) follow();
  }
  const target = document.getElementById(parts.get("at") ?? decodeURIComponent(hash));
  target?.closest("section.figure")?.openView?.(target);
  target?.scrollIntoView();
}
addEventListener("hashchange", readAddress);
document.addEventListener("click", event => {  // a link within the page keeps the filters in the address
  const link = event.target.closest?.("a[href^='#']");
  if (!link || !filtered() || event.defaultPrevented) return;
  event.preventDefault();
  location.hash = address(link.hash.slice(1));
});
const controls = made("form", { className: "controls" }, made("label", {}, "Search", search));
controls.setAttribute("role", "search");
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
  history.replaceState(history.state, "", address());
  follow();
}));
controls.append(made("button", { type: "reset" }, "show all"), shown);
const contents = made("details", { className: "contents" }, made("summary", {}, "Contents"), document.querySelector("nav ul").cloneNode(true));
contents.addEventListener("click", event => { if (event.target.closest("a")) contents.open = false; });
controls.prepend(contents);
let waiting;
search.addEventListener("input", () => { clearTimeout(waiting); waiting = setTimeout(apply, 120); });
document.querySelector("nav").closest("section").after(controls);
document.querySelector("nav").hidden = true;  // its entries are in the bar now
// A click on a system in a table of scores chooses it everywhere; another click shows all again.
for (const row of all(".ranking tbody tr")) {
  const of = numbers(row);
  if (of.length !== 1 || !selects.system) continue;
  const button = made("button", { type: "button", title: "Show only this system" }, row.cells[0].textContent);
  row.cells[0].replaceChildren(button);
  button.addEventListener("click", () => toggle("system", known.results[of[0]].system));
}
function toggle(name, value) { choose(name, chosen[name] === value ? "" : value); }

// Charts: those in sight first, the others when there is time (a printed page needs all). A chart shows the rows of its
// data whose results the filters keep; rows about no result stay with them.
const drawn = new Map();  // view: what vega-embed returned
const inSight = new Set();
const PADDING = 90;  // pixels beside the frame of a chart: names and ticks of its axis
const NARROW = 500;  // pixels of a window with short texts and legends of one column
const whenIdle = work => (window.requestIdleCallback ? requestIdleCallback(work, { timeout: 500 }) : setTimeout(work, 50));
const parts = spec => spec.concat ?? [spec];
const datasetsOf = part => [part.data?.name, ...(part.layer ?? []).flatMap(datasetsOf)].filter(name => name);
const hasNames = part => (part.encoding?.y?.field === "label" && part.encoding.y.type === "nominal") || (part.layer ?? []).some(hasNames);
function fitted(view, room) {  // the specification for the room that there is, or null if nothing is left
  const spec = JSON.parse(view.querySelector("figure script").textContent);
  spec.description = view.dataset.title + ". " + view.querySelector(".answer").textContent;
  const whole = spec.datasets;
  const ofResults = Object.values(whole).flat().filter(row => row._of?.length);
  if (ofResults.length && !ofResults.some(row => kept(row._of))) return null;
  spec.datasets = Object.fromEntries(Object.entries(whole).map(([name, rows]) => [name, rows.filter(row => kept(row._of ?? []))]));
  const holds = part => datasetsOf(part).some(name => spec.datasets[name].length > 0);
  if (spec.concat) spec.concat = spec.concat.filter(holds);
  if (!parts(spec).some(holds)) return null;
  if (spec.concat) spec.columns = Math.max(1, Math.min(spec.columns, Math.floor(room / (spec.concat[0].width + PADDING))));
  for (const part of parts(spec)) {
    if (part.width) part.width = Math.min(part.width, room - PADDING);
    if (!hasNames(part)) continue;
    const count = data => new Set(datasetsOf(part).flatMap(name => data[name].map(row => row.label))).size;
    part.height = Math.max(40, part.height * count(spec.datasets) / count(whole));
  }
  if (room < NARROW) {
    Object.assign(spec.config.axis, { labelLimit: 110, titleLimit: room - 110 });
    Object.assign(spec.config.text, { limit: 140 });
    Object.assign(spec.config.legend, { columns: 1, labelLimit: 220 });
    Object.assign(spec.config.title, { limit: room - 40 });
  }
  return spec;
}
async function draw(view) {
  if (drawn.has(view)) return;
  const draft = { finalize() {} };
  drawn.set(view, draft);
  const place = view.querySelector(".chart");
  const room = place.clientWidth || view.parentElement.clientWidth;  // a view behind another has no width
  const spec = fitted(view, room);
  if (spec === null) {
    place.replaceChildren(made("p", { className: "missing" }, "Nothing of this figure is in the selection."));
    return;
  }
  const embed = () => vegaEmbed(place, spec, { actions: false, renderer: "svg", tooltip: false });
  let chart = await embed();
  for (let tries = 0; tries < 3; tries++) {  // texts beside the frame may take more than the padding
    const excess = chart.view.container().querySelector("svg").getAttribute("width") - room;
    if (excess <= 0) break;
    for (const part of parts(spec)) if (part.width) part.width = Math.max(100, part.width - Math.ceil(excess / (spec.columns ?? 1)));
    chart.finalize();
    chart = await embed();
  }
  if (drawn.get(view) !== draft) { chart.finalize(); return; }  // chosen anew in the meantime
  drawn.set(view, chart);
  chart.view.addEventListener("mouseover", (event, item) => show(view, rowOf(event, item), event));
  chart.view.addEventListener("mouseout", () => { tip.hidden = true; });
  chart.view.addEventListener("click", (event, item) => { if (rowOf(event, item) !== undefined) detail(view, rowOf(event, item)); });
  reachable(view, place);
}
async function drawNext() {
  const next = all(".view").find(view => !drawn.has(view));
  if (!next) return;
  await draw(next);
  whenIdle(drawNext);
}
const sight = new IntersectionObserver(entries => {
  for (const { target, isIntersecting } of entries) {
    if (isIntersecting) { inSight.add(target); draw(target); } else inSight.delete(target);
  }
}, { rootMargin: "400px" });

// One view of a figure at a time: the others behind tabs.
for (const section of all("section.figure")) {
  const views = all(".view", section);
  views.forEach(view => sight.observe(view));
  if (views.length < 2) continue;
  const bar = made("div", { className: "tabs", ariaLabel: section.getAttribute("aria-label") });
  bar.setAttribute("role", "tablist");
  const tabs = views.map(view => {
    const tab = made("button", { type: "button", id: "tab-" + view.id }, view.dataset.title);
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", view.id);
    view.setAttribute("role", "tabpanel");
    tab.addEventListener("click", () => section.openView(view));
    return tab;
  });
  bar.append(...tabs);
  bar.addEventListener("keydown", event => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const next = (tabs.indexOf(document.activeElement) + step + tabs.length) % tabs.length;
    section.openView(views[next]);
    tabs[next].focus();
  });
  section.querySelector("h2").after(bar);
  section.openView = wanted => {
    if (!views.includes(wanted)) return;
    views.forEach((view, place) => {
      view.classList.toggle("behind", view !== wanted);
      tabs[place].setAttribute("aria-selected", view === wanted);
      tabs[place].tabIndex = view === wanted ? 0 : -1;
    });
  };
  section.openView(views[0]);
}

// Values of a mark where the pointer rests: the texts of its row of the table.
const tip = made("div", { className: "tip", hidden: true });
tip.setAttribute("role", "status");
document.body.append(tip);
function rowOf(event, item) {  // the number of the row; on a line that of the nearest point
  if (item?.mark?.marktype === "line" && event.vega) {
    const [x, y] = event.vega.xy(item);
    const distance = each => Math.hypot(each.x - x, each.y - y);
    item = item.mark.items.reduce((a, b) => (distance(b) < distance(a) ? b : a));
  }
  return item?.datum?._row ?? item?.datum?.datum?._row;
}
function said(view, number) {
  const heads = all("thead th", view);
  return [...rowsOf.get(view)[number].cells].map((cell, place) => [heads[place].textContent, cell.textContent])
    .filter(([, text]) => text !== "–").map(([head, text]) => `${head}: ${text}`).join("\n");
}
function show(view, number, event) {
  tip.hidden = number === undefined;
  if (tip.hidden) return;
  tip.textContent = said(view, number);
  const at = event.touches?.[0] ?? event;
  tip.style.left = scrollX + Math.max(4, Math.min(at.clientX + 14, document.documentElement.clientWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = scrollY + Math.max(4, Math.min(at.clientY + 14, innerHeight - tip.offsetHeight - 8)) + "px";
}
// A click on a mark opens its values and logs beside the figure. Back, Escape or "close" returns.
function detail(view, number) {
  const from = document.activeElement;
  all(".about").forEach(box => box.remove());
  const of = numbers(rowsOf.get(view)[number]);
  const rows = logRows.filter(row => numbers(row).some(each => of.includes(each)));
  const links = rows.slice(0, 12).map(row => {
    const link = made("a", { href: "#logs" }, row.cells[0].textContent);
    link.addEventListener("click", event => {
      event.preventDefault();
      history.pushState({ about: view.id }, "", filtered() ? address("logs") : "#logs");
      logs.closest("details").open = true;
      for (const each of logRows) each.classList.toggle("hit", each === row);
      row.hidden = false;
      row.scrollIntoView({ block: "center" });
    });
    return made("li", {}, link);
  });
  if (rows.length > 12) links.push(made("li", {}, `and ${rows.length - 12} more logs`));
  const close = made("button", { type: "button" }, "close");
  const box = made("aside", { className: "about", ariaLabel: "The mark" }, made("p", { className: "values" }, said(view, number)), made("ul", {}, ...links), close);
  close.addEventListener("click", () => history.back());
  box.addEventListener("keydown", event => { if (event.key === "Escape") history.back(); });
  box.closed = () => { box.remove(); from.focus({ preventScroll: true }); };
  view.querySelector("figure").append(box);
  if (!history.state?.about) history.pushState({ about: view.id }, "");
  close.focus({ preventScroll: true });
}
addEventListener("popstate", event => { if (!event.state?.about) all(".about").forEach(box => box.closed()); });
// From the keyboard a chart is one stop: arrows go from entries of its legend to its marks, Enter does what a click does.
function reachable(view, place) {
  const stops = [];
  for (const text of all(".role-legend-label text", place)) {
    const name = text.__data__?.datum?.value;
    const filter = known.filters.find(each => selects[each] && known.results.some(result => result[each] === name));
    if (!filter) continue;
    text.setAttribute("role", "button");
    text.setAttribute("aria-label", `Show only ${name}`);
    text.setAttribute("aria-pressed", chosen[filter] === name);
    text.addEventListener("click", () => toggle(filter, name));
    stops.push({ element: text, enter: () => toggle(filter, name) });
  }
  for (const element of all("[role=graphics-symbol]", place)) {
    const row = element.__data__?.datum?._row;
    if (row === undefined) continue;
    element.setAttribute("aria-label", said(view, row).replaceAll("\n", ", "));
    element.addEventListener("focus", () => {
      const box = element.getBoundingClientRect();
      show(view, row, { clientX: box.right, clientY: box.top });
    });
    element.addEventListener("blur", () => { tip.hidden = true; });
    stops.push({ element, enter: () => detail(view, row) });
  }
  stops.forEach(({ element, enter }, at) => {
    element.setAttribute("tabindex", at === 0 ? "0" : "-1");
    element.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (step) {
        const next = stops[(at + step + stops.length) % stops.length].element;
        element.setAttribute("tabindex", "-1");
        next.setAttribute("tabindex", "0");
        next.focus();
      } else if (event.key === "Enter") enter();
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
  if (view.querySelector("figure script").textContent.includes('"bind":"scales"')) {
    files.append(made("span", {}, "Ctrl and the wheel zoom, a drag moves, a double click shows all."));
  }
}
addEventListener("beforeprint", () => all(".view").forEach(view => draw(view)));

readAddress();
whenIdle(drawNext);
