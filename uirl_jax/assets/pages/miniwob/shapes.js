// What is drawn or dragged: figures, lists that are sorted by mouse.
const describes = (element, words) => {  // "large green circle" of an element of shapes.js
  const tag = element.tagName.toLowerCase(), content = text(element);
  const kind = {rect: "rectangle", circle: "circle", polygon: "triangle"}[tag] || (/\d/.test(content) ? "digit" : "letter");
  const size = {text: () => parseFloat(element.getAttribute("font-size")), circle: () => 2 * parseFloat(element.getAttribute("r")),
    rect: () => parseFloat(element.getAttribute("width")), polygon: () => element.getBBox().width}[tag]();
  const known = [element.getAttribute("fill"), size > 15 ? "large" : "small", kind, content, "item"];
  return words.every(word => known.includes(word) || (word === "shape" && !["digit", "letter"].includes(kind)));
};
const figures = () => all("#area_svg > *");
const sorted = () => {  // one move of selection sort by mouse
  const items = all("#sortable li"), values = items.map(e => parseInt(text(e), 10));
  const goal = [...values].sort((a, b) => a - b), wrong = values.findIndex((value, i) => value !== goal[i]);
  if (wrong < 0) return submit();
  const from = items[values.indexOf(goal[wrong])].getBoundingClientRect(), to = items[wrong].getBoundingClientRect();
  return drag({x: from.left + 60, y: from.top + from.height / 2}, {x: to.left + 60, y: to.top + 2});
};
const dragged = /Drag (.+?) ((?:to|up|down|left|right) .*)\./;  // whom, and where to
const moveItem = () => {
  const items = all("#sortable li"), match = query.match(dragged);
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

Object.assign(experts, {
  "ascending-numbers": () => {
    const numbers = all("svg text");
    return click(numbers.length ? numbers.find(e => text(e) === "1") : all("svg rect")[0]);
  },
  "click-shape": () => {
    const words = query.replace(/^Click on an? /, "").split(" ");
    return click(figures().find(e => describes(e, words)));
  },
  "count-shape": () => {
    const words = query.match(/How many (.*)s are there/)[1].split(" ");
    return click(withText("#count-buttons button", String(figures().filter(e => describes(e, words)).length)));
  },
  "drag-box": () => {
    const [small, large] = ["#draggableSmall", "#draggableLarge"].map(e => one(e).getBoundingClientRect());
    const inside = small.left > large.left && small.right < large.right && small.top > large.top && small.bottom < large.bottom;
    return inside ? submit() : drag(middle(one("#draggableSmall")), middle(one("#draggableLarge")));
  },
  "drag-circle": moveShape,
  "drag-single-shape": moveShape,
  "drag-items": moveItem,
  "drag-items-grid": () => {
    const items = all("#sortable li"), [, label, way] = query.match(dragged);
    const at = items.findIndex(e => text(e) === label);
    const steps = {up: -3, down: 3, left: -1, right: 1};
    const row = /top/.test(way) ? 0 : /bottom/.test(way) ? 2 : 1;
    const column = /left/.test(way) ? 0 : /right/.test(way) ? 2 : 1;
    const goal = /by one/.test(way) ? at + steps[way.split(" ")[0]] : 3 * row + column;
    // The others move while it passes them. So it arrives in 70 of the 72 ways, not from 6 to 1 or 7 to 2.
    const to = middle(items[goal]), beyond = goal > at && goal % 3 >= at % 3 ? 8 : -8;
    return drag(middle(items[at]), {x: to.x + beyond, y: to.y + beyond});
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
  "drag-sort-numbers": sorted,
  "identify-shape": () => {
    const figure = figures()[0];
    const kind = ["rectangle", "circle", "triangle", "letter", "digit"].find(word => describes(figure, [word]));
    return click(one(`[data-type=${kind}]`));
  },
  "count-sides": () => {  // the outline's distance from the middle rises once for each corner
    const {data, width} = one("#c").getContext("2d").getImageData(0, 0, 150, 100), distances = [];
    for (let degree = 0; degree < 360; degree++) {
      const [dx, dy] = [Math.cos(degree * Math.PI / 180), Math.sin(degree * Math.PI / 180)];
      let distance = 45;
      while (distance > 0 && !data[4 * (Math.round(50 + distance * dy) * width + Math.round(75 + distance * dx)) + 3]) distance--;
      distances.push(distance);
    }
    const strength = sides => Math.hypot(...[Math.cos, Math.sin].map(wave =>
      distances.reduce((sum, distance, degree) => sum + distance * wave(sides * degree * Math.PI / 180), 0)));
    const sides = [3, 4, 5, 6, 7].sort((a, b) => strength(b) - strength(a))[0];
    return click(withText("#form button", String(sides)));
  },
  "drag-shapes-2": () => {
    const [, what] = query.match(/Drag all (\w+)/), boxes = all("#shape-container").map(e => e.getBoundingClientRect());
    const tag = {rectangles: "rect", circles: "circle", triangles: "polygon"}[what];
    for (const shape of figures().filter(e => e.id !== "shape-container")) {
      const left = tag ? shape.tagName === tag : shape.getAttribute("fill") === what;
      const box = boxes[left ? 0 : 1], at = shape.getBoundingClientRect();
      const inside = at.left > box.left && at.right < box.right && at.top > box.top && at.bottom < box.bottom;
      if (!inside) return drag(middle(shape), {x: box.left + box.width / 2, y: box.top + box.height / 2});
    }
    return submit();
  },
  "draw-line": () => {
    if (one("svg path")) return submit();
    const {x, y} = middle(one("#circ")), way = /horizontal/.test(query) ? {x: 20, y: 0} : {x: 0, y: 20};
    const at = {x: x - 2, y: y - 2};  // it counts from the dot's upper left corner
    return drag({x: at.x - way.x, y: at.y - way.y}, {x: at.x + way.x, y: at.y + way.y});
  },
});
