// The frame of the page: its tabs, and the tab about the runs themselves.

const TABS = { curves: ["Curves", curvesTab], episodes: ["Episodes", episodesTab], runs: ["Runs", runsTab] };

function runsTab() {
  const differing = DATA.differing.length === 0 ? null : el("div", { class: "card" }, el("h2", {}, "Keys that differ"),
    el("div", { class: "wide" }, el("table", { id: "differing" },
      el("thead", {}, el("tr", {}, el("th", {}, "key"), RUNS.map((run, i) => el("th", {}, swatch(i), run.name)))),
      el("tbody", {}, DATA.differing.map((key) => el("tr", {}, el("td", {}, key),
        RUNS.map((run) => el("td", {}, entryOf(run.config, key) ?? "–"))))))));
  return el("section", { id: "runs" }, differing, RUNS.map(runCard));
}

function runCard(run, i) {
  const config = el("table", { class: "config" });
  const search = el("input", { id: `config-${i}`, type: "search", placeholder: "config keys",
    input: () => draw(search.value) });
  const draw = (words) => fill(config, Object.entries(run.config).filter(([key, value]) =>
    `${key} ${value}`.toLowerCase().includes(words.toLowerCase())).map(([key, value]) =>
    el("tr", {}, el("td", {}, key), el("td", {}, value))));
  search.value = keep(search, `search of ${run.path}`).text || "";
  draw(search.value);
  const details = el("details", {}, el("summary", {}, `Config (${Object.keys(run.config).length} keys)`), search,
    el("div", { class: "wide" }, config));
  details.open = keep(details, `config of ${run.path}`).open;
  const marks = (kind) => run.marks.filter((mark) => mark.kind === kind);
  const table = (title, heads, rows) => !rows.length ? null : [el("h3", {}, title), el("div", { class: "wide" },
    el("table", {}, el("thead", {}, el("tr", {}, heads.map((head) => el("th", {}, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((cell) => el("td", {}, cell)))))))];
  return el("div", { class: "card", "data-run": run.name },
    el("h2", {}, RUNS.length > 1 ? swatch(i) : null, run.name),
    el("dl", {}, [["path", run.path], ["task", run.task], ["steps", `${run.step} of ${run.total_steps}`], ["best", bestOf(run) || "–"],
      ["checkpoints", marks("checkpoint").map((mark) => mark.step).join(", ") || "none"]].map(([name, value]) =>
      [el("dt", {}, name), el("dd", {}, value)])),
    table("Advice", ["steps", "key", ""], run.advice.map((one) =>
      [one.steps.join(" to "), one.key, one.text])),
    table("Restarts", ["time", "step", ""], marks("restart").map((one) => [one.time, one.step, one.text])),
    table("Incidents", ["time", "step", "class", "", ""], marks("incident").map((one) =>
      [one.time, one.step, one.class, one.who, one.text])),
    table("Starts", ["time", "host", "commit", "command"], run.starts.map((one) =>
      [one.time, one.host, one.git.join(" "), one.command])),
    details);
}

function showTab() {
  if (!entryOf(TABS, STATE.tab)) STATE.tab = "curves";
  hideTip();
  for (const button of document.querySelectorAll("nav button")) {
    button.setAttribute("aria-selected", String(button.dataset.tab === STATE.tab));
  }
  const main = document.getElementById("main");
  fill(main, TABS[STATE.tab][1]());
  main.querySelectorAll(".wide, #advice").forEach((node, i) => scrollBack(node, `${STATE.tab} ${i}`));
  scrollBack(main, STATE.tab);
}

function start() {
  loadState();
  loadPlaces();
  const names = RUNS.map((run) => run.name).join(", ");
  document.title = `${names.replace(HIDDEN_RUNS, "?").slice(0, 80)} – trainer`;
  const first = RUNS[0], where = RUNS.length > 1 ? `${RUNS.length} runs` : `step ${first.step} of ${first.total_steps}`;
  const nav = el("nav", { role: "tablist" }, Object.entries(TABS).map(([tab, [label]]) =>
    el("button", { role: "tab", "data-tab": tab, click: () => change({ tab }, showTab) }, label)));
  fill(document.getElementById("app"), el("div", { class: "top" }, el("h1", {}, RUNS.length > 1 ? "trainer" : first.name),
    el("span", { class: "where" }, where), nav),
    el("main", { id: "main" }), el("div", { id: "tip", hidden: true }));
  showTab();
  addEventListener("hashchange", () => { loadState(); showTab(); });
  addEventListener("pagehide", savePlaces);
}

start();
