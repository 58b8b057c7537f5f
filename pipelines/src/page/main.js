// The page: built once, then drawn anew as updates come.

const data = JSON.parse(document.getElementById("data").textContent);

/** Badge of a state; a report is read when the run may have gone on. */
function stateOf(head) {
  if (!data.live && head.state === "running") return "running when written";
  return head.state;
}

/** State of a run in a line: chip, name, state, progress, newest result, time left. */
class RunLine {
  constructor(index) {
    this.index = index;
    const toggle = () => {
      runs[index].shown = this.box.checked;
      page.draw();
    };
    this.box = element("input", { type: "checkbox", checked: true, "aria-label": "draw this run", on: { change: toggle } });
    this.swatch = element("i", { class: "swatch" });
    this.name = element("b", { class: "name" });
    this.badge = element("span", { class: "badge" });
    this.step = element("span", { class: "steps" });
    this.newest = element("span", { class: "newest" });
    this.left = element("span", { class: "left" });
    this.bar = element("span", { class: "done" });
    this.about = element("p", { class: "about" });
    this.reason = element("p", { class: "reason", hidden: true });
    const title = element("label", {}, this.box, this.swatch, this.name);
    const facts = element("span", { class: "facts" }, this.newest, this.step, this.left);
    this.line = element("div", { class: "run" }, element("div", { class: "first" }, title, this.badge, facts), element("div", { class: "progress" }, this.bar), this.about, this.reason);
  }

  draw(isAlone) {
    const { head, shown } = runs[this.index];
    const { name, description, path, state, reason, step, steps, left_s: left } = head;
    this.box.checked = shown;
    this.box.hidden = isAlone;
    this.swatch.hidden = isAlone;
    this.swatch.style.setProperty("--series", colour(`--series-${this.index % COLOURS}`));
    this.name.textContent = name;
    this.badge.textContent = stateOf(head);
    this.badge.className = `badge ${state}`;
    this.newest.textContent = head.newest ?? "no result yet";
    const [done, all] = head.warmup ?? [step ?? 0, steps];
    this.step.textContent = `${head.warmup ? "warm-up " : ""}step ${done}${all === null ? "" : ` of ${all}`}`;
    this.left.textContent = left === null || !data.live ? "" : `${duration(left)} left`;
    this.bar.style.setProperty("--done", `${steps ? Math.min(100, (100 * (step ?? 0)) / steps) : 0}%`);
    this.about.textContent = data.live ? `${description} · ${path}` : description;
    this.reason.hidden = !reason;
    this.reason.textContent = reason ?? "";
  }
}

const page = {
  lines: [],
  charts: data.figures.map((plan) => new Chart(plan, () => page.drawCharts())),
  newest: new Newest(),

  build() {
    this.runs = element("header", { class: "runs" });
    this.connection = element("p", { class: "connection", hidden: true });
    this.problems = element("section", { class: "problems", hidden: true });
    this.tiles = element("section", { class: "tiles", "aria-label": "Results" });
    this.advice = element("section", { class: "advice", hidden: true, "aria-label": "Advice" }, element("h2", {}, "Advice"), element("ul"));
    this.figures = element("section", { class: "charts", "aria-label": "Curves" }, ...this.charts.map((chart) => chart.figure));
    this.empty = element("p", { class: "empty" }, "The curves begin with the first step.");
    this.device = element("p", { class: "note" });
    this.gallery = card("Images", "The same noise each time, one row per class.", element("div", { class: "shots" }));
    this.before = card("Samples", "", element("div", { class: "wide" }));
    this.training = card("Completions of training", "The best and the worst completion of the groups that were written at the newest steps; samples.jsonl has all.", element("div", { class: "wide" }));
    this.log = card("Log", "Lines that the run printed.", element("div", { class: "wide log" }));
    this.config = element("section", { "aria-label": "Config" });
    const main = document.getElementById("page");
    main.replaceChildren(this.connection, this.runs, this.problems, this.tiles, this.advice, this.toolbar(), this.empty, this.figures, this.device, this.gallery, this.newest.section, this.before, this.training, this.log, this.config);
    new ResizeObserver(() => this.charts.forEach((chart) => chart.resize())).observe(this.figures);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.redraw());
  },

  toolbar() {
    const redraw = () => this.drawCharts();
    const check = (text, name) => {
      const set = (event) => {
        view[name] = event.target.checked;
        redraw();
      };
      return element("label", {}, element("input", { type: "checkbox", "data-set": name, on: { change: set } }), text);
    };
    const smooth = (event) => {
      view.smoothing = Number(event.target.value);
      redraw();
    };
    const slider = element("input", { type: "range", min: 0, max: 0.4, step: 0.02, value: view.smoothing, on: { input: smooth } });
    const zoom = (share) => () => {
      view.zoom = null;
      const [first, last] = stepsShown();
      if (share < 1) view.zoom = [last - (last - first) * share, last];
      redraw();
    };
    const part = (text, share) => element("button", { type: "button", "data-part": share, on: { click: zoom(share) } }, text);
    const steps = element("span", { class: "group" }, "steps:", part("all", 1), part("last half", 0.5), part("last tenth", 0.1));
    return element("nav", { class: "bar", "aria-label": "Charts" }, element("label", {}, "smoothing", slider), check("log y", "logY"), check("log steps", "logX"), steps, element("span", { class: "hint" }, "drag in a chart to zoom, double-click for all"));
  },

  /** Draws all of the page. */
  draw() {
    const known = runs.filter((run) => run);
    for (const { index } of known) {
      if (!this.lines[index]) {
        this.lines[index] = new RunLine(index);
        this.runs.append(this.lines[index].line);
      }
      this.lines[index].draw(known.length === 1);
    }
    const drawn = shownRuns();
    this.drawTitle(drawn);
    this.drawResults(drawn);
    this.drawAdvice(drawn);
    this.drawCharts();
    this.newest.draw();
    const alone = drawn.length === 1 ? drawn[0] : null;
    drawGallery(this.gallery, drawn);
    drawBeforeAndAfter(this.before, alone);
    drawTraining(this.training, alone);
    drawLog(this.log, drawn);
    this.drawConfigs(drawn);
  },

  drawTitle(drawn) {
    if (drawn.length !== 1) {
      document.title = `${drawn.length} runs · anyroll`;
      return;
    }
    const { name, state, step, steps } = drawn[0].head;
    const done = state === "running" && steps ? `${Math.floor((100 * (step ?? 0)) / steps)} % · ` : "";
    document.title = `${done}${name} · anyroll`;
  },

  /** Tiles of one run, or a table of several. */
  drawResults(drawn) {
    if (drawn.length === 1) {
      this.tiles.className = "tiles";
      this.tiles.replaceChildren(...drawn[0].head.tiles.map(({ name, value, change, direction, detail }) => {
        const changed = change === null ? null : element("span", { class: direction }, `${change} `);
        return element("div", { class: "tile" }, element("h2", {}, name), element("p", { class: "value" }, value), element("p", { class: "detail" }, changed, detail));
      }));
      return;
    }
    this.tiles.className = "wide";
    const names = [...new Set(drawn.flatMap((run) => run.head.tiles.map(({ name }) => name)))];
    const rows = drawn.map((run) => {
      const tile = (name) => run.head.tiles.find((it) => it.name === name);
      const cell = (it) => element("td", {}, it ? it.value : "–", it && it.change ? element("span", { class: it.direction }, ` ${it.change}`) : null);
      return element("tr", {}, runCell(run), ...names.map((name) => cell(tile(name))));
    });
    this.tiles.replaceChildren(table(["run", ...names], rows));
  },

  drawAdvice(drawn) {
    const all = drawn.flatMap((run) => run.head.advice.map((it) => ({ run, it })));
    this.advice.hidden = all.length === 0;
    const name = (run) => (drawn.length > 1 ? `${run.head.name}, ` : "");
    this.advice.querySelector("ul").replaceChildren(...all.map(({ run, it }) => element("li", {}, `${name(run)}step ${it.step}: ${it.text}`)));
  },

  drawCharts() {
    this.charts.forEach((chart) => chart.draw());
    this.empty.hidden = this.charts.some((chart) => !chart.figure.hidden);
    const has = (metric) => shownRuns().some((run) => run.steps.curves.has(metric));
    const isSilent = has("perf/resident_bytes") && !has("perf/device_utilization");
    this.device.textContent = isSilent ? "The devices of these runs do not report how busy they are." : "";
    this.device.hidden = !isSilent;
  },

  drawConfigs(drawn) {
    const key = drawn.map((run) => `${run.index} ${run.config}`).join("\n");
    if (this.configKey === key) return;
    this.configKey = key;
    this.config.replaceChildren(...drawn.map((run) => element("details", {}, element("summary", {}, drawn.length > 1 ? `Resolved config of ${run.head.name}` : "Resolved config"), textBlock(run.config ?? ""))));
  },

  /** Draws all anew, as after another choice of colours. */
  redraw() {
    this.charts.forEach((chart) => chart.forget());
    this.draw();
  },

  tell(text) {
    this.connection.hidden = text === "";
    this.connection.textContent = text;
  },

  tellProblems(problems) {
    this.problems.hidden = problems.length === 0;
    this.problems.replaceChildren(...problems.map((text) => element("p", {}, text)));
  },
};

/** Follows the server's events; the browser connects anew by itself, and then gets the whole runs again. */
function follow() {
  const events = new EventSource("events");
  let isDue = false;
  events.addEventListener("open", () => page.tell(""));
  events.addEventListener("error", () => page.tell("The connection to anyroll watch is lost: what is below may be old. Is it still running?"));
  events.addEventListener("run", (event) => {
    const { run, update } = JSON.parse(event.data);
    take(run, update);
    if (isDue) return;
    isDue = true;
    setTimeout(() => {
      isDue = false;
      page.draw();
    }, 50);
  });
  events.addEventListener("problems", (event) => page.tellProblems(JSON.parse(event.data)));
}

page.build();
data.updates.forEach((update, index) => take(index, update));
if (data.live) {
  page.tell("Connecting to anyroll watch …");
  follow();
} else {
  page.draw();
}
