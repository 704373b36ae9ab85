// What goes on by the clock: the moment of an action counts.
Object.assign(experts, {
  "button-delay": () => {
    if (!state.clicked) { state.clicked = Date.now(); return click(withText("#area button", "ONE")); }
    const left = parseInt(query.match(/wait (\d)/)[1], 10) - (Date.now() - state.clicked) / 1000 - 0.06;
    return left > 0.05 ? {kind: "wait", seconds: left} : click(withText("#area button", "TWO"));
  },
  "drag-cube": () => {  // a pull turns it by 2.8 degrees a pixel, less what is lost to its friction
    const view = cube.viewport, active = text(one(".cube-image.active"));
    const spins = Math.max(Math.abs(view.torqueX), Math.abs(view.torqueY)) > 1;
    if (spins) return {kind: "wait", seconds: 0.2};
    const tilt = {1: 264, 6: 88}[quoted[0]] ?? 175, turn = [0, 177, 86, 0, 269][quoted[0] - 1];  // degrees
    const between = (goal, at) => ((goal - at) % 360 + 540) % 360 - 180;
    const pull = angle => Math.sign(angle) * Math.min(Math.abs(angle) / 2.8 + 5, 60);
    const up = between(tilt, view.positionY), aside = between(turn, view.positionX);
    const upright = Math.abs(up) < 25, there = upright && (/1|6/.test(active) || Math.abs(aside) < 25);
    if (active === quoted[0] && there) return submit();
    const way = !upright ? {x: 0, y: -pull(up)} : {x: -pull(aside), y: 0};
    const from = {x: 80, y: 130};
    if (view.mouseX !== from.x || view.mouseY !== from.y) return {kind: "move", ...from};  // the way there would turn it too
    return drag(from, {x: from.x + way.x, y: from.y + way.y});
  },
  "simon-says": () => {  // each button flashes once, 0.25 s of every 0.6 s
    if (!state.flashes) {
      state.flashes = [];
      new MutationObserver(records => records.forEach(({target}) => {
        if (target.classList.contains("push")) state.flashes.push(target.id);
      })).observe(one("#area"), {subtree: true, attributeFilter: ["class"]});
    }
    const passed = (Date.now() - core.ept0) / 1000, next = 0.6 * (state.flashes.length + 1) + 0.1;
    if (passed < next + 0.3) return {kind: "wait", seconds: Math.max(next - passed, 0.05)};
    state.pushed = (state.pushed ?? -1) + 1;
    const button = document.getElementById(state.flashes[state.pushed]);
    return button && click(button);  // none is left where the first flash was over before the first turn
  },
  "stock-market": async () => {  // what holds over a tick, and has just ticked, holds until the click
    const limit = parseFloat(query.match(/\$([\d.]+)\.$/)[1]), price = () => parseFloat(text(one("#stock-price")).slice(1));
    const dear = price() - limit;
    if (dear > 0) return {kind: "wait", seconds: Math.max(dear / 15, 0.1)};  // it falls by 15 a second at most
    const ticks = all("svg circle").length;
    while (all("svg circle").length === ticks) await new Promise(requestAnimationFrame);
    return price() <= limit ? click(one("#buy")) : {kind: "wait", seconds: 0.1};
  },
});
