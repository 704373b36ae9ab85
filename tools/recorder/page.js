// Where a person's gesture begins and ends; what it means is decided by gestures.py.
"use strict";

const CLICK_PAUSE_MS = 300; // a second click within it belongs to the first
const DRAG_PX = 4; // of the page: less is an unsteady hand
const WHEEL_PAUSE_MS = 250;
const LINE_PX = 40; // wheels that count lines
const EDITS = ["Backspace", "Delete", "ArrowLeft", "ArrowRight", "Home", "End"];
const LONE = ["Shift", "Control", "Alt", "Meta", "AltGraph", "CapsLock", "Dead", "Process", "Unidentified"];

const at = id => document.getElementById(id);
const screen = at("screen"), text = at("text");
let state = null;
let waiting = Promise.resolve(); // one request at a time, in the order of the gestures
let pending = 0;

// ------------------------------------------------------------------------ the server

function ask(path, body) {
  pending += 1;
  draw();
  waiting = waiting.then(async () => {
    try {
      const options = body && {method: "POST", body: JSON.stringify(body()),
        headers: {"Content-Type": "application/json"}};
      const answer = await fetch(path, options);
      if (!answer.ok) throw new Error(`HTTP ${answer.status} ${await answer.text()}`);
      await show(await answer.json());
    } catch (error) {
      state = {...state, message: `The recorder does not answer (${error.message}). Is it still running?`};
    }
    pending -= 1;
    draw();
  });
  return waiting;
}

function send(gesture) {
  // With the number of the screen that will be shown when its turn has come.
  return ask("gesture", () => ({...gesture, screen: state.screen}));
}

async function show(next) {
  const fresh = !state || next.screen !== state.screen;
  state = next;
  if (state.open && fresh) {
    screen.src = `screen?${state.screen}`;
    await screen.decode().catch(() => {});
  }
}

// ------------------------------------------------------------------------- the page

function fit() {
  // Whole multiples where the screen is small; never wider than there is room.
  const room = at("stage").clientWidth - 2, high = Math.max(240, window.innerHeight - 260);
  const most = Math.min(room / state.width, high / state.height);
  const scale = most >= 1 ? Math.min(3, Math.floor(most)) : Math.max(most, Math.min(1, room / state.width));
  screen.width = Math.round(state.width * scale);
  screen.height = Math.round(state.height * scale);
  at("frame").classList.toggle("large", scale > 1);
}

function draw() {
  if (!state || state.screen === undefined) return at("message").textContent = state?.message ?? "";
  const open = state.open, ended = !open || state.ended, busy = pending > 0;
  at("frame").className = `${busy ? "busy" : ""} ${ended ? "ended" : ""}`;
  at("frame").hidden = !open;
  at("message").textContent = state.message;
  at("saved").textContent = state.saved.length
    ? `Saved ${state.saved.length} of ${state.episodes}:\n${state.saved.join("\n")}` : "";
  for (const control of document.querySelectorAll("#typing *, #spoken *, .say"))
    control.disabled = ended;
  if (state.finished) {
    at("instruction").textContent = "All demonstrations are saved.";
    at("facts").textContent = "The recorder has ended; this page can be closed.";
    for (const button of document.querySelectorAll("aside button")) button.disabled = true;
    at("verdict").textContent = at("count").textContent = "";
    at("turns").replaceChildren();
    return;
  }
  if (!open) {
    for (const id of ["save", "again"]) at(id).disabled = true;
    at("skip").disabled = busy;
    return;
  }
  fit();
  at("instruction").textContent = state.instruction;
  const variant = state.variant ? ` · ${state.variant}` : "";
  at("facts").textContent = `${state.task}${variant} · seed ${state.seed} · `
    + `${state.width} x ${state.height} · demonstration ${state.saved.length + 1} of ${state.episodes}`;
  at("count").textContent = `${state.turns.length} of at most ${state.max_turns}`;
  const lines = state.turns.map(turn => {
    const line = document.createElement("li");
    line.textContent = turn;
    return line;
  });
  at("turns").replaceChildren(...lines);
  at("turns").scrollTop = at("turns").scrollHeight;
  const reward = state.reward === null ? "no reward yet" : `reward ${state.reward}`;
  at("verdict").className = state.solved ? "solved" : state.ended ? "failed" : "";
  at("verdict").textContent = state.solved ? `Solved, ${reward}.`
    : state.ended ? `Ended without being solved, ${reward}.` : `Under way, ${reward}.`;
  at("save").textContent = state.solved ? "Save" : "Save unsolved";
  at("save").classList.toggle("ready", state.solved);
  at("save").disabled = busy || !state.turns.length;
  at("again").disabled = at("skip").disabled = busy;
}

// ------------------------------------------------------------------------- the mouse

const place = event => {
  const box = screen.getBoundingClientRect();
  const inside = (value, most) => Math.min(most - 1, Math.max(0, Math.floor(value)));
  return {
    x: inside((event.clientX - box.left) * state.width / box.width, state.width),
    y: inside((event.clientY - box.top) * state.height / box.height, state.height),
  };
};
let down = null, clicks = null, wheel = null;

const ready = () => state && state.open && !state.ended && pending === 0;
const near = (a, b) => Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY) < DRAG_PX;

screen.addEventListener("contextmenu", event => event.preventDefault());
screen.addEventListener("pointerdown", event => {
  event.preventDefault();
  text.focus({preventScroll: true}); // the keyboard belongs to the screen
  finishWheel();
  if (!ready() || (event.button !== 0 && event.button !== 2)) return;
  screen.setPointerCapture(event.pointerId);
  down = {event, at_ms: event.timeStamp};
});
screen.addEventListener("pointercancel", () => { down = null; });
screen.addEventListener("pointerup", event => {
  if (!down || event.button !== down.event.button) return;
  const started = down;
  down = null;
  const from = place(started.event), held_s = (event.timeStamp - started.at_ms) / 1000;
  const still = near(started.event, event);
  const to = still ? from : place(event);
  const button = event.button === 2 ? "right" : "left";
  const mouse = {kind: "mouse", button, clicks: 1, held_s, ...from, x2: to.x, y2: to.y};
  if (clicks && still && button === "left" && near(clicks.event, event)) {
    clicks.mouse.clicks += 1; // where the first one was
    clearTimeout(clicks.timer);
  } else {
    finishClicks();
    clicks = {event, mouse};
  }
  const more = still && button === "left" && clicks.mouse.clicks < 3 && held_s < CLICK_PAUSE_MS / 1000;
  if (more) clicks.timer = setTimeout(finishClicks, CLICK_PAUSE_MS);
  else finishClicks();
});

function finishClicks() {
  if (!clicks) return;
  clearTimeout(clicks.timer);
  const {mouse} = clicks;
  clicks = null;
  sendText();
  send(mouse);
}

screen.addEventListener("wheel", event => {
  event.preventDefault();
  finishClicks(); // they came first; the wheel counts from the screen after them
  if (!ready()) return;
  const unit = [1, LINE_PX, state.height][event.deltaMode];
  wheel = wheel || {kind: "wheel", dx: 0, dy: 0, ...place(event)};
  wheel.dx += event.deltaX * unit;
  wheel.dy += event.deltaY * unit;
  clearTimeout(wheel.timer);
  wheel.timer = setTimeout(finishWheel, WHEEL_PAUSE_MS);
}, {passive: false});

function finishWheel() {
  if (!wheel) return;
  const {timer, ...gesture} = wheel;
  clearTimeout(timer);
  wheel = null;
  sendText();
  send({...gesture, dx: Math.round(gesture.dx), dy: Math.round(gesture.dy)});
}

// ----------------------------------------------------------------------- the keyboard

function sendText() {
  if (!text.value) return;
  send({kind: "text", text: text.value});
  text.value = "";
}

text.addEventListener("keydown", event => {
  if (event.isComposing || LONE.includes(event.key)) return;
  finishWheel();
  finishClicks(); // or what is typed within their pause would be sent before them
  const types = event.key.length === 1 && !event.metaKey
    && (event.getModifierState("AltGraph") || (!event.ctrlKey && !event.altKey));
  if (types || (text.value && EDITS.includes(event.key) && !event.ctrlKey)) return; // into the field
  event.preventDefault();
  if (event.repeat || !state || !state.open || state.ended) return;
  if (event.key === "Escape" && text.value) {
    text.value = "";
    return;
  }
  sendText();
  const held = {ctrl: event.ctrlKey, alt: event.altKey, shift: event.shiftKey, meta: event.metaKey};
  const modifiers = Object.keys(held).filter(name => held[name]);
  send({kind: "key", key: event.key, code: event.code, modifiers});
});
at("send").addEventListener("click", () => { sendText(); text.focus(); });

// ------------------------------------------------------------------------ the buttons

function finish() { // all that was begun, in its order: at most one of wheel and clicks is
  finishWheel();
  finishClicks();
  sendText();
}

function drop() { // or it would be done in the next session
  clearTimeout(clicks?.timer);
  clearTimeout(wheel?.timer);
  clicks = wheel = null;
  text.value = "";
}

function say(words) {
  finish();
  send({kind: "words", text: words});
}

at("spoken").addEventListener("submit", event => {
  event.preventDefault();
  if (at("words").value) say(at("words").value);
  at("words").value = "";
  text.focus();
});
for (const button of document.querySelectorAll(".say"))
  button.addEventListener("click", () => say(button.dataset.words));
at("save").addEventListener("click", async () => {
  finish();
  await waiting;
  const sure = state.solved || confirm("The task does not count this as solved. What is saved is "
    + "learnt from like any other demonstration. Save it?");
  if (sure) ask("end", () => ({how: "save"})).then(() => text.focus());
});
for (const how of ["again", "skip"])
  at(how).addEventListener("click", () => {
    drop();
    ask("end", () => ({how})).then(() => text.focus());
  });

window.addEventListener("resize", draw);
ask("state").then(() => text.focus());
