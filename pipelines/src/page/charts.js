// Charts of the runs' curves, drawn with uPlot.

/** What the toolbar sets, for all charts. */
const view = { smoothing: 0.08, logX: false, logY: false, zoom: null };

/** Dashes of a figure's curves where colours tell runs apart. */
const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
const COLOURS = 8;
const HEIGHT = 210;
/** Distances of the labels of steps, which are whole. */
const DISTANCES = [1, 2, 5].flatMap((digit) => [...Array(9).keys()].map((power) => digit * 10 ** power)).sort((a, b) => a - b);

const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

/** Metrics of the warm-up are over its own steps. */
const trackOf = (plan) => (plan.series[0][0].startsWith("warmup/") ? "warmup" : "steps");

/** Curves of a figure: each with its run, metric, label, colour, dash and points. */
function curvesOf(plan) {
  const drawn = shownRuns();
  const curves = [];
  for (const run of drawn) {
    const track = run[trackOf(plan)];
    const matched = plan.series.flatMap((series) => matching(track, series));
    if (matched.length < plan.least) continue;
    matched.forEach(({ metric, label }, place) => {
      const several = drawn.length > 1;
      const hue = several ? run.index : place;
      const name = several ? `${run.head.name} · ${label}` : label;
      const stroke = colour(`--series-${hue % COLOURS}`);
      const dash = several ? DASHES[place % DASHES.length] : [];
      curves.push({ run, metric, label: name, stroke, dash, width: track.width, points: pointsOf(track, metric, plan.unit) });
    });
  }
  return curves.filter(({ points }) => points.mean.some((value) => value !== null));
}

/** Points in the figure's unit. On a logarithmic axis only what is above 0 has a place. */
function pointsOf(track, metric, unit) {
  const curve = track.curves.get(metric);
  const kept = curve.at.map((at, index) => index).filter((index) => !view.logX || curve.at[index] > 0);
  const placed = (value) => (value === null || (view.logY && value <= 0) ? null : value / unit);
  const of = (values) => (values.length ? kept.map((index) => placed(values[index])) : null);
  const x = kept.map((index) => curve.at[index] * track.width);
  return { x, mean: of(curve.mean), low: of(curve.low), high: of(curve.high) };
}

/** Steps of all drawn runs, or the part that was zoomed to. */
function stepsShown(name = "steps") {
  if (view.zoom && name === "steps") return view.zoom;
  let [first, last] = [Infinity, 0];
  for (const run of shownRuns()) {
    const { curves, width } = run[name];
    for (const { at } of curves.values()) {
      if (!at.length) continue;
      first = Math.min(first, at[0] * width);
      last = Math.max(last, at[at.length - 1] * width);
    }
  }
  if (!Number.isFinite(first)) first = 0;
  if (view.logX) first = Math.max(1, first);
  return [first, Math.max(last, first + 1)];
}

/** A figure on the page, which is hidden without curves. */
class Chart {
  constructor(plan, redrawAll) {
    this.plan = plan;
    this.track = trackOf(plan);
    this.redrawAll = redrawAll;
    this.legend = element("ul");
    this.note = element("p");
    this.place = element("div", { class: "plot" });
    this.flat = element("p", { class: "flat" });
    this.step = element("span", { class: "step" });
    const caption = element("figcaption", {}, element("h2", {}, plan.title), this.step, this.note, this.legend);
    this.figure = element("figure", { hidden: true, "data-figure": plan.title }, caption, this.flat, this.place);
  }

  /** Draws the present curves. */
  draw() {
    this.curves = curvesOf(this.plan);
    this.figure.hidden = this.curves.length === 0;
    if (this.figure.hidden) return this.forget();
    const metrics = [...new Set(this.curves.map(({ metric }) => metric))];
    const notes = metrics.map((metric) => this.curves.find((it) => it.metric === metric).run.notes[metric]);
    this.note.textContent = [...new Set(notes.filter((note) => note))].join(" ");
    this.showValues(null);
    if (this.tellIfFlat()) return this.forget();
    const { series, bands, tables } = this.layers();
    const data = uPlot.join(tables);
    const key = JSON.stringify([this.curves.map(({ label, stroke }) => [label, stroke]), series.length, view.logX, view.logY]);
    if (this.plot && this.key === key) {
      this.drawing = true;
      this.plot.setData(data, false);
      this.zoom();
      this.drawing = false;
    } else {
      this.forget();
      this.key = key;
      this.drawing = true;
      this.plot = new uPlot(this.options(series, bands), data, this.place);
      this.zoom();
      this.drawing = false;
      this.listenToFingers();
    }
    return undefined;
  }

  /** A figure whose values are all 0 has no curve to look at. */
  tellIfFlat() {
    const count = Math.max(...this.curves.map(({ points }) => points.x.length));
    const isFlat = this.curves.every(({ points }) => [points.mean, points.low ?? [], points.high ?? []].flat().every((value) => value === 0));
    this.flat.textContent = isFlat ? `0 at ${count === 1 ? "the one point" : `each of ${count} points`} so far: no curve is drawn` : "";
    return isFlat;
  }

  /** Series, bands and data of the curves: raw points, their extremes and the trend, or stacked areas. */
  layers() {
    const [series, bands, tables] = [[{}], [], []];
    const isStacked = this.plan.kind === "stacked" && shownRuns().length === 1 && !view.logY;
    if (isStacked) return this.stacked();
    const isSmooth = this.plan.kind === "noisy" || this.plan.kind === "stacked";
    for (const curve of this.curves) {
      const { points, stroke, dash } = curve;
      const add = (values, look) => {
        tables.push([points.x, values]);
        series.push({ spanGaps: false, points: { show: false }, ...look });
        return series.length - 1;
      };
      if (points.low) {
        const [high, low] = [points.high, points.low].map((values) => add(values, { stroke: "transparent" }));
        bands.push({ series: [high, low], fill: `${stroke}2e` });
      }
      const isLone = points.x.length === 1;
      const marked = this.plan.kind === "marked" || isLone;
      const marks = marked ? { show: true, size: 6, fill: stroke, stroke } : { show: false };
      const drawsTrend = isSmooth && view.smoothing > 0 && points.x.length > 3;
      const line = { stroke: drawsTrend ? `${stroke}55` : stroke, width: drawsTrend ? 1 : 2, dash, points: marks };
      add(points.mean, line);
      if (drawsTrend) add(trend(points.mean, view.smoothing), { stroke, width: 2, dash });
    }
    return { series, bands, tables };
  }

  /** Trends, each upon the sum of those before it, at the steps where all have a value. */
  stacked() {
    const [series, bands, tables] = [[{}], [], []];
    const maps = this.curves.map(({ points }) => new Map(points.x.map((x, index) => [x, points.mean[index]])));
    const whole = (x) => maps.every((map) => map.has(x) && map.get(x) !== null);
    const x = this.curves[0].points.x.filter(whole);
    let below = x.map(() => 0);
    this.curves.forEach((curve, index) => {
      const part = x.map((step) => maps[index].get(step));
      const smooth = view.smoothing > 0 && x.length > 3 ? trend(part, view.smoothing) : part;
      below = below.map((sum, at) => sum + smooth[at]);
      tables.push([x, below]);
      const marks = { show: x.length === 1, size: 6, fill: curve.stroke, stroke: curve.stroke };
      series.push({ stroke: curve.stroke, width: 1.25, points: marks, fill: index === 0 ? `${curve.stroke}4d` : undefined });
      if (index > 0) bands.push({ series: [index + 1, index], fill: `${curve.stroke}4d` });
    });
    return { series, bands, tables };
  }

  options(series, bands) {
    const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui, sans-serif" };
    const logarithmic = (isLog) => (isLog ? { distr: 3, log: 10 } : { distr: 1 });
    const values = (_, splits) => splits.map(short);
    return {
      width: Math.max(200, this.place.clientWidth),
      height: HEIGHT,
      scales: {
        x: { time: false, ...logarithmic(view.logX), auto: false, range: () => stepsShown(this.track) },
        y: { ...logarithmic(view.logY), range: (_, low, high) => this.heights(low, high) },
      },
      axes: [
        { ...axis, size: 28, values, ...(view.logX ? {} : { incrs: DISTANCES }) },
        { ...axis, size: 52, values },
      ],
      series,
      bands,
      legend: { show: false },
      cursor: {
        sync: { key: this.track, scales: ["x", null], filters: { pub: (kind) => kind === "mousemove" || kind === "mouseleave" } },
        drag: { x: this.track === "steps", y: false, setScale: false },
        points: { size: 7 },
        focus: { prox: -1 },
      },
      hooks: {
        setCursor: [(plot) => this.showValues(plot.cursor.idx)],
        setSelect: [(plot) => this.zoomTo(plot)],
      },
    };
  }

  /** Limits of the vertical axis for values from `low` to `high`. */
  heights(low, high) {
    if (low === null || high === null || !Number.isFinite(low)) return view.logY ? [0.1, 1] : [0, 1];
    if (view.logY) return uPlot.rangeLog(low, high, 10, false);
    if (low === high) {
      const pad = Math.abs(low) / 2 || 1;
      [low, high] = [low - pad, high + pad];
    }
    const room = (high - low) * 0.05;
    if (this.plan.range === "unit") return [Math.min(0, low), Math.max(1, high) + 0.02];
    if (this.plan.range === "fromzero" && low >= 0) return [0, high + room];
    return [low - room, high + room];
  }

  /** Values of the curves at the point under the pointer, or the newest ones. */
  showValues(index) {
    const x = index === null || index === undefined || !this.plot ? null : this.plot.data[0][index];
    const entries = this.curves.map(({ label, stroke, dash, points }) => {
      let at = points.x.length - 1;
      while (x !== null && at > 0 && points.x[at] > x) at -= 1;
      while (at > 0 && points.mean[at] === null) at -= 1;
      const swatch = element("i", { style: { "--series": stroke }, class: dash.length ? "dashed" : "" });
      return element("li", {}, swatch, label, " ", element("b", {}, number(points.mean[at])));
    });
    this.legend.replaceChildren(...entries);
    const width = Math.max(...this.curves.map((curve) => curve.width));
    const steps = width > 1 ? `mean of steps ${x} to ${x + width - 1}` : `step ${x}`;
    this.step.textContent = x === null ? "" : steps;
  }

  /** Zooms all charts to what was selected in this one. */
  zoomTo(plot) {
    if (this.drawing || plot.select.width < 8) return;
    const { left, width } = plot.select;
    view.zoom = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.redrawAll();
  }

  zoom() {
    const [min, max] = stepsShown(this.track);
    this.plot.setScale("x", { min, max });
  }

  /** A finger moves the cursor; the page scrolls up and down below it as usual. */
  listenToFingers() {
    const move = (event) => {
      const box = this.plot.over.getBoundingClientRect();
      const { clientX, clientY } = event.touches[0];
      this.plot.setCursor({ left: clientX - box.left, top: clientY - box.top }, true, true);
    };
    this.plot.over.addEventListener("touchstart", move, { passive: true });
    this.plot.over.addEventListener("touchmove", move, { passive: true });
    this.plot.over.addEventListener("dblclick", () => {
      view.zoom = null;
      this.redrawAll();
    });
  }

  resize() {
    const width = this.place.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  forget() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    this.key = null;
  }
}
