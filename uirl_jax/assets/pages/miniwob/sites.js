// Pages of a site: an inbox, a shop, a search, a calendar, a terminal.
const email = () => {  // the list of messages, the message, or the answer to it
  const {by, task, to, message} = core.currentFields || {  // what the utterance says, as the page has it, or else read here
    by: (query.match(/email by (.+?) and /) || [])[1], task: (query.match(/trash|star|reply/) || [])[0],
    to: (query.match(/email to (.+)\.$/) || [])[1], message: quoted[0],
  };
  const thread = all(".email-thread").find(e => text(e.querySelector(".email-sender")) === by);
  if (/trash|delete/.test(task)) return click(thread.querySelector(".trash"));
  if (/star/.test(task)) return click(thread.querySelector(".star"));
  if (one("#reply")) return fill(one("#reply-text"), message) || click(one("#send-reply"));
  if (one("#forward")) return fill(one(".forward-sender"), to) || click(one("#send-forward"));
  if (one("#email")) return click(one(/reply/.test(task) ? ".email-reply" : ".email-forward"));
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
const search = () => {  // one of the pages of results
  const input = one("#search-text"), position = ordinal(query.match(/click the (\d+)/)[1]);
  if (!one("#page-content a")) return fill(input, quoted[0]) || click(one("#search"));
  const page = String(Math.floor(position / 3) + 1);
  if (text(one("#pagination .active")) !== page) return click(withText("#pagination a", page));
  return click(all("#page-content a")[position % 3]);
};
const suggested = (input, wanted) => {  // a city or an airport, from what the field suggests
  if (input.value.includes(wanted) && DOMESTIC_FLIGHTS.includes(input.value)) return null;
  const item = all(".ui-autocomplete li").filter(shown).find(e => text(e).includes(wanted));
  return item ? click(item) : fill(input, wanted) || {kind: "wait", seconds: 0.4};
};
const flight = () => {
  const [, what, from, to, date] = query.match(/Book the (\w+) one-way flight from: (.*) to: (.*) on (.*)\.$/);
  if (!one("#results .flight")) {
    return suggested(one("#flight-from"), from) || suggested(one("#flight-to"), to) || datepicker(...date.split("/")) || click(one("#search"));
  }
  const value = e => what === "cheapest" ? parseInt(e.querySelector(".flight-price").dataset.price, 10)
    : parseInt(e.querySelector(".time-duration").dataset.duration, 10);
  return click(all(".flight").sort((a, b) => value(a) - value(b))[0].querySelector(".flight-price"));
};

Object.assign(experts, {
  "buy-ticket": () => {
    const price = e => parseInt(e.querySelector(".buy-ticket").dataset.price, 10);
    const duration = e => parseInt(e.querySelector(".time-duration").dataset.duration, 10);
    const by = /cost/.test(query) ? price : duration, sign = /cheapest|shortest/.test(query) ? 1 : -1;
    return click(all(".flight").sort((a, b) => sign * (by(a) - by(b)))[0].querySelector(".buy-ticket"));
  },
  "email-inbox": email,
  "email-inbox-delete": email,
  "email-inbox-forward": email,
  "email-inbox-important": email,
  "email-inbox-noscroll": email,
  "email-inbox-reply": email,
  "email-inbox-star-reply": email,
  "phone-book": () => {
    const [, person, , what] = query.match(/Find (.+) in the contact book and click on their (the )?(\w+)/);
    if (text(one("#contact .name")) !== person) return click(withText("#pagination a", ">"));
    return click(one(`#contact .${what}`));
  },
  "search-engine": search,
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
  "book-flight": flight,
  "book-flight-nodelay": flight,
  "daily-calendar": () => {
    const [, length, name, from] = query.match(/Create a (.*) event named "(.*)", between (\w+)/);
    if (one("#create-event")) return fill(one("#event-name"), name) || click(one("#create-event .create"));
    const halves = /hour/.test(length) ? 2 * parseFloat(length) : parseInt(length, 10) / 30;
    const taken = all(".event").map(e => e.getBoundingClientRect());
    const free = half => {
      const box = document.getElementById(`hh-${half}`).getBoundingClientRect();
      return taken.every(other => box.bottom <= other.top + 2 || box.top >= other.bottom - 2);
    };
    let first = 2 * CALENDAR_TIMES.indexOf(from.toLowerCase());
    while (![...Array(halves).keys()].every(n => free(first + n))) first++;
    const [start, end] = [first, first + halves - 1].map(half => document.getElementById(`hh-${half}`));
    for (const part of [end, start]) {
      const next = click(part);
      if (next.kind === "scroll") return next;
    }
    return drag({x: middle(start).x, y: middle(start).y - 4}, {x: middle(end).x, y: middle(end).y + 4});
  },
  "email-inbox-forward-nl": email,
  "email-inbox-forward-nl-turk": email,
  "email-inbox-nl-turk": email,
  "order-food": () => {
    const names = (query.match(/each item: (.*)/) || [null, ""])[1].split(", ");
    const [, count, kind] = query.match(/Order (\d) items that are (.*)/) || [];
    const dishes = all(".food-item").filter(e => kind ? e.querySelector(`img[title="${kind}"]`) : names.includes(e.dataset.item.trim()));
    const amount = e => parseInt(e.dataset.quantity, 10);
    const least = dishes.sort((a, b) => amount(a) - amount(b))[0];  // few dishes: some of them twice
    const ordered = dishes.reduce((sum, e) => sum + amount(e), 0);
    return click(ordered < (count || names.length) ? least.querySelector(".add") : one("#submit-order button"));
  },
  "terminal": () => {
    const listing = all(".terminal-line .command").find(e => text(e) === "ls" && e.id !== "active-input");
    const files = listing ? text(listing.parentElement.nextElementSibling).split(" ") : [];
    const ending = (query.match(/extension (\.\S+)$/) || [])[1];
    const named = files.filter(file => ending ? file.endsWith(ending) : !file.includes("."));
    const paid = file => !ending || file.indexOf(ending.slice(1)) === file.length - ending.length + 1;  // not shark.sh
    const wanted = listing ? `rm ${named.find(paid) || named[0]}` : "ls";
    const typed = one("#active-input") ? text(one("#active-input")) : "";
    if (document.activeElement !== document.getElementById("terminal-target")) return click(one("#terminal-header"));
    return typed === wanted ? keys("enter") : typed ? keys("backspace") : {kind: "type", text: wanted};
  },
});
