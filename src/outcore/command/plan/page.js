"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const TIERS = ["device", "host", "disk"];
  const SVG = "http://www.w3.org/2000/svg";

  // Words.

  const bytes = (n, rounded = (value) => (value >= 100 ? Math.round(value) : +value.toPrecision(3))) => {
    if (!n) return "0";
    const names = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
    const i = Math.min(Math.floor(Math.log2(n) / 10), names.length - 1);
    const value = n / 2 ** (10 * i);
    return `${rounded(value)} ${names[i]}`;
  };
  // A size that is needed must suffice as it is shown.
  const needed = (n) => bytes(n, (value) => Math.ceil(100 * value) / 100);
  const seconds = (s) => {
    if (s === null || s === undefined) return "does not fit";
    if (s === 0) return "0 s";
    for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["µs", 1e6]]) {
      if (Math.abs(s) * factor >= 1 || unit === "µs") return `${plain(s * factor)} ${unit}`;
    }
  };
  const plain = (x) => (Math.abs(x) >= 1000 ? Math.round(x).toLocaleString("en") : String(+x.toPrecision(3)));
  const percent = (x) => `${Math.round(100 * x)}%`;

  // Elements.

  const put = (parent, tag, text, attributes = {}) => {
    const element = document.createElement(tag);
    if (text !== undefined && text !== null) element.textContent = text;
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    parent.append(element);
    return element;
  };
  const draw = (parent, tag, attributes, text) => {
    const element = document.createElementNS(SVG, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    if (text !== undefined) element.textContent = text;
    parent.append(element);
    return element;
  };
  const table = (parent, heads, rows, numbers = []) => {
    const made = put(parent, "table");
    const row = put(put(made, "thead"), "tr");
    heads.forEach((head, i) => put(row, "th", head, { scope: "col", class: numbers.includes(i) ? "number" : "" }));
    const body = put(made, "tbody");
    for (const cells of rows) {
      const line = put(body, "tr");
      cells.forEach((cell, i) => put(line, "td", cell, { class: numbers.includes(i) ? "number" : "" }));
    }
  };
  const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // The beginning.

  byId("title").textContent = `Training ${data.model} on ${data.machine.replaceAll("+", ", ")}`;
  byId("verdict").textContent = data.verdict;
  byId("asked").textContent = data.asked;
  const duration = (s) => {
    const [name, length] = [["days", 86400], ["hours", 3600], ["minutes", 60]].find(([, n]) => s >= 1.5 * n) || ["seconds", 1];
    return `${plain(s / length)} ${name}`;
  };
  const estimate = () => {
    const s = (1e6 * Math.max(+byId("tokens").value || 0, 0)) / data.tokens_per_s, takes = byId("takes");
    const worn = data.drive_days ? s / 86400 / data.drive_days : 0;
    takes.textContent = `${duration(s)}${worn ? `, and ${plain(100 * worn)}% of the drive's life` : ""}.`;
    takes.className = worn > 0.1 ? "short" : "";
  };
  byId("counted").textContent = data.counted;
  byId("tokens").oninput = estimate;
  estimate();
  for (const [name, value, more] of data.facts) {
    const box = put(byId("facts"), "div");
    put(box, "dt", name);
    const said = put(box, "dd", value);
    if (name === "Disk writes" && data.drive_days && data.drive_days < 365) said.className = "short";
    if (more) put(said, "small", more);
  }

  // Where every byte lives.

  const SHADES = { weights: 1, gradients: 0.74, states: 0.5, slots: 0.32, buffers: 0.9, activations: 0.16 };
  const shade = (label) => SHADES[label.split(" ")[0]] ?? 0.4;
  for (const tier of data.tiers) {
    const box = put(byId("tiers"), "div", null, { class: "tier" });
    const head = put(box, "div", null, { class: "tier-head" });
    put(head, "strong", tier.tier);
    put(head, "span", tier.reserved ? `${bytes(tier.reserved)} of ${bytes(tier.budget)}; at most ${bytes(tier.peak)} in use at once` : `nothing of ${bytes(tier.budget)}`, { class: "quiet" });
    const said = tier.parts.map((part) => `${part.label} ${bytes(part.bytes)}`).join(", ");
    const svg = draw(box, "svg", { viewBox: "0 0 1000 34", preserveAspectRatio: "none", role: "img", "aria-label": `${tier.tier}: ${said || "nothing"}` });
    draw(svg, "rect", { x: 0, y: 7, width: 1000, height: 20, rx: 4, style: "fill: var(--grid)" });
    let x = 0;
    for (const part of tier.parts) {
      const width = (1000 * part.bytes) / tier.budget;
      const rect = draw(svg, "rect", { x, y: 7, width: Math.max(width - 1, 0.6), height: 20, style: `fill: var(--${tier.tier}); opacity: ${shade(part.label)}` });
      draw(rect, "title", {}, `${part.label}: ${bytes(part.bytes)}`);
      x += width;
    }
    const labels = put(box, "div", null, { class: "labels", "aria-hidden": "true" });
    for (const part of tier.parts) {
      const share = (100 * part.bytes) / tier.budget;  // a label that would not fit is in the list alone
      put(labels, "span", share > 14 ? part.label : "", { style: `width: ${share}%` });
    }
    const list = put(box, "ul", null, { class: "parts" });
    for (const part of tier.parts) {
      const item = put(list, "li");
      put(item, "i", null, { style: `background: var(--${tier.tier}); opacity: ${shade(part.label)}` });
      item.append(`${part.label} ${bytes(part.bytes)}`);
    }
  }

  for (const tier of TIERS) {
    const item = put(byId("tier-legend"), "span");
    put(item, "i", null, { style: `background: var(--${tier})` });
    item.append(tier);
  }
  const KINDS = ["weights", "gradients", "states"];
  const units = data.units;
  const unitSaid = (i) => {
    const u = units[i];
    return `${u.name || "root"}: ` + KINDS.map((kind) => `${kind} ${u[kind][1] ? `${bytes(u[kind][1])} on ${u[kind][0]}` : "none"}`).join(", ") + `; ${u.how}`;
  };
  const map = byId("units");
  let chosen = 0;
  const drawUnits = () => {
    const width = Math.max(map.clientWidth, 160), left = 74, wide = (width - left) / units.length;
    map.replaceChildren();
    map.setAttribute("viewBox", `0 0 ${width} 132`);
    KINDS.forEach((kind, row) => {
      const y = 6 + row * 36;
      draw(map, "text", { x: 0, y: y + 19 }, kind);
      for (let i = 0; i < units.length; ) {  // neighbours with one home are one shape where cells are thin
        let j = i + 1;
        while (wide < 4 && j < units.length && units[j][kind][0] === units[i][kind][0] && !!units[j][kind][1] === !!units[i][kind][1]) j++;
        const gap = wide >= 4 ? 1 : 0.2;
        const fill = units[i][kind][1] ? `var(--${units[i][kind][0]})` : "var(--grid)";
        draw(map, "rect", { x: left + i * wide, y, width: Math.max((j - i) * wide - gap, 0.5), height: 28, rx: Math.min(3, wide / 4), style: `fill: ${fill}` });
        i = j;
      }
    });
    draw(map, "rect", { x: left + chosen * wide - 1, y: 2, width: wide + 1, height: 108, rx: 3, style: "fill: none; stroke: var(--ink); stroke-width: 1.5", id: "unit-mark" });
    draw(map, "text", { x: left, y: 126 }, units[0].name || "root");
    draw(map, "text", { x: width, y: 126, "text-anchor": "end" }, units[units.length - 1].name);
    byId("unit-said").textContent = unitSaid(chosen);
  };
  map.setAttribute("aria-label", data.homes_text);
  const choose = (i) => { chosen = Math.max(0, Math.min(units.length - 1, i)); drawUnits(); };
  map.addEventListener("pointermove", (event) => {
    const box = map.getBoundingClientRect();
    choose(Math.floor(((event.clientX - box.left - 74) / (box.width - 74)) * units.length));
  });
  map.addEventListener("pointerdown", (event) => {
    const box = map.getBoundingClientRect();
    choose(Math.floor(((event.clientX - box.left - 74) / (box.width - 74)) * units.length));
  });
  map.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -units.length, End: units.length }[event.key];
    if (by) { choose(chosen + by); event.preventDefault(); }
  });
  table(byId("homes-table"), ["unit", ...KINDS, "how"], units.map((u) => [u.name || "root", ...KINDS.map((k) => (u[k][1] ? `${u[k][0]}, ${bytes(u[k][1])}` : "none")), u.how]));

  // A step in time.

  const time = data.timeline, canvas = byId("timeline");
  const SHADE_OF = { compute: "backward", update: "update", device_update: "update", weights_read: "drive", states_read: "drive", disk_write: "drive", states_write: "drive" };
  const shadeOf = (lane, kind) => (lane !== "compute" ? SHADE_OF[lane] || "bus" : { forward: "forward", backward: "backward", update: "update" }[kind] || "other");
  const ROW = 34, AREA = 52, TOP = 22;
  const rows = time.lanes.map((lane, i) => ({ lane, y: TOP + i * ROW, spans: time.spans.filter((s) => s[0] === i) }));
  const areas = TIERS.filter((tier) => time.loads.some((load) => load.tier === tier)).map((tier, i) => ({ tier, y: TOP + rows.length * ROW + 8 + i * AREA, moments: added(tier) }));
  const height = TOP + rows.length * ROW + 8 + areas.length * AREA + 4;
  let from = 0, to = time.step_s, pointed = null;

  function added(tier) {
    const changes = new Map();
    for (const load of time.loads.filter((l) => l.tier === tier)) {
      let before = 0;
      for (const [moment, n] of load.moments) { changes.set(moment, (changes.get(moment) || 0) + n - before); before = n; }
    }
    let sum = 0;
    return [...changes.keys()].sort((a, b) => a - b).map((moment) => [moment, (sum += changes.get(moment))]);
  }
  const nameOf = (span) => `${time.kinds[span[1]]} ${units[span[2]] ? units[span[2]].name || "root" : ""}`;
  const HINT = "Point at an operation to read what it is.";
  byId("span-said").textContent = HINT;
  let frame = 0;
  const later = () => { frame = frame || requestAnimationFrame(() => { frame = 0; drawTime(); }); };
  const firstAfter = (spans, moment) => {
    let low = 0, high = spans.length;
    while (low < high) { const mid = (low + high) >> 1; if (spans[mid][3] + spans[mid][4] < moment) low = mid + 1; else high = mid; }
    return low;
  };

  function drawTime() {
    const width = Math.max(canvas.clientWidth, 160), ratio = window.devicePixelRatio || 1;
    canvas.style.height = `${height}px`;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const g = canvas.getContext("2d");
    g.scale(ratio, ratio);
    const c = Object.fromEntries(["ink", "soft", "grid", "line", "forward", "backward", "other", "update", "bus", "drive", "wait", "device", "host", "disk", "card"].map((n) => [n, color(n)]));
    const at = (moment) => ((moment - from) / (to - from)) * width;
    g.font = "11px system-ui, sans-serif";
    g.textBaseline = "alphabetic";
    const step = nice((to - from) / Math.max(2, width / 110));
    g.strokeStyle = c.grid;
    for (let moment = Math.ceil(from / step) * step; moment <= to; moment += step) {
      g.beginPath(); g.moveTo(at(moment), TOP - 6); g.lineTo(at(moment), height); g.stroke();
      g.fillStyle = c.soft; g.fillText(seconds(+moment.toPrecision(6)), Math.min(at(moment) + 3, width - 44), 11);
    }
    g.strokeStyle = c.ink; g.setLineDash([4, 4]);
    for (let moment = time.step_s; moment < time.wall_s * 0.999; moment += time.step_s) {
      g.beginPath(); g.moveTo(at(moment), 0); g.lineTo(at(moment), height); g.stroke();
    }
    g.setLineDash([]);
    for (const row of rows) {
      g.fillStyle = c.grid; g.fillRect(0, row.y + 14, width, 16);
      let until = -1;
      for (let i = firstAfter(row.spans, from); i < row.spans.length && row.spans[i][3] < to; i++) {
        const [, kind, , start, lasts] = row.spans[i];
        const x = at(start), w = at(start + lasts) - x;
        if (x + w <= until) continue;  // within the last pixel
        g.fillStyle = c[shadeOf(row.lane, time.kinds[kind])];
        g.fillRect(x, row.y + 14, Math.max(w - (w > 3 ? 0.75 : 0), 0.6), 16);
        until = Math.floor(x + w);
        if (w > 70) {
          const label = nameOf(row.spans[i]);
          if (g.measureText(label).width < w - 8) { g.fillStyle = c.card; g.fillText(label, Math.max(x, 0) + 4, row.y + 26); }
        }
      }
      if (row.lane === "compute") {
        g.fillStyle = c.wait; g.globalAlpha = 0.32;
        for (let i = firstAfter(time.waits, from); i < time.waits.length && time.waits[i][3] < to; i++) {
          const x = at(time.waits[i][3]);
          g.fillRect(x, row.y + 20, Math.max(at(time.waits[i][3] + time.waits[i][4]) - x, 0.6), 4);
        }
        g.globalAlpha = 1;
      }
      if (pointed && pointed.lane === row.lane) {
        const [, , , start, lasts] = pointed.span;
        g.strokeStyle = c.ink; g.lineWidth = 1.5; g.strokeRect(at(start), row.y + 13, Math.max(at(start + lasts) - at(start), 2), 18); g.lineWidth = 1;
      }
      g.fillStyle = c.soft; g.fillText(row.lane.replaceAll("_", " "), 2, row.y + 10);
    }
    for (const area of areas) {
      const most = Math.max(...area.moments.map((m) => m[1]), 1), base = area.y + AREA - 8, tall = AREA - 24;
      g.fillStyle = c[area.tier]; g.globalAlpha = 0.75; g.beginPath(); g.moveTo(0, base);
      let level = 0, i = 0;
      while (i < area.moments.length && area.moments[i][0] <= from) level = area.moments[i++][1];
      g.lineTo(0, base - (tall * level) / most);
      for (; i < area.moments.length && area.moments[i][0] < to; i++) {
        const x = at(area.moments[i][0]);
        g.lineTo(x, base - (tall * level) / most); level = area.moments[i][1]; g.lineTo(x, base - (tall * level) / most);
      }
      g.lineTo(width, base - (tall * level) / most); g.lineTo(width, base); g.closePath(); g.fill(); g.globalAlpha = 1;
      g.fillStyle = c.soft; g.fillText(`in use on ${area.tier}, at most ${bytes(most)}`, 2, area.y + 10);
    }
    canvas.dataset.from = from; canvas.dataset.to = to;
  }
  function nice(x) {
    const power = 10 ** Math.floor(Math.log10(x));
    return [1, 2, 5, 10].map((f) => f * power).find((f) => f >= x);
  }
  const show = (a, b) => {
    const least = time.wall_s / 20000, span = Math.min(Math.max(b - a, least), time.wall_s);
    from = Math.min(Math.max(a + (b - a - span) / 2, 0), time.wall_s - span);
    to = from + span;
    later();
  };
  const zoom = (factor, middle = (from + to) / 2) => show(middle - (middle - from) * factor, middle + (to - middle) * factor);
  const slide = (part) => show(from + part * (to - from), to + part * (to - from));
  const timeAt = (event) => { const box = canvas.getBoundingClientRect(); return from + ((event.clientX - box.left) / box.width) * (to - from); };
  canvas.addEventListener("wheel", (event) => {
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) { slide(event.deltaX / canvas.clientWidth); event.preventDefault(); return; }
    if (event.deltaY > 0 && to - from >= time.wall_s * 0.999) return;  // the page may scroll
    zoom(Math.exp(Math.max(-0.5, Math.min(0.5, event.deltaY * 0.002))), timeAt(event));
    event.preventDefault();
  }, { passive: false });
  const held = new Map();
  canvas.addEventListener("pointerdown", (event) => { held.set(event.pointerId, event.clientX); canvas.setPointerCapture(event.pointerId); canvas.classList.add("dragging"); point(event); });
  canvas.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId)) { point(event); return; }
    const before = [...held.values()];
    held.set(event.pointerId, event.clientX);
    const after = [...held.values()], perPixel = (to - from) / canvas.clientWidth;
    if (held.size === 1) { show(from - (after[0] - before[0]) * perPixel, to - (after[0] - before[0]) * perPixel); return; }
    const apart = (xs) => Math.max(Math.abs(xs[0] - xs[1]), 8), box = canvas.getBoundingClientRect();
    zoom(apart(before) / apart(after), from + ((after[0] + after[1]) / 2 - box.left) * perPixel);
  });
  for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => { held.delete(event.pointerId); if (!held.size) canvas.classList.remove("dragging"); });
  canvas.addEventListener("pointerleave", () => { pointed = null; later(); });
  function point(event) {
    const y = event.clientY - canvas.getBoundingClientRect().top, moment = timeAt(event);
    const row = rows.find((r) => y >= r.y && y < r.y + ROW);
    const slack = ((to - from) / canvas.clientWidth) * 3;
    pointed = null;
    if (row) {
      for (let i = firstAfter(row.spans, moment - slack); i < row.spans.length && row.spans[i][3] <= moment + slack; i++) pointed = { lane: row.lane, span: row.spans[i] };
    }
    if (pointed) {
      const [, , , start, lasts, n] = pointed.span;
      byId("span-said").textContent = `${pointed.lane.replaceAll("_", " ")}: ${nameOf(pointed.span)}, ${seconds(lasts)} from ${seconds(start)}${n ? `, ${bytes(n)}` : ""}`;
    } else {
      const area = areas.find((a) => y >= a.y && y < a.y + AREA);
      const level = area && area.moments.filter((m) => m[0] <= moment).pop();
      byId("span-said").textContent = level ? `${area.tier}: ${bytes(level[1])} in use at ${seconds(moment)}` : HINT;
    }
    later();
  }
  canvas.addEventListener("keydown", (event) => {
    const act = { "+": () => zoom(0.6), "=": () => zoom(0.6), "-": () => zoom(1 / 0.6), ArrowLeft: () => slide(-0.2), ArrowRight: () => slide(0.2), 0: () => show(0, time.step_s), Home: () => show(0, to - from), End: () => show(time.wall_s - (to - from), time.wall_s) }[event.key];
    if (act && !event.ctrlKey && !event.metaKey) { act(); event.preventDefault(); }
  });
  byId("zoom-in").onclick = () => zoom(0.6);
  byId("zoom-out").onclick = () => zoom(1 / 0.6);
  byId("zoom-left").onclick = () => slide(-0.4);
  byId("zoom-right").onclick = () => slide(0.4);
  byId("zoom-step").onclick = () => show(0, time.step_s);
  byId("zoom-all").onclick = () => show(0, time.wall_s);
  canvas.setAttribute("aria-label", data.time_text);
  byId("time-text").textContent = data.time_text;
  for (const [name, text] of [["forward", "forward"], ["backward", "backward"], ["other", "copies on the device"], ["update", "updates"], ["bus", "between host and device"], ["drive", "disk"], ["wait", "compute waits"]]) {
    const item = put(byId("lane-legend"), "span");
    put(item, "i", null, { style: `background: var(--${name})` });
    item.append(text);
  }
  table(byId("lanes-table"), ["lane", "busy per step", "compute waits for it", "moved per step"], data.lanes.map((l) => [l.lane.replaceAll("_", " "), seconds(l.busy_s), seconds(l.exposed_s), l.bytes ? bytes(l.bytes) : ""]), [1, 2, 3]);

  // If there were more, or less.

  for (const curve of data.curves) {
    const say = (value) => (curve.is_bytes ? bytes(value) : String(value));
    const figure = put(byId("curves"), "figure");
    put(figure, "figcaption", curve.name);
    const W = 400, H = 260, left = 50, right = 14, top = 28, bottom = 50;
    const points = curve.points, logs = points.map((p) => Math.log2(p.value));
    const low = Math.min(...logs), high = Math.max(...logs, low + 1e-9);
    const rate = (p) => p.tokens / p.step_s;
    const largest = Math.max(...points.map((p) => (p.step_s ? rate(p) : 0))) || 1;
    const tick = nice(largest / 4), ceiling = Math.ceil(largest / tick) * tick;
    const x = (value) => left + ((Math.log2(value) - low) / (high - low)) * (W - left - right);
    const y = (s) => H - bottom - (s / ceiling) * (H - top - bottom);
    const said = points.map((p) => `${say(p.value)}: ${seconds(p.step_s)}`).join("; ");
    const svg = draw(figure, "svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": `${curve.name}. ${said}` });
    for (let s = 0; s <= ceiling * 1.0001; s += tick) {
      draw(svg, "line", { x1: left, x2: W - right, y1: y(s), y2: y(s), style: "stroke: var(--grid)" });
      draw(svg, "text", { x: left - 6, y: y(s) + 4, "text-anchor": "end" }, plain(+s.toPrecision(4)));
    }
    draw(svg, "text", { x: 0, y: 14 }, `${data.counted} per second`);
    draw(svg, "text", { x: (left + W - right) / 2, y: H - 6, "text-anchor": "middle" }, curve.name.toLowerCase());
    const fitting = points.filter((p) => p.step_s !== null), missing = points.filter((p) => p.step_s === null);
    if (missing.length && fitting.length) {
      const isLow = missing[0].value < fitting[0].value;
      const edge = isLow ? (x(missing[missing.length - 1].value) + x(fitting[0].value)) / 2 : (x(fitting[fitting.length - 1].value) + x(missing[0].value)) / 2;
      draw(svg, "rect", { x: isLow ? left : edge, y: top, width: isLow ? edge - left : W - right - edge, height: H - top - bottom, style: "fill: var(--wait); opacity: .1" });
      draw(svg, "text", { x: isLow ? left + 4 : W - right - 4, y: top + 13, "text-anchor": isLow ? "start" : "end" }, "does not fit");
    }
    draw(svg, "polyline", { points: fitting.map((p) => `${x(p.value)},${y(rate(p))}`).join(" "), style: "fill: none; stroke: var(--device); stroke-width: 2; stroke-linejoin: round" });
    let labelled = -99;
    for (const p of points) {
      if (p.is_today || x(p.value) - labelled > 62) {
        const isFree = points.every((q) => !q.is_today || q === p || Math.abs(x(q.value) - x(p.value)) > 62);
        if (p.is_today || isFree) {
          const px = Math.min(Math.max(x(p.value), left + 8), W - right - 18);
          draw(svg, "text", { x: px, y: H - bottom + 18, "text-anchor": "middle", style: p.is_today ? "font-weight: 600; fill: var(--ink)" : "" }, say(p.value));
          labelled = x(p.value);
        }
      }
      if (p.step_s === null) continue;
      const said = `${say(p.value)}: ${seconds(p.step_s)} per step, ${plain(p.tokens / p.step_s)} ${data.counted} per second${p.is_today ? " (today)" : ""}`;
      if (p.is_today) draw(svg, "circle", { cx: x(p.value), cy: y(rate(p)), r: 9, style: "fill: none; stroke: var(--device); stroke-width: 2", class: "today" });
      const dot = draw(svg, "circle", { cx: x(p.value), cy: y(rate(p)), r: p.is_today ? 5 : 4, style: "fill: var(--device); stroke: var(--card); stroke-width: 1.5" });
      draw(dot, "title", {}, said);
    }
  }
  table(byId("curves-table"), ["", "value", "seconds per step", `${data.counted} per second`], data.curves.flatMap((curve) => curve.points.map((p) => [curve.name + (p.is_today ? " (today)" : ""), curve.is_bytes ? bytes(p.value) : p.value, seconds(p.step_s), p.step_s ? plain(p.tokens / p.step_s) : ""])), [1, 2, 3]);

  // The rest.

  for (const recipe of data.recipes) {
    const item = put(byId("changes"), "li");
    put(item, "b", `${recipe.gain.toFixed(2)}×`);
    put(item, "strong", recipe.options);
    put(item, "span", `${seconds(time.step_s)} → ${seconds(recipe.step_s)} per step, ${plain(recipe.tokens_per_s)} ${data.counted} per second`);
    put(item, "span", recipe.result + (recipe.means && `: ${recipe.means}`));
  }
  if (!data.recipes.length) put(byId("changes"), "li", "No recipe that was tried gains two percent.");
  table(byId("others"), ["plan", "step", "why not"], data.runners_up.map((o) => [o.name, o.step_s === null ? "" : seconds(o.step_s), o.reason]), [1]);
  table(byId("least"), ["tier", "others as given", "all at once, the least device first"], TIERS.map((t) => [t, t in data.least.with_others ? needed(data.least.with_others[t]) : "no amount alone", needed(data.least.at_all[t])]), [1, 2]);
  table(byId("sources"), ["part", "figure", "value", "source"], data.sources.map((s) => [s[0], s[1].replaceAll("_", " "), plain(s[2]), s[3]]), [2]);

  byId("theme").onclick = () => {
    const isDark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    document.documentElement.dataset.theme = isDark ? "light" : "dark";
    later();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", later);
  new ResizeObserver(() => { later(); drawUnits(); }).observe(document.body);
  drawUnits();
  drawTime();
})();
