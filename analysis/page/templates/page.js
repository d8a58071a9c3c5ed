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
  for (const row of all("main tbody tr")) {
    const heading = row.closest("[data-heading]")?.dataset.heading ?? "";
    row.hidden = !kept(numbers(row)) || (terms.length > 0 && !holds(heading + " " + row.textContent));
    total += 1;
    visible += !row.hidden;
  }
  for (const statement of all("span[data-of]")) statement.hidden = !kept(numbers(statement));
  for (const block of all(".ranking")) block.hidden = !all("tbody tr", block).some(row => !row.hidden);
  for (const view of all(".figures .view")) view.hidden = terms.length > 0 && !holds(all("h3, p, figcaption, table", view).map(e => e.textContent).join(" "));
  for (const item of all("ul.issues li")) item.hidden = !found(item);
  for (const term of all("dl.answers dt")) term.hidden = term.nextElementSibling.hidden = !(found(term) || found(term.nextElementSibling));
  shown.textContent = filtered() || terms.length ? `${visible} of ${total} rows; the headline is about all` : "";
}
function follow() {  // after a choice: tables at once, charts in sight next, the others when there is time
  apply();
  all(".view").forEach(forget);
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
  for (let place = target?.closest("details"); place; place = place.parentElement.closest("details")) place.open = true;
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
document.querySelector("nav").after(controls);
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

// Prices: at which of them the faster result is the cheaper one.
for (const pair of new Set(known.breaks.map(each => each.devices.join("|")))) {
  const [one, other] = pair.split("|");
  const slider = made("input", { type: "range", min: -1, max: 1, step: 0.01, value: 0 });
  const [price, said] = [made("output", {}), made("span", {})];
  const show = () => {
    const hours = 10 ** slider.value;
    price.textContent = hours.toPrecision(2);
    slider.setAttribute("aria-valuetext", price.textContent);
    const of = known.breaks.filter(each => each.devices.join("|") === pair);
    said.textContent = "cheaper: " + of.map(each => `${hours < each.hours ? each.faster : each.other} (${each.task})`).join(", ");
  };
  slider.addEventListener("input", show);
  show();
  document.querySelector(".summary > .scroll").after(made("p", { className: "price" }, made("label", {}, `If an hour of one ${one} costs as much as `, slider, price, ` hours of one ${other}: `), said));
}

// Charts: those in sight first, the others when there is time (a printed page needs all). A chart shows the rows of its
// data whose results the filters keep; rows about no result stay with them. Each of its panels is as wide as its place.
const drawn = new Map();  // view: what vega-embed returned for each panel
const inSight = new Set();
const LETTER = 6.6;  // pixels
const NARROW = 500;  // pixels of a panel with short texts
const whenIdle = work => (window.requestIdleCallback ? requestIdleCallback(work, { timeout: 500 }) : setTimeout(work, 50));
const datasetsOf = part => [part.data?.name, ...(part.layer ?? []).flatMap(datasetsOf)].filter(name => name);
const nameOf = part => [part.encoding?.y?.field, ...(part.layer ?? []).map(nameOf)].find(field => field === "label" || field === "_place");
function panelsOf(view) {  // the specifications of the panels that have a row left
  const { concat, columns, resolve, datasets, ...spec } = JSON.parse(view.querySelector("figure script").textContent);
  const ofResults = Object.values(datasets).flat().filter(row => row._of?.length);
  if (ofResults.length && !ofResults.some(row => kept(row._of))) return [];
  const left = Object.fromEntries(Object.entries(datasets).map(([name, rows]) => [name, rows.filter(row => kept(row._of ?? []))]));
  const holds = part => datasetsOf(part).some(name => left[name].length > 0);
  const panels = (concat ?? [spec]).filter(holds).map((part, place) => {
    const own = Object.fromEntries(datasetsOf(part).map(name => [name, left[name]]));
    const panel = { ...spec, ...part, datasets: own, width: "container", autosize: { type: "fit-x", contains: "padding" }, padding: { left: 5, top: 5, bottom: 5, right: 24 } };
    panel.description = view.dataset.title + ". " + view.querySelector(".answer").textContent;
    const field = nameOf(part);
    const count = data => new Set(datasetsOf(part).flatMap(name => data[name].map(row => row[field]))).size;
    if (field) panel.height = Math.max(40, part.height * count(left) / count(datasets));
    return panel;
  });
  const first = spec.usermeta?.first ?? panels.length;
  view.querySelector(".chart").classList.toggle("rows", columns === 1);
  return panels.length > first ? choosePanels(view, panels, first) : panels;
}
function choosePanels(view, panels, first) {  // the first ones, and one of the others by a choice
  let select = view.querySelector("select");
  if (!select) {
    select = made("select", {});
    select.addEventListener("change", () => { forget(view); draw(view); });
    view.querySelector(".chart").after(made("label", { className: "more" }, "Also show ", select));
  }
  const before = select.value;
  select.replaceChildren(new Option(`one of ${panels.length - first} more`, ""), ...panels.slice(first).map(panel => new Option(panel.title)));
  select.value = before;
  return panels.filter((panel, place) => place < first || panel.title === select.value);
}
const SHAPES = {  // outlines of marks, 10 pixels wide
  circle: "M-5,0a5,5 0 1,0 10,0a5,5 0 1,0 -10,0", square: "M-4.5,-4.5h9v9h-9z", "triangle-up": "M0,-5L5,4H-5z", "triangle-down": "M0,5L5,-4H-5z",
  diamond: "M0,-5.5L4,0L0,5.5L-4,0z", cross: "M-1.6,-5h3.2v3.4h3.4v3.2h-3.4v3.4h-3.2v-3.4h-3.4v-3.2h3.4z", "triangle-right": "M5,0L-4,5V-5z",
};
function legendOf(panel) {  // one for all panels: names of colours; those that a filter has are buttons
  const channels = part => [part.encoding?.color, part.encoding?.shape, ...(part.layer ?? []).flatMap(channels)].filter(each => each?.scale?.domain);
  const found = channels(panel);
  const colour = found.find(each => each.type === "nominal" && each.legend !== null && /^#/.test(each.scale.range?.[0]));
  if (!colour) return [];
  const shapes = found.find(each => !/^#/.test(each.scale.range?.[0] ?? "#") && each.scale.domain.length === colour.scale.domain.length)?.scale.range ?? [];
  const keys = colour.scale.domain.map((name, at) => {
    const filter = known.filters.find(each => selects[each] && known.results.some(result => result[each] === name));
    const key = made(filter ? "button" : "span", filter ? { type: "button", ariaLabel: `Show only ${name}`, ariaPressed: chosen[filter] === name } : {});
    key.innerHTML = `<svg viewBox="-6 -6 12 12" width="12" height="12" aria-hidden="true"><path d="${SHAPES[shapes[at]] ?? SHAPES.square}" fill="${colour.scale.range[at % colour.scale.range.length]}"/></svg>`;
    key.append(" " + name);
    if (filter) key.addEventListener("click", () => toggle(filter, name));
    return key;
  });
  return [made("p", { className: "legend" }, ...keys)];
}
function fit(panel, room) {
  panel.config = { ...panel.config, title: { ...panel.config.title, limit: room - 30 } };
  for (const row of Object.values(panel.datasets).flat())
    if (LETTER * row._said?.length > row._side * (room - 40) - 12) row._said = row._short;
  if (room >= NARROW) return panel;
  const text = JSON.parse(JSON.stringify(panel));
  const { axis, legend } = text.config;
  Object.assign(axis, { labelLimit: 110, titleLimit: room - 110 });
  Object.assign(legend, { columns: 2, labelLimit: 110 });
  text.config.text.limit = room / 2.2;
  return text;
}
function forget(view) {
  for (const chart of drawn.get(view) ?? []) chart.finalize();
  drawn.delete(view);
}
async function draw(view) {
  if (drawn.has(view)) return;
  const draft = [];
  drawn.set(view, draft);
  const place = view.querySelector(".chart");
  const panels = panelsOf(view);
  if (panels.length === 0) {
    place.replaceChildren(made("p", { className: "missing" }, "Nothing of this figure is in the selection."));
    return;
  }
  const places = panels.map(() => made("div", { className: "panel" }));
  place.replaceChildren(...legendOf(panels[0]), made("div", { className: "panels" }, ...places));
  if (place.querySelector(".legend")) panels.forEach(panel => { panel.config = { ...panel.config, legend: { disable: true } }; });
  const tooltip = { formatTooltip: datum => (datum._row === undefined ? "" : lines(view, datum._row)) };
  const embed = (panel, at) => vegaEmbed(places[at], fit(panel, places[at].clientWidth), { actions: false, renderer: "svg", tooltip });
  const charts = await Promise.all(panels.map(embed));
  if (drawn.get(view) !== draft) { charts.forEach(chart => chart.finalize()); return; }  // chosen anew in the meantime
  drawn.set(view, charts);
  for (const chart of charts) chart.view.addEventListener("click", (_, item) => { if (item?.datum?._row !== undefined) detail(view, item.datum._row); });
  prune(place);
  reachable(view, place);
}
function prune(place) {  // names that cover another one; on hover they are told
  const taken = all(".role-axis-label text", place).map(text => text.getBoundingClientRect());
  for (const text of all(".mark-text.role-mark text", place)) {
    const box = text.getBoundingClientRect();
    const clashes = other => box.left < other.right && other.left < box.right && box.top < other.bottom && other.top < box.bottom;
    if (taken.some(clashes) || box.right > text.ownerSVGElement.getBoundingClientRect().right + 1) text.setAttribute("opacity", 0);
    else if (box.width) taken.push(box);
  }
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
all(".view").forEach(view => sight.observe(view));

// Values of a mark: the texts of its row of the table.
function said(view, number) {
  const heads = all("thead th", view);
  return [...rowsOf.get(view)[number].cells].map((cell, place) => [heads[place].textContent, cell.textContent])
    .filter(([, text]) => text !== "–").map(([head, text]) => `${head}: ${text}`);
}
function lines(view, number) {  // as HTML
  const escaped = made("div", {}, said(view, number).join("\n")).innerHTML;
  return escaped.replaceAll("\n", "<br>");
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
  const box = made("aside", { className: "about", ariaLabel: "The mark" }, made("p", { className: "values" }, said(view, number).join("\n")), made("ul", {}, ...links), close);
  close.addEventListener("click", () => history.back());
  box.addEventListener("keydown", event => { if (event.key === "Escape") history.back(); });
  box.closed = () => { box.remove(); from.focus({ preventScroll: true }); };
  view.querySelector("figure").append(box);
  if (!history.state?.about) history.pushState({ about: view.id }, "");
  close.focus({ preventScroll: true });
}
addEventListener("popstate", event => { if (!event.state?.about) all(".about").forEach(box => box.closed()); });
// From the keyboard a chart is one stop: arrows go from mark to mark, Enter does what a click does.
function reachable(view, place) {
  const stops = [];
  for (const element of all("[role=graphics-symbol]", place)) {
    if (!element.hasAttribute("aria-label")) element.setAttribute("aria-hidden", "true");  // a line of the scale
    const row = element.__data__?.datum?._row;
    if (row === undefined) continue;
    element.setAttribute("aria-label", said(view, row).join(", "));
    const point = kind => {
      const { right: clientX, top: clientY } = element.getBoundingClientRect();
      element.dispatchEvent(new PointerEvent(kind, { clientX, clientY, bubbles: true }));
    };
    element.addEventListener("focus", () => point("pointermove"));
    element.addEventListener("blur", () => point("pointerout"));
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
async function joinPanels(view) {  // one SVG of all panels, each where it is on the page
  const place = view.querySelector(".chart");
  const frame = place.getBoundingClientRect();
  const parts = await Promise.all(drawn.get(view).map(async chart => {
    const box = chart.view.container().getBoundingClientRect();
    const svg = new DOMParser().parseFromString(await chart.view.toSVG(), "image/svg+xml").documentElement;
    svg.setAttribute("x", box.left - frame.left);
    svg.setAttribute("y", box.top - frame.top);
    return new XMLSerializer().serializeToString(svg);
  }));
  for (const key of all(".legend > *", place)) {
    const box = key.getBoundingClientRect();
    const name = made("div", {}, key.textContent).innerHTML;
    parts.push(`<g transform="translate(${box.left - frame.left + 6},${box.top - frame.top + 10})">${key.querySelector("path").outerHTML}<text x="10" y="4" style="font: 12px sans-serif">${name}</text></g>`);
  }
  return `<svg xmlns="http://www.w3.org/2000/svg" width="${frame.width}" height="${place.scrollHeight}">${LIGHT}${parts.join("")}</svg>`;
}
async function picture(view, form) {
  await draw(view);
  const svg = await joinPanels(view);
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
addEventListener("beforeprint", () => all(".view").forEach(draw));

readAddress();
whenIdle(drawNext);
