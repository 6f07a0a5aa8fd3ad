/** The page: drawings become samples, a worker trains on them, and what it says is shown. */

import { SIZE, LARGEST, batchOf, pixelsOf, readDigits, shuffled } from "./digits.js";

const BATCH = 32;
const TEST_SAMPLES = 360;
const OWN_PASSES = 10;
const element = (id) => document.getElementById(id);

const worker = new Worker("./worker.js", { type: "module" });
const waiting = new Map();
let calls = 0;
worker.onmessage = ({ data: { id, error, ...found } }) => {
  const { resolve, reject } = waiting.get(id);
  waiting.delete(id);
  if (error === undefined) resolve(found);
  else reject(new Error(error));
};
worker.onerror = (event) => say(`The worker failed: ${event.message}`);

function ask(does, about = {}) {
  const id = calls++;
  return new Promise((resolve, reject) => {
    waiting.set(id, { resolve, reject });
    worker.postMessage({ id, does, ...about });
  });
}

const own = [];
const losses = [];
let digits = [];
let isStopped = false;
let isBusy = true;

function say(text) {
  element("status").textContent = text;
}

function enable() {
  const isDrawn = pixelsOf(element("drawing")) !== null;
  element("add").disabled = isBusy || !isDrawn;
  element("train-all").disabled = isBusy;
  element("train-own").disabled = isBusy || own.length === 0;
  element("stop").disabled = !isBusy || digits.length === 0;
  for (const id of ["export", "save", "restore"]) element(id).disabled = isBusy;
}

/** Does something that nothing else may run beside; a failure is shown. */
async function alone(does) {
  isBusy = true;
  enable();
  try {
    await does();
  } catch (error) {
    say(error.message);
  }
  isBusy = false;
  enable();
}

// ---------------------------------------------------------------------- drawing

const drawing = element("drawing");
const pen = drawing.getContext("2d", { willReadFrequently: true });
pen.lineWidth = 22;
pen.lineCap = pen.lineJoin = "round";

function place(event) {
  const area = drawing.getBoundingClientRect();
  return [((event.clientX - area.left) / area.width) * drawing.width, ((event.clientY - area.top) / area.height) * drawing.height];
}

drawing.addEventListener("pointerdown", (event) => {
  drawing.setPointerCapture(event.pointerId);
  pen.beginPath();
  pen.moveTo(...place(event));
  pen.lineTo(...place(event));
  pen.stroke();
});
drawing.addEventListener("pointermove", (event) => {
  if (event.buttons === 0) return;
  pen.lineTo(...place(event));
  pen.stroke();
});
drawing.addEventListener("pointerup", () => {
  enable();
  predict();
});

function clear() {
  pen.clearRect(0, 0, drawing.width, drawing.height);
  showBars(new Array(10).fill(0));
  enable();
}

async function predict() {
  const pixels = pixelsOf(drawing);
  if (pixels === null || digits.length === 0) return;
  const { X } = batchOf([{ pixels }]);
  const { outputs } = await ask("predict", { batch: { X } });
  const scores = Array.from(outputs.predictions.data);
  const largest = Math.max(...scores);
  const powers = scores.map((score) => Math.exp(score - largest));
  const sum = powers.reduce((a, b) => a + b);
  showBars(powers.map((power) => power / sum));
}

function showBars(shares) {
  const best = shares.indexOf(Math.max(...shares));
  element("bars").replaceChildren(
    ...shares.map((share, digit) => {
      const row = document.createElement("li");
      const [name, bar, filled, value] = ["span", "div", "span", "span"].map((tag) => document.createElement(tag));
      row.classList.toggle("best", share > 0 && digit === best);
      name.textContent = digit;
      bar.className = "bar";
      filled.style.width = `${100 * share}%`;
      bar.append(filled);
      value.textContent = share > 0 ? `${(100 * share).toFixed(1)} %` : "";
      row.append(name, bar, value);
      return row;
    }),
  );
}

function addSample() {
  const sample = { pixels: pixelsOf(drawing), label: Number(element("label").value) };
  own.push(sample);
  const figure = document.createElement("figure");
  const small = document.createElement("canvas");
  small.width = small.height = SIZE;
  const image = new ImageData(SIZE, SIZE);
  sample.pixels.forEach((value, index) => image.data.set([0, 0, 0, (255 * value) / LARGEST], 4 * index));
  small.getContext("2d").putImageData(image, 0, 0);
  small.style.background = "#fff";
  figure.append(small, document.createTextNode(sample.label));
  element("samples").append(figure);
  element("count").textContent = own.length;
  clear();
}

// ---------------------------------------------------------------------- training

async function train(samples, passes) {
  isStopped = false;
  for (let pass = 0; pass < passes && !isStopped; pass++) {
    const order = shuffled(samples, losses.length + 1);
    for (let begin = 0; begin < order.length && !isStopped; begin += BATCH) {
      const started = performance.now();
      const { loss, updates } = await ask("train", { batch: batchOf(order.slice(begin, begin + BATCH)) });
      losses.push(loss);
      element("pace").textContent = (performance.now() - started).toFixed(0);
      element("loss").textContent = loss.toFixed(3);
      element("updates").textContent = updates;
      say(`Training on ${samples.length} samples: ${Math.min(begin + BATCH, order.length)} of pass ${pass + 1} of ${passes}.`);
      drawChart();
    }
  }
  await evaluate();
  await predict();
  say(isStopped ? "Stopped." : `Trained ${passes === 1 ? "once" : `${passes} times`} on ${samples.length} samples.`);
}

async function evaluate() {
  const test = digits.slice(0, TEST_SAMPLES);
  const batches = [];
  for (let begin = 0; begin < test.length; begin += 120) batches.push(batchOf(test.slice(begin, begin + 120)));
  const { metrics } = await ask("evaluate", { batches });
  element("accuracy").textContent = `${(100 * metrics.accuracy).toFixed(1)} %`;
}

function drawChart() {
  const [left, right, top, bottom] = [34, 470, 10, 196];
  const largest = Math.max(...losses, 0.1);
  const x = (index) => left + ((right - left) * index) / Math.max(1, losses.length - 1);
  const y = (loss) => bottom - ((bottom - top) * loss) / largest;
  const points = losses.map((loss, index) => `${x(index).toFixed(1)},${y(loss).toFixed(1)}`).join(" ");
  const ticks = [0, 0.5, 1].map((part) => part * largest);
  element("chart").innerHTML =
    ticks
      .map((tick) => `<line class="axis" x1="${left}" x2="${right}" y1="${y(tick)}" y2="${y(tick)}"/><text x="4" y="${y(tick) + 4}">${tick.toFixed(1)}</text>`)
      .join("") +
    `<text x="${left}" y="214">1</text><text x="${right}" y="214" text-anchor="end">${losses.length} updates</text>` +
    `<polyline points="${points}"/>`;
}

function download(bytes, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([bytes]));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

// ---------------------------------------------------------------------- the page

for (let digit = 0; digit < 10; digit++) element("label").append(new Option(digit, digit));
element("clear").onclick = clear;
element("add").onclick = addSample;
element("train-all").onclick = () => alone(() => train([...digits.slice(TEST_SAMPLES), ...own], 1));
element("train-own").onclick = () => alone(() => train(own, OWN_PASSES));
element("stop").onclick = () => {
  isStopped = true;
};
element("export").onclick = () => alone(async () => download((await ask("export")).bytes, "trained.onnx"));
element("save").onclick = () => alone(async () => download((await ask("save")).bytes, "state.safetensors"));
element("restore").onchange = ({ target }) =>
  alone(async () => {
    const bytes = new Uint8Array(await target.files[0].arrayBuffer());
    target.value = "";
    const { updates } = await ask("restore", { bytes });
    element("updates").textContent = updates;
    await evaluate();
    say("Loaded the state.");
  });

clear();
drawChart();
alone(async () => {
  await ask("load");
  digits = shuffled(await readDigits("./digits.bin"), 0);
  await evaluate();
  say("Ready: the network is untrained. Train it, then draw.");
});
