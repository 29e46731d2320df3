// Tokens a second over the length of a text, one line a model.

import { count } from "./numbers.js";

const NAMES = ["performer", "softmax"];
const MARGIN = { left: 44, right: 8, top: 8, bottom: 22 };
const SVG = "http://www.w3.org/2000/svg";

/** The least round number that is no less than `x`, give or take the prompt's tokens. */
function roundUp(x) {
  const power = 10 ** Math.floor(Math.log10(x));
  return [1, 1.2, 1.6, 2, 3, 4, 5, 6, 8, 10].map((n) => n * power).find((n) => n >= x * 0.99);
}

export class Chart {
  series = { performer: [], softmax: [] };

  constructor(svg) {
    this.svg = svg;
    new ResizeObserver(() => this.draw()).observe(svg);
  }

  clear() {
    this.series = { performer: [], softmax: [] };
    this.describe();
    this.draw();
  }

  /** Shows pairs of a length and a rate. */
  show(name, pairs) {
    this.series[name] = pairs;
    this.draw();
  }

  draw() {
    const { clientWidth: width, clientHeight: height } = this.svg;
    if (!width) return;
    const all = NAMES.flatMap((name) => this.series[name]);
    const longest = roundUp(Math.max(100, ...all.map(([length]) => length)));
    const fastest = roundUp(Math.max(100, ...all.map(([, rate]) => rate)));
    const right = width - MARGIN.right;
    const bottom = height - MARGIN.bottom;
    const x = (length) => MARGIN.left + (length / longest) * (right - MARGIN.left);
    const y = (rate) => bottom - (rate / fastest) * (bottom - MARGIN.top);
    const parts = [];
    const element = (name, attributes, text) => {
      const made = document.createElementNS(SVG, name);
      for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
      if (text !== undefined) made.textContent = text;
      parts.push(made);
    };
    for (const share of [0, 0.5, 1]) {
      const rate = share * fastest;
      element("line", { class: "grid", x1: MARGIN.left, x2: right, y1: y(rate), y2: y(rate) });
      element("text", { x: MARGIN.left - 6, y: y(rate) + 4, "text-anchor": "end" }, count(rate));
      const anchor = share === 1 ? "end" : share === 0 ? "start" : "middle";
      element("text", { x: x(share * longest), y: height - 5, "text-anchor": anchor }, count(share * longest));
    }
    for (const name of NAMES) {
      const pairs = this.series[name];
      if (!pairs.length) continue;
      const points = pairs.map(([length, rate]) => `${x(length).toFixed(1)} ${y(rate).toFixed(1)}`);
      // One point alone is a dot.
      element("path", { class: name, d: `M${points.join("L")}${points.length === 1 ? "h0.1" : ""}` });
    }
    this.svg.replaceChildren(...parts);
  }

  /** What the chart shows, for those who do not see it. */
  describe() {
    const lines = NAMES.filter((name) => this.series[name].length).map((name) => {
      const pairs = this.series[name];
      const [[, first], [length, last]] = [pairs[0], pairs[pairs.length - 1]];
      return `${name} at first ${count(first)}, at ${count(length)} tokens ${count(last)}`;
    });
    const said = lines.length ? lines.join("; ") : "nothing measured yet";
    this.svg.setAttribute("aria-label", `Tokens a second over the length of the text: ${said}`);
  }
}
