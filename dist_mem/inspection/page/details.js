"use strict";
// The panel of the chosen token.

const SHOWN_WORSE = 8;

/** Return an element with attributes, and children that are elements or plain text. */
function make(name, attributes, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const DIGITS = { minimumSignificantDigits: 3, maximumSignificantDigits: 3 };

/** Return nats with three significant digits, but no more than three after the point. */
function nats(value, sign) {
  if (value !== value) return "not scored";
  const size = Math.abs(value), text = size < 0.1 ? size.toFixed(3) : size.toLocaleString("en", DIGITS);
  if (Number(text) === 0) return "0";
  return (value < 0 ? "−" : sign ? "+" : "") + text;
}

function percent(share) {
  return share > 0 && share < 0.005 ? "< 1 %" : `${Math.round(100 * share)} %`;
}

function count(number) { return number.toLocaleString("en"); }

/** Return a token's text so that it can be seen. */
function visible(text) { return text.replace(/\n/g, "↵").replace(/^ | $/g, "␣") || "▫"; }

class Details {
  /** @param go called with a token's position to show it. */
  constructor(book, panel, go) {
    this.book = book;
    this.panel = panel;
    this.go = go;
  }

  show(token) {
    const { book, panel } = this;
    panel.classList.add("filled");
    panel.replaceChildren(
      this.closing(),
      make("h3", {}, "“", make("span", { id: "chosen-text" }, visible(book.texts(token, token + 1)[0])), "”"),
      make("p", { class: "hint" }, `token ${count(token)}; the book has 0 to ${count(book.length - 1)}`),
      this.losses(token), ...this.removed(token), ...this.looked(token));
    panel.scrollTop = 0;
  }

  close() { this.panel.classList.remove("filled"); }

  /** Return the button that closes the panel where it covers the text. */
  closing() {
    const button = make("button", { type: "button", class: "close", "aria-label": "Close" }, "×");
    button.addEventListener("click", () => this.close());
    return button;
  }

  losses(token) {
    const { book } = this, list = make("dl", {});
    const add = (name, value, sign) => list.append(make("dt", {}, name), make("dd", {}, nats(value, sign)));
    add("loss with memory (nats)", book.nll[token]);
    add("loss without memory", book.without[token]);
    add("gain of memory", book.gain(token), true);
    if (book.others) add(`loss of ${book.other}`, book.others[token]);
    return list;
  }

  looked(token) {
    const { book } = this, title = make("h4", {}, "Where each layer looked");
    if (book.placeOf(token) < 0) {
      const kept = `This page has details of the ${count(book.detailed.length)} tokens that memory changed most, ` +
        "but not of this one.";
      return [title, make("p", { class: "hint" }, Number.isNaN(book.nll[token]) ? "This token is not scored." : kept)];
    }
    const found = book.whereLooked(token);
    if (!found.length) return [title, make("p", { class: "hint" }, "No layer of this model attends to a memory.")];
    return [title, ...found.flatMap(({ layer, kind, mass, passages }) => [
      make("h4", {}, `Layer ${layer}, ${kind}: ${percent(mass)} of its ${kind === "signal" ? "density" : "attention"}`),
      passages.length ? make("ol", {}, ...passages.map((one) => this.passage(token, one)))
        : make("p", { class: "hint" }, kind === "summary" && mass > 0 ? "It holds something of all that precedes the segment."
          : "The memory is empty."),
    ])];
  }

  passage(token, { begin, end, share }) {
    return make("li", {}, this.place(token, begin, percent(share), share, ""), this.quote(begin, end));
  }

  removed(token) {
    const found = this.book.removals(token);
    if (!found.length) return [];
    const largest = Math.max(0.1, ...found.map(({ rise }) => Math.abs(rise)));
    return [
      make("h4", {}, "Without a passage, its loss changes by"),
      make("ol", { id: "removed" }, ...found.map(({ passage, begin, end, rise }) => make("li", {},
        this.place(token, begin, nats(rise, true), Math.abs(rise) / largest, rise < 0 ? "down" : ""),
        this.quote(begin, end), this.others(passage)))),
    ];
  }

  /** Return what else gets worse without a passage, found when it is opened. */
  others(passage) {
    const list = make("ol", {}), folded = make("details", {}, make("summary", {}, "What else gets worse"), list);
    folded.addEventListener("toggle", () => {
      if (list.childElementCount) return;
      const found = this.book.worseWithout(passage, SHOWN_WORSE);
      list.append(...found.map(({ token, rise }) => {
        const [before, text, after] = this.book.passage(token, token + 1);
        return make("li", {}, make("div", { class: "place" }, `${nats(rise, true)} nats`, this.goTo(token)),
          make("div", { class: "quote" }, before, make("mark", {}, text), after));
      }));
    });
    return folded;
  }

  /** Return a line with a bar, a figure, a distance, and the button that goes to the passage. */
  place(token, begin, figure, share, kind) {
    const filled = make("i", { class: kind });
    filled.style.width = `${100 * share}%`;
    const back = `${count(token - begin)} back`;
    return make("div", { class: "place" }, make("span", { class: "mass" }, filled), `${figure}, ${back}`,
      this.goTo(Math.max(0, begin)));
  }

  goTo(token) {
    const button = make("button", { type: "button" }, "Go there");
    button.addEventListener("click", () => this.go(token));
    return button;
  }

  quote(begin, end) {
    const [before, passage, after] = this.book.passage(begin, end);
    return make("div", { class: "quote" }, before, make("mark", {}, passage), after);
  }
}
