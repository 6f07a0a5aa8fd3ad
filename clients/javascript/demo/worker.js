/** Trains in a worker, so that the page answers while it computes. Messages: {id, does, ...} in, {id, ...} out. */

import * as ort from "./runtime/ort.wasm.bundle.min.mjs";
import { Trainer } from "./client/index.js";

ort.env.wasm.numThreads = 1;
ort.env.wasm.wasmPaths = new URL("./runtime/", import.meta.url).href;

let trainer;

const does = {
  async load() {
    trainer = await Trainer.load(new URL("./bundle", import.meta.url), { runtime: ort });
    return { metrics: trainer.bundle.manifest.metrics.map((one) => one.name) };
  },
  async train({ batch }) {
    return { loss: await trainer.trainStep(batch), updates: await trainer.updates() };
  },
  async evaluate({ batches }) {
    return { metrics: await trainer.evaluate(batches) };
  },
  async predict({ batch }) {
    return { outputs: await trainer.predict(batch) };
  },
  async save() {
    return { bytes: await trainer.saveState() };
  },
  async restore({ bytes }) {
    await trainer.loadState(bytes);
    return { updates: await trainer.updates() };
  },
  async export() {
    return { bytes: await trainer.exportModel() };
  },
};

onmessage = async ({ data: { id, does: what, ...about } }) => {
  try {
    postMessage({ id, ...(await does[what](about)) });
  } catch (error) {
    postMessage({ id, error: error.message });
  }
};
