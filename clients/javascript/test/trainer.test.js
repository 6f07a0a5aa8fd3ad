/** The client in Node, against what was written down beside a bundle (see tests/clients of the repository). */

import assert from "node:assert/strict";
import { createHash } from "node:crypto";
import { readFile } from "node:fs/promises";
import { join } from "node:path";
import { test } from "node:test";

import * as ort from "onnxruntime-node";

import { checksum } from "../dist/bundle.js";
import { Bundle, BundleError, SkippedUpdatesError, Trainer } from "../dist/index.js";

const folder = process.env.ONWARD_DEVICE_EXAMPLE;
assert.ok(folder, "set ONWARD_DEVICE_EXAMPLE to a folder of a bundle and expected.json");
const expected = JSON.parse(await readFile(join(folder, "expected.json"), "utf-8"));
const bundle = join(folder, "bundle");
const load = () => Trainer.load(bundle, { runtime: ort });

/** The same bundle as a browser has it, without paths. */
function served(changes = {}) {
  return {
    name: "served",
    read: async (file) => changes[file]?.() ?? readFile(join(bundle, file)),
  };
}

function assertClose(found, wanted, bound) {
  assert.equal(found.length, wanted.length);
  found.forEach((value, index) => assert.ok(Math.abs(value - wanted[index]) <= bound, `${index}: ${value}, ${wanted[index]}`));
}

test("losses, metrics and weights are those of the other clients", async () => {
  const trainer = await load();
  const losses = [];
  for (const batch of expected.batches) losses.push(await trainer.trainStep(batch));
  assertClose(losses, expected.losses, 1e-5);
  const metrics = await trainer.evaluate(expected.batches.slice(0, 7));
  assert.deepEqual(Object.keys(metrics).sort(), Object.keys(expected.metrics).sort());
  for (const [name, value] of Object.entries(metrics)) assertClose([value], [expected.metrics[name]], 1e-5);
  assert.equal(await trainer.updates(), expected.updates);
  assert.equal(await trainer.skippedUpdates(), 0);
  assertClose([trainer.gradientNorm], [expected.gradient_norm], 1e-4);
});

test("a bundle without paths is read whole, and calls wait for one another", async () => {
  const trainer = await Trainer.load(served());
  const losses = await Promise.all(expected.batches.slice(0, 8).map((batch) => trainer.trainStep(batch)));
  assertClose(losses, expected.losses.slice(0, 8), 1e-5);
  await trainer.release();
});

test("a saved state continues bit for bit, and Python's is read", async () => {
  const [one, other] = [await load(), await load()];
  for (const batch of expected.batches.slice(0, 3)) await one.trainStep(batch);
  await other.loadState(await one.saveState());
  for (const batch of expected.batches.slice(3, 9)) assert.equal(await one.trainStep(batch), await other.trainStep(batch));
  assert.deepEqual(await one.state(), await other.state());
  await other.loadState(await readFile(join(folder, "state.safetensors")));
  assertClose([await other.trainStep(expected.batches[3])], [expected.losses[3]], 1e-5);
});

test("a state carries the fields of its bundle's run", async () => {
  const state = await (await load()).saveState();
  const header = state.subarray(8, 8 + Number(new DataView(state.buffer, state.byteOffset).getBigUint64(0, true)));
  const { run_fields: fields } = JSON.parse(new TextDecoder().decode(header)).__metadata__;
  const manifest = JSON.parse(await readFile(join(bundle, "manifest.json"), "utf-8"));
  assert.ok(fields.length > 100);
  assert.equal(fields, manifest.run_fields);
});

test("the exported model stands alone", async () => {
  const trainer = await load();
  for (const batch of expected.batches.slice(0, 3)) await trainer.trainStep(batch);
  const [batch] = expected.batches;
  const predicted = await trainer.predict(batch);
  const session = await ort.InferenceSession.create(await trainer.exportModel());
  const feeds = Object.fromEntries(
    session.inputNames.map((name) => [name, new ort.Tensor("float32", Float32Array.from(batch[name].data), batch[name].shape)]),
  );
  const found = await session.run(feeds);
  for (const name of session.outputNames) assertClose(found[name].data, predicted[name].data, 1e-6);
});

const refused = (words) => (error) => error instanceof BundleError && words.test(error.message);

test("what does not fit is refused with what was expected", async () => {
  const trainer = await load();
  const [{ x, label }] = expected.batches;
  const [rows, columns] = x.shape;
  const short = { shape: [rows - 1, columns], data: x.data.slice(columns) };
  const wide = { shape: [rows, columns + 1], data: new Float32Array(rows * (columns + 1)) };
  await assert.rejects(trainer.trainStep({ x: short, label }), refused(/"label" has the shape \[4\]; expected \[batch=3\]/));
  await assert.rejects(trainer.trainStep({ x: wide, label }), refused(/"x" has the shape \[4, 7\]; expected \[batch=4, 6\]/));
  await assert.rejects(trainer.trainStep({ label }), refused(/the batch has no "x"; it has label/));
  await assert.rejects(trainer.trainStep({ x: { ...x, shape: [rows] }, label }), refused(/"x" has 24 values, and its shape \[4\] 4/));
  const negative = { ...label, data: label.data.map(() => -1) };
  await assert.rejects(trainer.trainStep({ x, label: negative }), refused(/"label" holds the label -1; expected 0 to \d+\. Fix the data/));
  const nothing = { shape: [0, columns], data: [] };
  await assert.rejects(trainer.predict({ x: nothing }), refused(/"x" has the shape \[0, 6\]\. Leave out batches without/));
  await assert.rejects(trainer.evaluate([]), refused(/there are no batches to evaluate\. Pass at least one/));
  const halves = { ...label, data: label.data.map(() => 0.5) };
  await assert.rejects(trainer.trainStep({ x, label: halves }), refused(/"label": 0.5 is no int64. Round it/));
  const bytes = { ...x, data: new Uint8Array(x.data.length) };
  await assert.rejects(trainer.trainStep({ x: bytes, label }), refused(/"x": a Uint8Array is no float32. Convert it to a Float32Array, scaled/));
  const truths = { ...x, data: x.data.map(() => true) };
  await assert.rejects(trainer.trainStep({ x: truths, label }), refused(/"x": true is no float32. Convert it to a Float32Array, scaled/));
  const floats = { ...label, data: new Float32Array(label.data.length) };
  await assert.rejects(trainer.trainStep({ x, label: floats }), refused(/"label": a Float32Array is no int64. Convert it to a BigInt64Array\./));
  const large = { ...label, data: new BigUint64Array(label.data.length).fill(2n ** 63n) };
  await assert.rejects(trainer.trainStep({ x, label: large }), refused(/"label": 9223372036854775808 is more than int64 holds/));
  const more = { x, label, weight: label };
  await assert.rejects(trainer.trainStep(more), refused(/the batch has "weight", which no graph reads; expected label, x\. Leave/));
  assertClose([await trainer.trainStep({ x, label })], [expected.losses[0]], 1e-5);
});

test("indices that no row of a table has are refused", async () => {
  const manifest = JSON.parse(await readFile(join(bundle, "manifest.json"), "utf-8"));
  const features = manifest.features.map(({ classes, ...one }) => (one.name === "label" ? { ...one, rows: 4 } : one));
  const written = async () => new TextEncoder().encode(JSON.stringify({ ...manifest, features, requires: ["table_rows", "accumulation"] }));
  const trainer = await Trainer.load(served({ "manifest.json": written }), { runtime: ort });
  const [batch] = expected.batches;
  const label = (index) => ({ ...batch, label: { ...batch.label, data: batch.label.data.map(() => index) } });
  const negative = /"label" holds the index -1; expected 0 to 3, since it picks rows of a table that has 4\. If it marks padding/;
  await assert.rejects(trainer.trainStep(label(-1)), refused(negative));
  await assert.rejects(trainer.trainStep(label(4)), refused(/"label" holds the index 4; .* Make the indices with the tokenizer/));
  assertClose([await trainer.trainStep(batch)], [expected.losses[0]], 1e-5);
});

test("damaged and other files are refused", async () => {
  const { state } = JSON.parse(await readFile(join(bundle, "manifest.json"), "utf-8"));
  const { file } = state.find(({ start }) => "file" in start).start; // of weights, or of a graph that has them inside
  const weights = async () => (await readFile(join(bundle, file))).fill(1, 0, 4);
  await assert.rejects(Bundle.open(served({ [file]: weights })), refused(/(weights.bin|train.onnx) of served was changed or damaged/));
  const manifest = JSON.parse(await readFile(join(bundle, "manifest.json"), "utf-8"));
  const written = (changes) => async () => new TextEncoder().encode(JSON.stringify({ ...manifest, ...changes }));
  await assert.rejects(Bundle.open(served({ "manifest.json": written({ version: 2 }) })), refused(/version 2; this package reads version 1/));
  const newer = served({ "manifest.json": written({ requires: ["class_labels", "tides"] }) });
  await assert.rejects(Bundle.open(newer), refused(/served is a device bundle that requires tides, which this package does not know/));
  await assert.rejects(Bundle.open(served({ "manifest.json": written({ format: "x" }) })), refused(/no manifest of a device bundle/));
  await assert.rejects(Bundle.open(served({ "manifest.json": async () => new Uint8Array([1]) })), refused(/is no JSON/));
  await assert.rejects(Trainer.load(join(folder, "nowhere"), { runtime: ort }), refused(/has no file manifest.json/));
});

test("states of other bundles and other files are refused", async () => {
  const trainer = await load();
  const other = await Trainer.load(served({
    "manifest.json": async () => {
      const manifest = JSON.parse(await readFile(join(bundle, "manifest.json"), "utf-8"));
      return new TextEncoder().encode(JSON.stringify({ ...manifest, identity: "0".repeat(64) }));
    },
  }), { runtime: ort });
  await assert.rejects(trainer.loadState(await other.saveState()), refused(/a state of the bundle 000000000000; this one is [0-9a-f]{12}/));
  const flipped = await trainer.saveState();
  flipped[flipped.length - 1] ^= 1;
  await assert.rejects(trainer.loadState(flipped), refused(/^this state was changed or damaged: the SHA-256 of its tensors is [0-9a-f]{64}, its header has [0-9a-f]{64}\. Copy/));
  const shifted = await trainer.saveState();
  const text = Buffer.from(shifted.buffer, shifted.byteOffset, shifted.byteLength);
  const [{ 0: offsets, index }] = [...text.toString("latin1").matchAll(/"data_offsets":\[\d+,\d+\]/g)].filter(({ 0: one }) => /\[8,16\]/.test(one));
  text.write(offsets.replace("[8,16]", "[0,8] "), index, "latin1");
  await assert.rejects(trainer.loadState(shifted), refused(/^these bytes are no safetensors file: a tensor begins at byte 0, where 8 comes next/));
  await assert.rejects(trainer.loadState(new Uint8Array(3)), refused(/these bytes are no safetensors file/));
  await assert.rejects(trainer.loadState(new Uint8Array(16).fill(255)), refused(/its header would take/));
});

test("without crypto.subtle, as in pages of other hosts over http, checksums are the same", async () => {
  const given = Object.getOwnPropertyDescriptor(globalThis, "crypto");
  Object.defineProperty(globalThis, "crypto", { value: {}, configurable: true });
  try {
    for (const length of [0, 1, 55, 56, 64, 119, 100_003]) {
      const bytes = Uint8Array.from({ length }, (_, index) => (index * 37) % 256);
      assert.equal(await checksum(bytes), createHash("sha256").update(bytes).digest("hex"));
    }
    const trainer = await load();
    const state = await trainer.saveState();
    await trainer.loadState(state);
    state[state.length - 1] ^= 1;
    await assert.rejects(trainer.loadState(state), refused(/^this state was changed or damaged/));
    const damaged = served({ "infer.onnx": async () => new Uint8Array(3) });
    await assert.rejects(Bundle.open(damaged), refused(/^infer\.onnx of served was changed or damaged/));
  } finally {
    Object.defineProperty(globalThis, "crypto", given);
  }
});

test("skipped updates are warned of once, and end training after many in a row", async () => {
  const manifest = JSON.parse(await readFile(join(bundle, "manifest.json"), "utf-8"));
  const passes = manifest.training.gradient_accumulation_steps;
  const written = (changes) => async () =>
    new TextEncoder().encode(JSON.stringify({ ...manifest, training: { ...manifest.training, ...changes } }));
  const warnings = [];
  const open = (changes) =>
    Trainer.load(served({ "manifest.json": written({ skipped_in_a_row: 2, ...changes }) }), {
      runtime: ort,
      onWarning: (message) => warnings.push(message),
    });
  const [batch] = expected.batches;
  const infinite = { ...batch, x: { ...batch.x, data: batch.x.data.map(() => Infinity) } };
  const update = async (trainer, given) => {
    for (let pass = 0; pass < passes; pass += 1) await trainer.trainStep(given);
  };
  const trainer = await open({});
  for (const given of [infinite, infinite, batch, infinite, infinite]) await update(trainer, given);
  assert.equal(await trainer.skippedUpdates(), 4);
  const skipped = (words) => (error) => error instanceof SkippedUpdatesError && words.test(error.message);
  const inARow =
    /^the last 3 weight updates were skipped, .*\(update 6: gradient norm NaN, loss NaN\).* allows 2 in a row\. Look for infinite/;
  await assert.rejects(update(trainer, infinite), skipped(inARow));
  assert.equal(warnings.length, 1);
  assert.match(warnings[0], /^update 1 was skipped: .*\(gradient norm NaN, loss NaN\).* more than 2 in a row throw an error\.$/);
  const scaled = await open({ skipped_in_a_row: 0, fixed_loss_scale: 1e12 });
  await assert.rejects(update(scaled, infinite), skipped(/ allows 0 in a row\. .*loss_scale of .* is 1000000000000, at which gradients/));
  await Promise.all([trainer.release(), scaled.release()]);
});
