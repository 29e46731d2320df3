// The attention weights of a head as two heat maps, with a square that is looked at in both.

import { percent } from "./numbers.js";

/** Names a token in a sentence. */
function quoted(token) {
  if (token === "(beginning)") return "the beginning";
  return token.trim() ? `“${token.trim()}”` : token.includes("\n") ? "a new line" : "a space";
}

export class Maps {
  tokens = [];
  favor = [];
  softmax = [];
  row = 0;
  column = 0;

  constructor(favorCanvas, softmaxCanvas, readout, summary) {
    this.canvases = { favor: favorCanvas, softmax: softmaxCanvas };
    this.readout = readout;
    this.summary = summary;
    for (const canvas of Object.values(this.canvases)) {
      canvas.addEventListener("pointermove", (event) => this.point(canvas, event));
      canvas.addEventListener("pointerdown", (event) => this.point(canvas, event));
      canvas.addEventListener("keydown", (event) => this.key(event));
      canvas.addEventListener("focus", () => this.look(this.row, this.column));
    }
    new ResizeObserver(() => this.draw()).observe(favorCanvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  show({ tokens, favor, softmax }) {
    const isLonger = tokens.length !== this.tokens.length;
    Object.assign(this, { tokens, favor, softmax });
    if (isLonger) {
      this.row = this.lastWord();
      this.column = this.strongest(favor, this.row)[0];
    }
    this.summary.textContent = this.summarise();
    this.look(Math.min(this.row, tokens.length - 1), this.column);
  }

  /** The last token that is more than punctuation. */
  lastWord() {
    return Math.max(0, this.tokens.findLastIndex((token) => /\p{Letter}/u.test(token)));
  }

  /** The columns of a row, those with the largest weights first. */
  strongest(weights, row) {
    const t = this.tokens.length;
    const columns = [...Array(row + 1).keys()];
    return columns.sort((a, b) => weights[row * t + b] - weights[row * t + a]);
  }

  /** Half the sum of the differences of two rows, 0 where they agree and 1 where they share nothing. */
  distance(row) {
    const t = this.tokens.length;
    let sum = 0;
    for (let j = 0; j <= row; j++) sum += Math.abs(this.favor[row * t + j] - this.softmax[row * t + j]);
    return sum / 2;
  }

  summarise() {
    const t = this.tokens.length;
    const mean = this.tokens.reduce((sum, _, row) => sum + this.distance(row), 0) / t;
    const row = this.lastWord();
    const list = (weights) => this.strongest(weights, row).slice(0, 3)
      .map((j) => `${quoted(this.tokens[j])} ${percent(weights[row * t + j])}`).join(", ");
    return `Over these ${t} tokens, ${percent(mean)} of the weight lies elsewhere on average. ` +
      `The last word of them, ${quoted(this.tokens[row])}, looks most at ${list(this.favor)} with FAVOR, ` +
      `and at ${list(this.softmax)} with softmax.`;
  }

  look(row, column) {
    const t = this.tokens.length;
    if (!t) return;
    this.row = row;
    this.column = Math.min(column, row);
    const at = this.row * t + this.column;
    this.readout.textContent = `${quoted(this.tokens[this.row])} looks at ${quoted(this.tokens[this.column])}: ` +
      `FAVOR ${percent(this.favor[at])}, softmax ${percent(this.softmax[at])}.`;
    this.draw();
  }

  point(canvas, event) {
    const t = this.tokens.length;
    if (!t) return;
    const box = canvas.getBoundingClientRect();
    const cell = (x, size) => Math.max(0, Math.min(t - 1, Math.floor((x / size) * t)));
    const row = cell(event.clientY - box.top, box.height);
    this.look(row, cell(event.clientX - box.left, box.width));
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move || !this.tokens.length) return;
    event.preventDefault();
    const row = Math.max(0, Math.min(this.tokens.length - 1, this.row + move[0]));
    this.look(row, Math.max(0, Math.min(row, this.column + move[1])));
  }

  draw() {
    const t = this.tokens.length;
    for (const [name, canvas] of Object.entries(this.canvases)) {
      const pixels = Math.round(canvas.clientWidth * devicePixelRatio);
      if (!pixels || !t) continue;
      if (canvas.width !== pixels) canvas.width = canvas.height = pixels;
      const style = getComputedStyle(document.documentElement);
      const colour = style.getPropertyValue(name === "favor" ? "--performer" : "--softmax");
      const pen = canvas.getContext("2d");
      pen.clearRect(0, 0, pixels, pixels);
      const edge = (i) => Math.round((i * pixels) / t);
      const square = (i, j) => [edge(j), edge(i), edge(j + 1) - edge(j), edge(i + 1) - edge(i)];
      for (let i = 0; i < t; i++) {
        pen.globalAlpha = 1;
        pen.fillStyle = style.getPropertyValue("--track");
        pen.fillRect(0, edge(i), edge(i + 1), edge(i + 1) - edge(i));
        pen.fillStyle = colour;
        for (let j = 0; j <= i; j++) {
          // The root lets small weights be seen.
          pen.globalAlpha = Math.min(1, Math.sqrt(Math.max(0, this[name][i * t + j])));
          pen.fillRect(...square(i, j));
        }
      }
      pen.globalAlpha = 1;
      pen.strokeStyle = style.getPropertyValue("--ink");
      pen.lineWidth = Math.max(1.5, devicePixelRatio * 1.5);
      pen.strokeRect(...square(this.row, this.column));
    }
  }
}
