// What a page keeps when it is loaded again, besides the state in its address: how far its parts are scrolled, which
// sections are open, how much of a long text is shown, and the field that somebody is in.

const PLACES = `places of ${location.pathname}`;
const before = new Map();
let fieldBefore = null;

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
