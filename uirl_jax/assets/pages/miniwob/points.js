// A point of the picture, paid by its distance from the right one. Most instances pay 1 for no whole
// pixel, so a script aims at the best one: `aim` is the reward that the page will give for it.
const DRAWING = {width: 150, height: 130, top: 50};  // the svg; the page takes a click at (x, y) as (x, y - top)
const point = e => ({x: parseFloat(e.getAttribute("cx")), y: parseFloat(e.getAttribute("cy"))});
const between = (p, q) => Math.hypot(p.x - q.x, p.y - q.y);
const inside = p => p.x >= 3 && p.x < DRAWING.width - 3 && p.y >= 3 && p.y < DRAWING.height - 3;
const along = (from, way, lengths) => {  // the first that is inside the drawing, else the last
  const norm = Math.hypot(way.x, way.y);
  const points = lengths.map(length => ({x: from.x + way.x / norm * length, y: from.y + way.y / norm * length}));
  return points.find(inside) || points.at(-1);
};
const degrees = (a, b, vertex) => {  // as the pages compute it
  const av = between(a, vertex), bv = between(b, vertex), ab = between(a, b);
  return Math.acos((bv * bv + av * av - ab * ab) / (2 * bv * av)) * 180 / Math.PI;
};
// The best whole pixel near `target`, then the button. It could be better elsewhere on a long line,
// by 0.0005 in the median, but at a place that no picture shows.
const pointAt = (target, reward) => {
  if (one(".blue")) return submit();
  let best = {aim: -1};
  for (let x = Math.ceil(target.x - 8); x <= target.x + 8; x++) for (let y = Math.ceil(target.y - 8); y <= target.y + 8; y++) {
    const aim = inside({x, y}) ? reward({x, y}) : -1;
    if (aim > best.aim || (aim === best.aim && between({x, y}, target) < between(best, target))) best = {aim, x, y};
  }
  return {kind: "click", aim: best.aim, x: best.x, y: best.y + DRAWING.top};
};
const shifted = ({x, y}, radius) => ({x: x - radius, y: y - radius});  // the corner of a circle's box, which the pages compare

Object.assign(experts, {
  "bisect-angle": () => {
    const vertex = point(one(".init-blue")), [a, b] = all(".init-black").map(point), whole = degrees(a, b, vertex);
    const share = between(a, vertex) / (between(a, vertex) + between(b, vertex));
    const meets = {x: a.x + share * (b.x - a.x), y: a.y + share * (b.y - a.y)};  // the bisector and the line from a to b
    const way = {x: meets.x - vertex.x, y: meets.y - vertex.y};
    const target = between(meets, vertex) < 30 ? along(vertex, way, [30, 25, 20, 15]) : meets;
    return pointAt(target, p => {
      const larger = Math.max(degrees(a, p, vertex), degrees(b, p, vertex));
      return larger <= whole ? (whole - larger) / (whole / 2) : -1;
    });
  },
  "circle-center": () => {
    const circle = one(".black-circle"), radius = parseFloat(circle.getAttribute("r")), centre = shifted(point(circle), 3);
    return pointAt(point(circle), p => (radius - between(shifted(p, 3.5), centre)) / radius);
  },
  "find-midpoint": () => {
    const [a, b] = all(".black-circle").map(point), target = {x: (a.x + b.x) / 2, y: (a.y + b.y) / 2};
    return pointAt(target, p => (30 - between(p, target)) / 30);
  },
  "right-angle": () => {
    const a = point(one("#init-black")), vertex = point(one("#init-blue")), corner = shifted(vertex, 3.5);
    const ways = [{x: a.y - vertex.y, y: vertex.x - a.x}, {x: vertex.y - a.y, y: a.x - vertex.x}];
    const targets = ways.map(way => along(vertex, way, [40, 30, 20, 15, 10]));
    const centre = {x: DRAWING.width / 2, y: DRAWING.height / 2};
    const target = targets.sort((p, q) => between(p, centre) - between(q, centre))[0];
    return pointAt(target, p => {
      const off = Math.abs(90 - degrees(shifted(a, 3.5), shifted(p, 3), corner));
      return off < 45 ? (90 - off) / 90 : -1;
    });
  },
});
