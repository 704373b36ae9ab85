// The viewer's pages: follow the run, keep a list of any length scrolling, move by keyboard.
// No library and no build step. Text from the server is only ever put in as text; the one piece of
// HTML, the parts of the run's page, was escaped by the templates.
"use strict";

const FOLLOW_MS = 1000;
const ROW_PX = 36; // as .row in viewer.css
const WINDOW = 100; // rows asked for at a time
const SPARE = 8; // rows drawn above and below what is seen
const KEPT_WINDOWS = 60;
const ORDER_MS = 100;
const FOCUSABLE = "a, summary, [tabindex]";

const byId = (id) => document.getElementById(id);
const number = (value) => value.toLocaleString("en-US");

async function ask(address) {
  const response = await fetch(address, { credentials: "same-origin" });
  if (!response.ok) throw new Error(`${address}: ${response.status}`);
  return response;
}

// ------------------------------------------------------------------------ following

function follow(onState) {
  const progress = byId("progress");
  let shown = progress.textContent;
  const say = (text) => {
    if (text !== shown) progress.textContent = shown = text; // a live region repeats what is set
  };
  async function look() {
    try {
      const state = await (await ask("/api/state")).json();
      let text = `${number(state.episodes)} episodes`;
      if (state.step !== null) text = `step ${number(state.step)}, ${text}`;
      if (!state.complete) text += `, ${number(state.read)} of ${number(state.shards)} shards read`;
      if (state.trouble) text = state.trouble;
      say(text);
      await onState(state);
    } catch (error) {
      say("The viewer does not answer; trying again.");
    }
    document.body.dataset.looks = Number(document.body.dataset.looks || 0) + 1;
    setTimeout(look, document.hidden ? 5 * FOLLOW_MS : FOLLOW_MS);
  }
  look();
}

function followRun() {
  let signature = "";
  const parts = byId("parts");
  const source = new Map(); // what each part was drawn from
  follow(async (state) => {
    if (state.signature === signature) return;
    const text = await (await ask("/parts/run")).text();
    const fresh = new DOMParser().parseFromString(text, "text/html").querySelectorAll("[data-part]");
    const names = new Set();
    let waits = false;
    for (const part of fresh) {
      const name = part.dataset.part;
      names.add(name);
      const old = parts.querySelector(`[data-part="${CSS.escape(name)}"]`);
      const html = part.innerHTML;
      if (old && source.get(name) === html) continue;
      const selection = document.getSelection();
      if (old && !selection.isCollapsed && old.contains(selection.anchorNode)) {
        waits = true; // somebody is copying from it
        continue;
      }
      const focused = old ? [...old.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement) : -1;
      source.set(name, html);
      const open = old ? [...old.querySelectorAll("details")].map((one) => one.open) : [];
      const placed = document.adoptNode(part);
      [...placed.querySelectorAll("details")].forEach((one, n) => {
        if (open[n] !== undefined) one.open = open[n];
      });
      if (old) old.replaceWith(placed);
      else parts.append(placed);
      if (focused >= 0) placed.querySelectorAll(FOCUSABLE)[focused]?.focus({ preventScroll: true });
    }
    for (const old of [...parts.querySelectorAll("[data-part]")]) {
      if (!names.has(old.dataset.part)) old.remove();
    }
    if (!waits) signature = state.signature;
  });
}

// ------------------------------------------------------------------------ the list

class EpisodeList {
  constructor() {
    this.form = byId("filters");
    this.table = byId("list");
    this.view = byId("view");
    this.body = byId("rows");
    this.found = byId("found");
    this.newer = byId("newer");
    this.rows = new Map(); // index in the list -> its element
    this.free = []; // elements to be used again
    this.windows = new Map(); // start -> rows, or the promise of them
    this.total = 0;
    this.upto = null; // of the index: the list stands still while the run grows
    this.active = 0; // where the keyboard is
    this.query = "";
    this.ordering = 0; // the timer
    this.version = 0; // of the answers: late ones are dropped
    this.view.addEventListener("scroll", () => this.draw(), { passive: true });
    this.view.addEventListener("keydown", (event) => this.onKey(event));
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.apply();
    });
    this.form.addEventListener("change", () => this.apply());
    this.newer.addEventListener("click", () => {
      this.reload();
      this.view.scrollTop = 0;
    });
    window.addEventListener("resize", () => this.draw());
    // Who comes back from an episode finds the list as it was.
    window.addEventListener("pagehide", () => {
      const place = { upto: this.upto, top: this.view.scrollTop, active: this.active };
      history.replaceState(place, "");
    });
    this.body.addEventListener("focusin", (event) => {
      const row = event.target.closest(".row");
      if (row) this.active = Number(row.getAttribute("aria-rowindex")) - 2;
    });
    this.place = history.state;
    this.query = this.read();
  }

  read() {
    const fields = [...new FormData(this.form)].filter(([, value]) => value !== "");
    return new URLSearchParams(fields).toString();
  }

  apply() {
    const query = this.read();
    if (query === this.query) return;
    this.query = query;
    history.replaceState(null, "", query ? `/episodes?${query}` : "/episodes");
    this.view.scrollTop = 0;
    this.active = 0;
    this.reload();
  }

  address(start, count, upto) {
    const fields = new URLSearchParams(this.query);
    fields.set("start", start);
    fields.set("count", count);
    if (upto !== null) fields.set("upto", upto);
    return `/api/episodes?${fields}`;
  }

  async reload() {
    const version = ++this.version;
    const place = this.place;
    this.place = null;
    const answer = await (await ask(this.address(0, WINDOW, place && place.upto))).json();
    if (version !== this.version) return;
    this.upto = answer.upto;
    this.total = answer.total;
    this.windows = new Map([[0, answer.rows]]);
    this.newer.hidden = true;
    this.body.style.height = `${this.total * ROW_PX}px`;
    this.table.setAttribute("aria-rowcount", String(this.total + 1));
    const text = `${number(this.total)} of ${number(this.upto)} episodes`;
    if (this.found.textContent !== text) this.found.textContent = text;
    this.active = Math.min(this.active, Math.max(0, this.total - 1));
    for (const [index, row] of this.rows) this.fill(row, index);
    this.draw();
    if (place) {
      this.view.scrollTop = place.top;
      this.go(Math.min(place.active, Math.max(0, this.total - 1)));
    }
  }

  onState(state) {
    if (this.upto === null || state.episodes === this.upto) {
      return this.upto === null ? this.reload() : undefined;
    }
    // At the top nobody has a place to lose; elsewhere the reader decides.
    const isReading = this.view.scrollTop > 0 || this.view.contains(document.activeElement);
    if (!isReading) return this.reload();
    this.newer.hidden = false;
    const text = `Show ${number(state.episodes - this.upto)} newer episodes`;
    if (this.newer.textContent !== text) this.newer.textContent = text;
    return undefined;
  }

  draw() {
    const first = Math.max(0, Math.floor(this.view.scrollTop / ROW_PX) - SPARE);
    const seen = Math.ceil(this.view.clientHeight / ROW_PX) + 2 * SPARE;
    const stop = Math.min(this.total, first + seen);
    for (const [index, row] of this.rows) {
      if (index >= first && index < stop) continue;
      if (row.contains(document.activeElement)) continue; // it keeps the focus
      this.rows.delete(index);
      row.hidden = true;
      this.free.push(row);
    }
    for (let index = first; index < stop; index++) {
      if (this.rows.has(index)) continue;
      const row = this.free.pop() || this.make();
      this.rows.set(index, row);
      this.fill(row, index);
      if (!row.isConnected) this.body.append(row);
    }
    clearTimeout(this.ordering);
    this.ordering = setTimeout(() => this.order(), ORDER_MS);
  }

  // A screen reader reads the rows in the order of the document. Moving elements costs more than
  // filling them, so it is done when the scrolling pauses.
  order() {
    let next = this.body.firstElementChild;
    for (const index of [...this.rows.keys()].sort((a, b) => a - b)) {
      const row = this.rows.get(index);
      if (next === row) next = row.nextElementSibling;
      else if (!row.contains(document.activeElement)) this.body.insertBefore(row, next);
    }
  }

  make() {
    const row = document.createElement("div");
    row.className = "row";
    row.setAttribute("role", "row");
    const cells = ["task", "number", "outcome", "number", "number", "number", "place", "actor"];
    for (const name of cells) {
      const cell = document.createElement("span");
      cell.setAttribute("role", "cell");
      cell.className = name;
      row.append(cell);
    }
    const link = document.createElement("a");
    const variant = document.createElement("span");
    variant.className = "variant";
    row.firstChild.append(link, " ", variant);
    return row;
  }

  fill(row, index) {
    row.hidden = index >= this.total;
    row.style.transform = `translateY(${index * ROW_PX}px)`;
    row.setAttribute("aria-rowindex", String(index + 2));
    const data = this.at(index);
    const [task, ...cells] = row.children;
    const [link, variant] = task.children;
    link.tabIndex = index === this.active ? 0 : -1;
    row.classList.toggle("gone", Boolean(data && data.gone));
    if (!data) {
      link.removeAttribute("href");
      link.textContent = "…";
      variant.textContent = "";
      for (const cell of cells) cell.textContent = "";
      return;
    }
    link.href = `/episode/${data.key}`;
    link.textContent = data.task;
    variant.textContent = data.variant;
    const texts = [
      ...[data.seed, data.outcome, data.reward, data.version, String(data.turns), data.place],
      data.actor,
    ];
    cells.forEach((cell, n) => {
      cell.textContent = texts[n];
    });
    cells[1].className = data.good ? "good" : "bad";
  }

  at(index) {
    const start = Math.floor(index / WINDOW) * WINDOW;
    const found = this.windows.get(start);
    if (found === undefined) this.fetchWindow(start);
    return Array.isArray(found) ? found[index - start] : undefined;
  }

  async fetchWindow(start) {
    if (start >= this.total) return;
    const version = this.version;
    this.windows.set(start, "asked");
    try {
      const answer = await (await ask(this.address(start, WINDOW, this.upto))).json();
      if (version !== this.version) return;
      this.windows.set(start, answer.rows);
    } catch (error) {
      if (version === this.version) this.windows.delete(start);
      return;
    }
    while (this.windows.size > KEPT_WINDOWS) this.windows.delete(this.windows.keys().next().value);
    for (const [index, row] of this.rows) {
      if (index >= start && index < start + WINDOW) this.fill(row, index);
    }
  }

  onKey(event) {
    const page = Math.max(1, Math.floor(this.view.clientHeight / ROW_PX) - 2);
    const steps = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page };
    let target = this.active;
    if (event.key in steps) target += steps[event.key];
    else if (event.key === "Home") target = 0;
    else if (event.key === "End") target = this.total - 1;
    else return;
    if (event.altKey || event.ctrlKey || event.metaKey || this.total === 0) return;
    event.preventDefault();
    this.go(Math.min(this.total - 1, Math.max(0, target)));
  }

  go(index) {
    this.active = index;
    const top = index * ROW_PX;
    const bottom = top + 2 * ROW_PX - this.view.clientHeight; // one row is the heading
    if (this.view.scrollTop > top) this.view.scrollTop = top;
    else if (this.view.scrollTop < bottom) this.view.scrollTop = bottom;
    this.draw();
    for (const [n, row] of this.rows) row.querySelector("a").tabIndex = n === index ? 0 : -1;
    const link = this.rows.get(index)?.querySelector("a");
    if (link) link.focus({ preventScroll: true });
    this.draw(); // the row that had the focus may go now
  }
}

// ------------------------------------------------------------------------ episodes

function chooseColour() {
  const fieldset = byId("colours");
  if (!fieldset) return;
  const set = () => {
    const chosen = fieldset.querySelector("input:checked");
    document.body.dataset.colour = chosen ? chosen.value : "logprob";
  };
  fieldset.addEventListener("change", set);
  set(); // a browser may remember the choice
}

function moveBetweenTurns() {
  const list = byId("turn-list");
  if (!list) return;
  list.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || event.altKey || event.ctrlKey || event.metaKey) return;
    if (event.target.closest("table, pre, .scroll")) return; // these scroll sideways themselves
    const turns = [...list.querySelectorAll(".turn-view")];
    const here = turns.indexOf(event.target.closest(".turn-view"));
    const next = turns[here + step];
    if (!next) return;
    event.preventDefault();
    next.focus();
    next.scrollIntoView({ block: "start" });
  });
}

const page = document.body.dataset.page;
chooseColour();
moveBetweenTurns();
if (page === "run") {
  followRun();
} else if (page === "episodes") {
  const list = new EpisodeList();
  follow((state) => list.onState(state));
} else {
  follow(() => {});
}
