// Measures the page in the frame it is in, and tells the page around it what is cut off, covered or too faint.
addEventListener("load", async () => {
  const views = [...document.querySelectorAll(".view")];
  document.querySelectorAll("main details").forEach(details => { details.open = !details.matches(".contents"); });
  const isDrawn = view => drawn.get(view)?.length || view.querySelector(".chart .missing");
  for (const view of views) await draw(view);
  for (let tries = 0; tries < 1000 && !views.every(isDrawn); tries++) await new Promise(resolve => setTimeout(resolve, 50));
  const found = [];
  const near = 1.5;
  const say = (what, element, more = "") => {
    const text = (element.textContent ?? "").trim().replace(/\s+/g, " ").slice(0, 60);
    const section = element.closest("section")?.getAttribute("aria-labelledby") ?? "";
    found.push(`${what}: ${section} ${element.localName} "${text}" ${more}`);
  };
  const width = document.documentElement.clientWidth;
  const seen = [...document.querySelectorAll("body *")].filter(e => e.checkVisibility() && e.getClientRects().length && !e.closest("svg"));
  if (document.documentElement.scrollWidth > width + 1)
    for (const e of seen) {
      const box = e.getBoundingClientRect();
      if (box.right > width + 1 && !e.parentElement.closest(".scroll, .controls")) say("wider than the page", e, `${Math.round(box.right)} of ${width}`);
    }
  for (const e of seen) {
    if (e.closest(".hidden") || e.matches(".scroll, .chart, .controls, select, input, body, table, thead, tbody, tr")) continue;
    if (e.scrollWidth > e.clientWidth + 2 && e.clientWidth > 0 && !e.querySelector(".scroll")) say("runs over its box", e, `${e.scrollWidth} in ${e.clientWidth}`);
  }

  // Corners of a text, in pixels of the screen, less the space above and below its letters.
  const corners = text => {
    const box = text.getBBox();
    const screen = text.getScreenCTM();
    const [top, bottom] = [box.y + 0.2 * box.height, box.y + 0.84 * box.height];
    return [[box.x, top], [box.x + box.width, top], [box.x + box.width, bottom], [box.x, bottom]]
      .map(([x, y]) => [screen.a * x + screen.c * y + screen.e, screen.b * x + screen.d * y + screen.f]);
  };
  // How far two boxes, turned or not, must be moved apart (separating axes); 0 if they do not touch.
  const overlap = (a, b) => {
    let least = Infinity;
    for (const [p, q] of [[a[0], a[1]], [a[1], a[2]], [b[0], b[1]], [b[1], b[2]]]) {
      const length = Math.hypot(q[0] - p[0], q[1] - p[1]) || 1;
      const axis = [(q[1] - p[1]) / length, (p[0] - q[0]) / length];
      const along = corner => corner[0] * axis[0] + corner[1] * axis[1];
      const [one, two] = [a.map(along), b.map(along)];
      least = Math.min(least, Math.min(Math.max(...one), Math.max(...two)) - Math.max(Math.min(...one), Math.min(...two)));
    }
    return Math.max(0, least);
  };
  for (const svg of document.querySelectorAll("figure svg")) {
    const frame = svg.getBoundingClientRect();
    if (svg.closest(".chart")?.scrollWidth > svg.closest(".chart")?.clientWidth + 1) say("wider than its place", svg.closest(".view").querySelector(".answer"), `${Math.round(frame.width)} px`);
    const texts = [...svg.querySelectorAll("text")].filter(text => text.textContent.trim() && text.getAttribute("opacity") !== "0");
    const boxes = texts.map(corners);
    texts.forEach((text, i) => {
      if (boxes[i].some(([x, y]) => x < frame.left - near || x > frame.right + near || y < frame.top - near || y > frame.bottom + near))
        say("cut off by the figure", text);
      for (let j = 0; j < i; j++)
        if (Math.abs(boxes[i][0][1] - boxes[j][0][1]) < 400 && overlap(boxes[i], boxes[j]) > near)
          say("covers another text", text, `"${texts[j].textContent.trim().slice(0, 40)}" by ${overlap(boxes[i], boxes[j]).toFixed(1)} px`);
    });
  }
  const channel = c => (c /= 255) <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const light = colour => {
    const [r, g, b] = colour.match(/[\d.]+/g).map(Number).map(channel);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const contrast = (a, b) => (Math.max(light(a), light(b)) + 0.05) / (Math.min(light(a), light(b)) + 0.05);
  const page = getComputedStyle(document.body).backgroundColor;
  for (const e of document.querySelectorAll("p, dd, dt, td, th, figcaption, .tiles .value, .tiles .detail, a, summary"))
    if (e.getClientRects().length && contrast(getComputedStyle(e).color, page) < 4.5) say("too faint", e);
  const onMark = text => ["#FEFEFE", "#000001"].includes(text.getAttribute("fill"));  // on a mark of its own colour
  for (const text of document.querySelectorAll("figure svg text"))
    if (!onMark(text) && text.getClientRects().length && contrast(getComputedStyle(text).fill, page) < 4.5) say("too faint", text, getComputedStyle(text).fill);
  // Marks of full strength, but not cells of a heat map, whose colours mean a number.
  const marks = [...document.querySelectorAll(".chart .role-mark path, .chart .role-legend-symbol path")]
    .filter(mark => !mark.closest(".view").querySelector(".role-legend-gradient") && mark.getClientRects().length);
  for (const mark of marks) {
    const look = getComputedStyle(mark);
    const strong = [["fill", look.fillOpacity], ["stroke", look.strokeOpacity]]
      .filter(([how, opacity]) => look[how] !== "none" && opacity * look.opacity > 0.8).map(([how]) => look[how]);
    if (strong.length && strong.every(colour => contrast(colour, page) < 3)) say("faint mark", mark.closest(".view").querySelector(".answer"), strong[0]);
  }
  const drawnViews = views.filter(isDrawn).length;
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  parent.postMessage({ found, width: innerWidth, dark, marks: marks.length, drawn: drawnViews, views: views.length, texts: document.querySelectorAll("figure svg text").length }, "*");
});
