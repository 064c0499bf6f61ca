"use strict";
// The data of the book: columns.py and book.py write them.

const NUMBERS = { u1: Uint8Array, u2: Uint16Array, u4: Uint32Array, i2: Int16Array, f4: Float32Array };
const MASS_STEPS = 255, RISE_STEPS = 1000, NO_PASSAGE = 0xffffffff;
const CONTEXT = 6; // tokens shown on either side of a passage
const LONGEST = 48; // tokens shown of a passage

/** Return the bytes of a text whose characters are bytes. */
function bytesOf(text) {
  const bytes = new Uint8Array(text.length);
  for (let n = 0; n < text.length; n++) bytes[n] = text.charCodeAt(n);
  return bytes;
}

/** Return the numbers of a column. */
async function numbersOf({ kind, data }) {
  const stream = new Blob([bytesOf(atob(data))]).stream().pipeThrough(new DecompressionStream("deflate"));
  const planes = new Uint8Array(await new Response(stream).arrayBuffer());
  const Numbers = NUMBERS[kind], size = Numbers.BYTES_PER_ELEMENT, count = planes.length / size;
  const bytes = new Uint8Array(planes.length);
  for (let place = 0; place < size; place++) {
    for (let n = 0; n < count; n++) bytes[n * size + place] = planes[place * count + n];
  }
  return new Numbers(bytes.buffer);
}

/** Replace every column within a value by its numbers. */
async function withNumbers(value) {
  if (Array.isArray(value)) return Promise.all(value.map(withNumbers));
  if (value === null || typeof value !== "object") return value;
  if ("kind" in value && "data" in value) return numbersOf(value);
  const parts = await Promise.all(Object.entries(value).map(async ([key, part]) => [key, await withNumbers(part)]));
  return Object.fromEntries(parts);
}

/** Return passages with those that touch made one, the most read first. */
function joined(passages) {
  const found = [];
  for (const passage of passages.sort((one, other) => one.begin - other.begin)) {
    const last = found.at(-1);
    if (last && passage.begin <= last.end) {
      last.end = Math.max(last.end, passage.end);
      last.share += passage.share;
    } else {
      found.push(passage);
    }
  }
  return found.sort((one, other) => other.share - one.share);
}

class Book {
  static async read(stored) {
    const { pieces, ...rest } = stored;
    return new Book(pieces, await withNumbers(rest));
  }

  constructor(pieces, columns) {
    Object.assign(this, columns);
    this.length = this.num_tokens;
    this.pieces = pieces.map(bytesOf);
    this.borderSet = new Set(this.borders);
    for (let n = 1; n < this.detailed.length; n++) this.detailed[n] += this.detailed[n - 1];
  }

  /** What memory gained, in nats; NaN for a token that is not scored. */
  gain(token) { return this.without[token] - this.nll[token]; }

  /** What memory gained over the other run. */
  gainOverOther(token) { return this.others[token] - this.nll[token]; }

  sumOfGains() {
    let sum = 0;
    for (let token = 0; token < this.length; token++) {
      const gain = this.gain(token);
      if (gain === gain) sum += gain;
    }
    return sum;
  }

  /** Return the text of every token of [begin, end); a character belongs to the token that completes it. */
  texts(begin, end) {
    const decoder = new TextDecoder("utf-8", { ignoreBOM: true });
    const from = Math.max(0, begin - 3), found = [];
    for (let token = from; token < end; token++) {
      const text = decoder.decode(this.pieces[this.ids[token]], { stream: true });
      if (token >= begin) found.push(text);
    }
    return found;
  }

  /** Return a passage with its context: [before, the passage, after]. */
  passage(begin, end) {
    const last = Math.min(end, begin + LONGEST), isWhole = last === end;
    const parts = [[begin - CONTEXT, begin], [begin, last], [last, isWhole ? end + CONTEXT : last]].map(
      ([from, to]) => this.texts(Math.max(0, from), Math.min(this.length, Math.max(0, to))).join(""));
    if (begin < 0) parts[1] = "(start of the text) " + parts[1];
    return [parts[0], parts[1], isWhole ? parts[2] : " …"];
  }

  /** Return where the details of a token are, or -1. */
  placeOf(token) {
    let low = 0, high = this.detailed.length - 1;
    while (low <= high) {
      const middle = (low + high) >> 1;
      if (this.detailed[middle] === token) return middle;
      if (this.detailed[middle] < token) low = middle + 1; else high = middle - 1;
    }
    return -1;
  }

  /** Return where the layers looked: [{layer, kind, mass, passages: [{begin, end, share}]}]; a summary has none. */
  whereLooked(token) {
    const place = this.placeOf(token);
    if (place < 0) return [];
    return this.looked.map(({ layer, kind, mass, back, length, shares, most }) => {
      const passages = [];
      if (kind === "summary") return { layer, kind, mass: mass[place] / MASS_STEPS, passages };
      for (let n = place * most; n < (place + 1) * most; n++) {
        const begin = token - back[n];
        if (length[n]) passages.push({ begin, end: begin + length[n], share: shares[n] / MASS_STEPS });
      }
      return { layer, kind, mass: mass[place] / MASS_STEPS, passages: joined(passages) };
    });
  }

  /** Return the passages whose removal raises the token's loss most: [{passage, begin, end, rise}]. */
  removals(token) {
    const place = this.placeOf(token), found = [];
    if (place < 0 || !this.removed) return found;
    const { begin, end, place: passages, rise, most } = this.removed;
    for (let n = place * most; n < (place + 1) * most; n++) {
      const passage = passages[n];
      if (passage === NO_PASSAGE) continue;
      found.push({ passage, begin: begin[passage] - 1, end: end[passage] - 1, rise: rise[n] / RISE_STEPS });
    }
    return found;
  }

  /** Return the tokens whose loss rises most without a passage: [{token, rise}], the worst first. */
  worseWithout(passage, count) {
    const { place, rise, most } = this.removed, found = [];
    for (let n = 0; n < place.length; n++) {
      if (place[n] === passage && rise[n] > 0) {
        found.push({ token: this.detailed[Math.floor(n / most)], rise: rise[n] / RISE_STEPS });
      }
    }
    return found.sort((one, other) => other.rise - one.rise).slice(0, count);
  }
}
