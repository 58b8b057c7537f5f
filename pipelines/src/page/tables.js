// Completions, the log, pictures and the config: texts of the runs.

/** Most rows of the table of the newest completions that are drawn at once. */
const MOST_DRAWN = 60;

const textBlock = (text, kind = "") => element("pre", { class: kind }, text === "" ? "(empty)" : text);

/** A card with a heading, hidden until it has content. */
function card(title, note, ...content) {
  const told = element("p", { class: "note" }, note);
  return element("section", { hidden: true, "aria-label": title }, element("h2", {}, title), told, ...content);
}

function table(headings, rows) {
  const head = element("thead", {}, element("tr", {}, ...headings.map((text) => element("th", {}, text))));
  return element("table", {}, head, element("tbody", {}, ...rows));
}

/** Name of a run with its colour, where several are shown. */
function runCell(run) {
  const swatch = element("i", { class: "swatch", style: { "--series": colour(`--series-${run.index % COLOURS}`) } });
  return element("td", {}, swatch, run.head.name);
}

/** The newest completions, with a search. */
class Newest {
  constructor() {
    this.search = element("input", { type: "search", placeholder: "search prompts, completions and answers", "aria-label": "search completions", on: { input: () => this.draw() } });
    const phases = [["", "all"], ["train", "training"], ["eval", "evaluation"]];
    this.phase = element("select", { "aria-label": "part of the run", on: { change: () => this.draw() } }, ...phases.map(([value, text]) => element("option", { value }, text)));
    this.wide = element("div", { class: "wide" });
    this.section = card("Newest completions", "", element("div", { class: "bar" }, this.search, this.phase), this.wide);
  }

  draw() {
    const drawn = shownRuns();
    const all = drawn.flatMap((run) => run.rows.map((row, place) => ({ run, row, place })));
    all.sort((a, b) => b.row.step - a.row.step || b.place - a.place);
    this.section.hidden = all.length === 0;
    const sought = this.search.value.toLowerCase();
    const isOfPhase = ({ phase }) => !this.phase.value || (phase === "train") === (this.phase.value === "train");
    const has = ({ prompt, completion, answer, columns }) => [prompt, completion, answer, ...Object.values(columns)].some((text) => text.toLowerCase().includes(sought));
    const found = all.filter(({ row }) => isOfPhase(row) && has(row));
    const newest = found.slice(0, MOST_DRAWN);
    const logged = [...new Set(newest.flatMap(({ row }) => Object.keys(row.columns)))];
    const rows = newest.map(({ run, row }) => {
      const verdict = row.reward >= 1 ? "right" : "wrong";
      const mark = element("span", { class: "mark", title: verdict }, row.reward >= 1 ? "✓" : "✗");
      const step = element("td", {}, String(row.step), element("br"), element("span", { class: "reward" }, row.phase));
      const completion = element("td", { class: verdict }, mark, textBlock(row.completion), element("span", { class: "reward" }, row.facts));
      const texts = [element("td", {}, textBlock(row.prompt)), completion, element("td", {}, textBlock(row.answer)), ...logged.map((name) => element("td", {}, name in row.columns ? textBlock(row.columns[name]) : "–"))];
      return element("tr", {}, drawn.length > 1 ? runCell(run) : null, step, ...texts);
    });
    const headings = ["step", "prompt", "completion", "right answer", ...logged];
    this.wide.replaceChildren(table(drawn.length > 1 ? ["run", ...headings] : headings, rows));
    const shown = Math.min(found.length, MOST_DRAWN);
    this.section.querySelector(".note").textContent = `${shown} of ${found.length} that match, of the newest ${all.length} that were written; samples.jsonl has all.`;
  }
}

/** The same prompts before and after training. */
function drawBeforeAndAfter(section, run) {
  const content = run && run.beforeAndAfter;
  section.hidden = !content;
  if (!content) return;
  const cell = ({ verdict, completion, turns, reward }) => {
    if (verdict === "none") return element("td", {}, "–");
    const mark = element("span", { class: "mark", title: verdict }, verdict === "right" ? "✓" : "✗");
    const of = (turn) => [textBlock(turn.text), turn.observation === null ? null : textBlock(turn.observation, "observation")];
    const texts = turns.length ? turns.flatMap(of) : [textBlock(completion)];
    return element("td", { class: verdict }, mark, ...texts, reward ? element("span", { class: "reward" }, reward) : null);
  };
  const rows = content.rows.map(({ prompt, answer, cells }) => element("tr", {}, element("td", {}, textBlock(prompt)), element("td", {}, textBlock(answer)), ...cells.map(cell)));
  const headings = ["prompt", "right answer", content.before, content.after].filter((text) => text);
  section.querySelector(".note").textContent = content.note;
  section.querySelector(".wide").replaceChildren(table(headings, rows));
}

/** The best and the worst completion of groups of the newest steps. */
function drawTraining(section, run) {
  const content = run && run.training;
  section.hidden = !content;
  if (!content) return;
  const cell = ({ completion, facts }) => element("td", {}, textBlock(completion), element("span", { class: "reward" }, facts));
  const rows = content.rows.map(({ step, prompt, answer, cells }) => element("tr", {}, element("td", {}, String(step)), element("td", {}, textBlock(prompt)), element("td", {}, textBlock(answer)), ...cells.map(cell)));
  section.querySelector(".wide").replaceChildren(table(["step", "prompt", "right answer", "best", "worst"], rows));
}

function drawGallery(section, drawn) {
  const shots = drawn.flatMap((run) => run.gallery.map((shot) => ({ run, shot })));
  section.hidden = shots.length === 0;
  const name = (run) => (drawn.length > 1 ? `${run.head.name}, ` : "");
  const figures = shots.map(({ run, shot }) => element("figure", {}, element("figcaption", {}, `${name(run)}step ${shot.step}`), element("img", { alt: `Images after step ${shot.step}`, src: `data:image/png;base64,${shot.png}` })));
  section.querySelector(".shots").replaceChildren(...figures);
}

function drawLog(section, drawn) {
  const lines = drawn.flatMap((run) => run.log.map((line) => ({ run, line })));
  lines.sort((a, b) => (a.line.time < b.line.time ? -1 : a.line.time > b.line.time ? 1 : 0));
  section.hidden = lines.length === 0;
  const place = section.querySelector(".log");
  const isAtEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 8;
  const name = (run) => (drawn.length > 1 ? `${run.head.name}  ` : "");
  const clock = (time) => new Date(time).toLocaleTimeString();
  place.replaceChildren(...lines.map(({ run, line }) => element("div", { class: line.kind }, element("time", { datetime: line.time }, clock(line.time)), `${name(run)}${line.text}`)));
  if (isAtEnd) place.scrollTop = place.scrollHeight;
}
