// One model in a thread of its own: it writes by pieces, and between two pieces reads what the page
// asks for. Messages are objects whose `type` says what they are.

import init, { Model } from "./performer_web.js?/* build */";

// The script that builds the page puts in a digest: the program and the models are asked for by
// their build, past those of another one in a browser's cache.
const BUILD = "?/* build */";

// A piece is written in about this time, after which the page is told of it.
const PIECE_MS = 16;
// Words appear at about this pace where somebody reads along.
const READING_TOKENS_PER_SECOND = 24;
// The chart's points: when there are more, neighbours are joined.
const MOST_POINTS = 80;
const FIRST_BUCKET = 16;

let memory;
let model;
// The text that is being written; another one takes its place.
let current = 0;

/** Lets messages in, without the 4 ms that a nested timer waits. */
const breathe = (() => {
  const { port1, port2 } = new MessageChannel();
  const waiting = [];
  port1.onmessage = () => waiting.shift()();
  return () => new Promise((resolve) => {
    waiting.push(resolve);
    port2.postMessage(0);
  });
})();

const sleep = (ms) => new Promise((resolve) => setTimeout(resolve, ms));

/** Reads a file to its end, and tells `tell` of each part. */
async function read(url, tell) {
  const response = await fetch(url + BUILD);
  if (!response.ok) {
    throw new Error(`cannot load ${url}: ${response.status} ${response.statusText}`);
  }
  const parts = [];
  let length = 0;
  const reader = response.body.getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) break;
    parts.push(value);
    length += value.length;
    tell(value.length);
  }
  const bytes = new Uint8Array(length);
  let at = 0;
  for (const part of parts) {
    bytes.set(part, at);
    at += part.length;
  }
  return bytes;
}

async function load({ name, bytes }) {
  let loaded = 0;
  const tell = (length) => {
    loaded += length;
    postMessage({ type: "loading", fraction: Math.min(1, loaded / bytes) });
  };
  const files = ["config.json", "tokenizer.json", "model.safetensors"];
  const [program, config, tokenizer, weights] = await Promise.all(
    ["performer_web_bg.wasm", ...files.map((file) => `models/${name}/${file}`)].map((url) => read(url, tell)),
  );
  ({ memory } = await init({ module_or_path: program }));
  model = new Model(config, tokenizer, weights);
  const { layers, heads, context, cache_bytes_per_token: cacheBytesPerToken } = model;
  postMessage({ type: "ready", layers, heads, context, cacheBytesPerToken });
}

/** Tokens a second over the length of a text, in few points however long it becomes. */
class Rates {
  points = [];
  bucket = FIRST_BUCKET;
  tokens = 0;
  seconds = 0;

  add(length, tokens, seconds) {
    this.tokens += tokens;
    this.seconds += seconds;
    // A coarse clock may not have moved yet, and a rate over no time is none.
    if (this.tokens < this.bucket || !this.seconds) return;
    this.points.push({ length, tokens: this.tokens, seconds: this.seconds });
    this.tokens = this.seconds = 0;
    if (this.points.length < MOST_POINTS) return;
    this.bucket *= 2;
    const joined = [];
    for (let i = 0; i + 1 < this.points.length; i += 2) {
      const [a, b] = [this.points[i], this.points[i + 1]];
      joined.push({ length: b.length, tokens: a.tokens + b.tokens, seconds: a.seconds + b.seconds });
    }
    this.points = joined;
  }

  /** Pairs of a length and a rate. */
  get series() {
    return this.points.map(({ length, tokens, seconds }) => [length, tokens / seconds]);
  }
}

async function write({ id, prompt, temperature, seed, most, pastEnds, pace }) {
  current = id;
  const story = model.begin(prompt, temperature, 0.95, seed, pastEnds);
  const rates = new Rates();
  let [tokens, seconds, text, told] = [0, 0, "", 0];
  let reason = "length";
  const report = (type, more) => {
    postMessage({
      type, id, text, tokens, seconds,
      read: story.tokens_read,
      stateBytes: story.state_bytes,
      memoryBytes: memory.buffer.byteLength,
      rates: rates.series,
      ...more,
    });
    text = "";
    told = performance.now();
  };
  // The first token comes with the reading of the prompt, which is no measure of writing.
  text += story.write(Math.min(1, most));
  tokens = story.tokens;
  report("piece");
  const begun = performance.now();
  while (tokens < most && !story.ended && current === id) {
    const start = performance.now();
    let now = start;
    if (pace === "reading") {
      text += story.write(1);
      now = performance.now();
    } else {
      while (now - start < PIECE_MS && story.tokens < most && !story.ended) {
        text += story.write(1);
        now = performance.now();
      }
    }
    const written = story.tokens - tokens;
    tokens = story.tokens;
    seconds += (now - start) / 1000;
    rates.add(story.tokens_read, written, (now - start) / 1000);
    if (pace === "reading") {
      report("piece");
      const due = begun + (1000 * tokens) / READING_TOKENS_PER_SECOND;
      await sleep(Math.max(0, due - performance.now()));
    } else {
      // A page draws at most so often.
      if (now - told > 60) report("piece");
      await breathe();
    }
  }
  if (story.ended) reason = "end";
  if (current !== id) reason = "stopped";
  report("done", { reason });
  story.free();
}

function weights({ text, most, layer, head }) {
  const found = model.weights(text, most, layer, head);
  const { tokens, favor, softmax } = found;
  found.free();
  postMessage({ type: "weights", layer, head, tokens, favor, softmax });
}

const handlers = {
  load,
  write,
  weights,
  stop: () => { current = 0; },
};

onmessage = async ({ data }) => {
  try {
    await handlers[data.type](data);
  } catch (error) {
    // A trap of the program leaves it in no state to go on from.
    const message = error instanceof WebAssembly.RuntimeError
      ? `the program has failed (${error.message}): reload the page`
      : error.message ?? String(error);
    postMessage({ type: "error", message });
  }
};
