// What a page shows in its upper left width x height pixels: {elements, texts, words, unread}, in CSS
// pixels. A function, evaluated by tools/grounding/browser.py once the page has settled. It changes
// nothing. A word is [its letters, the middle of each small letter]; unread are boxes with text of
// which no letter's place is known, because a field draws it, or that can be seen in part.
(width, height) => {
  const ROLES = {button: "button", link: "link", tab: "tab", checkbox: "checkbox", radio: "radio button",
    switch: "switch", menuitem: "menu item", option: "option", slider: "slider", textbox: "text field",
    searchbox: "text field", combobox: "dropdown", listitem: "list item"};
  const INPUTS = {button: "button", submit: "button", reset: "button", checkbox: "checkbox",
    radio: "radio button", range: "slider", hidden: "", file: "", image: "", color: "", number: "number field"};
  const TAGS = {button: "button", textarea: "text area", td: "cell", th: "cell", h1: "heading", h2: "heading",
    h3: "heading", h4: "heading", h5: "heading", h6: "heading", li: "list item", summary: "item",
    rect: "shape", circle: "shape", ellipse: "shape", polygon: "shape"};
  const OUTER = new Set(["button", "link", "tab", "checkbox", "radio button", "switch", "menu item", "option", "dropdown", "item"]);
  const TEXTUAL = new Set(["heading", "list item"]);  // their box is that of their text
  const FIELDS = new Set(["text field", "text area", "number field", "dropdown", "checkbox", "radio button", "switch", "slider"]);
  const SMALL_LETTERS = 0.57;  // of a line's height: where their middle is, in Liberation and DejaVu alike
  const clean = text => (text || "").replace(/\s+/g, " ").trim();
  const area = box => Math.max(0, box[2] - box[0]) * Math.max(0, box[3] - box[1]);
  const cross = (a, b) => [Math.max(a[0], b[0]), Math.max(a[1], b[1]), Math.min(a[2], b[2]), Math.min(a[3], b[3])];
  const boxOf = rect => [rect.left, rect.top, rect.right, rect.bottom];
  const union = boxes => boxes.reduce((a, b) => [Math.min(a[0], b[0]), Math.min(a[1], b[1]), Math.max(a[2], b[2]), Math.max(a[3], b[3])]);

  const cached = compute => {
    const known = new Map();
    return element => {
      if (!known.has(element)) known.set(element, compute(element));
      return known.get(element);
    };
  };
  const styleOf = cached(element => {  // a computed style is live: every reading of it costs
    const style = getComputedStyle(element);
    return {clips: style.overflowX !== "visible" || style.overflowY !== "visible", hidesX: style.overflowX !== "visible",
      fixed: style.position === "fixed", opacity: parseFloat(style.opacity), pointer: style.cursor === "pointer",
      inline: style.display === "inline", color: style.color};
  });

  const kindOf = element => {
    const tag = element.localName, role = element.getAttribute("role");
    if (role && ROLES[role] !== undefined) return ROLES[role];
    if (tag === "input") return INPUTS[element.type] ?? "text field";
    if (tag === "select") return element.size > 1 || element.multiple ? "" : "dropdown";
    if (tag === "a" || element.classList.contains("alink")) {
      if (tag === "a" && !element.hasAttribute("href")) return "";
      return /(^|\s)(btn|button)(\s|$)/.test(element.className) ? "button" : "link";
    }
    if (TAGS[tag]) return TAGS[tag];
    return tag !== "label" && styleOf(element).pointer && !styleOf(element.parentElement).pointer ? "item" : "";
  };
  const shapeOf = element => {
    const box = element.getBoundingClientRect(), square = Math.abs(box.width - box.height) <= 1;
    if (element.localName === "rect") return square ? "square" : "rectangle";
    if (element.localName === "polygon") return element.points.length === 3 ? "triangle" : "";
    return square ? "circle" : "ellipse";
  };
  const clipOf = cached(element => {  // what the viewport and scrolling ancestors leave
    const parent = element.parentElement;
    if (!parent || element === document.body || styleOf(element).fixed) return [0, 0, width, height];
    const box = clipOf(parent);
    if (parent === document.body || !parent.clientWidth || !styleOf(parent).clips) return box;
    const rect = parent.getBoundingClientRect(), left = rect.left + parent.clientLeft, top = rect.top + parent.clientTop;
    return cross(box, [left, top, left + parent.clientWidth, top + parent.clientHeight]);
  });
  const opacityOf = cached(element => styleOf(element).opacity * (element.parentElement ? opacityOf(element.parentElement) : 1));
  const isShown = cached(element =>
    element.checkVisibility({opacityProperty: true, visibilityProperty: true}) && opacityOf(element) > 0.5);
  const textNodes = element => {
    const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), found = [];
    while (walker.nextNode()) if (walker.currentNode.nodeValue.trim()) found.push(walker.currentNode);
    return found.filter(node => !["SCRIPT", "STYLE", "OPTION", "TITLE", "NOSCRIPT"].includes(node.parentElement.tagName.toUpperCase()));
  };
  const textBoxes = node => {
    const range = document.createRange();
    range.selectNodeContents(node);
    return [...range.getClientRects()].filter(rect => rect.width > 0 && rect.height > 0).map(boxOf);
  };
  const isWhole = (box, clip) => area(cross(box, clip)) >= 0.97 * area(box);
  const isFaint = node => {
    const alpha = /^rgba\(.*, ([\d.]+)\)$/.exec(styleOf(node.parentElement).color);
    return !textBoxes(node).length || Boolean(alpha && alpha[1] < 0.4);
  };
  const widthOfChoice = element => {  // that a dropdown needs to show it; its arrow is 18 pixels where the browser draws it
    const style = getComputedStyle(element), pen = document.createElement("canvas").getContext("2d");
    pen.font = style.font;
    const arrow = style.appearance === "none" ? 0 : 18;
    return pen.measureText(element.selectedOptions[0]?.text ?? "").width + parseFloat(style.paddingLeft) + parseFloat(style.paddingRight) + arrow;
  };
  const isCut = element => {  // not all of its text can be read
    if (element.localName === "select") return widthOfChoice(element) > element.clientWidth;
    if (["input", "textarea"].includes(element.localName))
      return element.scrollWidth > element.clientWidth + 1 || element.scrollHeight > element.clientHeight + 2;
    if (textNodes(element).some(isFaint)) return true;
    if (element.scrollWidth > element.clientWidth + 1 && element.clientWidth && styleOf(element).hidesX) return true;
    return textNodes(element).some(node => {
      const clip = node.parentElement, inside = clipOf(clip);
      const hides = clip !== document.body && styleOf(clip).hidesX && clip.clientWidth > 0;
      return textBoxes(node).some(box => !isWhole(box, inside) || (hides && !isWhole(box, boxOf(clip.getBoundingClientRect()))));
    });
  };
  const labelOf = element => {
    const by = (element.getAttribute("aria-labelledby") || "").split(/\s+/).filter(Boolean).map(id => document.getElementById(id));
    if (by.length && by.every(Boolean)) return clean(by.map(e => e.innerText).join(" "));
    const labels = [...(element.labels || [])].filter(isShown);
    if (labels.length) return clean(labels.map(label => {
      const inner = [...label.childNodes].filter(node => node !== element && !(node.contains && node.contains(element)));
      const own = inner.map(node => node.nodeType === 3 ? node.nodeValue : node.innerText || "").join(" ");
      return own.trim() ? own : label.innerText;
    }).join(" "));
    const aria = element.getAttribute("aria-label") || element.placeholder;
    if (aria) return clean(aria);
    const next = element.nextSibling;
    return ["checkbox", "radio"].includes(element.type) && next && next.nodeType === 3 ? clean(next.nodeValue) : "";
  };
  const fullBox = (element, kind) => {
    if (TEXTUAL.has(kind)) {
      const boxes = textNodes(element).flatMap(textBoxes);
      return boxes.length ? union(boxes) : [0, 0, 0, 0];
    }
    const boxes = [...element.getClientRects()].map(boxOf).filter(box => area(box) > 0);
    if (!boxes.length) return [0, 0, 0, 0];
    if (boxes.length > 1) return boxes.reduce((a, b) => area(b) > area(a) ? b : a);
    if (boxes[0][3] - boxes[0][1] > 0 && styleOf(element).inline && element.children.length)
      return union([boxes[0], ...[...element.children].map(e => boxOf(e.getBoundingClientRect())).filter(area)]);
    return boxes[0];
  };
  const isBroken = (element, kind) => {  // over two lines: a part of it is not the whole, and their union too much
    const lines = [...element.getClientRects()].filter(rect => rect.width > 0);
    return !TEXTUAL.has(kind) && lines.some(rect => rect.top >= lines[0].bottom - 1);
  };
  const onTop = (element, box, kind) => {
    const hits = (across, down) => {
      const x = box[0] + (box[2] - box[0]) * across, y = box[1] + (box[3] - box[1]) * down;
      const found = document.elementFromPoint(x, y);
      return Boolean(found) && (found === element || element.contains(found));
    };
    if (!hits(0.5, 0.5)) return false;
    const corners = [[0.2, 0.2], [0.8, 0.2], [0.2, 0.8], [0.8, 0.8]].filter(at => hits(...at)).length;
    return kind === "shape" || kind === "list item" || kind === "heading" || corners >= 4;
  };

  const elements = [], texts = [], kinds = new Map(), holders = new Set();  // of an element with a kind
  for (const element of document.body.querySelectorAll("*")) {
    const kind = kindOf(element);
    if (!kind) continue;
    let outer = element.parentElement;
    while (outer && !(kinds.has(outer) && OUTER.has(kinds.get(outer)))) outer = outer.parentElement;
    if (outer) continue;
    // A part of the page with controls of its own, such as an opened section.
    if (OUTER.has(kind) && element.querySelector("button, input, select, textarea")) continue;
    kinds.set(element, kind);
    for (let parent = element.parentElement; parent && !holders.has(parent); parent = parent.parentElement) holders.add(parent);
  }
  for (const [element, kind] of kinds) {
    if (!OUTER.has(kind) && !FIELDS.has(kind) && holders.has(element)) continue;
    if (!isShown(element)) continue;
    const whole = fullBox(element, kind), box = cross(whole, clipOf(element));
    if (area(box) <= 0 || area(box) >= 0.6 * width * height) continue;
    const isField = FIELDS.has(kind);
    const value = element.localName === "select" ? element.selectedOptions[0]?.text : element.value;
    const isInput = element.localName === "input" && kind === "button";
    const shown = element.innerText ?? element.textContent;
    // The first line of a message, a card or the like names it.
    const lines = kind === "item" ? shown.split("\n").filter(clean).slice(0, 1).join() : shown;
    const own = isField ? (["checkbox", "radio button", "switch", "slider"].includes(kind) ? "" : value) : isInput ? element.value : lines;
    elements.push({
      kind, box,
      text: clean(own ?? ""),
      label: clean(isField ? labelOf(element) : element.getAttribute("aria-label") || element.title || element.getAttribute("alt")),
      shape: kind === "shape" ? shapeOf(element) : "",
      id: element.id,
      whole: area(box) >= 0.9 * area(whole) && !isBroken(element, kind),
      cut: isCut(element),
      top: onTop(element, box, kind),
      disabled: Boolean(element.closest("[disabled], [aria-disabled=true], .disabled, fieldset[disabled]")),
    });
  }
  for (const node of textNodes(document.body)) {
    if (!isShown(node.parentElement)) continue;
    const clip = clipOf(node.parentElement);
    if (textBoxes(node).some(box => area(cross(box, clip)) > 0)) texts.push(clean(node.nodeValue));
  }
  const shownAs = (text, node) => {
    const transform = getComputedStyle(node.parentElement).textTransform;
    if (transform === "uppercase") return text.toUpperCase();
    if (transform === "lowercase") return text.toLowerCase();
    return transform === "capitalize" ? text[0].toUpperCase() + text.slice(1) : text;
  };
  const words = [], unread = [...kinds.keys()].filter(element =>
    isShown(element) && ["input", "textarea", "select"].includes(element.localName)
    && !["checkbox", "radio", "range"].includes(element.type)).map(element => boxOf(element.getBoundingClientRect()));
  const range = document.createRange();
  for (const node of textNodes(document.body)) {
    if (!isShown(node.parentElement)) continue;
    const clip = clipOf(node.parentElement), faint = isFaint(node);
    for (const {0: text, index} of node.nodeValue.matchAll(/\S+/g)) {
      const boxes = [...text].length === text.length ? [...text].map((_, at) => {
        range.setStart(node, index + at);
        range.setEnd(node, index + at + 1);
        return boxOf(range.getBoundingClientRect());
      }) : [];
      const whole = boxes.length ? union(boxes) : [0, 0, 0, 0];
      if (area(cross(whole, clip)) <= 0) continue;
      const found = document.elementFromPoint((whole[0] + whole[2]) / 2, (whole[1] + whole[3]) / 2);
      if (!found || !(node.parentElement.contains(found) || found.contains(node.parentElement))) continue;
      const shown = shownAs(text, node);
      if (faint || !isWhole(whole, clip) || shown.length !== text.length || boxes.some(box => !area(box))) unread.push(whole);
      else words.push([shown, boxes.map(box => [(box[0] + box[2]) / 2, box[1] + SMALL_LETTERS * (box[3] - box[1])])]);
    }
  }
  return {elements, texts, words, unread};
}
