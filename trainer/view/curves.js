// The curves of all runs: a panel for each metric, with marks where a run started again, failed, or saved.

const OVERVIEW = [
  "reward/mean", "val/accuracy", "val/reward/mean", "sft/loss", "val/loss", "response_length/mean", "policy/kl",
  "policy/entropy", "policy/clip_frac", "policy/grad_norm", "reward/zero_std_frac", "response_length/clip_ratio",
  "rollout/logprob_diff_mean", "critic/explained_variance", "rollout/staleness_mean", "time/step", "perf/tokens_per_s",
];
const TERM = /^(val\/)?reward\/[^/]+\/mean$/, MOST_TERMS = 6;
const WIDTH = 380, HEIGHT = 190, LEFT = 46, RIGHT = 8, TOP = 8, BOTTOM = 22;
const MANY = 200;
const KINDS = { restart: "restarts", incident: "incidents", checkpoint: "checkpoints" };

function curvesTab() {
  const names = [...new Set(RUNS.flatMap((run) => Object.keys(run.curves)))].sort();
  const panels = el("div", { id: "panels" });
  const search = el("input", {
    id: "find", type: "search", placeholder: "metrics", value: STATE.find,
    input: later(() => change({ find: search.value }, draw), 120),
  });
  const hidden = new Set(STATE.hide.split(",").filter(Boolean));
  const toggle = (word) => (on) => {
    on ? hidden.delete(word) : hidden.add(word);
    change({ hide: [...hidden].join(",") }, draw);
  };
  const kinds = Object.entries(KINDS).filter(([kind]) => RUNS.some((run) => run.marks.some((mark) => mark.kind === kind)));
  const legend = RUNS.length < 2 ? [] : RUNS.map((run, i) =>
    el("label", { class: `tick run${i % COLOURS}` }, checkbox(!hidden.has(`r${i}`), toggle(`r${i}`)), swatch(i), run.name));

  function draw() {
    const runs = RUNS.map((run, i) => [run, i]).filter(([, i]) => !hidden.has(`r${i}`));
    const marks = new Set(Object.keys(KINDS).filter((kind) => !hidden.has(kind)));
    const wanted = STATE.find.trim().toLowerCase();
    if (wanted) {
      const found = names.filter((name) => name.toLowerCase().includes(wanted));
      fill(panels, section(`${found.length} metrics`, found, runs, marks, true));
      return;
    }
    const terms = names.filter((name) => TERM.test(name)).slice(0, MOST_TERMS);
    const first = OVERVIEW.flatMap((name) => name === "reward/mean" ? [name, ...terms] : name)
      .filter((name) => names.includes(name));
    const groups = new Map();
    for (const name of names) {
      const group = name.split("/")[0];
      groups.set(group, [...(groups.get(group) || []), name]);
    }
    fill(panels, section("overview", first, runs, marks, true),
      [...groups].map(([group, some]) => section(`${group} (${some.length})`, some, runs, marks, false)));
  }

  draw();
  const boxes = kinds.map(([kind, text]) => tick(`show-${kind}`, text, !hidden.has(kind), toggle(kind)));
  return el("section", { id: "curves" }, adviceBox(), el("div", { class: "bar" }, search, boxes, legend),
    el("div", { id: "best" }, RUNS.map((run, i) => bestOf(run) ? el("div", {}, RUNS.length > 1 ? swatch(i) : null,
      `best ${bestOf(run)}`) : null)), panels);
}

/** Return the best value of the metric that runs are compared by, as a text; "": no step has measured it. */
function bestOf(run) {
  const [metric, mode] = run.compared, [steps, all] = entryOf(run.curves, metric) || [[], []];
  const values = all.filter((value) => value !== null), better = mode === "min" ? Math.min : Math.max;
  if (!values.length) return "";
  const best = values.reduce((a, b) => better(a, b)), step = steps[all.indexOf(best)];
  return `${metric} ${figure(best)} at ${step === 0 ? "the start" : `step ${step}`}`;
}

function checkbox(value, action) {
  const box = el("input", { type: "checkbox", change: () => action(box.checked) });
  box.checked = value;
  return box;
}

const swatch = (i) => el("span", { class: `swatch run${i % COLOURS}` });

function adviceBox() {
  const lines = RUNS.flatMap((run, i) => run.advice.map((one) => [run, i, one]));
  const notes = DATA.notes.map((note) => el("li", {}, note));
  if (!lines.length && !notes.length) return null;
  return el("div", { class: "advice", id: "advice" }, el("ul", {},
    lines.map(([run, i, one]) => el("li", { class: "warning" }, RUNS.length > 1 ? swatch(i) : null,
      RUNS.length > 1 ? `${run.name}: ` : "", `steps ${one.steps[0]} to ${one.steps[1]}: ${one.text}`)), notes));
}

/** Return panels below a title. A closed section draws them when it is opened. */
function section(title, names, runs, marks, open) {
  const details = el("details"), grid = el("div", { class: "grid" });
  const draw = () => { if (!grid.firstChild) grid.append(...names.map((name) => panel(name, runs, marks))); };
  details.open = keep(details, `section ${title.split(" (")[0]}`).open ?? open;
  if (details.open) draw();
  details.addEventListener("toggle", draw);
  details.append(el("summary", {}, title), grid);
  return details;
}

/** Return the panel of a metric: its curves, axes and marks, and what the pointer is at. */
function panel(name, runs, marks) {
  const lines = [];
  for (const [run, i] of runs) {
    const curve = entryOf(run.curves, name);
    if (curve) lines.push({ i, steps: curve[0], values: curve[1], shown: shownOf(curve[1]) });
  }
  const finite = lines.flatMap((line) => line.values.filter((value) => value !== null));
  const [unit, meaning] = entryOf(DATA.metrics, name) || ["", ""];
  const steps = runs.flatMap(([run]) => Object.values(run.curves).flatMap((one) => [one[0][0], one[0][one[0].length - 1]]))
    .concat(lines.flatMap((line) => [line.steps[0], line.steps[line.steps.length - 1]]));
  const low = steps.reduce((a, b) => Math.min(a, b), Infinity), high = steps.reduce((a, b) => Math.max(a, b), -Infinity);
  let bottom = finite.reduce((a, b) => Math.min(a, b), Infinity), top = finite.reduce((a, b) => Math.max(a, b), -Infinity);
  if (!finite.length) [bottom, top] = [0, 1];
  if (bottom === top) [bottom, top] = [bottom - (Math.abs(bottom) || 1) / 2, top + (Math.abs(top) || 1) / 2];
  const margin = 0.05 * (top - bottom);
  [bottom, top] = [bottom - margin, top + margin];
  const x = (step) => LEFT + (WIDTH - LEFT - RIGHT) * (high > low ? (step - low) / (high - low) : 0.5);
  const y = (value) => HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * (value - bottom) / (top - bottom);
  const svg = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": name });
  for (const value of ticks(bottom, top, 4)) {
    svg.append(el("line", { class: "rule", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    svg.append(el("text", { class: "axis", x: LEFT - 5, y: y(value) + 4, "text-anchor": "end" }, short(value)));
  }
  for (const step of ticks(low, high, 5).filter(Number.isInteger)) {
    svg.append(el("text", { class: "axis", x: x(step), y: HEIGHT - 6, "text-anchor": "middle" }, String(step)));
  }
  for (const [run, i] of runs) drawMarks(svg, run, i, marks, x, low, high);
  for (const line of lines) drawLine(svg, line, x, y);
  const readout = el("div", { class: "readout" });
  const cursor = el("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, x1: -9, x2: -9 });
  svg.append(cursor);
  const stepAt = (event) => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) * WIDTH / box.width;
    return Math.min(high, Math.max(low, Math.round(low + (high - low) * (at - LEFT) / (WIDTH - LEFT - RIGHT))));
  };
  svg.addEventListener("pointermove", (event) => {
    const step = stepAt(event);
    cursor.setAttribute("x1", x(step));
    cursor.setAttribute("x2", x(step));
    fill(readout, `step ${step}: `, lines.map((line) =>
      el("span", {}, RUNS.length > 1 ? swatch(line.i) : null, figure(valueAt(line, step)), " ")));
  });
  const rest = () => {
    cursor.setAttribute("x1", -9);
    cursor.setAttribute("x2", -9);
    fill(readout, lines.map((line) =>
      el("span", {}, RUNS.length > 1 ? swatch(line.i) : null, figure(line.values[line.values.length - 1]), " ")), unit);
  };
  svg.addEventListener("pointerleave", rest);
  svg.addEventListener("click", (event) => {
    const box = svg.getBoundingClientRect(), scale = WIDTH / box.width;
    const distance = (line) => distanceTo(line, scale * (event.clientX - box.left), scale * (event.clientY - box.top), x, y);
    const [nearest] = lines.map((line) => [line.i, distance(line)]).sort((a, b) => a[1] - b[1]);
    if (nearest) goTo(nearest[0], stepAt(event));
  });
  rest();
  return el("figure", { "data-metric": name }, el("figcaption", { title: meaning }, name), svg, readout);
}

function valueAt(line, step) {
  let low = 0, high = line.steps.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    line.steps[middle] <= step ? low = middle : high = middle - 1;
  }
  return line.values[low];
}

/** Return the values that a curve is drawn through: of many, a running mean. */
function shownOf(values) {
  return values.length > MANY ? smooth(values, Math.max(1, Math.floor(values.length / 50))) : values;
}

/** Return how far a point of the panel is from a curve. */
function distanceTo({ steps, shown }, left, top, x, y) {
  let least = Infinity, last = null;
  shown.forEach((value, k) => {
    const next = value === null ? null : [x(steps[k]), y(value)];
    if (next) {
      const [fromX, fromY] = last || next, byX = next[0] - fromX, byY = next[1] - fromY, square = byX * byX + byY * byY;
      const along = square ? Math.min(1, Math.max(0, ((left - fromX) * byX + (top - fromY) * byY) / square)) : 0;
      least = Math.min(least, Math.hypot(left - fromX - along * byX, top - fromY - along * byY));
    }
    last = next;
  });
  return least;
}

/** Draw a curve: with dots if it has few points; a running mean over the values themselves if it has many. */
function drawLine(svg, { i, steps, values, shown }, x, y) {
  const colour = `curve run${i % COLOURS}`;
  if (shown !== values) svg.append(el("path", { class: `${colour} raw`, d: path(steps, values, x, y) }));
  svg.append(el("path", { class: colour, d: path(steps, shown, x, y) }));
  if (values.length <= 30) {
    values.forEach((value, k) => {
      if (value !== null) svg.append(el("circle", { class: `dot run${i % COLOURS}`, cx: x(steps[k]), cy: y(value), r: 2.2 }));
    });
  }
}

function path(steps, values, x, y) {
  let d = "", pen = false;
  values.forEach((value, k) => {
    if (value === null) pen = false;
    else {
      d += `${pen ? "L" : "M"}${x(steps[k]).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = true;
    }
  });
  return d;
}

function smooth(values, width) {
  const sums = [0], counts = [0];
  for (const value of values) {
    sums.push(sums[sums.length - 1] + (value ?? 0));
    counts.push(counts[counts.length - 1] + (value === null ? 0 : 1));
  }
  return values.map((_, k) => {
    const from = Math.max(0, k - width), to = Math.min(values.length, k + width + 1);
    const count = counts[to] - counts[from];
    return count ? (sums[to] - sums[from]) / count : null;
  });
}

function drawMarks(svg, run, i, kinds, x, low, high) {
  for (const mark of run.marks) {
    if (!kinds.has(mark.kind) || mark.step < low - 1 || mark.step > high + 1) continue;
    const at = Math.min(WIDTH - RIGHT, Math.max(LEFT, mark.kind === "incident" ? x(mark.step - 0.5) : x(mark.step)));
    const title = el("title", {}, `${RUNS.length > 1 ? `${run.name}, ` : ""}${mark.kind} at step ${mark.step}: ${mark.text}`);
    if (mark.kind === "checkpoint") {
      const base = HEIGHT - BOTTOM;
      const corners = `${at},${base - 6} ${at - 4},${base} ${at + 4},${base}`;
      svg.append(el("polygon", { class: `mark checkpoint run${i % COLOURS}`, points: corners }, title));
      continue;
    }
    const kind = mark.kind === "incident" && mark.class === "job" ? "incident job" : mark.kind;
    const owner = RUNS.length > 1 ? ` of-run run${i % COLOURS}` : "";
    svg.append(el("g", { class: `mark ${kind}${owner}` }, title,
      el("line", { x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM }),
      el("line", { class: "wide", x1: at, x2: at, y1: TOP, y2: HEIGHT - BOTTOM })));
  }
}

/** Return round numbers between two bounds, about `count` of them. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
  const unit = power * [1, 2, 5, 10].find((factor) => factor * power >= rough);
  const found = [];
  const first = Math.ceil(low / unit);  // of which 1 more may be the same number
  for (let k = 0; k <= 2 * count && (first + k) * unit <= high + unit * 1e-9; k++) {
    found.push(Number(((first + k) * unit).toPrecision(12)));
  }
  return found;
}

function short(value) {
  const size = Math.abs(value);
  if (size >= 1e9 || (size > 0 && size < 1e-3)) return Number(value.toPrecision(2)).toExponential();
  for (const [limit, letter] of [[1e6, "M"], [1e4, "k"]]) {
    if (size >= limit) return `${Number((value / (letter === "M" ? 1e6 : 1e3)).toPrecision(3))}${letter}`;
  }
  return String(Number(value.toPrecision(3)));
}
