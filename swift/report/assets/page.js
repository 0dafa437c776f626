// The controls of the page: which runs, which axis, how smooth, which part; and the keys and the pointer in charts.
{
  const {runs, charts} = JSON.parse(document.getElementById("data").textContent);
  const drawn = [...document.querySelectorAll("figure[data-chart]")].map(figure => new Chart(
    figure.querySelector(".frame"), charts[figure.dataset.chart], runs, figure.querySelector("figcaption").textContent));
  const bar = document.getElementById("controls"), told = document.getElementById("told");
  const view = {axis: "step", smoothing: 0.05, shown: new Set(runs.keys()), apart: false, range: null, cursor: null, active: null};
  let start = null;

  const draw = () => {
    drawn.forEach(chart => chart.draw(view));
    bar.querySelector("[name=whole]").disabled = view.range === null;
  };
  const mark = () => drawn.forEach(chart => chart.drawCursor(view));
  const whole = () => { view.range = null; draw(); };

  bar.hidden = !drawn.length;
  for (const box of bar.querySelectorAll("[name=run]")) box.addEventListener("change", () => {
    view.shown[box.checked ? "add" : "delete"](Number(box.value));
    draw();
  });
  for (const [name, isOn] of [["none", false], ["all", true]]) bar.querySelector(`[name=${name}]`)?.addEventListener("click", () => {
    for (const box of bar.querySelectorAll("[name=run]")) box.checked = isOn;
    view.shown = new Set(isOn ? runs.keys() : []);
    draw();
  });
  bar.querySelector("[name=apart]")?.addEventListener("change", event => { view.apart = event.target.checked; draw(); });
  const axis = bar.querySelector("[name=axis]");
  for (const option of axis.options) option.disabled = !runs.every(run => option.value in run.x || !run.x.step.length);
  axis.addEventListener("change", () => { Object.assign(view, {axis: axis.value, range: null, cursor: null}); draw(); });
  const smoothing = bar.querySelector("[name=smoothing]");
  smoothing.addEventListener("input", () => { view.smoothing = smoothing.value / 100; draw(); });
  bar.querySelector("[name=whole]").addEventListener("click", whole);

  function zoom(chart, factor) {
    const all = chart.positions(view), [from, to] = view.range ?? [all[0], all.at(-1)], middle = view.cursor ?? (from + to) / 2;
    const range = [middle - (middle - from) * factor, middle + (to - middle) * factor];
    if (range[1] - range[0] < (all.at(-1) - all[0]) / 1e6) return;
    view.range = range[0] <= all[0] && range[1] >= all.at(-1) ? null : range;
  }

  function press(chart, event) {
    const all = chart.positions(view), step = event.shiftKey ? 10 : 1, index = view.cursor === null ? -1 : nearest(all, view.cursor);
    const go = to => { view.cursor = all[Math.max(0, Math.min(all.length - 1, to))] ?? null; };
    const keys = {
      ArrowRight: () => go(index + step), ArrowLeft: () => go(index - step), Home: () => go(0), End: () => go(all.length - 1),
      "+": () => zoom(chart, 0.5), "=": () => zoom(chart, 0.5), "-": () => zoom(chart, 2), 0: () => { view.range = null; },
      Escape: () => { view.range = view.cursor = null; },
    };
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey || !all.length) return;
    event.preventDefault();
    view.active = chart;
    const before = view.range;
    keys[event.key]();
    (view.range === before ? mark : draw)();
    told.textContent = [...chart.tip.children].map(row => row.textContent).join("; ");
  }

  for (const chart of drawn) {
    const {svg} = chart;
    const band = document.createElement("div");
    band.className = "band";
    chart.frame.append(band);
    svg.addEventListener("keydown", event => press(chart, event));
    svg.addEventListener("dblclick", whole);
    svg.addEventListener("pointerdown", event => { if (event.button) return; start = event.clientX; svg.setPointerCapture(event.pointerId); });
    svg.addEventListener("pointermove", event => {
      const all = chart.positions(view), index = nearest(all, chart.at(event.clientX));
      Object.assign(view, {cursor: all[index] ?? null, active: chart});
      mark();
      const left = svg.getBoundingClientRect().left - chart.frame.getBoundingClientRect().left;
      band.style.left = `${Math.min(start, event.clientX) - svg.getBoundingClientRect().left + left}px`;
      band.style.width = start === null ? 0 : `${Math.abs(event.clientX - start)}px`;
    });
    svg.addEventListener("pointerup", event => {
      const [one, other] = [start, event.clientX].map(x => chart.at(x));
      const isDragged = start !== null && Math.abs(event.clientX - start) > 8;
      start = null;
      band.style.width = 0;
      if (!isDragged) return;
      view.range = [Math.min(one, other), Math.max(one, other)];
      draw();
    });
    svg.addEventListener("pointercancel", () => { start = null; band.style.width = 0; });
    svg.addEventListener("pointerleave", () => { if (start === null) { view.cursor = null; mark(); } });
    svg.addEventListener("blur", () => { view.cursor = null; mark(); });
  }
  // Room for the controls above what is scrolled to, where they stay at the top.
  const room = () => { document.documentElement.style.scrollPaddingTop = getComputedStyle(bar).position === "sticky"
    ? `${bar.offsetHeight + 8}px` : ""; };
  new ResizeObserver(() => { draw(); room(); }).observe(document.body);
  draw();
}
