// The episodes of a step: the slider over the steps, the table with its filters, and the groups.

const ROW = 26;
let shownRows = [];

const stepsOf = (run, split) => RUNS[run].steps.filter((one) => one.split === split);
const splitsOf = (run) => [...new Set(RUNS[run].steps.map((one) => one.split))];

/** Show the episodes of the step that is nearest to `step`. */
function goTo(run, step) {
  if (!RUNS[run].steps.length) return;
  change({ tab: "episodes", run, step, all: false, group: "", uid: "" }, showTab);
}

function episodesTab() {
  const splits = splitsOf(STATE.run);
  if (!splits.includes(STATE.split)) STATE.split = splits[0] || "";
  const steps = stepsOf(STATE.run, STATE.split);
  const runs = RUNS.length < 2 ? null : choice("run", "run ", RUNS.map((run, i) => [String(i), run.name]), STATE.run,
    (value) => change({ run: Number(value), group: "", uid: "" }, showTab));
  if (!steps.length) {
    return el("section", { id: "episodes" }, el("div", { class: "bar" }, runs), el("p", { class: "empty" },
      "This run has kept no episodes yet. It keeps those of every tenth step, with logger.save_rollouts=true of all."));
  }
  const parts = {
    slider: el("input", { id: "slider", type: "range", min: 0, max: steps.length - 1, step: 1, "aria-label": "step" }),
    label: el("output", { id: "step" }), summary: el("div", { id: "summary" }), filters: el("div", { class: "bar" }),
    head: el("div", { class: "head", role: "row" }), body: el("div", { class: "rows" }),
    scroll: el("div", { id: "table", tabindex: 0, role: "table" }), detail: el("div", { id: "detail" }),
    count: el("span", { id: "count" }),
  };
  const table = new Table(parts, steps);
  parts.slider.addEventListener("input", () => table.moveTo(Number(parts.slider.value)));
  const move = (by) => () => table.moveTo(Math.min(steps.length - 1, Math.max(0, table.index + by)));
  parts.scroll.append(parts.head, parts.body);
  const split = splits.length < 2 ? null : choice("split", "", splits.map((one) => [one, one]), STATE.split,
    (value) => change({ split: value, group: "", uid: "" }, showTab));
  const kinds = [["episodes", "episodes"], ["groups", "groups"]];
  const bar = el("div", { class: "bar" }, runs, split,
    el("button", { id: "back", "aria-label": "step before", click: move(-1) }, "◀"), parts.slider,
    el("button", { id: "forth", "aria-label": "step after", click: move(1) }, "▶"), parts.label,
    tick("all", "all steps", STATE.all, (on) => change({ all: on }, () => table.load())),
    choice("view", "", kinds, STATE.view, (value) => change({ view: value, sort: "", uid: "" }, () => table.load())));
  table.load();
  return el("section", { id: "episodes" }, bar, parts.summary, parts.filters,
    el("div", { class: "split" }, parts.scroll, parts.detail));
}

class Table {
  constructor(parts, steps) {
    Object.assign(this, { parts, steps, rows: [], shown: [], columns: [], turn: 0, filtered: 0 });
    this.index = 0;
    if (STATE.step === null) this.index = steps.length - 1;
    else steps.forEach((one, i) => {
      if (Math.abs(one.step - STATE.step) < Math.abs(steps[this.index].step - STATE.step)) this.index = i;
    });
    this.draw = this.draw.bind(this);
    this.search = later(() => this.filter(), 150);
    this.statuses = el("span");
    this.ungroup = el("span");
    this.filters();
    parts.scroll.addEventListener("scroll", () => requestAnimationFrame(this.draw));
    parts.scroll.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => this.draw()).observe(parts.scroll);
  }

  moveTo(index) {
    this.index = index;
    change({ step: this.steps[index].step, all: false, group: "", uid: "" });
    document.getElementById("all").checked = false;
    this.load();
  }

  /** Unpack the rows of the chosen steps, and show them. */
  async load() {
    const turn = ++this.turn, here = this.steps[this.index], { parts } = this;
    parts.slider.value = this.index;
    fill(parts.label, STATE.all ? `${this.steps.length} steps` : `step ${here.step}`);
    const chosen = STATE.all ? this.steps : [here];
    const found = await Promise.all(chosen.map((one) => unpackJson(one.rows)));
    if (turn !== this.turn) return;  // somebody has moved on
    this.rows = found.flatMap((columns, k) => rowsOf(columns, chosen[k]));
    this.groups = groupsOf(this.rows);
    this.isOfGroups = STATE.view === "groups";
    this.columns = this.isOfGroups ? groupColumns() : episodeColumns(this.rows);
    this.offer();
    this.summarise(chosen);
    await this.filter();
    const row = STATE.uid && this.rows.find((one) => one.uid === STATE.uid && (!STATE.all || one.step === STATE.step));
    if (row) return this.open(row);
    parts.detail.parentNode.classList.remove("open");
    fill(parts.detail, el("p", { class: "empty" }, "Choose an episode."));
  }

  summarise(chosen) {
    const { rows, groups, parts } = this, known = rows.filter((row) => row.reward !== null).map((row) => row.reward);
    const mean = known.reduce((sum, one) => sum + one, 0) / known.length;
    const several = groups.filter((group) => group.rows.length > 1), agree = several.filter((group) => group.agrees);
    const texts = [`${rows.length.toLocaleString("en")} episodes in ${groups.length.toLocaleString("en")} groups`];
    if (known.length) texts.push(`mean reward ${figure(mean)}`);
    if (known.length < rows.length) texts.push(`${rows.length - known.length} without reward`);
    const origin = chosen.some((one) => one.origin === "journal") ? [" · ", el("span", {
      title: "The journal has the last steps only; logger.save_rollouts=true keeps all" }, "from the journal")] : [];
    fill(parts.summary, texts.join(" · "), several.length ? [" · ", el("span", { class: agree.length ? "agrees" : "" },
      `${agree.length} of ${several.length} groups agree in their rewards`)] : [], origin);
  }

  /** Make the fields that stay while somebody moves over the steps. */
  filters() {
    const input = (name, type, title, width) => {
      const field = el("input", { id: name, type, placeholder: title, value: STATE[name], size: width, "aria-label": title,
        input: () => { change({ [name]: field.value }); this.search(); } });
      return field;
    };
    fill(this.parts.filters, input("search", "search", "search in texts", 24), this.statuses,
      el("span", {}, "reward ", input("low", "text", "from", 5), " – ", input("high", "text", "to", 5)),
      tick("agree", "only groups that agree", STATE.agree, (on) => change({ agree: on }, this.search)),
      this.ungroup, this.parts.count);
  }

  /** Offer what the episodes of the chosen steps have. */
  offer() {
    const statuses = [...new Set(this.rows.map((row) => row.status))].sort();
    if (STATE.status && !statuses.includes(STATE.status)) STATE.status = "";
    fill(this.statuses, choice("status", "", [["", "every status"], ...statuses.map((one) => [one, one])], STATE.status,
      (value) => change({ status: value }, this.search)));
    fill(this.ungroup, STATE.group ? el("button", { id: "ungroup", click: () => { change({ group: "" }); this.load(); } },
      "show all groups") : null);
  }

  /** Choose the rows to show, and sort them. */
  async filter() {
    const turn = this.turn, time = ++this.filtered, words = STATE.search.trim() ? STATE.search.toLowerCase() : "";
    const holds = words ? await this.holders(words) : null;
    if (turn !== this.turn || time !== this.filtered) return;  // somebody has chosen other rows
    const low = STATE.low.trim() === "" ? -Infinity : Number(STATE.low);
    const high = STATE.high.trim() === "" ? Infinity : Number(STATE.high);
    const bounded = low > -Infinity || high < Infinity;
    let rows = this.rows.filter((row) => (!holds || holds.has(row))
      && (!STATE.status || row.status === STATE.status)
      && (!bounded || (row.reward !== null && row.reward >= low && row.reward <= high))
      && (!STATE.agree || row.of.agrees) && (!STATE.group || row.group === STATE.group));
    if (this.isOfGroups) rows = [...new Set(rows.map((row) => row.of))];
    const column = this.columns.find((one) => one.key === STATE.sort);
    if (column) {
      const sign = STATE.down ? -1 : 1;
      const values = new Map(rows.map((row) => [row, column.value(row)]));
      rows = [...rows].sort((a, b) => compare(values.get(a), values.get(b), sign));
    }
    this.shown = shownRows = rows;
    fill(this.parts.count, `${rows.length.toLocaleString("en")} shown`);
    this.header();
    this.parts.body.style.height = `${rows.length * ROW}px`;
    scrollBack(this.parts.scroll, `table of ${STATE.view} ${STATE.all ? "" : this.steps[this.index].step}`);
    this.drawn = null;
    this.draw();
  }

  /** Return the rows whose texts hold the words. */
  async holders(words) {
    const has = (text) => text.toLowerCase().includes(words), found = new Set();
    const steps = [...new Set(this.rows.map((row) => row.files))];
    const texts = new Map(await Promise.all(steps.map(async (one) => [one, await unpackJson(one.texts)])));
    const matching = new Map([...texts].map(([one, content]) =>
      [one, content.messages.map((message) => has(message[1]) || has(message[2]))]));
    for (const row of this.rows) {
      const messages = matching.get(row.files), own = texts.get(row.files).episodes[row.index];
      if (has(row.uid) || has(row.answer || "") || has(row.failure || "") || own.some((i) => messages[i])) found.add(row);
    }
    return found;
  }

  header() {
    const cells = this.columns.map((column) => {
      const isSorted = column.key === STATE.sort;
      const sort = () => {
        const isOn = column.key === STATE.sort, isOver = isOn && STATE.down !== (column.first === "down");
        change(isOver ? { sort: "", down: false } : { sort: column.key, down: isOn ? !STATE.down : column.first === "down" });
        this.filter();
      };
      return el("button", { class: `cell ${column.kind}`, role: "columnheader", "data-key": column.key,
        "aria-sort": isSorted ? (STATE.down ? "descending" : "ascending") : null, title: column.title, click: sort },
        el("span", { class: "name" }, column.name),
        isSorted ? el("span", { class: "arrow", "aria-hidden": "true" }, STATE.down ? "▼" : "▲") : null);
    });
    fill(this.parts.head, cells);
    const widths = this.columns.map((column) => column.width), { style } = this.parts.scroll;
    style.setProperty("--columns", widths.map((width, i) => this.columns[i].grows ? `minmax(${width}, 1fr)` : width).join(" "));
    style.setProperty("--width", `calc(${widths.join(" + ")})`);  // the same for all rows, whatever is in them
  }

  /** Draw the rows that can be seen. */
  draw() {
    const { scroll, body } = this.parts;
    const first = Math.max(0, Math.floor(scroll.scrollTop / ROW) - 10);
    const last = Math.min(this.shown.length, Math.ceil((scroll.scrollTop + scroll.clientHeight) / ROW) + 10);
    const key = `${first} ${last} ${STATE.uid} ${STATE.step}`;
    if (this.drawn === key) return;
    this.drawn = key;
    const nodes = [];
    for (let k = first; k < last; k++) {
      const row = this.shown[k];
      const isOpen = !this.isOfGroups && row.uid === STATE.uid && row.step === this.openStep;
      const node = el("div", { class: `row${isOpen ? " open" : ""}`, role: "row", "data-uid": row.uid || row.name,
        click: () => {
          if (this.isOfGroups) return this.openGroup(row);
          this.open(row).then(() => isNarrow() && this.parts.detail.scrollIntoView());  // it is below the table
        } });
      node.style.top = `${k * ROW}px`;
      for (const column of this.columns) {
        const cell = el("div", { class: `cell ${column.kind}`, role: "cell" });
        put(cell, column.text(row).replace(/\s+/g, " "));
        if (column.mark && column.mark(row)) cell.classList.add("agrees");
        node.append(cell);
      }
      nodes.push(node);
    }
    body.replaceChildren(...nodes);
  }

  key(event) {
    const by = { ArrowDown: 1, ArrowUp: -1 }[event.key];
    if (!by || this.isOfGroups || !this.shown.length) return;
    event.preventDefault();
    const at = this.shown.findIndex((row) => row.uid === STATE.uid && row.step === this.openStep);
    const next = Math.min(this.shown.length - 1, Math.max(0, at + by)), { scroll } = this.parts;
    const top = next * ROW;
    if (top < scroll.scrollTop) scroll.scrollTop = top;
    if (top + 2 * ROW > scroll.scrollTop + scroll.clientHeight) scroll.scrollTop = top + 2 * ROW - scroll.clientHeight;
    this.open(this.shown[next]);
  }

  open(row) {
    this.openStep = row.step;
    change({ uid: row.uid, step: row.step });  // the step too: the page may soon have a newer one
    this.parts.detail.parentNode.classList.add("open");
    this.draw();
    return showEpisode(this.parts.detail, row, (other) => this.open(other));
  }

  openGroup(group) {
    change({ view: "episodes", group: group.name, uid: group.rows[0].uid, sort: "" });
    document.getElementById("view").value = "episodes";
    this.load();
  }
}

function rowsOf(columns, files) {
  return columns.uid.map((uid, index) => {
    const row = { files, index, step: files.step };
    for (const name of Object.keys(columns)) row[name] = columns[name][index];
    return row;
  });
}

/** Return the groups of rows; each row gets its own as `of`. */
function groupsOf(rows) {
  const groups = new Map();
  for (const row of rows) {
    const key = `${row.step} ${row.group}`;
    if (!groups.has(key)) groups.set(key, { name: row.group, step: row.step, rows: [], number: 0 });
    row.of = groups.get(key);
    row.number = row.of.rows.push(row) - 1;
  }
  const numbers = new Map();
  for (const group of groups.values()) {
    const known = group.rows.filter((row) => row.reward !== null).map((row) => row.reward);
    group.number = (numbers.get(group.step) || 0) + 1;
    numbers.set(group.step, group.number);
    group.low = Math.min(...known);
    group.high = Math.max(...known);
    group.mean = known.length ? known.reduce((sum, one) => sum + one, 0) / known.length : null;
    const squares = known.reduce((sum, one) => sum + (one - group.mean) ** 2, 0);
    group.std = known.length ? Math.sqrt(squares / known.length) : null;
    group.agrees = group.rows.length > 1 && (!known.length || group.low === group.high);
  }
  return [...groups.values()];
}

function compare(a, b, sign) {
  const isMissing = (one) => one === null || one === undefined || one === "";
  if (isMissing(a) || isMissing(b)) return isMissing(a) - isMissing(b);
  return sign * (typeof a === "number" && typeof b === "number" ? a - b : String(a) < String(b) ? -1 : Number(a !== b));
}

const number = (key, name, title, value, width = "4.6rem") => ({
  key, name, title, width, kind: "number", first: "down", value, text: (row) => figure(value(row)),
});
const text = (key, name, title, value, width, grows = false) => ({
  key, name, title, width, grows, kind: "text", first: "up", value, text: (row) => String(value(row) ?? ""),
});
const isNarrow = () => matchMedia("(max-width: 900px)").matches;  // as in view.css

function episodeColumns(rows) {
  const terms = new Map(), measures = new Map();
  for (const row of rows) {
    for (const name of Object.keys(row.terms || {})) terms.set(name, true);
    for (const name of Object.keys(row.metrics || {})) measures.set(name, true);
  }
  const has = (name) => rows.some((row) => row[name] !== null && row[name] !== undefined && row[name] !== "");
  const width = (name) => `${Math.min(8, Math.max(3.8, 1.6 + 0.5 * name.length))}rem`;
  const means = "the reward minus the mean reward of the group";
  return [
    STATE.all ? number("step", "step", "step", (row) => row.step, "3.6rem") : null,
    { ...number("group", "group", "completions of one prompt; marked if their rewards agree", (row) => row.of.number, "3.8rem"),
      first: "up", mark: (row) => row.of.agrees },
    { ...number("number", "#", "number in its group", (row) => row.number, "2.4rem"), first: "up" },
    number("reward", "reward", "reward", (row) => row.reward, "5.2rem"),
    number("above", "± group", means, (row) => row.reward === null || row.of.mean === null ? null : row.reward - row.of.mean, "5.2rem"),
    text("preview", "last reply", "beginning of the last reply", (row) => row.preview, "15rem", true),
    has("advantage") ? number("advantage", "advantage", "mean advantage of its tokens", (row) => row.advantage, "6rem") : null,
    has("players") ? text("players", "players", "reward and advantage of each player", playersOf, "12rem") : null,
    ...(terms.size > 1 ? [...terms.keys()].slice(0, 6) : []).map((name) =>
      number(`term ${name}`, name, `term of the reward: ${name}`, (row) => entryOf(row.terms, name) ?? null, width(name))),
    text("status", "status", "why it ended", (row) => row.failure ? `${row.status} (failed)` : row.status, "4.6rem"),
    number("turns", "turns", "replies of the policy", (row) => row.turns, "3.8rem"),
    has("length") ? number("length", "tokens", "tokens that the policy sampled", (row) => row.length, "4.6rem") : null,
    ...[...measures.keys()].slice(0, 4).map((name) =>
      number(`metric ${name}`, name, `counted by the environment: ${name}`, (row) => entryOf(row.metrics, name) ?? null, width(name))),
    has("source") ? text("source", "source", "source of data.mix", (row) => row.source, "6rem") : null,
    text("uid", "episode", "name of the episode", (row) => row.uid, "6.5rem"),
  ].filter(Boolean);
}

function groupColumns() {
  return [
    STATE.all ? number("step", "step", "step", (group) => group.step, "3.6rem") : null,
    { ...number("group", "group", "completions of one prompt", (group) => group.number, "3.8rem"), first: "up" },
    number("size", "episodes", "number of episodes", (group) => group.rows.length, "5rem"),
    number("mean", "mean", "mean reward", (group) => group.mean),
    number("std", "std", "standard deviation of the rewards", (group) => group.std),
    number("low", "low", "lowest reward", (group) => Number.isFinite(group.low) ? group.low : null),
    number("high", "high", "highest reward", (group) => Number.isFinite(group.high) ? group.high : null),
    { ...text("agrees", "agree", "all rewards are equal: no signal, if the advantages compare the completions of a prompt",
      (group) => group.agrees ? "agree" : "", "4.4rem"), mark: (group) => group.agrees },
    text("name", "prompt", "name of the group", (group) => group.name, "7rem"),
    text("first", "first reply", "beginning of the last reply of its first episode", (group) => group.rows[0].preview,
      "14rem", true),
  ].filter(Boolean);
}
