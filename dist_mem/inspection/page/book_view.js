"use strict";
// The text of the book, a page at a time, and the keys that move through it.

const PAGE = 500; // tokens
const BINS = 300; // of the strip
const LEVELS = [0.1, 0.5, 1.5, 3]; // nats, where a colour begins
const BIG = 1; // nats: a gain or a loss that the buttons and the keys n and p look for

const byId = (id) => document.getElementById(id);

/** Return the class of a number of nats: up-1 to up-4, down-1 to down-4, or none. */
function shade(value) {
  const level = LEVELS.filter((limit) => Math.abs(value) >= limit).length;
  return level ? `${value > 0 ? "up" : "down"}-${level}` : "";
}

class BookView {
  constructor(book) {
    this.book = book;
    this.chosen = 0;
    this.first = -1; // token at the beginning of the page that is shown
    this.colours = { "gain of memory": (token) => book.gain(token) };
    if (book.others) this.colours[`gain over ${book.other}`] = (token) => book.gainOverOther(token);
    this.colours["loss with memory"] = (token) => -book.nll[token];
    this.colour = this.colours["gain of memory"];
    this.details = new Details(book, byId("details"), (token) => { this.choose(token); byId("text").focus(); });
    this.describe();
    this.drawStrip();
    this.listen();
    for (const id of ["bar", "reader", "keys"]) byId(id).hidden = false;
    this.turn(0);
  }

  describe() {
    const { book } = this, { nll, without, emptied } = book.total;
    const gain = without - nll, mean = (total) => nats(total / book.num_scored);
    byId("book-sum").replaceChildren(
      make("strong", {}, book.title), `, ${count(book.length)} tokens, read by ${book.run}. Loss per token, in nats: `,
      `${mean(nll)} with memory; ${mean(without)} without memory, from half a segment or more of text before each word; `,
      `${mean(emptied)} if the memory is emptied before every segment. Colours and tables compare the first two: `,
      make("span", { id: "sum", "data-sum": book.sumOfGains(), "data-total": gain }, nats(gain)),
      ` nats in all.`,
      book.not_removed ? ` No passage was removed: ${book.not_removed}.` : "");
    byId("pages").textContent = count(Math.ceil(book.length / PAGE));
    byId("page").max = Math.ceil(book.length / PAGE);
    byId("colour").replaceChildren(...Object.keys(this.colours).map((name) => make("option", {}, name)));
    const levels = [...LEVELS.map((limit) => -limit).reverse(), ...LEVELS];
    byId("scale").replaceChildren(...levels.map(
      (value) => make("li", { class: shade(value) }, `${value > 0 ? "+" : "−"}${Math.abs(value)}`)));
  }

  drawStrip() {
    const { book } = this, strip = byId("strip"), bins = Math.min(BINS, book.length), means = [];
    for (let bin = 0; bin < bins; bin++) {
      let sum = 0, number = 0;
      const end = Math.floor(((bin + 1) * book.length) / bins);
      for (let token = Math.floor((bin * book.length) / bins); token < end; token++) {
        const gain = book.gain(token);
        if (gain === gain) { sum += gain; number++; }
      }
      means.push(number ? sum / number : 0);
    }
    const high = Math.max(0.01, ...means), low = Math.min(0, ...means);
    const scale = 60 / (high - low), zero = 2 + high * scale;
    const draw = (name, attributes) => {
      const drawn = document.createElementNS("http://www.w3.org/2000/svg", name);
      for (const [key, value] of Object.entries(attributes)) drawn.setAttribute(key, value);
      strip.append(drawn);
      return drawn;
    };
    means.forEach((mean, bin) => draw("rect", {
      class: mean < 0 ? "strip-down" : "strip-up", x: (bin * 600) / bins, width: 600 / bins,
      y: mean < 0 ? zero : zero - mean * scale, height: Math.abs(mean) * scale,
    }));
    draw("line", { class: "strip-zero", x1: 0, x2: 600, y1: zero, y2: zero });
    this.here = draw("rect", { class: "strip-here", y: 0, height: 64 });
  }

  listen() {
    byId("back").addEventListener("click", () => this.turn(this.first - PAGE));
    byId("on").addEventListener("click", () => this.turn(this.first + PAGE));
    byId("next").addEventListener("click", () => this.big(1, 1));
    byId("previous").addEventListener("click", () => this.big(-1, 1));
    byId("page").addEventListener("change", ({ target }) => {
      const asked = Math.round(Number(target.value)) || 1;
      this.turn((Math.min(Number(target.max), Math.max(1, asked)) - 1) * PAGE);
    });
    byId("colour").addEventListener("change", ({ target }) => {
      this.colour = this.colours[target.value];
      this.turn(this.first);
    });
    byId("strip").addEventListener("click", ({ clientX, currentTarget }) => {
      const { left, width } = currentTarget.getBoundingClientRect();
      this.choose(Math.min(this.book.length - 1, Math.floor(((clientX - left) / width) * this.book.length)));
    });
    byId("text").addEventListener("click", ({ target }) => {
      const token = target.closest(".t");
      if (token) this.choose(Number(token.dataset.token));
    });
    byId("text").addEventListener("keydown", (event) => this.press(event));
  }

  press(event) {
    if (event.ctrlKey || event.altKey || event.metaKey) return;
    const moves = {
      ArrowLeft: () => this.choose(this.chosen - 1), ArrowRight: () => this.choose(this.chosen + 1),
      ArrowUp: () => this.line(-1), ArrowDown: () => this.line(1),
      Home: () => this.choose(this.first), End: () => this.choose(this.first + PAGE - 1),
      PageUp: () => this.choose(this.chosen - PAGE), PageDown: () => this.choose(this.chosen + PAGE),
      n: () => this.big(1, 1), p: () => this.big(-1, 1), N: () => this.big(1, -1), P: () => this.big(-1, -1), Escape: () => this.details.close(),
    };
    if (!(event.key in moves)) return;
    event.preventDefault();
    moves[event.key]();
  }

  /** Show the page with a token, and the first token of it as chosen if the chosen one is elsewhere. */
  turn(token) {
    const { book } = this, last = Math.floor((book.length - 1) / PAGE) * PAGE;
    this.first = Math.min(last, Math.max(0, Math.floor(token / PAGE) * PAGE));
    const end = Math.min(book.length, this.first + PAGE);
    byId("text").replaceChildren(...book.texts(this.first, end).flatMap((text, n) => this.token(this.first + n, text)));
    byId("page").value = this.first / PAGE + 1;
    byId("back").disabled = this.first === 0;
    byId("on").disabled = this.first === last;
    this.here.setAttribute("x", (600 * this.first) / book.length);
    this.here.setAttribute("width", Math.max(2, (600 * (end - this.first)) / book.length));
    if (this.chosen < this.first || this.chosen >= end) this.chosen = this.first;
    this.mark();
  }

  /** Return a token's text as an element, after its leading space, which a line break would cut off. */
  token(token, text) {
    const space = /^ +(?=\S)/.exec(text)?.[0] ?? "", rest = text.slice(space.length);
    const classes = ["t", shade(this.colour(token))];
    if (text.startsWith("\n")) classes.push("line-end");
    if (token && this.book.borderSet.has(token)) classes.push("border");
    const attributes = { class: classes.join(" "), id: `t${token}`, role: "option", "aria-selected": "false" };
    const made = make("span", attributes, rest);
    made.dataset.token = token;
    return [space, made];
  }

  /** Choose a token, on whichever page it is, and show its details. */
  choose(token) {
    this.chosen = Math.min(this.book.length - 1, Math.max(0, token));
    if (this.chosen < this.first || this.chosen >= this.first + PAGE) this.turn(this.chosen); else this.mark();
    this.details.show(this.chosen);
    clearTimeout(this.addressed); // browsers refuse more than a few changes of the address per second
    this.addressed = setTimeout(() => history.replaceState(null, "", `#t=${this.chosen}`), 150);
    byId(`t${this.chosen}`).scrollIntoView({ block: "nearest" });
  }

  /** Choose the token of the first page that gains most, so that the details show what there is to see. */
  begin() {
    const gains = Array.from({ length: Math.min(this.book.length, PAGE) }, (_, token) => this.book.gain(token));
    this.chosen = Math.max(0, gains.indexOf(Math.max(...gains.filter((gain) => !Number.isNaN(gain)))));
    this.turn(0);
    this.details.show(this.chosen);
  }

  /** Choose the token of an address, "#t=302", counted from 0 as everywhere. */
  follow(link) {
    const [, number] = /^#t=(\d+)$/.exec(link) ?? [];
    if (!number) return this.begin();
    this.choose(Number(number));
    byId(`t${this.chosen}`).scrollIntoView({ block: "center" });
  }

  /** Mark the chosen token, and the tokens of this page that its layers looked at. */
  mark() {
    for (const old of byId("text").querySelectorAll(".chosen, .seen")) {
      old.classList.remove("chosen", "seen");
      old.setAttribute("aria-selected", "false");
    }
    const chosen = byId(`t${this.chosen}`);
    chosen.classList.add("chosen");
    chosen.setAttribute("aria-selected", "true");
    byId("text").setAttribute("aria-activedescendant", chosen.id);
    for (const { passages } of this.book.whereLooked(this.chosen)) {
      for (const { begin, end } of passages) {
        for (let token = begin; token < end; token++) byId(`t${token}`)?.classList.add("seen");
      }
    }
  }

  /** Choose the token above or below the chosen one. */
  line(direction) {
    const from = byId(`t${this.chosen}`).getBoundingClientRect(), middle = from.left + from.width / 2;
    let found = null, best = Infinity;
    for (const token of byId("text").children) {
      const box = token.getClientRects()[0];
      const down = box ? (box.top - from.top) * direction : 0;
      if (down < from.height / 3) continue;
      const distance = 100 * Math.round(down / 10) + Math.abs(box.left + box.width / 2 - middle) / 10;
      if (distance < best) [found, best] = [token, distance];
    }
    this.choose(found ? Number(found.dataset.token) : this.chosen + direction);
  }

  /** Choose the next token in a direction that gains a nat or more from memory; sign -1: that loses as much. */
  big(direction, sign) {
    for (let token = this.chosen + direction; token >= 0 && token < this.book.length; token += direction) {
      if (sign * this.book.gain(token) >= BIG) return this.choose(token);
    }
  }
}
