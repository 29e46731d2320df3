// The page: what it asks of the two models, each in a worker, and what it shows of their answers.

import { bytes, count, tokens } from "./numbers.js";
import { Chart } from "./chart.js";
import { Maps } from "./maps.js";
import { Text } from "./text.js";

// What is loaded of each model, so that progress is known: the script that builds the page counts.
const BYTES = { performer: 0/* performer */, softmax: 0/* softmax */ };
// As many tokens of a text as the heat maps show.
const MAP_TOKENS = 40;
// The beginning of a text that has at least so many tokens.
const MAP_CHARACTERS = 600;
const RACE_TOKENS = "4000";

const $ = (id) => document.getElementById(id);
const announce = (text) => { $("announce").textContent = text; };

/** Shows how things stand, and tells whoever listens. */
function say(state) {
  $("state").textContent = state;
  announce(state);
}

const chart = new Chart($("chart"));
const maps = new Maps($("favor-map"), $("softmax-map"), $("readout"), $("summary"));
// A run is one text by one or two models; `id` is how the workers' answers are told apart.
const run = { id: 0, writing: new Set(), beginning: "", cache: 0, sentence: "", pace: "reading" };

/** A model in its worker. */
class Writer {
  constructor(name, article) {
    this.name = name;
    this.text = new Text(article);
    this.worker = null;
    this.loaded = false;
    this.shown = null;
  }

  /** Loads the model, once. */
  load() {
    this.ready ??= new Promise((resolve, reject) => {
      this.worker = new Worker("worker.js?/* build */", { type: "module" });
      this.worker.onerror = (event) => reject(new Error(event.message ?? "the worker cannot be started"));
      this.worker.onmessage = ({ data }) => {
        if (data.type === "loading") {
          $("loading").value = data.fraction;
        } else if (data.type === "ready") {
          $("loading").hidden = true;
          this.loaded = true;
          this.worker.onmessage = ({ data }) => receive(this, data);
          resolve(data);
        } else {
          reject(new Error(data.message));
        }
      };
      $("loading").value = 0;
      this.worker.postMessage({ type: "load", name: this.name, bytes: BYTES[this.name] });
    }).catch((error) => {
      // The network may be back when the model is asked for again.
      this.worker?.terminate();
      this.worker = this.ready = null;
      $("loading").hidden = true;
      throw error;
    });
    return this.ready;
  }

  ask(message) {
    this.worker?.postMessage(message);
  }
}

const performer = new Writer("performer", $("performer-text"));
const softmax = new Writer("softmax", $("softmax-text"));

function fail(error) {
  // The other model must not write on, nor say that it is done: what it answers from now on belongs
  // to no run.
  stop();
  run.id += 1;
  say(error.message);
  $("state").classList.add("error");
  finish();
}

// What is asked

function settings() {
  // The seed that is shown, and kept in the address, is the one that is used.
  const asked = $("seed").valueAsNumber;
  const seed = Number.isInteger(asked) && asked >= 0 && asked < 2 ** 32 ? asked : 0;
  $("seed").value = seed;
  return {
    prompt: $("prompt").value,
    temperature: $("temperature").valueAsNumber,
    seed,
    most: $("length").value === "story" ? 1000 : Number($("length").value),
    pastEnds: $("length").value !== "story",
    pace: $("pace").value,
  };
}

/** The settings that are not the page's own, as an address that begins the same story. */
function address() {
  const query = new URLSearchParams();
  for (const id of ["prompt", "temperature", "seed", "length", "pace"]) {
    const field = $(id);
    const own = field.options ? field.options[0].value : field.defaultValue;
    if (field.value !== own) query.set(id, field.value);
  }
  if ($("beside").checked) query.set("beside", "1");
  const text = query.toString();
  return text ? `?${text}` : location.pathname;
}

function readAddress() {
  const query = new URLSearchParams(location.search);
  for (const id of ["prompt", "temperature", "seed", "length", "pace"]) {
    const field = $(id);
    const value = query.get(id);
    if (value === null) continue;
    if (field.options && ![...field.options].some((option) => option.value === value)) continue;
    // A field itself limits only what is typed.
    field.value = field.maxLength > 0 ? value.slice(0, field.maxLength) : value;
  }
  $("beside").checked = query.get("beside") === "1";
  showTemperature();
}

async function begin() {
  stop();
  const asked = { ...settings(), id: ++run.id };
  const writers = $("beside").checked ? [performer, softmax] : [performer];
  run.writing = new Set(writers);
  Object.assign(run, { beginning: asked.prompt, sentence: "", cache: 0, pace: asked.pace, looked: false });
  history.replaceState(null, "", address());
  $("state").classList.remove("error");
  const isLoading = writers.length > 1 && !softmax.loaded;
  if (isLoading) say("Loading softmax …");
  $("loading").hidden = !isLoading;
  $("start").textContent = "Stop";
  $("softmax-text").parentElement.hidden = writers.length < 2;
  $("performer-text").previousElementSibling.hidden = writers.length < 2;
  $("texts").classList.toggle("two", writers.length > 1);
  clearFigures();
  for (const writer of writers) {
    writer.shown = null;
    writer.text.clear(asked.prompt);
    writer.text.article.setAttribute("aria-busy", "true");
  }
  try {
    await Promise.all(writers.map((writer) => writer.load()));
  } catch (error) {
    // Another story may have been asked for, which says so itself if it cannot be written.
    if (run.id === asked.id) fail(error);
    return;
  }
  // While a model was loaded, another story may have been asked for, or none.
  if (run.id !== asked.id || !run.writing.size) return;
  say("Writing …");
  for (const writer of writers) writer.ask({ type: "write", ...asked });
}

function stop() {
  for (const writer of run.writing) writer.ask({ type: "stop" });
}

function finish() {
  run.writing.clear();
  $("loading").hidden = true;
  $("start").textContent = "Write";
  for (const writer of [performer, softmax]) writer.text.article.removeAttribute("aria-busy");
}

function askWeights() {
  performer.ask({
    type: "weights",
    text: run.beginning,
    most: MAP_TOKENS,
    layer: $("layer").selectedIndex,
    head: $("head").selectedIndex,
  });
}

// What is shown

/** Leaves nothing of an earlier story's figures. */
function clearFigures() {
  chart.clear();
  $("rate").textContent = "";
  $("tokens").textContent = tokens(0);
  $("verdict").textContent = "";
  for (const name of ["state", "cache"]) showMeter(name, 0, 1);
  for (const name of ["tokens", "rate", "stateBytes", "cacheBytes", "memoryBytes", "done"]) {
    delete $("main").dataset[name];
  }
}

function receive(writer, data) {
  if (data.type === "error") {
    fail(new Error(data.message));
  } else if (data.type === "weights") {
    if (data.layer === $("layer").selectedIndex && data.head === $("head").selectedIndex) maps.show(data);
  } else if (data.id === run.id) {
    writer.shown = data;
    writer.text.append(data.text);
    chart.show(writer.name, data.rates);
    if (writer === performer) showPerformer(data);
    showVerdict();
    if (data.type === "done") showDone(writer, data);
  }
}

function showPerformer(data) {
  if (run.beginning.length < MAP_CHARACTERS) run.beginning += data.text;
  if (!run.looked && data.tokens >= MAP_TOKENS) {
    run.looked = true;
    askWeights();
  }
  const cache = data.read * performer.cacheBytesPerToken;
  run.cache = cache;
  const most = Math.max(cache, data.stateBytes);
  showMeter("state", data.stateBytes, most);
  showMeter("cache", cache, most);
  $("tokens").textContent = tokens(data.tokens);
  if (data.seconds) $("rate").textContent = `${count(rateOf(data))} tokens a second`;
  $("memory").textContent = `Memory of the program, model included: ${bytes(data.memoryBytes)}.`;
  if (run.pace === "reading") sayFurther(data.text);
  // For whoever drives the page from outside.
  Object.assign($("main").dataset, {
    tokens: data.tokens,
    rate: rateOf(data).toFixed(1),
    stateBytes: data.stateBytes,
    cacheBytes: cache,
    memoryBytes: data.memoryBytes,
  });
}

const rateOf = ({ tokens, seconds }) => (seconds ? (tokens - 1) / seconds : 0);

function showMeter(name, value, most) {
  const bar = $(`${name}-bar`);
  bar.firstElementChild.style.transform = `scaleX(${value / most})`;
  bar.setAttribute("aria-valuenow", ((100 * value) / most).toFixed(1));
  bar.setAttribute("aria-valuetext", bytes(value));
  $(`${name}-bytes`).textContent = bytes(value);
}

function showVerdict() {
  const { stateBytes } = performer.shown ?? {};
  if (!stateBytes) return;
  const ratio = run.cache / stateBytes;
  const even = Math.ceil(stateBytes / performer.cacheBytesPerToken);
  $("verdict").textContent = ratio < 1
    ? `The state has its full size from the first token on; a cache grows past it at ${count(even)} tokens.`
    : `The state has not grown by a byte. A cache would take ${ratio.toFixed(1)} times as much by now, ` +
      `${count(performer.cacheBytesPerToken)} bytes more with every token.`;
}

/** Tells whoever listens of each sentence as a whole. */
function sayFurther(text) {
  run.sentence += text;
  const end = run.sentence.search(/[.!?]["”]?\s/);
  if (end < 0) return;
  announce(run.sentence.slice(0, end + 2).trim());
  run.sentence = run.sentence.slice(end + 2);
}

function showDone(writer, data) {
  writer.text.draw();
  writer.text.article.removeAttribute("aria-busy");
  run.writing.delete(writer);
  chart.describe();
  if (run.writing.size) {
    say(writer === performer
      ? "The Performer is done; softmax is still writing …" : "Softmax is done; the Performer is still writing …");
    return;
  }
  finish();
  askWeights();
  const shown = performer.shown ?? data;
  // Where the last of two models was stopped, the race was, though the other had reached its end.
  const reason = data.reason === "stopped" ? "stopped" : shown.reason ?? data.reason;
  const why = { end: "The story has ended", length: "Done", stopped: "Stopped" }[reason];
  const rates = [performer, softmax].filter((w) => w.shown?.id === run.id && w.shown.seconds)
    .map((w) => `${count(rateOf(w.shown))} by ${w.name === "performer" ? "the Performer" : "softmax"}`).join(", ");
  $("state").textContent = `${why} after ${tokens(shown.tokens)}${rates && `; tokens a second: ${rates}`}.`;
  // The last sentence has nothing after it, by which it would have been told before.
  announce(`${run.sentence} ${$("state").textContent} ${$("verdict").textContent}`.trim());
  $("main").dataset.done = String(run.id);
}

function showTemperature() {
  $("temperature-value").textContent = $("temperature").valueAsNumber.toFixed(2);
}

// What the person does

$("form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (run.writing.size) {
    stop();
    // What is still being loaded answers nothing.
    if (!performer.shown) {
      // Nor does an error belong to what was stopped.
      run.id += 1;
      finish();
      say("Stopped.");
    }
  } else if (performer.cacheBytesPerToken) {
    begin();
  } else {
    open();
  }
});
$("form").addEventListener("keydown", (event) => {
  // Enter in a field begins with what it holds. The button that the form has for it would only
  // stop.
  if (event.key !== "Enter" || event.isComposing || !event.target.matches("input")) return;
  if (run.writing.size && performer.cacheBytesPerToken) {
    event.preventDefault();
    begin();
  }
});
$("race").addEventListener("click", () => {
  $("length").value = RACE_TOKENS;
  $("pace").value = "full";
  $("beside").checked = true;
  begin();
});
$("temperature").addEventListener("input", showTemperature);
for (const id of ["layer", "head"]) $(id).addEventListener("change", askWeights);

async function main() {
  readAddress();
  await open();
}

/** Loads the Performer and begins; where that fails, the button tries again. */
async function open() {
  $("start").disabled = true;
  $("state").classList.remove("error");
  say("Loading the model …");
  $("loading").hidden = false;
  let about;
  try {
    about = await performer.load();
  } catch (error) {
    fail(error);
    $("start").textContent = "Try again";
    $("start").disabled = false;
    return;
  }
  $("start").textContent = "Write";
  performer.cacheBytesPerToken = about.cacheBytesPerToken;
  for (const [id, many] of [["layer", about.layers], ["head", about.heads]]) {
    $(id).replaceChildren(...Array.from({ length: many }, (_, i) => new Option(i + 1)));
    $(id).disabled = false;
  }
  $("layer").selectedIndex = 1;
  $("start").disabled = $("race").disabled = false;
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) {
    say("Ready: press Write.");
    run.beginning = $("prompt").value;
    askWeights();
  } else {
    begin();
  }
  keepOffline();
}

/** Keeps the page for the time without a network, after everything has been loaded once. */
async function keepOffline() {
  if (!("serviceWorker" in navigator)) return;
  try {
    await navigator.serviceWorker.register("service-worker.js");
    await navigator.serviceWorker.ready;
    $("offline").textContent = "Kept in this browser: works without a network from now on.";
    $("main").dataset.offline = "ready";
  } catch {
    // A page of plain HTTP from elsewhere may not keep anything; all else works.
    $("offline").textContent = "";
  }
}

main();
