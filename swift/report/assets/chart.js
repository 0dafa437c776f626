// One chart of lines: draws values of several runs over an axis, and tells which value is under the pointer.
// A view says what to draw: {axis, smoothing, shown, apart, range, cursor}; charts only read it.
"use strict";

const MOST_TOLD = 16;  // values at the cursor, of more lines
const HEIGHT = 270, EDGE = {left: 56, right: 12, top: 30, bottom: 40};
const AXES = {
  step: {title: "step", unit: () => [1, ""]},
  tokens: {title: "tokens", unit: top => [[1e9, " B"], [1e6, " M"], [1e3, " K"]].find(([size]) => top >= size) ?? [1, ""]},
  time: {title: "time of running", unit: top => top >= 10800 ? [3600, " h"] : top >= 600 ? [60, " min"] : [1, " s"]},
};
// The name of SVG, without writing an address into a page that has none.
const SPACE = document.querySelector("svg")?.namespaceURI;

function make(name, attributes, parent, text) {
  const element = document.createElementNS(SPACE, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  parent.append(element);
  return element;
}

function show(value) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return size >= 1e4 ? Math.round(value).toLocaleString("en") : String(Number(value.toPrecision(4)));
}

// A value at an axis, where there is little room.
function brief(value) {
  const [size, unit] = [[1e9, "G"], [1e6, "M"], [1e4, "k"]].find(([least]) => Math.abs(value) >= least) ?? [1, ""];
  return show(Number((value / (unit === "k" ? 1e3 : size)).toPrecision(6))) + unit;
}

// Marks between two values: multiples of 1, 2 or 5 times a power of ten.
function ticks(low, high, most) {
  if (!(high - low > Math.abs(high) * 1e-12)) return [];  // no numbers in between
  const least = (high - low) / most, power = 10 ** Math.floor(Math.log10(least));
  const gap = power * [1, 2, 5, 10].find(factor => power * factor >= least * 0.999);
  const found = [];
  for (let index = Math.ceil(low / gap - 1e-6); index * gap <= high + gap * 1e-6; index++) found.push(index * gap);
  return found;
}

// Centred moving average over a share of the points, which narrows at both ends and leaves out what is unknown.
function smooth(values, share) {
  const widest = Math.floor(values.length * share / 2), sums = [0], counts = [0];
  for (const value of values) {
    sums.push(sums.at(-1) + (value ?? 0));
    counts.push(counts.at(-1) + (value !== null));
  }
  return values.map((_, index) => {
    const half = Math.min(widest, index, values.length - 1 - index), first = index - half, last = index + half + 1;
    const number = counts[last] - counts[first];
    return number ? (sums[last] - sums[first]) / number : null;
  });
}

// Mean, smallest and largest of several runs at each point; null where one of them is unknown.
function overRuns(rows) {
  const all = rows[0].map((_, index) => rows.map(row => row[index]));
  const [mean, low, high] = [column => column.reduce((a, b) => a + b) / column.length, column => Math.min(...column),
    column => Math.max(...column)].map(of => all.map(column => column.includes(null) ? null : of(column)));
  return {mean, low, high};
}

function nearest(xs, x) {
  let best = -1;
  xs.forEach((at, index) => { if (at !== null && (best < 0 || Math.abs(at - x) < Math.abs(xs[best] - x))) best = index; });
  return best;
}

class Chart {
  constructor(frame, chart, runs, caption) {
    Object.assign(this, {frame, chart, runs, caption, kept: new Map()});
    this.tip = document.createElement("div");
    this.tip.className = "tip";
    this.svg = document.createElementNS(SPACE, "svg");
    for (const [key, value] of Object.entries({role: "img", tabindex: 0, "aria-label": caption, "aria-describedby": "help", class: "live"}))
      this.svg.setAttribute(key, value);
    frame.replaceChildren(this.svg, this.tip);
  }

  // Groups of seeds as they are drawn: those with at least two runs that are switched on.
  groups(bands, view) {
    if (view.apart) return [];
    return bands.map(band => ({...band, members: band.members.filter(one => view.shown.has(one.run))}))
      .filter(band => band.members.length > 1);
  }

  // What is left of lines or rings when groups are drawn: those of single runs.
  single(all, groups, view) {
    const grouped = new Set(groups.flatMap(group => group.members.map(one => one.run)));
    return all.filter(one => view.shown.has(one.run) && !grouped.has(one.run));
  }

  lines(view) {
    const groups = this.groups(this.chart.bands, view);
    return [...groups.map(group => this.mean(group, view)), ...this.single(this.chart.lines, groups, view).map(line => ({
      ...line, ...this.runs[line.run], x: this.runs[line.run].x[view.axis], smooth: this.smoothed(line, view.smoothing),
      low: line.low ?? line.mean, high: line.high ?? line.mean,
    }))];
  }

  // The mean of several runs, each smoothed before, with the smallest and largest value at each point.
  mean(group, view) {
    const raw = overRuns(group.members.map(one => one.mean));
    const {mean, low, high} = overRuns(group.members.map(one => this.smoothed(one, view.smoothing)));
    return {...group, label: `${group.name}, mean of ${group.members.length}`, x: group.x[view.axis], raw, mean: raw.mean,
      smooth: mean, low, high};
  }

  // A line's smoothed values, computed again only for another share.
  smoothed(line, share) {
    if (this.chart.exact) return line.mean;
    if (this.kept.get(line)?.share !== share) this.kept.set(line, {share, values: smooth(line.mean, share)});
    return this.kept.get(line).values;
  }

  // Where the points lie that the cursor can be at: those of the first line that is drawn.
  positions(view) {
    const groups = this.groups(this.chart.bands, view), first = this.single(this.chart.lines, groups, view)[0];
    const xs = groups.length ? groups[0].x[view.axis] : first ? this.runs[first.run].x[view.axis] : [];
    return xs.filter(x => x !== null);
  }

  draw(view) {
    const width = Math.max(240, this.svg.getBoundingClientRect().width || this.frame.clientWidth - 14);
    const lines = this.lines(view), everywhere = lines.flatMap(line => [line.x[0], line.x.at(-1)]);
    const [from, to] = view.range ?? [Math.min(...everywhere), Math.max(...everywhere)];
    const [low, high] = this.limits(lines, from, to);
    this.left = from;
    this.scale = (width - EDGE.left - EDGE.right) / (to - from || 1);
    this.x = value => EDGE.left + (value - from) * this.scale;
    this.y = value => HEIGHT - EDGE.bottom - (value - low) / (high - low) * (HEIGHT - EDGE.top - EDGE.bottom);
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren();
    this.mark = null;
    make("title", {}, this.svg, this.caption);
    if (!lines.length) {
      make("text", {x: width / 2, y: HEIGHT / 2, "text-anchor": "middle"}, this.svg, "no run is switched on");
      this.drawCursor(view);
      return;
    }
    this.drawAxes(view, width, from, to, low, high);
    this.clip(width);
    for (const line of lines) this.drawBand(line);
    for (const line of lines) this.drawLine(line, view);
    this.drawExtras(view, width);
    this.mark = {lines, width, group: make("g", {}, this.plot)};
    this.drawCursor(view);
  }

  limits(lines, from, to) {
    const inside = lines.flatMap(line => line.x.flatMap((x, i) => x !== null && x >= from && x <= to && line.low[i] !== null
      ? [line.low[i], line.high[i]] : []));
    let low = inside.reduce((a, b) => Math.min(a, b), Infinity), high = inside.reduce((a, b) => Math.max(a, b), -Infinity);
    if (!inside.length) [low, high] = [0, 1];
    const room = (high - low) * 0.06 || Math.abs(high) * 0.06 || 1;
    low = this.chart.fromZero ? Math.min(0, low) : low - room;
    return [low, Math.min(high + room, this.chart.top === null ? Infinity : Math.max(this.chart.top + room / 4, low + room))];
  }

  drawAxes(view, width, from, to, low, high) {
    const axis = AXES[view.axis], [size, unit] = axis.unit(to), bottom = HEIGHT - EDGE.bottom;
    for (const value of ticks(low, high, 5)) {
      make("line", {class: "grid", x1: EDGE.left, x2: width - EDGE.right, y1: this.y(value), y2: this.y(value)}, this.svg);
      make("text", {x: EDGE.left - 6, y: this.y(value) + 4, "text-anchor": "end"}, this.svg, brief(value));
    }
    for (const value of ticks(from / size, (to > from ? to : from + 1) / size, Math.min(6, width / 80))) {
      if (view.axis === "step" && value % 1) continue;
      make("line", {class: "grid", x1: this.x(value * size), x2: this.x(value * size), y1: EDGE.top, y2: bottom}, this.svg);
      make("text", {x: this.x(value * size), y: bottom + 16, "text-anchor": "middle"}, this.svg, show(Number(value.toPrecision(6))));
    }
    make("path", {class: "axis", d: `M${EDGE.left} ${EDGE.top}V${bottom}H${width - EDGE.right}`}, this.svg);
    make("text", {x: 4, y: 14, class: "name"}, this.svg, this.chart.ylabel);
    make("text", {x: width - EDGE.right, y: HEIGHT - 6, "text-anchor": "end"}, this.svg, axis.title + (unit && ` (${unit.trim()})`));
  }

  // What lies outside of the axes while the reader looks at a part is not drawn.
  clip(width) {
    const part = {x: EDGE.left - 6, y: EDGE.top - 10, width: width - EDGE.left - EDGE.right + 12,
      height: HEIGHT - EDGE.bottom - EDGE.top + 14};
    this.plot = make("svg", {...part, viewBox: Object.values(part).join(" ")}, this.svg);
  }

  path(xs, ys) {
    let pen = "M";
    return xs.map((x, index) => {
      if (x === null || ys[index] === null) { pen = "M"; return ""; }
      const piece = `${pen}${this.x(x).toFixed(1)} ${this.y(ys[index]).toFixed(1)}`;
      pen = "L";
      return piece;
    }).join("");
  }

  drawBand(line) {
    if (line.members) {
      make("path", {class: "range", style: `fill: var(${line.color})`, d: this.area(line)}, this.plot);
      return;
    }
    // Of a point that stands for several steps, from its smallest to its largest value.
    const xs = line.x.flatMap(x => [x, x]), ys = line.x.flatMap((_, i) => [line.low[i], line.high[i]]);
    const style = `stroke: var(${line.color})`;
    make("path", {class: "raw", style, d: this.path(line.low === line.mean ? line.x : xs, line.low === line.mean ? line.mean : ys)}, this.plot);
  }

  // The area between the smallest and the largest values, in as many pieces as gaps make.
  area(line) {
    const pieces = [[]];
    line.x.forEach((x, index) => x === null || line.low[index] === null ? pieces.push([]) : pieces.at(-1).push(index));
    const at = (index, ys) => `${this.x(line.x[index]).toFixed(1)} ${this.y(ys[index]).toFixed(1)}`;
    return pieces.filter(piece => piece.length).map(piece => "M" + [...piece.map(index => at(index, line.high)),
      ...piece.toReversed().map(index => at(index, line.low))].join("L") + "Z").join("");
  }

  drawLine(line, view) {
    const {color, dash} = line, style = `stroke: var(${color})`, run = line.run ?? line.members.map(one => one.run);
    make("path", {class: "line", style, "stroke-dasharray": dash, d: this.path(line.x, line.smooth), "data-run": run}, this.plot);
    if (line.x.length === 1 && line.smooth[0] !== null)
      make("circle", {cx: this.x(line.x[0]), cy: this.y(line.smooth[0]), r: 3, style: `fill: var(${color})`}, this.plot);
  }

  drawExtras(view, width) {
    for (const level of this.chart.levels.filter(one => this.y(one) > EDGE.top && this.y(one) < HEIGHT - EDGE.bottom)) {
      make("line", {class: "level", x1: EDGE.left, x2: width - EDGE.right, y1: this.y(level), y2: this.y(level)}, this.plot);
      make("text", {x: width - EDGE.right - 4, y: this.y(level) - 4, "text-anchor": "end"}, this.plot, `target ${show(level)}`);
    }
    const groups = this.groups(this.chart.ringBands, view);
    for (const group of groups) {
      const {mean, low, high} = overRuns(group.members.map(one => one.mean)), style = `stroke: var(${group.color})`;
      group.x[view.axis].forEach((x, index) => {
        make("line", {class: "bar", style, x1: this.x(x), x2: this.x(x), y1: this.y(low[index]), y2: this.y(high[index])}, this.plot);
        make("circle", {class: "ring", style, r: 3.5, cx: this.x(x), cy: this.y(mean[index])}, this.plot);
      });
    }
    for (const ring of this.single(this.chart.rings, groups, view))
      ring.x[view.axis].forEach((x, index) => make("circle", {class: "ring", r: 3.5, cx: this.x(x), cy: this.y(ring.values[index]),
        style: `stroke: var(${this.runs[ring.run].color})`}, this.plot));
    for (const mark of this.chart.marks.filter(one => view.shown.has(one.run)))
      for (const x of mark.x[view.axis])
        make("path", {class: "failure", d: `M${this.x(x) - 5} ${EDGE.top - 9}h10l-5 9z`}, this.plot);
  }

  // The mark at the cursor, in place of the one before, over a chart that stays as it was drawn; and the values there as
  // text, for eyes and for screen readers.
  drawCursor(view) {
    this.mark?.group.replaceChildren();
    this.tip.hidden = !this.mark || view.cursor === null || view.active !== this;
    if (!this.mark || view.cursor === null) return;
    const {lines, width, group} = this.mark, axis = AXES[view.axis], at = this.x(view.cursor);
    if (at < EDGE.left || at > width - EDGE.right) { this.tip.hidden = true; return; }
    make("line", {class: "cursor", x1: at, x2: at, y1: EDGE.top, y2: HEIGHT - EDGE.bottom}, group);
    const rows = [];
    for (const line of lines) {
      const index = nearest(line.x, view.cursor), value = line.mean[index];
      if (index < 0 || value === null) continue;
      make("circle", {cx: this.x(line.x[index]), cy: this.y(line.smooth[index]), r: 3.5,
        style: `fill: var(${line.color})`}, group);
      const told = (mean, {low, high}) => show(mean[index]) + (line.members ? `, ${show(low[index])} to ${show(high[index])}` : "");
      const smooth = view.smoothing && !this.chart.exact ? ` (${told(line.smooth, line)})` : "";
      rows.push([line.color, `${line.label}: ${told(line.mean, line.raw ?? line)}${smooth}`]);
    }
    if (rows.length > MOST_TOLD) rows.push(["", `and ${rows.splice(MOST_TOLD).length} more: switch some off`]);
    const [size, unit] = axis.unit(view.cursor);
    this.tip.replaceChildren(...[["", `${axis.title} ${show(view.cursor / size)}${unit}`], ...rows].map(([color, text]) => {
      const row = document.createElement("div");
      row.textContent = text;
      if (color) row.style.borderColor = `var(${color})`;
      return row;
    }));
    if (this.tip.hidden) return;
    const room = this.frame.clientWidth - this.tip.offsetWidth - 8;
    this.tip.style.left = `${Math.max(0, Math.min(room, at > width / 2 ? at - this.tip.offsetWidth - 10 : at + 16))}px`;
  }

  // The position on the axis under a place of the screen.
  at(clientX) {
    const box = this.svg.getBoundingClientRect();
    return this.left + (clientX - box.left - EDGE.left) / this.scale;
  }
}
