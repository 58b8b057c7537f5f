// The runs as the updates tell them: the page's copy of what `follow/update.rs` sends.

/** Most rows and log lines that are kept of a run, as on the server. */
const MOST_ROWS = 200;
const MOST_LINES = 300;

/** Runs by index. */
const runs = [];

/** Takes an update of the run with this index. */
function take(index, update) {
  const shown = runs[index] ? runs[index].shown : runs.filter((run) => run).length < 8;
  if (update.reset || !runs[index]) {
    const track = () => ({ curves: new Map(), width: 1 });
    runs[index] = { index, shown, steps: track(), warmup: track(), notes: {}, rows: [], log: [], gallery: [] };
  }
  const run = runs[index];
  run.head = update.head;
  run.config = update.config ?? run.config;
  run.notes = update.notes ?? run.notes;
  run.beforeAndAfter = update.before_and_after ?? run.beforeAndAfter;
  run.training = update.training ?? run.training;
  run.gallery = update.gallery ?? run.gallery;
  run.rows = run.rows.concat(update.rows).slice(-MOST_ROWS);
  run.log = run.log.concat(update.log).slice(-MOST_LINES);
  takeCurves(run.steps, update.curves);
  takeCurves(run.warmup, update.warmup);
}

/** Points from the stretch `from` on replace those that were known. */
function takeCurves(track, { width, from, of }) {
  track.width = width;
  for (const [metric, points] of Object.entries(of)) {
    const known = track.curves.get(metric) ?? { at: [], mean: [], low: [], high: [] };
    let kept = known.at.length;
    while (kept > 0 && known.at[kept - 1] >= from) kept -= 1;
    const joined = (old, added) => old.slice(0, kept).concat(added ?? []);
    track.curves.set(metric, {
      at: joined(known.at, points.at),
      mean: joined(known.mean, points.mean),
      low: joined(known.low, points.low),
      high: joined(known.high, points.high),
    });
  }
}

/** Runs that are drawn. */
function shownRuns() {
  return runs.filter((run) => run && run.shown);
}

/**
 * Curves of a run, over its steps or over those of the warm-up, that a figure's series names, with their labels: `reward/{term}/mean` is every term's. A part in
 * braces stands for any text, without a slash unless the name is the user's.
 */
function matching(track, [pattern, label]) {
  if (!pattern.includes("{")) return track.curves.has(pattern) ? [{ metric: pattern, label }] : [];
  const escaped = pattern.replace(/[.*+?^$()|[\]\\]/g, "\\$&").replace(/\{([^}]*)\}/g, (_, name) => `(?<${name}>${["domain", "metric"].includes(name) ? ".+" : "[^/]+"})`);
  const found = [];
  for (const metric of track.curves.keys()) {
    const match = new RegExp(`^${escaped}$`).exec(metric);
    if (match) found.push({ metric, label: label.replace(/\{([^}]*)\}/g, (_, name) => match.groups[name]) });
  }
  return found;
}
