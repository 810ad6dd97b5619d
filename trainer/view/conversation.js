// One episode: what is known of it, and its conversation, with the policy's tokens in colours.

const MOST_TOKENS = 3000;
const SHADES = 8;
const COLOURINGS = {
  logprob: {
    label: "log-prob", needs: "logprob", legend: ["likely", "unlikely (5 nats)"], hue: "hot",
    shade: (value) => -value / 5,
  },
  entropy: {
    label: "entropy", needs: "entropy", legend: ["sure", "unsure (3 nats)"], hue: "cool", shade: (value) => value / 3,
  },
  difference: {
    label: "engine – trainer", needs: "difference", legend: ["trainer higher", "engine higher (1 nat)"], hue: "sign",
    shade: (value) => Math.sign(value) * Math.max(0, 1 + Math.log10(Math.max(Math.abs(value), 1e-3)) / 3),
  },
  advantage: {
    label: "advantage", needs: "advantage", legend: ["worse (–2)", "better (2)"], hue: "sign", shade: (value) => value / 2,
  },
  mask: { label: "mask", needs: null, legend: ["context", "sampled by the policy"], hue: "mask" },
  none: { label: "none", needs: null, legend: [], hue: "" },
};

let episodeTurn = 0;

/** Show an episode in a node. `open` shows another one. */
async function showEpisode(node, row, open) {
  const turn = ++episodeTurn;
  const [texts, tokens, vocabulary] = await Promise.all([
    unpackJson(row.files.texts), row.files.tokens ? unpackTokens(row.files.tokens) : null, vocabularyOf(STATE.run),
  ]);
  if (turn !== episodeTurn) return;
  const messages = texts.episodes[row.index].map((i) => texts.messages[i]);
  const samples = tokens ? tokens.samples.get(row.index) || [] : [];
  const again = () => showEpisode(node, row, open);
  const colouring = colouringOf(tokens);
  const shown = { tokens, vocabulary, colouring: COLOURINGS[colouring] };
  const replies = samples.length ? repliesOf(tokens, samples) : [];
  const firstReply = messages.length - countBack(messages, row.turns);
  const isAligned = replies.length === row.turns && row.turns > 0;
  const asStream = samples.length > 0 && (STATE.stream || row.players || colouring === "mask" || !isAligned || !messages.length);
  shown.name = `${row.step} ${row.uid} ${asStream}`;
  const conversation = asStream ? streamOf(shown, samples, row.players) : messagesOf(shown, messages, row.turns, replies, isAligned);
  const scroll = node.scrollTop;
  hideTip();
  fill(node, aboutOf(row, open), samples.length ? colourBar(tokens, colouring, again) : el("p", { class: "note" },
    "Without tokens: the files of a validation have texts alone."),
    el("div", { class: `conversation${firstReply ? "" : " free"}`, id: "conversation", mouseover: (event) => tip(event, shown),
      mouseleave: hideTip }, conversation));
  node.scrollTop = scroll;
  scrollBack(node, `episode ${shown.name}`);
}

function countBack(messages, turns) {
  let left = turns, k = messages.length;
  while (left > 0 && k > 0) if (messages[--k][0] === "assistant") left--;
  return messages.length - k;
}

function colouringOf(tokens) {
  const wanted = entryOf(COLOURINGS, STATE.colour) ? STATE.colour : "logprob", { needs } = COLOURINGS[wanted];
  return !needs || (tokens && tokens.scores[needs]) ? wanted : "none";
}

function aboutOf(row, open) {
  const terms = Object.entries(row.terms || {}).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
  const counts = Object.entries(row.metrics || {}).map(([name, value]) => `${name} ${figure(value)}`).join(", ");
  const siblings = row.of.rows.slice(0, 64);
  const facts = [
    ["reward", figure(row.reward) + (terms ? ` (${terms})` : "")],
    ["players", playersOf(row)], ["status", row.status], ["failure", row.failure], ["answer", row.answer], ["advantage", row.advantage ?? ""],
    ["turns", row.turns], ["tokens", row.length ?? ""], ["counted", counts], ["source", row.source || ""],
    ["weights", row.versions ? [...new Set(row.versions)].join(" to ") : ""],
  ].filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return el("header", {},
    el("h2", {}, `step ${row.step}, ${row.uid}`),
    el("dl", {}, facts.map(([name, value]) => [el("dt", {}, name),
      el("dd", {}, typeof value === "number" ? figure(value) : value)])),
    siblings.length < 2 ? null : el("div", { class: `siblings${row.of.agrees ? " agrees" : ""}` },
      row.of.agrees ? "group (rewards agree): " : "group: ", siblings.map((one) =>
        el("button", { class: one === row ? "open" : "", title: one.uid, click: () => open(one) }, figure(one.reward)))));
}

function colourBar(tokens, colouring, again) {
  const options = Object.entries(COLOURINGS).map(([name, one]) =>
    [name, one.label + (one.needs && !tokens.scores[one.needs] ? " (not recorded)" : "")]);
  const bar = el("div", { class: "bar" }, choice("colour", "colour ", options, colouring,
    (value) => change({ colour: value }, again)));
  for (const option of bar.querySelectorAll("option")) {
    const { needs } = COLOURINGS[option.value];
    option.disabled = Boolean(needs && !tokens.scores[needs]);
  }
  const { legend, hue } = COLOURINGS[colouring];
  if (legend.length) {
    const shades = hue === "sign" ? [-8, -5, -2, 2, 5, 8] : hue === "mask" ? [] : [1, 2, 4, 6, 8];
    const classOf = (shade) => hue === "sign" ? (shade < 0 ? `minus${-shade}` : `plus${shade}`) : `${hue}${shade}`;
    bar.append(el("span", { class: "legend" }, hue === "mask" ? el("span", { class: "context" }, legend[0]) : legend[0], " ",
      shades.map((shade) => el("span", { class: `t ${classOf(shade)}` }, "  ")), " ",
      hue === "mask" ? el("span", { class: "t sampled" }, legend[1]) : legend[1]));
  }
  bar.append(tick("stream", "every token", STATE.stream, (on) => change({ stream: on }, again)));
  return bar;
}

/** Return the ranges of tokens that the policy sampled in one piece. */
function repliesOf(tokens, samples) {
  const ranges = [];
  for (const [start, end] of samples) {
    for (let k = start; k < end; k++) {
      if (!tokens.mask[k]) continue;
      const begin = k;
      while (k < end && tokens.mask[k]) k++;
      ranges.push([begin, k]);
    }
  }
  return ranges;
}

function messagesOf(shown, messages, turns, replies, isAligned) {
  const policy = messages.map((message, i) => [message[0], i]).filter(([role]) => role === "assistant");
  const own = new Map((turns ? policy.slice(-turns) : []).map(([, i], k) => [i, k]));
  return messages.map(([role, content, others], i) => {
    const body = el("div", { class: "content", dir: "auto" });
    if (own.has(i) && isAligned) addAllTokens(body, shown, ...replies[own.get(i)]);
    else addText(body, content, keep(body, `text ${i} of ${shown.name}`).parts);
    if (others) {
      const details = el("details", { class: "others" }, el("summary", {}, "more"), el("pre", {}, others));
      details.open = keep(details, `others ${i} of ${shown.name}`).open;
      body.append(details);
    }
    return el("article", { class: `message ${own.has(i) ? "policy" : "given"}` },
      el("div", { class: "role" }, own.has(i) ? `${role} (policy)` : role), body);
  });
}

const MOST_CHARACTERS = 60000;

/** Append a text: its beginning, and all of it when somebody asks for it, or with `parts`. */
function addText(body, text, parts) {
  const first = parts ? text.length : MOST_CHARACTERS;
  put(body, text.slice(0, first));
  body.parts = parts;
  if (text.length <= first) return;
  const more = el("button", { click: () => { body.parts = 1; more.replaceWith(rest()); } },
    `show ${(text.length - first).toLocaleString("en")} more characters`);
  const rest = () => fill(document.createDocumentFragment(), text.slice(first));
  body.append(more);
}

/** Return the names of the players, each with its reward and its advantage. */
function playersOf(row) {
  const known = new Map((row.players || []).map((one) => [one[0], playerText(one)]));
  return [...known.values()].join(", ");
}

function playerText([name, reward, advantage]) {
  return `${name} ${figure(reward)}${advantage === null ? "" : ` (advantage ${figure(advantage)})`}`;
}

/** Return every token of an episode, those of each sample in a block, under the name of its player. */
function streamOf(shown, samples, players) {
  return samples.map(([start, end], i) => {
    const body = el("div", { class: "content", dir: "auto" });
    addAllTokens(body, shown, start, end);
    const title = samples.length > 1 ? `sample ${i + 1} of ${samples.length}` : "all tokens";
    return el("article", { class: "message stream" },
      el("div", { class: "role" }, players ? `${playerText(players[i])} · ${title}` : title), body);
  });
}

/** Append the tokens of a range: as many parts as were there before, the others when somebody asks for them. */
function addAllTokens(body, shown, start, end) {
  const parts = keep(body, `tokens from ${start} of ${shown.name}`).parts || 0;
  body.parts = 0;
  addTokens(body, shown, start, end);
  while (body.parts < parts && body.querySelector("button.more")) body.querySelector("button.more").click();
}

/** Append some thousand tokens of a range, and a button for the others. */
function addTokens(body, shown, start, end) {
  const last = Math.min(end, start + MOST_TOKENS), fragment = document.createDocumentFragment();
  const texts = textsOf(shown, start, last);
  for (let k = start; k < last; k++) fragment.append(tokenSpan(shown, k, texts[k - start]));
  body.append(fragment);
  if (last < end) {
    const showMore = () => { more.remove(); body.parts++; addTokens(body, shown, last, end); };
    const more = el("button", { class: "more", click: showMore },
      `show ${Math.min(MOST_TOKENS, end - last).toLocaleString("en")} more of ${(end - last).toLocaleString("en")} tokens`);
    body.append(more);
  }
}

function tokenSpan(shown, k, text) {
  const { tokens, vocabulary, colouring } = shown, id = tokens.ids[k];
  const span = document.createElement("span");
  span.className = `t ${shadeOf(shown, k)}`;
  span.token = k;
  if (text === null) {
    span.classList.add("unknown");
    span.textContent = ` ${id} `;
  } else if (text === "") span.classList.add("part");
  else put(span, text);
  if (vocabulary.special.has(id)) span.classList.add("special");
  if (text && text.includes("\n")) span.classList.add("break");
  if (!tokens.mask[k]) span.classList.add("context");
  else if (colouring.hue === "mask") span.classList.add("sampled");
  return span;
}

function shadeOf({ tokens, colouring }, k) {
  const { needs, hue, shade } = colouring;
  if (!needs || !tokens.mask[k]) return "";
  const value = scoreOf(tokens, needs, k);
  if (value === null) return "missing";
  const level = Math.round(SHADES * Math.max(-1, Math.min(1, shade(value))));
  if (hue === "sign") return level < 0 ? `minus${-level}` : level > 0 ? `plus${level}` : "";
  return level > 0 ? `${hue}${level}` : "";
}

/** Return the text of each token of a range. A character of several tokens stands at its first one; null: unknown. */
function textsOf({ tokens, vocabulary }, start, end) {
  const texts = [];
  for (let k = start; k < end; k++) {
    const text = vocabulary.texts.get(tokens.ids[k]);
    if (!Array.isArray(text)) {
      texts.push(text ?? null);
      continue;
    }
    let bytes = [], whole = null, last = k;
    for (; last < end && last < k + 4; last++) {
      const part = vocabulary.texts.get(tokens.ids[last]);
      if (!Array.isArray(part)) break;
      bytes = bytes.concat(part);
      whole = decoded(bytes);
      if (whole !== null) break;
    }
    if (whole === null) {
      texts.push(text.map((byte) => `<${byte.toString(16).padStart(2, "0")}>`).join(""));
      continue;
    }
    texts.push(whole);
    for (; k < last; k++) texts.push("");
  }
  return texts;
}

function decoded(bytes) {
  try {
    return new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(new Uint8Array(bytes));
  } catch {
    return null;
  }
}

// ---------------------------------------------------------------------------------------------------
// What is known of the token under the pointer

function tip(event, shown) {
  const span = event.target.closest(".t"), box = document.getElementById("tip");
  if (!span || span.token === undefined) return hideTip();
  const { tokens, vocabulary } = shown, k = span.token, id = tokens.ids[k], text = vocabulary.texts.get(id);
  const value = (name) => scoreOf(tokens, name, k);
  const logprob = value("logprob"), difference = value("difference");
  const name = text === undefined ? "?" : JSON.stringify(Array.isArray(text) ? `bytes ${text.join(" ")}` : text);
  const facts = [
    ["token", `${name} (${id})`],
    ["by", tokens.mask[k] ? "the policy" : "context"],
    logprob === null ? null : ["log-prob", `${logprob.toFixed(3)} (${(100 * Math.exp(logprob)).toPrecision(3)} %)`],
    difference === null ? null : ["trainer", `${(logprob - difference).toFixed(3)} (difference ${figure(difference)})`],
    value("entropy") === null ? null : ["entropy", value("entropy").toFixed(3)],
    value("advantage") === null ? null : ["advantage", value("advantage").toFixed(3)],
  ].filter(Boolean);
  fill(box, el("dl", {}, facts.map(([name, fact]) => [el("dt", {}, name), el("dd", {}, fact)])));
  const place = span.getBoundingClientRect();
  box.hidden = false;
  box.style.left = `${Math.max(4, Math.min(place.left, innerWidth - box.offsetWidth - 8))}px`;
  const below = place.bottom + 6 + box.offsetHeight < innerHeight;
  box.style.top = `${below ? place.bottom + 6 : place.top - box.offsetHeight - 6}px`;
}

function hideTip() {
  document.getElementById("tip").hidden = true;
}
