// A click or a few: buttons, links, tabs, dialogs, checkboxes, menus.
const listed = () => {
  const names = query.match(/Select (.*) and click Submit/)[1];
  return names === "nothing" ? [] : names.split(", ");
};
const check = wanted => {  // wanted: label text -> bool
  const label = all("#area label").find(e => e.querySelector("input").checked !== wanted(text(e)));
  return label ? click(label.querySelector("input")) : submit();
};
const checkboxes = () => { const names = listed(); return check(label => names.includes(label)); };
const namedButton = () => click(withText("#area button", quoted[0]));
// A link that may be in a section or behind a tab that is closed. A script knows which; a policy that
// sees the screen cannot learn that, but to look: behind one tab after the other, and into the sections
// from the last, as the headers above an open one stay where they are.
const link = () => {
  if (window.$?.(":animated").length) return {kind: "wait", seconds: 0.4};  // what it moves would be missed
  const target = all(".alink").find(e => text(e) === quoted[0] && shown(e));
  if (target) return click(target);
  const [tabs, headers] = [".ui-tabs-tab", ".ui-accordion-header"].map(all), open = ".ui-state-active";
  if (tabs.length) return click(tabs[(tabs.findIndex(e => e.matches(open)) + 1) % tabs.length].querySelector("a"));
  return click(headers.at(Math.max(headers.findIndex(e => e.matches(open)), 0) - 1));
};
const collapsible = () => click(one(".ui-accordion-content") ? one("#subbtn") : one("h3"));
const tree = () => {  // as in `link`: folders are opened from the top
  const target = all("#tree span").find(e => text(e) === quoted[0] && shown(e));
  return click(target || one("#tree .expandable-hitarea"));
};
const menu = () => {  // each level opens under the mouse
  const path = query.replace("Select ", "").split(">");
  let list = document.getElementById("menu");
  for (const [depth, label] of path.entries()) {
    const item = [...list.children].find(e => text(e.querySelector("div")) === label);
    list = item.querySelector("ul");
    if (depth === path.length - 1) return click(item.querySelector("div"));
    if (shown(list)) continue;
    const over = item.querySelector("div").classList.contains("ui-state-active");
    return over ? {kind: "wait", seconds: 0.4} : {kind: "move", ...middle(item.querySelector("div"))};
  }
};
const menu2 = () => {
  if (!one("#menu")) return click(one("#open-menu"));
  const icon = document.querySelector("#query .ui-icon");
  const wanted = icon ? `.${icon.classList[1]}` : null;
  const item = all("#menu li").find(e => !e.querySelector("ul") && (wanted ? e.querySelector(wanted) : text(e) === quoted[1]));
  return click(shown(item) ? item.querySelector("div") : withText("#menu li > div", "Playback"));
};
const pie = () => {
  const label = all("#divWheel text").find(e => text(e) === quoted[0] && e.getBoundingClientRect().width > 3);
  return label && getComputedStyle(label).display !== "none" ? click(label) : click(one("#divWheel path"));
};

Object.assign(experts, {
  "click-button": namedButton,
  "click-button-sequence": () => {
    state.next = state.next ? "TWO" : "ONE";
    return click(withText("#area button", state.next));
  },
  "click-checkboxes": checkboxes,
  "click-checkboxes-large": checkboxes,
  "click-checkboxes-transfer": checkboxes,
  "click-checkboxes-soft": () => {
    const names = query.match(/similar to (.*) and click/)[1].split(", ");
    return check(label => SYNONYMS.some(group => group.includes(label) && names.some(n => group.includes(n))));
  },
  "click-collapsible": collapsible,
  "click-collapsible-nodelay": collapsible,
  "click-collapsible-2": link,
  "click-collapsible-2-nodelay": link,
  "click-color": () => click(one(`[data-color="${core.getUtterance().match(/the (.*) colored/)[1]}"]`)),
  "click-dialog": () => click(one(".ui-dialog-titlebar-close")),
  "click-dialog-2": () => click(quoted[0] === "x" ? one(".ui-dialog-titlebar-close") : withText(".ui-dialog button", quoted[0])),
  "click-link": link,
  "click-menu": menu,
  "click-menu-2": menu2,
  "click-option": () => { const names = listed(); return check(label => label === names[0]); },
  "click-pie": pie,
  "click-pie-nodelay": pie,
  "click-shades": () => {
    const color = query.match(/shades of (\w+)/)[1];
    const left = all("#area span").find(e => (e.dataset.color === color) !== /selected/.test(e.className));
    return left ? click(left) : submit();
  },
  "click-tab": () => click(one(`a[href="#tabs-${query.match(/#(\d)/)[1]}"]`)),
  "click-tab-2": link,
  "click-tab-2-easy": link,
  "click-tab-2-medium": link,
  "click-tab-2-hard": link,
  "click-test": () => click(one("#subbtn")),
  "click-test-2": () => click(withText("#area button", "ONE")),
  "click-test-transfer": () => click(withText("#area button", "ONE")),
  "click-widget": () => click(one(`#area [data-type="${quoted[0]}"]`)),
  "find-greatest": () => {  // as in `link`: of hidden cards one is shown at a time
    const cards = all(".card"), hidden = e => /hidden/.test(e.className), seen = state.seen = state.seen || new Map();
    cards.filter(e => !hidden(e)).forEach(e => seen.set(e, parseInt(text(e), 10)));
    const best = cards.find(e => !seen.has(e)) || cards.reduce((a, b) => seen.get(b) > seen.get(a) ? b : a);
    return hidden(best) ? click(best) : submit();
  },
  "focus-text": () => click(one("#area input")),
  "focus-text-2": () => click(all("#area input")[ordinal(query.match(/the (\d)/)[1])]),
  "grid-coordinate": () => click(document.getElementById(query.match(/\(.*\)/)[0])),
  "navigate-tree": tree,
  "number-checkboxes": () => {
    const pattern = PATTERNS[parseInt(quoted[0], 10)].flat();
    const box = all("#checkboxes input").find((e, index) => e.checked !== Boolean(pattern[index]));
    return box ? click(box) : submit();
  },
  "odd-or-even": () => {
    const row = all(".row").find(e => !e.querySelector(".selected"));
    if (!row) return submit();
    return click(row.querySelector(parseInt(text(row.querySelector(".display-number")), 10) % 2 ? ".odd" : ".even"));
  },
  "unicode-test": namedButton,
});
