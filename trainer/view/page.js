"use strict";
// What all parts of the page share: its data, its state, how it makes elements, how it shows text of models.

const DATA = JSON.parse(document.getElementById("data").textContent);
const RUNS = DATA.runs;
const COLOURS = 8;

// Characters that control a terminal, change the direction of text, or cannot be seen.
const HIDDEN = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]/u;
const HIDDEN_RUNS = /[\p{Cc}\p{Cf}\p{Cs}\p{Co}\p{Cn}\p{Zl}\p{Zp}\p{Default_Ignorable_Code_Point}]+/gu;

/** Return an element. Attributes that are functions are listeners; children that are strings are text. */
function el(tag, attributes = {}, ...children) {
  const node = document.createElementNS(
    SVG_TAGS.has(tag) ? "http://www.w3.org/2000/svg" : "http://www.w3.org/1999/xhtml", tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) node.setAttribute(name, value);
  }
  for (const child of children.flat(Infinity)) {
    if (child instanceof Node) node.append(child);
    else if (child !== null && child !== undefined) put(node, String(child));
  }
  return node;
}
const SVG_TAGS = new Set(["svg", "g", "path", "line", "text", "rect", "circle", "title", "polygon"]);

/** Append text to a node. Hidden characters become marks that say which they are. */
function put(node, text) {
  if (!HIDDEN.test(text)) {
    node.append(text);
    return;
  }
  let last = 0;
  for (const match of text.matchAll(HIDDEN_RUNS)) {
    if (match.index > last) node.append(text.slice(last, match.index));
    last = match.index + match[0].length;
    let plain = "";
    for (const c of match[0]) {
      const before = plain || (match.index > 0 ? text[match.index - 1] : "");
      const joins = (c === "\u200c" || c === "\u200d") && before > "\u007f" && !/[\ud800-\udbff]$/.test(before);
      const colours = c === "\ufe0f" && !plain && /\p{Emoji}$/u.test(text.slice(Math.max(0, match.index - 2), match.index));
      if (c === "\n" || c === "\t" || joins || colours) {
        plain += c;
        continue;
      }
      if (plain) node.append(plain);
      plain = "";
      const mark = document.createElement("span");
      mark.className = "hidden";
      mark.textContent = named(c);
      node.append(mark);
    }
    if (plain) node.append(plain);
  }
  if (last < text.length) node.append(text.slice(last));
}

/** Return the name of a hidden character, as in Python. */
function named(c) {
  const code = c.codePointAt(0);
  if (c === "\r") return "\\r";
  if (code < 256) return "\\x" + code.toString(16).padStart(2, "0");
  if (code < 65536) return "\\u" + code.toString(16).padStart(4, "0");
  return "\\U" + code.toString(16).padStart(8, "0");
}

/** Replace the children of a node. */
function fill(node, ...children) {
  node.replaceChildren();
  for (const child of children.flat(Infinity)) {
    if (child instanceof Node) node.append(child);
    else if (child !== null && child !== undefined) put(node, String(child));
  }
  return node;
}

/** Return the entry of an object by a name that a user chose, such as `constructor`, which every object inherits. */
const entryOf = (object, name) => object && Object.hasOwn(object, name) ? object[name] : undefined;

/** Return a number as people read it. */
function figure(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e6) return String(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toFixed(size < 10 ? 3 : size < 100 ? 2 : 1);
}

// ---------------------------------------------------------------------------------------------------
// Data that is unpacked when somebody looks at it

const unpacked = new Map();
const MOST_UNPACKED = 400;

async function bytesOf(id) {
  const text = document.getElementById(id).textContent, binary = atob(text), bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

/** Return what `read` makes of the bytes of a chunk. It is kept as long as few others are looked at. */
function unpack(id, read) {
  if (!unpacked.has(id)) {
    unpacked.set(id, bytesOf(id).then(read));
    if (unpacked.size > MOST_UNPACKED) unpacked.delete(unpacked.keys().next().value);
  }
  return unpacked.get(id);
}
const unpackJson = (id) => unpack(id, (bytes) => JSON.parse(new TextDecoder().decode(bytes)));

/** Return the tokens of a step by episode: see `pack_tokens`. */
const unpackTokens = (id) => unpack(id, (bytes) => {
  const view = new DataView(bytes.buffer), size = view.getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + size)));
  const total = header.samples.reduce((sum, pair) => sum + pair[1], 0);
  let at = 4 + size;
  const ids = new Uint32Array(bytes.buffer, at, total);
  at += 4 * total;
  const scores = {};
  for (const [name, factor] of Object.entries(header.scores)) {
    scores[name] = { parts: new Int16Array(bytes.buffer, at, total), factor };
    at += 2 * total;
  }
  const mask = new Uint8Array(bytes.buffer, at, total), samples = new Map();
  let start = 0;
  for (const [episode, length] of header.samples) {
    if (!samples.has(episode)) samples.set(episode, []);
    samples.get(episode).push([start, start + length]);
    start += length;
  }
  return { ids, scores, mask, samples };
});

/** Return what a score of a token is; null: it is not known. */
function scoreOf(tokens, name, k) {
  const score = tokens.scores[name];
  return score && tokens.mask[k] && score.parts[k] !== NOTHING ? score.parts[k] / score.factor : null;
}
const NOTHING = -32768;

/** Return the texts of a run's tokens by id; an array is the bytes of a token that is no whole character. */
async function vocabularyOf(run) {
  if (RUNS[run].vocabulary === null) return { texts: new Map(), special: new Set() };
  return unpack(RUNS[run].vocabulary, (bytes) => {
    const content = JSON.parse(new TextDecoder().decode(bytes));
    return { texts: new Map(content.ids.map((id, i) => [id, content.texts[i]])), special: new Set(content.special) };
  });
}

// ---------------------------------------------------------------------------------------------------
// The state of the page, which its address keeps over a reload

const STATE = {
  tab: "curves", run: 0, split: "", step: null, all: false, view: "episodes", sort: "", down: false, search: "",
  status: "", low: "", high: "", agree: false, group: "", uid: "", colour: "logprob", stream: false, find: "", hide: "",
};
const DEFAULTS = { ...STATE };

function loadState() {
  const words = new URLSearchParams(location.hash.slice(1));
  for (const [name, value] of words) {
    if (!Object.hasOwn(DEFAULTS, name)) continue;
    if (typeof DEFAULTS[name] === "boolean") STATE[name] = value === "1";
    else if (name === "run") STATE.run = Math.min(Math.max(0, parseInt(value, 10) || 0), RUNS.length - 1);
    else if (name === "step") STATE.step = /^\d+$/.test(value) ? Number(value) : null;
    else STATE[name] = value;
  }
}

function saveState() {
  const words = new URLSearchParams();
  for (const [name, value] of Object.entries(STATE)) {
    if (value !== DEFAULTS[name] && value !== null) words.set(name, value === true ? "1" : value === false ? "0" : value);
  }
  try {
    history.replaceState(null, "", "#" + words);
  } catch {
    location.hash = words;
  }
}

/** Change the state, keep it, and call what shows it. */
function change(changes, show) {
  Object.assign(STATE, changes);
  saveState();
  if (show) show();
}

/** Return a function that calls `action` once, a moment after its last call. */
function later(action, milliseconds) {
  let timer = 0;
  return (...words) => {
    clearTimeout(timer);
    timer = setTimeout(() => action(...words), milliseconds);
  };
}

function choice(name, label, options, value, action) {
  const select = el("select", { id: name, change: () => action(select.value) });
  for (const [key, text] of options) select.append(el("option", { value: key, selected: key === String(value) }, text));
  return el("label", {}, label, select);
}

function tick(name, label, value, action) {
  const box = el("input", { type: "checkbox", id: name, change: () => action(box.checked) });
  box.checked = value;
  return el("label", { class: "tick" }, box, label);
}
