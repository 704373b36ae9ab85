// What is written, chosen or set: fields, lists, dates, sliders, an editor.
const slide = (handle, value, wanted) => {  // to the nearest pixel, then by the arrow keys
  if (value === wanted) return null;
  const bar = handle.parentElement, dragged = state.dragged = state.dragged || [];
  if (!dragged.includes(bar.id)) {
    dragged.push(bar.id);
    const [low, high, way] = ["min", "max", "orientation"].map(option => $(bar).slider("option", option));
    const box = bar.getBoundingClientRect(), share = (wanted - low) / (high - low), at = middle(handle);
    return drag(at, way === "vertical" ? {x: at.x, y: box.bottom - share * box.height} : {x: box.left + share * box.width, y: at.y});
  }
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
    const wanted = all(".ui-autocomplete li").find(e => text(e).startsWith(quoted[0]) && text(e).endsWith(quoted[1] || ""));
    if (wanted.getBoundingClientRect().bottom <= 210) return click(wanted);
    return {kind: "type", text: text(wanted).slice(input.value.length)};  // below the screen: a shorter list
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
const color = hex => {  // typed into the picker's field; its pad covers the button
  const input = one("#col"), wanted = hex.slice(1).toUpperCase();
  if (input.value !== wanted) return fill(input, wanted);
  return keys(document.activeElement === input ? "tab" : "enter");
};
const ends = (element, word) => {  // the two ends of a word in a text
  const line = element.querySelector("p").firstChild, range = document.createRange();
  const start = ` ${line.data} `.indexOf(` ${word} `);
  range.setStart(line, start);
  range.setEnd(line, start + word.length);
  const box = range.getBoundingClientRect(), y = box.top + box.height / 2;
  return [{x: box.left, y}, {x: box.right, y}];
};

Object.assign(experts, {
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
  "copy-paste": copied,
  "copy-paste-2": copied,
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
  "find-word": () => {
    const words = text(one("#area p")).split(" "), which = ordinal(query.match(/the (\d+)/)[1]);
    return fillAndSubmit(["#area input[type=text]", words[which].replace(/[.,]/g, "")]);
  },
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
  "highlight-text": () => {
    const block = one("#area p") || one("#randomText");
    return getSelection().toString().trim() ? submit() : {kind: "triple_click", ...middle(block)};
  },
  "highlight-text-2": () => {
    const block = all("#randomText p")[ordinal(query.match(/the (\d)/)[1])];
    return getSelection().toString().trim() ? submit() : {kind: "triple_click", ...middle(block)};
  },
  "login-user": () => fillAndSubmit(["#username", quoted[0]], ["#password", quoted[1]]),
  "login-user-popup": () => {
    const popup = one("#popup");
    if (popup) return click(one("#popup-cancel") || popup.querySelector("button:last-of-type, a"));
    return fillAndSubmit(["#username", quoted[0]], ["#password", quoted[1]]);
  },
  "multi-layouts": movies,
  "multi-orderings": movies,
  "read-table": () => fillAndSubmit(["#tt", cellOf(query.match(/value of (.*) into/)[1])]),
  "read-table-2": () => fillAndSubmit(...[1, 2].map(n => [`#tt${n}`, cellOf(text(one(`#ll${n}`)).replace(/:\s*$/, ""))])),
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
  "text-transform": () => fillAndSubmit(["#tt", all("#captcha span").map(text).join("")]),
  "use-autocomplete": complete,
  "use-autocomplete-nodelay": complete,
  "use-slider": () => slide(one(".ui-slider-handle"), parseInt(text(one("#val")), 10), parseInt(query.match(/Select (-?\d+)/)[1], 10)) || submit(),
  "use-slider-2": () => {
    const wanted = JSON.parse(query.match(/\[.*\]/)[0]);
    for (const n of [1, 2, 3]) {
      const next = slide(one(`#slider-${n} .ui-slider-handle`), parseInt(text(one(`#val-${n}`)), 10), wanted[n - 1]);
      if (next) return next;
    }
    return submit();
  },
  "use-spinner": () => {
    const value = parseInt(one("#spinner").value, 10), wanted = parseInt(query.match(/Select (-?\d+)/)[1], 10);
    return value === wanted ? submit() : click(one(value < wanted ? ".ui-spinner-up" : ".ui-spinner-down"));
  },
  "visual-addition": () => answer(all(".addition-block").length),
  "click-scroll-list": () => {  // two entries by keyboard: ctrl+arrow moves, ctrl+space adds
    const list = one("#options"), wanted = query.match(/Select (.*) from the scroll list/)[1].split(", ");
    const goals = [...list.options].filter(e => wanted.includes(text(e))).map(e => e.index);
    const taken = [...list.selectedOptions].map(e => e.index);
    if (String(taken) === String(goals)) return submit();
    if (taken.length !== 1 || taken[0] !== goals[0]) { state.at = goals[0]; return click(list.options[goals[0]]); }
    return keys(state.at++ < goals[1] ? "ctrl+down" : "ctrl+space");
  },
  "form-sequence-3": () => {
    const wanted = query.match(/Choose (.*) from/)[1];
    if (one("#dropdown-container .label") && text(one("#dropdown-container .label")) === wanted) return click(withText("#buttons button", quoted[0]));
    const item = withText(".selectric-items li", wanted);
    return click(item || one(".selectric"));
  },
  "text-editor": () => {
    const [, word, look] = query.match(/give the text (.*) the (?:style|color) (\w+)/) || [null, null, query.match(/(\w+) and press/)[1]];
    const editor = one(".ql-editor"), wanted = word || text(editor);
    const marked = [...editor.querySelectorAll("strong, em, u, span")].map(e => e.textContent).join("");
    if (marked.trim() === wanted) return submit();
    const swatch = COLOR_MAP[look] && one(`.ql-picker-item[data-value="${COLOR_MAP[look][0]}"]`);
    if (swatch) return click(swatch);
    if (getSelection().toString().trim() !== wanted) {
      if (word) return drag(...ends(editor, word));
      return document.activeElement === editor ? keys("ctrl+a") : click(editor.querySelector("p"));
    }
    if (!state.waited) { state.waited = true; return {kind: "wait", seconds: 0.2}; }  // until the editor has noticed
    return click(one({bold: ".ql-bold", italics: ".ql-italic", underlined: ".ql-underline"}[look] || ".ql-color .ql-picker-label"));
  },
  "use-colorwheel": () => color(ui_utils.colorNameToHex(query.match(/Select (\w+)/)[1])),
  "use-colorwheel-2": () => {
    const shades = getComputedStyle(document.querySelector("#query .cc")).backgroundColor.match(/\d+/g);
    return color(`#${shades.map(shade => parseInt(shade, 10).toString(16).padStart(2, "0")).join("")}`);
  },
});
