// What a demonstrator of MiniWoB++ does next: task name -> an action in pixels of the page, or null
// where there is nothing (more) to do. It reads the page as it likes, keeps nothing from turn to turn
// but what the page shows, and acts by mouse and keyboard alone.
(name => {
  const query = document.getElementById("query").textContent.replace(/\s+/g, " ").trim();
  const quoted = [...query.matchAll(/"([^"]*)"/g)].map(match => match[1]);
  const shown = element => element.getClientRects().length > 0;
  const all = selector => [...document.querySelectorAll(selector)].filter(e => !e.closest("#query"));
  const one = selector => all(selector).find(shown);
  const text = element => element.textContent.replace(/\s+/g, " ").trim();
  const withText = (selector, wanted) => all(selector).filter(shown).find(e => text(e) === wanted);
  const ordinal = word => parseInt(word, 10) - 1;
  const state = window.expertState = window.expertState || {};  // for tasks of the clock alone

  const scroll = (element, direction, amount) => {
    const box = element.getBoundingClientRect();
    return {kind: "scroll", x: box.left + box.width / 2, y: Math.min(box.top + box.height / 2, 205),
      direction, amount: Math.round(Math.max(amount, 20))};
  };
  const middle = element => {
    const box = element.getClientRects()[0];
    return {x: box.left + box.width / 2, y: box.top + box.height / 2};
  };
  const click = element => {  // scrolls first where it is out of sight
    const at = middle(element);
    for (let parent = element.parentElement; parent && parent.id !== "wrap"; parent = parent.parentElement) {
      if (parent.scrollHeight <= parent.clientHeight + 1 || !/auto|scroll/.test(getComputedStyle(parent).overflowY)) continue;
      const box = parent.getBoundingClientRect(), bottom = Math.min(box.bottom, 210);
      if (at.y < box.top) return scroll(parent, "up", (box.top + bottom) / 2 - at.y);
      if (at.y > bottom) return scroll(parent, "down", at.y - (box.top + bottom) / 2);
    }
    return {kind: "click", ...at};
  };
  const keys = chord => ({kind: "keys", keys: chord});
  const drag = (from, to) => ({kind: "drag", x: from.x, y: from.y, x2: to.x, y2: to.y});
  const fill = (input, wanted) => {  // null once it holds what is wanted
    if (input.value === wanted) return null;
    if (document.activeElement !== input) return click(input);
    const whole = input.selectionStart === 0 && input.selectionEnd === input.value.length;
    if (input.value && !whole && getSelection().toString() !== input.value) return keys("ctrl+a");
    return wanted ? {kind: "type", text: wanted} : keys("delete");
  };
  const submit = () => click(one("#subbtn") || one("#submit") || withText("#area button", "Submit"));
  const check = wanted => {  // wanted: label text -> bool
    const label = all("#area label").find(e => e.querySelector("input").checked !== wanted(text(e)));
    return label ? click(label.querySelector("input")) : submit();
  };
  const fillAndSubmit = (...pairs) => {
    for (const [selector, wanted] of pairs) {
      const next = fill(one(selector), wanted);
      if (next) return next;
    }
    return submit();
  };
  const listed = () => {
    const names = query.match(/Select (.*) and click Submit/)[1];
    return names === "nothing" ? [] : names.split(", ");
  };
  const checkboxes = () => { const names = listed(); return check(label => names.includes(label)); };
  const namedButton = () => click(withText("#area button", quoted[0]));
  const link = () => {  // a link that may be in a section or behind a tab that is closed
    const target = all(".alink").find(e => text(e) === quoted[0]);
    if (!target) return click(one("a[href='#tabs-2']"));  // click-tab-2-medium: that alone is asked for
    if (shown(target)) return click(target);
    const panel = target.closest(".ui-accordion-content, .ui-tabs-panel");
    return click(panel.matches(".ui-tabs-panel") ? one(`a[href="#${panel.id}"]`) : panel.previousElementSibling);
  };
  const collapsible = () => click(one(".ui-accordion-content") ? one("#subbtn") : one("h3"));
  const describes = (element, words) => {  // "large green circle" of an element of shapes.js
    const tag = element.tagName.toLowerCase(), content = text(element);
    const kind = {rect: "rectangle", circle: "circle", polygon: "triangle"}[tag] || (/\d/.test(content) ? "digit" : "letter");
    const size = {text: () => parseFloat(element.getAttribute("font-size")), circle: () => 2 * parseFloat(element.getAttribute("r")),
      rect: () => parseFloat(element.getAttribute("width")), polygon: () => element.getBBox().width}[tag]();
    const known = [element.getAttribute("fill"), size > 15 ? "large" : "small", kind, content, "item", "shape"];
    return words.every(word => known.includes(word) || (word === "shape" && !["digit", "letter"].includes(kind)));
  };
  const figures = () => all("#area_svg > *");
  const slide = (handle, value, wanted) => {  // by the arrow keys, once the handle has the focus
    if (value === wanted) return null;
    if (document.activeElement !== handle) return click(handle);
    return keys(value < wanted ? "right" : "left");
  };
  const datepicker = (month, day, year) => {
    const field = one("#datepicker");
    const wanted = [month, day, year].join("/");
    if (field.value === wanted) return null;
    if (!one("#ui-datepicker-div")) return click(field);
    const months = ["January", "February", "March", "April", "May", "June", "July", "August", "September",
      "October", "November", "December"];
    const at = parseInt(text(one(".ui-datepicker-year")), 10) * 12 + months.indexOf(text(one(".ui-datepicker-month")));
    const goal = parseInt(year, 10) * 12 + parseInt(month, 10) - 1;
    if (at !== goal) return click(one(at < goal ? ".ui-datepicker-next" : ".ui-datepicker-prev"));
    return click(withText(".ui-datepicker-calendar td a", String(parseInt(day, 10))));
  };
  const chooseDate = () => datepicker(...query.match(/(\d+)\/(\d+)\/(\d+)/).slice(1)) || submit();
  const answer = value => fillAndSubmit(["#math-answer", String(value)]);
  const cellOf = label => text(all("#area td").find(e => text(e) === label).nextElementSibling);
  const email = () => {  // the list of messages, the message, or the answer to it
    const sender = (query.match(/email by (\w+)/) || [])[1];
    const thread = all(".email-thread").find(e => text(e.querySelector(".email-sender")) === sender);
    if (/trash/.test(query)) return click(thread.querySelector(".trash"));
    if (/star/.test(query)) return click(thread.querySelector(".star"));
    if (one("#reply")) return fill(one("#reply-text"), quoted[0]) || click(one("#send-reply"));
    if (one("#forward")) return fill(one(".forward-sender"), query.match(/to (\w+)\.$/)[1]) || click(one("#send-forward"));
    if (one("#email")) return click(one(/reply/.test(query) ? ".email-reply" : ".email-forward"));
    return click(thread.querySelector(".email-subject"));
  };
  const posts = () => {  // several posts of one user, or all of them
    const [, action, , count, user] = query.match(/the "(\w+)" button on (all|(\d+)) posts? by (@\w+)/);
    const buttons = all(".media").filter(e => text(e.querySelector(".username")) === user)
      .map(e => e.querySelector(`.${action.toLowerCase()}`));
    const active = buttons.filter(e => e.classList.contains("active"));
    if (active.length === (count ? parseInt(count, 10) : buttons.length)) return click(withText("#submitRow button", "Submit"));
    return click(buttons.find(e => !e.classList.contains("active")));
  };
  const movies = () => {  // labels differ from layout to layout
    const [, genre, director, year] = query.match(/for (\w+) movies directed by (\w+) from year (\d+)/);
    for (const input of all("#area input[type=text]").filter(shown)) {
      let e = input;
      while (!(e.previousElementSibling && text(e.previousElementSibling)) && !text(e.parentElement)) e = e.parentElement;
      const before = e.previousElementSibling, label = before && text(before) ? text(before) : text(e.parentElement);
      const wanted = /genre/i.test(label) ? genre : /director|name/i.test(label) ? director : year;
      if (input.value.toLowerCase() !== wanted.toLowerCase()) return fill(input, wanted);
    }
    return click(all("#area *").filter(shown).find(e => !e.children.length && /^(submit|search|go!)$/i.test(text(e) || e.value)));
  };
  const complete = () => {  // from what it suggests
    const input = one("#tags");
    if (one(".ui-autocomplete li")) {
      return click(all(".ui-autocomplete li").find(e => text(e).startsWith(quoted[0]) && text(e).endsWith(quoted[1] || "")));
    }
    if (input.value.startsWith(quoted[0]) && input.value.length > quoted[0].length) return submit();
    return fill(input, quoted[0]) || {kind: "wait", seconds: 0.4};
  };
  const copied = () => {  // select all of one field, copy, paste into the other
    const areas = all("#area textarea"), input = one("#area input[type=text]");
    const which = query.match(/(\d)\w\w text area/);
    const source = areas[which ? ordinal(which[1]) : 0];
    if (input.value === source.value) return submit();
    if (document.activeElement === input) return keys("ctrl+v");
    if (document.activeElement !== source) return click(source);
    if (source.selectionEnd - source.selectionStart < source.value.length) return keys("ctrl+a");
    if (!state.copied) { state.copied = true; return keys("ctrl+c"); }
    return click(input);
  };
  const search = () => {  // one of the pages of results
    const input = one("#search-text"), position = ordinal(query.match(/click the (\d+)/)[1]);
    if (!one("#page-content a")) return fill(input, quoted[0]) || click(one("#search"));
    const page = String(Math.floor(position / 3) + 1);
    if (text(one("#pagination .active")) !== page) return click(withText("#pagination a", page));
    return click(all("#page-content a")[position % 3]);
  };
  const tree = () => {
    const target = all("#tree span").find(e => text(e) === quoted[0]);
    if (shown(target)) return click(target);
    let folder = target.closest("ul");
    while (!shown(folder.parentElement)) folder = folder.parentElement.closest("ul");
    return click(folder.parentElement.querySelector(".hitarea"));
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
  const sorted = () => {  // one move of selection sort by mouse
    const items = all("#sortable li"), values = items.map(e => parseInt(text(e), 10));
    const goal = [...values].sort((a, b) => a - b), wrong = values.findIndex((value, i) => value !== goal[i]);
    if (wrong < 0) return submit();
    const from = items[values.indexOf(goal[wrong])].getBoundingClientRect(), to = items[wrong].getBoundingClientRect();
    return drag({x: from.left + 60, y: from.top + from.height / 2}, {x: to.left + 60, y: to.top + 2});
  };
  const moveItem = () => {
    const items = all("#sortable li"), match = query.match(/Drag (\S+) (.*)\./);
    const at = items.findIndex(e => text(e) === match[1]);
    const goal = match[2] === "to the top" ? 0 : match[2] === "to the bottom" ? items.length - 1
      : /down/.test(match[2]) ? at + 1 : /up/.test(match[2]) ? at - 1 : ordinal(match[2].match(/\d/)[0]);
    const from = items[at].getBoundingClientRect(), to = items[goal].getBoundingClientRect();
    return drag({x: from.left + 60, y: from.top + from.height / 2},
      {x: to.left + 60, y: goal > at ? to.bottom - 2 : to.top + 2});
  };
  const moveShape = () => {
    const shape = one("svg circle, svg rect, svg polygon"), box = shape.getBoundingClientRect();
    const [dx, dy] = {left: [-12, 0], right: [12, 0], up: [0, -12], down: [0, 12]}[query.match(/left|right|up|down/)[0]];
    if (state.moved) return submit();
    state.moved = true;
    const at = {x: box.left + box.width / 2, y: box.top + box.height / 2};
    return drag(at, {x: at.x + dx, y: at.y + dy});
  };

  const experts = {
    "ascending-numbers": () => {
      const numbers = all("svg text");
      return click(numbers.length ? numbers.find(e => text(e) === "1") : all("svg rect")[0]);
    },
    "button-delay": () => {
      if (!state.clicked) { state.clicked = Date.now(); return click(withText("#area button", "ONE")); }
      const left = parseInt(query.match(/wait (\d)/)[1], 10) - (Date.now() - state.clicked) / 1000 - 0.06;
      return left > 0.05 ? {kind: "wait", seconds: left} : click(withText("#area button", "TWO"));
    },
    "buy-ticket": () => {
      const price = e => parseInt(e.querySelector(".buy-ticket").dataset.price, 10);
      const duration = e => parseInt(e.querySelector(".time-duration").dataset.duration, 10);
      const by = /cost/.test(query) ? price : duration, sign = /cheapest|shortest/.test(query) ? 1 : -1;
      return click(all(".flight").sort((a, b) => sign * (by(a) - by(b)))[0].querySelector(".buy-ticket"));
    },
    "choose-date": chooseDate,
    "choose-date-easy": chooseDate,
    "choose-date-medium": chooseDate,
    "choose-date-nodelay": chooseDate,
    "choose-list": () => {  // its native popup is not drawn: the keyboard moves through the options
      const select = one("#options"), wanted = query.match(/Select (.*) from the list/)[1];
      const goal = [...select.options].findIndex(e => text(e) === wanted);
      if (select.selectedIndex === goal) return submit();
      return document.activeElement === select ? keys(select.selectedIndex < goal ? "down" : "up") : keys("tab");
    },
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
    "click-shape": () => {
      const words = query.replace(/^Click on an? /, "").split(" ");
      return click(figures().find(e => describes(e, words)));
    },
    "click-tab": () => click(one(`a[href="#tabs-${query.match(/#(\d)/)[1]}"]`)),
    "click-tab-2": link,
    "click-tab-2-easy": link,
    "click-tab-2-medium": link,
    "click-tab-2-hard": link,
    "click-test": () => click(one("#subbtn")),
    "click-test-2": () => click(withText("#area button", "ONE")),
    "click-test-transfer": () => click(withText("#area button", "ONE")),
    "click-widget": () => {
      const selector = {text: "input[type=text]", textarea: "textarea", button: "button", radio: "input[type=radio]",
        checkbox: "input[type=checkbox]"}[quoted[0]];
      return click(one(`#area ${selector}`));
    },
    "copy-paste": copied,
    "copy-paste-2": copied,
    "count-shape": () => {
      const words = query.match(/How many (.*)s are there/)[1].split(" ");
      return click(withText("#count-buttons button", String(figures().filter(e => describes(e, words)).length)));
    },
    "drag-circle": moveShape,
    "drag-single-shape": moveShape,
    "drag-items": moveItem,
    "drag-sort-numbers": sorted,
    "drag-box": () => {
      const [small, large] = ["#draggableSmall", "#draggableLarge"].map(e => one(e).getBoundingClientRect());
      const inside = small.left > large.left && small.right < large.right && small.top > large.top && small.bottom < large.bottom;
      return inside ? submit() : drag(middle(one("#draggableSmall")), middle(one("#draggableLarge")));
    },
    "drag-items-grid": () => {
      const items = all("#sortable li"), [, label, way] = query.match(/Drag (\S+) (.*)\./);
      const at = items.findIndex(e => text(e) === label);
      const steps = {up: -3, down: 3, left: -1, right: 1};
      const row = /top/.test(way) ? 0 : /bottom/.test(way) ? 2 : 1;
      const column = /left/.test(way) ? 0 : /right/.test(way) ? 2 : 1;
      const goal = /by one/.test(way) ? at + steps[way.split(" ")[0]] : 3 * row + column;
      const to = middle(items[goal]);
      return drag(middle(items[at]), {x: to.x + (goal > at ? 8 : -8), y: to.y});
    },
    "drag-shapes": () => {
      const tag = {rectangles: "rect", circles: "circle", triangles: "polygon"}[query.match(/all (\w+)/)[1]];
      const box = one("#shape-container").getBoundingClientRect();
      const out = all(`#area_svg ${tag}:not(#shape-container)`).find(e => {
        const {x, y} = middle(e);
        return x < box.left || x > box.right || y < box.top || y > box.bottom;
      });
      return out ? drag(middle(out), middle(one("#shape-container"))) : submit();
    },
    "email-inbox": email,
    "email-inbox-delete": email,
    "email-inbox-forward": email,
    "email-inbox-important": email,
    "email-inbox-noscroll": email,
    "email-inbox-reply": email,
    "email-inbox-star-reply": email,
    "enter-date": () => {
      const [, month, day, year] = query.match(/(\d+)\/(\d+)\/(\d+)/), input = one("#tt");
      if (input.value === `${year}-${month}-${day}`) return submit();
      if (document.activeElement === input) return {kind: "type", text: month + day + year};
      const box = input.getBoundingClientRect();
      return {kind: "click", x: box.left + 12, y: box.top + box.height / 2};
    },
    "enter-password": () => fillAndSubmit(["#password", quoted[0]], ["#verify", quoted[0]]),
    "enter-text": () => fillAndSubmit(["#tt", quoted[0]]),
    "enter-text-2": () => fillAndSubmit(["#tt", /lower/.test(query) ? quoted[0].toLowerCase() : quoted[0].toUpperCase()]),
    "enter-text-dynamic": () => fillAndSubmit(["#tt", quoted[0]]),
    "enter-time": () => {
      const [, hour, minute, half] = query.match(/(\d+):(\d+)\s*([AP])M/), input = one("#tt");
      const hours = parseInt(hour, 10) % 12 + (half === "P" ? 12 : 0);
      if (input.value === `${String(hours).padStart(2, "0")}:${minute}`) return submit();
      if (document.activeElement === input) return {kind: "type", text: hour.padStart(2, "0") + minute + half};
      const box = input.getBoundingClientRect();
      return {kind: "click", x: box.left + 10, y: box.top + box.height / 2};
    },
    "find-greatest": () => {
      const cards = all(".card"), values = cards.map(e => parseInt(text(e), 10));
      const best = cards[values.indexOf(Math.max(...values))];
      return /hidden/.test(best.className) ? click(best) : submit();
    },
    "find-word": () => {
      const words = text(one("#area p")).split(" "), which = ordinal(query.match(/the (\d+)/)[1]);
      return fillAndSubmit(["#area input[type=text]", words[which].replace(/[.,]/g, "")]);
    },
    "focus-text": () => click(one("#area input")),
    "focus-text-2": () => click(all("#area input")[ordinal(query.match(/the (\d)/)[1])]),
    "form-sequence": () => {
      const [, value, box] = query.match(/Select (-?\d+) with the slider, click the (\d)/);
      const target = one(`#checkbox-${box}`);
      return slide(one(".ui-slider-handle"), parseInt(text(one("#val")), 10), parseInt(value, 10))
        || click(target.checked ? one("#subbtn") : target);
    },
    "form-sequence-2": () => {
      const [, radio, , box] = query.match(/the (\d)\w\w radio.*number "(-?\d+)" into the (\d)/);
      const target = all("#area input[type=radio]")[radio - 1];
      return target.checked ? fillAndSubmit([`#input-${box}`, quoted[0]]) : click(target);
    },
    "generate-number": () => {
      const [, relation, limit] = query.match(/(less|greater) than (-?\d+)/) || [null, query.match(/even|odd/)[0]];
      const value = parseInt(text(one("#display-number") || document.body), 10), bound = parseInt(limit, 10);
      const good = {less: value < bound, greater: value > bound, even: value % 2 === 0, odd: Math.abs(value % 2) === 1}[relation];
      return good ? submit() : click(withText("#area button", "Generate"));
    },
    "grid-coordinate": () => click(document.getElementById(query.match(/\(.*\)/)[0])),
    "guess-number": () => {
      state.low = one("#higher") ? Math.max(state.low ?? 0, parseInt(text(one("#higher span")), 10) + 1) : state.low ?? 0;
      state.high = one("#lower") ? Math.min(state.high ?? 9, parseInt(text(one("#lower span")), 10) - 1) : state.high ?? 9;
      return fillAndSubmit(["#tt", String(Math.floor((state.low + state.high) / 2))]);
    },
    "highlight-text": () => {
      const block = one("#area p") || one("#randomText");
      return getSelection().toString().trim() ? submit() : {kind: "triple_click", ...middle(block)};
    },
    "highlight-text-2": () => {
      const block = all("#randomText p")[ordinal(query.match(/the (\d)/)[1])];
      return getSelection().toString().trim() ? submit() : {kind: "triple_click", ...middle(block)};
    },
    "identify-shape": () => {
      const figure = figures()[0];
      const kind = ["rectangle", "circle", "triangle", "letter", "digit"].find(word => describes(figure, [word]));
      return click(one(`[data-type=${kind}]`));
    },
    "login-user-popup": () => {
      const popup = one("#popup");
      if (popup) return click(one("#popup-cancel") || popup.querySelector("button:last-of-type, a"));
      return fillAndSubmit(["#username", quoted[0]], ["#password", quoted[1]]);
    },
    "multi-layouts": movies,
    "multi-orderings": movies,
    "login-user": () => fillAndSubmit(["#username", quoted[0]], ["#password", quoted[1]]),
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
    "phone-book": () => {
      const [, person, , what] = query.match(/Find (.+) in the contact book and click on their (the )?(\w+)/);
      if (text(one("#contact .name")) !== person) return click(withText("#pagination a", ">"));
      return click(one(`#contact .${what}`));
    },
    "read-table-2": () => fillAndSubmit(...[1, 2].map(n => [`#tt${n}`, cellOf(text(one(`#ll${n}`)).replace(/:\s*$/, ""))])),
    "read-table": () => fillAndSubmit(["#tt", cellOf(query.match(/value of (.*) into/)[1])]),
    "resize-textarea": () => {
      const [, side, way] = query.match(/the (width|height) is (smaller|larger)/);
      if (state.resized) return submit();
      state.resized = true;
      const box = one("#tt").getBoundingClientRect(), by = way === "larger" ? 12 : -12;
      const corner = {x: box.right - 4, y: box.bottom - 4};
      return drag(corner, {x: corner.x + (side === "width" ? by : 0), y: corner.y + (side === "height" ? by : 0)});
    },
    "scroll-text": () => {
      const area = one("#text-area"), words = area.value.trim().split(/\s+/);
      if (area.scrollTop + area.clientHeight < area.scrollHeight - 10) return scroll(area, "down", 100);
      return fillAndSubmit(["#area input[type=text]", words[words.length - 1].replace(/[.,]/g, "")]);
    },
    "scroll-text-2": () => {
      const area = one("#text-area"), bottom = area.scrollHeight - area.clientHeight;
      const up = /top/.test(query), there = up ? area.scrollTop <= 0 : area.scrollTop >= bottom - 1;
      return there ? submit() : scroll(area, up ? "up" : "down", 100);
    },
    "search-engine": search,
    "sign-agreement": () => {
      const area = one("#text-area"), button = one(/Cancel|cancel/.test(query) ? "#cancel" : "#agree");
      if (!quoted.length) return click(button);
      if (one("#name").disabled) return scroll(area, "down", 300);
      return fill(one("#name"), quoted[0]) || click(button);
    },
    "simple-algebra": () => {
      const parts = text(one("#math-problem")).match(/(x|-?\d+) ([-+]) (x|-?\d+) = (-?\d+)/);
      const [a, sign, b, sum] = [parts[1], parts[2] === "+" ? 1 : -1, parts[3], parseInt(parts[4], 10)];
      return answer(a === "x" ? sum - sign * parseInt(b, 10) : sign * (sum - parseInt(a, 10)));
    },
    "simple-arithmetic": () => {
      const [, a, sign, b] = text(one("#math-problem")).match(/(-?\d+) ([-+x]) (-?\d+)/);
      const [left, right] = [parseInt(a, 10), parseInt(b, 10)];
      return answer({"+": left + right, "-": left - right, x: left * right}[sign]);
    },
    "social-media": () => {
      const [, user, what] = query.match(/user (@\w+), click on the "(.*)" button/);
      const post = all(".media").find(e => text(e.querySelector(".username")) === user);
      const button = {Reply: ".reply", Retweet: ".retweet", Like: ".like"}[what];
      if (button) return click(post.querySelector(button));
      const item = [...post.querySelectorAll("ul li")].find(e => text(e) === what || text(e).startsWith(`${what} `));
      return click(shown(item) ? item : post.querySelector(".more"));
    },
    "social-media-all": posts,
    "social-media-some": posts,
    "text-transform": () => fillAndSubmit(["#tt", all("#captcha span").map(text).join("")]),
    "unicode-test": namedButton,
    "use-autocomplete": complete,
    "use-autocomplete-nodelay": complete,
    "use-slider-2": () => {
      const wanted = JSON.parse(query.match(/\[.*\]/)[0]);
      for (const n of [1, 2, 3]) {
        const next = slide(one(`#slider-${n} .ui-slider-handle`), parseInt(text(one(`#val-${n}`)), 10), wanted[n - 1]);
        if (next) return next;
      }
      return submit();
    },
    "use-slider": () => slide(one(".ui-slider-handle"), parseInt(text(one("#val")), 10), parseInt(query.match(/Select (-?\d+)/)[1], 10)) || submit(),
    "use-spinner": () => {
      const value = parseInt(one("#spinner").value, 10), wanted = parseInt(query.match(/Select (-?\d+)/)[1], 10);
      return value === wanted ? submit() : click(one(value < wanted ? ".ui-spinner-up" : ".ui-spinner-down"));
    },
    "visual-addition": () => answer(all(".addition-block").length),
  };
  return experts[name] ? experts[name]() : null;
})
