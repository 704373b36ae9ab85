// Games: the next move follows from what the page answered to those before.
const LINES = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [0, 3, 6], [1, 4, 7], [2, 5, 8], [0, 4, 8], [2, 4, 6]];
const won = (board, mark) => LINES.some(line => line.every(i => board[i] === mark));
const placed = (board, i, mark) => board.slice(0, i) + mark + board.slice(i + 1);
const free = board => [...board].flatMap((mark, i) => mark === " " ? [i] : []);
const finishing = (board, mark) => free(board).filter(i => won(placed(board, i, mark), mark));
const chances = new Map();
const best = board => {  // [chance to win, move] against one that moves at random, but for 45 of 100 moves that win or block
  if (!chances.has(board)) {
    const values = free(board).map(i => [afterMove(placed(board, i, "x")), i]);
    chances.set(board, values.sort((a, b) => b[0] - a[0])[0] || [0, null]);
  }
  return chances.get(board);
};
const afterMove = board => {
  if (won(board, "x")) return 1;
  const mean = moves => moves.reduce((sum, i) => {
    const next = placed(board, i, "o");
    return sum + (won(next, "o") ? 0 : best(next)[0]);
  }, 0) / moves.length;
  const all = free(board);
  if (!all.length) return 0;
  const wins = finishing(board, "o"), blocks = finishing(board, "x");
  return 0.55 * mean(all) + 0.45 * mean(wins.length ? wins : blocks.length ? blocks : all);
};

Object.assign(experts, {
  "guess-number": () => {
    state.low = one("#higher") ? Math.max(state.low ?? 0, parseInt(text(one("#higher span")), 10) + 1) : state.low ?? 0;
    state.high = one("#lower") ? Math.min(state.high ?? 9, parseInt(text(one("#lower span")), 10) - 1) : state.high ?? 9;
    return fillAndSubmit(["#tt", String(Math.floor((state.low + state.high) / 2))]);
  },
  "hot-cold": () => {  // next into the middle of where it can be after all that was felt so far
    const signal = one("#signal") && text(one("#signal")), tried = state.tried = state.tried || [];
    if (tried.length && signal) tried[tried.length - 1].signal = signal;
    if (signal === "HOT") return {kind: "click", x: tried[tried.length - 1].x, y: tried[tried.length - 1].y};
    const bounds = {HOT: [0, 5], WARM: [5, 10], COLD: [10, 40], "ICE COLD": [40, 1e9]};
    const places = [];
    for (let x = 5; x < 155; x++) for (let y = 55; y < 170; y++) {
      const fits = tried.every(t => {
        const distance = Math.hypot(t.x - x, t.y - y), [low, high] = bounds[t.signal];
        return distance >= low && distance < high;
      });
      if (fits) places.push({x, y});
    }
    const mean = key => places.reduce((sum, p) => sum + p[key], 0) / places.length;
    const centre = {x: mean("x"), y: mean("y")}, off = p => Math.hypot(p.x - centre.x, p.y - centre.y);
    const next = places.reduce((a, b) => off(b) < off(a) ? b : a);
    tried.push({...next});
    return {kind: "move", ...next};
  },
  "tic-tac-toe": () => {
    const cells = all(".ttt-row span");
    const board = cells.map(e => ({"mark-x": "x", "mark-o": "o"})[e.className] || " ").join("");
    return click(cells[best(board)[1]]);
  },
});
