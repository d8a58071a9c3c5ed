// Uses the page as a reader would, and tells the page around it what happened.
const wait = ms => new Promise(resolve => setTimeout(resolve, ms));
const views = () => [...document.querySelectorAll(".view")];
const chartOf = view => drawn.get(view)?.[0]?.view;
const tipLines = () => (document.getElementById("vg-tooltip-element")?.innerHTML ?? "").split("<br>").map(html => new DOMParser().parseFromString(html, "text/html").body.textContent);
const over = element => element.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 5, clientY: 5 }));
const isDrawn = view => chartOf(view) || view.querySelector(".chart .missing");
const settled = async () => {
  for (const view of views()) await draw(view);  // the clock of a headless browser does not wait for idle time
  for (let tries = 0; tries < 1000 && !views().every(isDrawn); tries++) await wait(50);
  if (!views().every(isDrawn)) throw new Error("not drawn: " + views().filter(view => !isDrawn(view)).map(view => view.id));
};
const marksOf = place => [...place.querySelectorAll(".chart [role=graphics-symbol]")].filter(e => e.__data__?.datum?._row !== undefined);
const visibleRows = selector => [...document.querySelectorAll(selector)].filter(row => !row.hidden);
const numbersOf = row => (row.dataset.of ?? "").split(" ").filter(text => text).map(Number);
const missing = () => views().filter(view => view.querySelector(".chart .missing")).map(view => view.querySelector(".chart").textContent);
const about = () => [...document.querySelectorAll(".about")].map(box => box.textContent);
const click = element => element.dispatchEvent(new MouseEvent("click", { bubbles: true, cancelable: true }));
const key = (element, name) => element.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true, cancelable: true }));
// Rows and marks that the filter should have hidden.
const strangers = (name, value) => {
  const is = number => known.results[number][name] === value;
  const rows = visibleRows(".ranking tbody tr, .view tbody tr, #logs tbody tr").filter(row => numbersOf(row).length && !numbersOf(row).some(is));
  const marks = marksOf(document).filter(mark => mark.__data__.datum._of?.length && !mark.__data__.datum._of.some(is));
  return [rows.length, marks.length];
};
const state = () => ({ hash: location.hash, rows: visibleRows(".view tbody tr").length, marks: marksOf(document).length });

const acts = {
  async legend() {
    const before = state();
    const entries = [...document.querySelectorAll(".legend button")];
    const entry = entries.find(e => Object.keys(selects).includes("division") && e.textContent.trim() === "open") ?? entries[0];
    const name = entry.textContent.trim();
    const filter = known.filters.find(each => known.results.some(result => result[each] === name));
    click(entry);
    await settled();
    const during = { ...state(), strangers: strangers(filter, name), value: selects[filter].value };
    click([...document.querySelectorAll(".legend button")].find(e => e.textContent.trim() === name));
    await settled();
    return { before, during, after: state(), name, filter };
  },
  async table() {
    const button = document.querySelector(".ranking tbody th button");
    const system = known.results[numbersOf(button.closest("tr"))[0]].system;
    click(button);
    await settled();
    const during = { ...state(), strangers: strangers("system", system), missing: missing() };
    document.querySelector(".controls a[href='#behind']").click();
    await wait(100);
    const linked = location.hash;
    document.querySelector(".controls [type=reset]").click();
    await wait(50);
    await settled();
    return { system, during, linked, after: state() };
  },
  async opened() {  // by a link with a filter
    const [name, value] = location.hash.slice(1).split("=").map(decodeURIComponent);
    return { ...state(), strangers: strangers(name, value), value: selects[name].value, all: document.querySelectorAll(".view tbody tr").length };
  },
  async search() {
    const box = document.getElementById("search");
    const counts = [];
    for (const text of ["no such thing anywhere", "OLDER closed", ""]) {
      box.value = text;
      box.dispatchEvent(new Event("input"));
      await wait(300);
      counts.push(visibleRows(".ranking > .scroll tbody tr").map(row => row.cells[0].textContent));
    }
    return counts;
  },
  async hover() {
    document.querySelector(".view thead th button")?.click();  // values are those of the mark's row after sorting, too
    const faults = [];
    let [marks, values] = [0, 0];
    for (const view of views()) {
      const heads = [...view.querySelectorAll("thead th")].map(head => head.textContent);
      for (const mark of marksOf(view)) {
        const datum = mark.__data__.datum;
        document.getElementById("vg-tooltip-element")?.replaceChildren();
        if (mark.__data__.mark.marktype === "line") continue;  // its points are told
        over(mark);
        const told = Object.fromEntries(tipLines().map(line => line.split(/: (.*)/s)));
        const row = [...view.querySelectorAll("tbody tr")].find(each => [...each.cells].every(
          (cell, place) => cell.textContent === (told[heads[place]] ?? "–")));
        marks += 1;
        if (!row) { faults.push(`${view.id}: ${mark.outerHTML.slice(0, 300)} ${tipLines()}`); continue; }
        heads.forEach((head, place) => {
          const drawn = datum[head];
          if (typeof drawn !== "number") return;
          values += 1;
          const key = Number(row.cells[place].dataset.key ?? row.cells[place].textContent.replaceAll(",", ""));
          if (Math.abs(key - drawn) > 1e-6 * Math.abs(drawn)) faults.push(`${view.id}: ${head} is drawn at ${drawn}, the table has ${key}`);
        });
      }
    }
    return { faults: faults.slice(0, 5), marks, values };
  },
  async click() {
    const [view, mark] = views().flatMap(view => marksOf(view).map(mark => [view, mark]))
      .find(([view, mark]) => logRows.some(row => numbersOf(row).some(each => mark.__data__.datum._of?.includes(each))));
    const expected = said(view, mark.__data__.datum._row).join("\n");
    const [entries, scroll] = [history.length, scrollY];
    click(mark);
    const box = view.querySelector("figure .about");
    const opened = { values: box.querySelector(".values").textContent === expected, links: box.querySelectorAll("li a").length, pushed: history.length - entries };
    history.back();
    await wait(200);
    const back = [about().length, scrollY === scroll];
    click(mark);
    view.querySelector(".about li a").click();
    await wait(300);
    const wanted = view.querySelector(".about li a").textContent;
    const hits = [...document.querySelectorAll("tr.hit")].map(row => row.cells[0].textContent);
    const logged = location.hash;
    history.back();
    await wait(300);
    const returned = [location.hash, about().length];
    return { opened, back, returned, hit: hits.length === 1 && hits[0] === wanted, open: logs.closest("details").open, hash: logged };
  },
  async downloads() {
    const saved = [];
    const original = HTMLAnchorElement.prototype.click;
    HTMLAnchorElement.prototype.click = function () { saved.push([this.download, this.href]); };
    const view = views().find(each => chartOf(each) && each.querySelectorAll("tbody tr").length > 1);
    view.querySelectorAll("tbody tr")[1].hidden = true;
    for (const button of view.querySelectorAll(".files button")) click(button);
    for (let tries = 0; tries < 100 && saved.length < 3; tries++) await wait(50);
    HTMLAnchorElement.prototype.click = original;
    const blobs = await Promise.all(saved.map(async ([name, href]) => [name, await (await fetch(href)).blob()]));
    const of = form => blobs.find(([name]) => name === `${view.id}.${form}`)[1];
    const parsed = new DOMParser().parseFromString(await of("svg").text(), "image/svg+xml");
    const image = await createImageBitmap(of("png"));
    const lines = (await of("csv").text()).trim().split("\n");
    const heads = view.querySelectorAll("thead th").length;
    const texts = view.querySelectorAll(".chart svg text, .legend > *").length;
    return {
      svg: [parsed.documentElement.localName, parsed.querySelectorAll("text").length === texts, texts > 3],
      png: [of("png").type, image.width > 600],
      csv: [lines.length, view.querySelectorAll("tr").length - 1, lines[0].split(",")[0], view.querySelector("thead th").textContent],
      cells: lines.map(line => line.match(/("([^"]|"")*"|[^,]*)(,|$)/g).slice(0, heads).map(cell => cell.replace(/,$/, "").replace(/^"|"$/g, ""))),
      table: [...view.querySelectorAll("tr")].filter(row => !row.hidden).map(row => [...row.cells].map(cell => cell.dataset.key ?? cell.textContent)),
    };
  },
  async zoom() {
    const view = views().find(each => chartOf(each) && each.textContent.includes("Ctrl and the wheel"));
    const ticks = () => [...view.querySelectorAll(".role-axis-label text")].map(text => text.textContent).join();
    const ground = view.querySelector(".chart svg .background[height], .chart svg path.background");
    const roll = async ctrlKey => {
      const frame = view.querySelector(".chart svg").getBoundingClientRect();
      const target = [...view.querySelectorAll(".chart svg .background")].find(e => e.getBoundingClientRect().width > 100 && e.__data__) ?? ground;
      const box = target.getBoundingClientRect();
      const event = new WheelEvent("wheel", { bubbles: true, cancelable: true, deltaY: -400, ctrlKey, clientX: (box.left + box.right) / 2, clientY: (box.top + box.bottom) / 2 });
      target.dispatchEvent(event);
      await wait(300);
      return [event.defaultPrevented, ticks(), frame.width];
    };
    const before = ticks();
    const [prevented, alone] = await roll(false);
    const [taken, zoomed] = await roll(true);
    return { alone: alone === before, scrolls: !prevented, zoomed: zoomed !== before, taken };
  },
  async keyboard() {
    const first = document.querySelector("a, button, input, select, summary, [tabindex]");
    const target = document.querySelector(first.hash);
    const stops = views().filter(chartOf).map(view => view.querySelectorAll(".chart [tabindex='0']").length);
    const view = views().find(each => marksOf(each).length > 2);
    const start = view.querySelector(".chart [tabindex='0']");
    start.focus();
    key(start, "ArrowRight");
    const moved = document.activeElement !== start && view.querySelector(".chart").contains(document.activeElement);
    while (document.activeElement.__data__?.datum?._row === undefined) key(document.activeElement, "ArrowRight");
    const mark = document.activeElement;
    const told = tipLines().join("\n") === said(view, mark.__data__.datum._row).join("\n");
    const still = view.querySelectorAll(".chart [tabindex='0']").length;
    key(mark, "ArrowLeft");
    const left = document.activeElement !== mark && view.querySelector(".chart").contains(document.activeElement);
    key(document.activeElement, "ArrowDown");
    const there = document.activeElement === mark;
    key(mark, "Enter");
    const inBox = document.activeElement.closest(".about") !== null;
    document.activeElement.dispatchEvent(new KeyboardEvent("keydown", { key: "Escape", bubbles: true }));
    await wait(200);
    return { skip: [first.className, target !== null], stops, moved, told, still, left, there, inBox, closed: about().length === 0, returned: document.activeElement === mark };
  },
  async axe() {
    const found = await axe.run(document, { resultTypes: ["violations"] });
    return found.violations.filter(each => ["serious", "critical"].includes(each.impact)).map(each => `${each.id}: ${each.nodes.length}: ${each.nodes[0].html.slice(0, 300)}`);
  },
  async first() {
    const top = selector => document.querySelector(selector).getBoundingClientRect().top + scrollY;
    return {
      headline: top("h1"), figure: top(".summary .chart"), table: top(".summary > .scroll"),
      drawn: marksOf(document.querySelector(".summary")).length > 0, sections: document.querySelectorAll("main > section").length,
    };
  },
  async price() {
    const box = document.querySelector(".price");
    if (!box) return null;
    const slider = box.querySelector("input");
    return ["-1", "1"].map(value => {
      slider.value = value;
      slider.dispatchEvent(new Event("input"));
      return box.querySelector("span").textContent;
    });
  },
  async texts() {  // alternatives to charts, and headings
    const svgs = views().filter(chartOf).map(view => [view, view.querySelector("[role=graphics-document]")?.getAttribute("aria-label")]);
    const levels = [...document.querySelectorAll("h1, h2, h3, h4")].map(head => Number(head.localName[1]));
    return {
      without: svgs.filter(([view, text]) => text !== `${view.dataset.title}. ${view.querySelector(".answer").textContent}`).map(([view, text]) => view.id + text),
      charts: svgs.length,
      fits: [...document.querySelectorAll(".summary > .scroll")].every(box => box.scrollWidth <= box.clientWidth),
      skipped: levels.filter((level, place) => level > (levels[place - 1] ?? 0) + 1).length,
    };
  },
  async sticky() {
    document.getElementById("provenance").scrollIntoView();
    await wait(100);
    const bar = document.querySelector(".controls").getBoundingClientRect();
    const head = document.getElementById("provenance").getBoundingClientRect();
    return { top: Math.round(bar.top), clear: head.top >= bar.bottom, height: bar.height };
  },
};
addEventListener("load", async () => {
  const done = {};
  try {
    await settled();
    for (const name of ACTS) done[name] = await acts[name]();
  } catch (error) { told.push(String(error.stack)); }
  const fetched = performance.getEntriesByType("resource").map(entry => entry.name).filter(name => !/^(blob|data):/.test(name));
  parent.postMessage({ ...done, errors: told, fetched }, "*");
});
