// What a demonstrator of MiniWoB++ does next: task name -> an action in pixels of the page, or null
// where there is nothing (more) to do. It reads the page as it likes, and acts by mouse and keyboard
// alone. This file has what all tasks share; the others add to `experts`, a kind of task each. They
// are joined to one function (verifiers/browser/miniwob.py), which is evaluated for every turn. With
// its `careless` true it clicks the next thing of the same sort, if not into a field to fill it in.
const experts = {};
const query = document.getElementById("query").textContent.replace(/\s+/g, " ").trim();
const quoted = [...query.matchAll(/"([^"]*)"/g)].map(match => match[1]);
const shown = element => element.getClientRects().length > 0;
const all = selector => [...document.querySelectorAll(selector)].filter(e => !e.closest("#query"));
const one = selector => all(selector).find(shown);
const text = element => element.textContent.replace(/\s+/g, " ").trim();
const withText = (selector, wanted) => all(selector).filter(shown).find(e => text(e) === wanted);
const ordinal = word => parseInt(word, 10) - 1;
const state = window.expertState = window.expertState || {};  // what was done or seen, and the page does not show
const scroll = (element, direction, amount) => {
  const box = element.getBoundingClientRect();
  return {kind: "scroll", x: box.left + box.width / 2, y: Math.min(box.top + box.height / 2, 205),
    direction, amount: Math.round(Math.max(amount, 20))};
};
const middle = element => {
  const box = element.getClientRects()[0];
  return {x: box.left + box.width / 2, y: box.top + box.height / 2};
};
const mistaken = element => {  // the thing of its sort after it, or before it; none where there is no other
  const sort = all(element.tagName).filter(e => shown(e) && e.getAttribute("class") === element.getAttribute("class"));
  const at = sort.indexOf(element);
  return sort[at + 1] || sort[at - 1];
};
const clear = element => {  // its middle, or the middle of what another element leaves of it
  const at = middle(element), box = element.getClientRects()[0];
  const hits = ({x, y}) => {
    const hit = document.elementFromPoint(x, y);
    return !hit || element.contains(hit) || hit.contains(element);
  };
  if (hits(at)) return at;
  const step = Math.max(1, Math.sqrt(box.width * box.height / 400)), free = [], covered = [];
  for (let x = box.left - step / 2; x < box.right + step; x += step) for (let y = box.top - step / 2; y < box.bottom + step; y += step) {
    const within = x > box.left && x < box.right && y > box.top && y < box.bottom;
    (within && hits({x, y}) ? free : covered).push({x, y});
  }
  const room = p => Math.min(...covered.map(q => Math.hypot(p.x - q.x, p.y - q.y)));
  return free.map(p => [room(p), p]).sort((a, b) => b[0] - a[0])[0]?.[1] || at;
};
const click = (wanted, slips = careless) => {  // scrolls first where it, or its edge, is out of sight
  const element = (slips && mistaken(wanted)) || wanted, at = clear(element), height = element.getClientRects()[0].height;
  if (slips && element === wanted) at.y += at.y + height < 210 ? height : -height;  // beside the only one
  const edge = Math.min(height / 2, 8) - 1;
  for (let parent = element.parentElement; parent && parent.id !== "wrap"; parent = parent.parentElement) {
    if (parent.scrollHeight <= parent.clientHeight + 1 || !/auto|scroll/.test(getComputedStyle(parent).overflowY)) continue;
    const box = parent.getBoundingClientRect(), bottom = Math.min(box.top + parent.clientHeight, 210);
    if (at.y < box.top + edge) return scroll(parent, "up", (box.top + bottom) / 2 - at.y);
    if (at.y > bottom - edge) return scroll(parent, "down", at.y - (box.top + bottom) / 2);
  }
  return {kind: "click", ...at};
};
const keys = chord => ({kind: "keys", keys: chord});
const drag = (from, to) => ({kind: "drag", x: from.x, y: from.y, x2: to.x, y2: to.y});
const fill = (input, wanted) => {  // null once it holds what is wanted
  if (input.value === wanted) return null;
  if (document.activeElement !== input) return click(input, false);
  const whole = input.selectionStart === 0 && input.selectionEnd === input.value.length;
  if (input.value && !whole && getSelection().toString() !== input.value) return keys("ctrl+a");
  return wanted ? {kind: "type", text: wanted} : keys("delete");
};
const submit = () => click(one("#subbtn") || one("#submit") || withText("#area button", "Submit"));
const fillAndSubmit = (...pairs) => {
  for (const [selector, wanted] of pairs) {
    const next = fill(one(selector), wanted);
    if (next) return next;
  }
  return submit();
};
