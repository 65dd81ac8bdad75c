"use strict";
// Draws the timeline of the step and changes the theme. Values come from the page's own JSON; nothing is fetched.
(function () {
  const root = document.documentElement;
  const media = window.matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : media.matches);
  const data = JSON.parse(document.getElementById("timeline-data").textContent);
  const canvas = document.getElementById("timeline-canvas");
  const told = document.getElementById("timeline-told");
  const label = 58, rowHeight = 26, gap = 4, axis = 24;
  const colours = data.colours;
  const paint = canvas.getContext("2d");
  let from = 0, to = data.end, printing = false;

  const shown = (us) =>
    us >= 1e6 ? (us / 1e6).toPrecision(4) + " s" : us >= 1e3 ? (us / 1e3).toPrecision(4) + " ms" : us.toPrecision(3) + " µs";

  function draw() {
    const width = canvas.clientWidth, height = data.ranks.length * (rowHeight + gap) + axis;
    const ratio = window.devicePixelRatio || 1;
    canvas.style.height = height + "px";
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    paint.setTransform(ratio, 0, 0, ratio, 0, 0);
    const style = getComputedStyle(root);
    const text = printing ? "#000000" : style.getPropertyValue("--text").trim();
    paint.fillStyle = printing ? "#ffffff" : style.getPropertyValue("--page").trim();
    paint.fillRect(0, 0, width, height);
    paint.font = "12px system-ui, sans-serif";
    paint.textBaseline = "middle";
    const scale = (width - label) / (to - from);
    data.ranks.forEach(function (row, place) {
      const top = place * (rowHeight + gap);
      paint.fillStyle = text;
      paint.fillText("rank " + row.rank, 4, top + rowHeight / 2);
      let last = -1;
      for (const span of row.spans) {
        if (span[2] < from || span[1] > to) continue;
        const start = Math.max(label, label + (span[1] - from) * scale);
        const end = Math.min(width, label + (span[2] - from) * scale);
        if (end - start < 0.3 && Math.round(end) === last) continue; // too narrow to be seen beside its neighbour
        last = Math.round(end);
        const isExposed = data.kinds[span[0]].startsWith("communication");
        paint.fillStyle = colours[span[0]];
        paint.fillRect(start, isExposed ? top + rowHeight - 8 : top, Math.max(0.4, end - start - (end - start > 3 ? 1 : 0)), isExposed ? 8 : rowHeight);
        if (!isExposed && span[4] >= 0 && end - start > 22) {
          paint.fillStyle = span[0] === 2 || span[0] === 3 ? "#000000" : "#ffffff";
          paint.fillText(String(span[4]), start + 4, top + rowHeight / 2 - 3);
        }
      }
    });
    paint.fillStyle = text;
    const bottom = height - axis / 2;
    paint.fillText(shown(from), label, bottom);
    const right = shown(to);
    paint.fillText(right, width - paint.measureText(right).width - 4, bottom);
  }

  function look(start, end) {
    const span = Math.min(data.end, Math.max(data.end / 1e5, end - start));
    from = Math.min(Math.max(0, start), data.end - span);
    to = from + span;
    draw();
    told.textContent = "shown: " + shown(from) + " to " + shown(to) + " of " + shown(data.end);
  }
  function zoom(factor, middle) {
    const at = middle === undefined ? (from + to) / 2 : middle;
    look(at - (at - from) * factor, at + (to - at) * factor);
  }
  const pan = (share) => look(from + share * (to - from), to + share * (to - from));
  const moves = {
    in: () => zoom(0.5), out: () => zoom(2), left: () => pan(-0.25), right: () => pan(0.25), all: () => look(0, data.end),
  };
  for (const [name, move] of Object.entries(moves)) document.getElementById("timeline-" + name).addEventListener("click", move);
  const keys = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", Home: "all" };
  canvas.addEventListener("keydown", function (event) {
    if (keys[event.key]) { event.preventDefault(); moves[keys[event.key]](); }
  });
  const timeAt = (event) => from + ((event.offsetX - label) / (canvas.clientWidth - label)) * (to - from);
  canvas.addEventListener("wheel", function (event) {
    if (!event.ctrlKey && document.activeElement !== canvas) return; // a page is scrolled past a chart
    event.preventDefault();
    zoom(event.deltaY > 0 ? 1.25 : 0.8, timeAt(event));
  }, { passive: false });
  let held = null;
  canvas.addEventListener("pointerdown", function (event) { held = { x: event.offsetX, from: from, to: to }; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointerup", function () { held = null; });
  canvas.addEventListener("pointermove", function (event) {
    if (held) {
      const moved = ((held.x - event.offsetX) / (canvas.clientWidth - label)) * (held.to - held.from);
      look(held.from + moved, held.to + moved);
      return;
    }
    const row = data.ranks[Math.floor(event.offsetY / (rowHeight + gap))];
    const at = timeAt(event);
    if (!row || event.offsetX < label) return;
    const hit = row.spans.filter((span) => span[1] <= at && at < span[2]).pop();
    if (!hit) { told.textContent = "rank " + row.rank + " at " + shown(at) + ": idle"; return; }
    const where = hit[4] < 0 ? "" : ", stage " + hit[3] + ", micro-batch " + hit[4];
    told.textContent = "rank " + row.rank + ": " + data.kinds[hit[0]] + where + ", " + shown(hit[1]) + " to " + shown(hit[2]) + " (" + shown(hit[2] - hit[1]) + ")";
  });

  document.getElementById("theme").addEventListener("click", function () {
    root.dataset.theme = isDark() ? "light" : "dark";
    draw();
  });
  media.addEventListener("change", draw);
  window.addEventListener("resize", draw);
  window.addEventListener("beforeprint", function () { printing = true; root.dataset.before = root.dataset.theme || ""; root.dataset.theme = "light"; draw(); });
  window.addEventListener("afterprint", function () {
    printing = false;
    if (root.dataset.before) root.dataset.theme = root.dataset.before; else delete root.dataset.theme;
    draw();
  });
  draw();
  told.textContent = "Point at an action to see what it is.";
})();
