// What a page keeps when it loads itself again, besides the state in its address: how far its parts are scrolled, which
// sections are open, how much of a long text is shown, and the field that somebody is in.

const PLACES = `places of ${location.pathname}`;
const BUSY_MS = 3000, LONG_BUSY_MS = 60000;
const before = new Map();
let fieldBefore = null;
let busySince = 0;

/** Name a part of the page, so that it is kept. Return what it was like before the page was loaded again, once. */
function keep(node, name) {
  node.dataset.keep = name;
  const place = before.get(name) || {};
  before.delete(name);
  return place;
}

/** Scroll a part of the page, which has its content now, to where it was. */
function scrollBack(node, name) {
  const { top, left } = keep(node, name);
  if (top) node.scrollTop = top;
  if (left) node.scrollLeft = left;
  focusBack();
}

/** Focus the field that somebody was in, if it is on the page by now. */
function focusBack() {
  const field = fieldBefore && document.getElementById(fieldBefore.id);
  if (!field) return;
  field.focus({ preventScroll: true });
  if (fieldBefore.selection) field.setSelectionRange(...fieldBefore.selection);
  fieldBefore = null;
}

function savePlaces() {
  const places = [...document.querySelectorAll("[data-keep]")].map((node) => [node.dataset.keep,
    { top: node.scrollTop, left: node.scrollLeft, open: node.open, parts: node.parts, text: node.value }]);
  const field = document.activeElement, hasText = ["text", "search"].includes(field.type);
  const focus = field.id ? { id: field.id, selection: hasText ? [field.selectionStart, field.selectionEnd] : null } : null;
  try {
    sessionStorage.setItem(PLACES, JSON.stringify({ hash: location.hash, places, focus }));
  } catch {}  // a browser may keep nothing for files
}

function loadPlaces() {
  try {
    if (performance.getEntriesByType("navigation")[0].type !== "reload") return;
    const saved = JSON.parse(sessionStorage.getItem(PLACES));
    if (saved === null || saved.hash !== location.hash) return;
    saved.places.forEach(([name, place]) => before.set(name, place));
    fieldBefore = saved.focus;
  } catch {}
}

/** Return whether somebody types, scrolls, chooses or selects, so that a reload would disturb. */
function isBusy() {
  const chooses = document.activeElement.tagName === "SELECT" || !getSelection().isCollapsed;
  return Date.now() - busySince < (chooses ? LONG_BUSY_MS : BUSY_MS);
}

/** Return the switch that loads the page again every few seconds, when nobody is busy with it. */
function following() {
  let on = true;
  for (const kind of ["keydown", "input", "pointerdown", "wheel", "touchmove", "selectionchange"]) {
    document.addEventListener(kind, () => { busySince = Date.now(); }, { capture: true, passive: true });
  }
  const again = () => {
    if (on && !isBusy()) location.reload();
    else setTimeout(again, 1000);
  };
  setTimeout(again, 1000 * DATA.refresh_s);
  return tick("follow", "follow the run", true, (value) => { on = value; });
}
