// What benchmarks/device_in_browser.py runs in its page: a bundle with onnxruntime-web, and the same network in TensorFlow.js.

const attend = (q, k, v) => tf.matMul(tf.softmax(tf.mul(tf.matMul(q, k, false, true), 1 / Math.sqrt(q.shape[3]))), v);

function normalized(x, scale, bias) {
  const { mean, variance } = tf.moments(x, -1, true);
  return tf.add(tf.mul(tf.mul(tf.sub(x, mean), tf.rsqrt(tf.add(variance, 1e-12))), scale), bias);
}

const linear = (w, x, name) => {
  const flat = x.reshape([-1, x.shape[x.shape.length - 1]]);
  const result = tf.add(tf.matMul(flat, w[`${name}.weight`], false, true), w[`${name}.bias`]);
  return result.reshape([...x.shape.slice(0, -1), result.shape[1]]);
};

const gelu = (x) => tf.mul(tf.mul(x, 0.5), tf.add(tf.erf(tf.mul(x, Math.SQRT1_2)), 1));

const networks = {
  mnist(w, { images }) {
    const convolved = (x, name) => tf.relu(tf.add(tf.conv2d(x, w[`${name}.weight`], 1, "valid"), w[`${name}.bias`]));
    const x = tf.maxPool(convolved(convolved(images, "conv1"), "conv2"), 2, 2, "valid");
    return linear(w, tf.relu(linear(w, x.reshape([x.shape[0], -1]), "fc1")), "fc2");
  },
  bert(w, { input_ids: tokens }, { heads, layers }) {
    const norm = (x, name) => normalized(x, w[`${name}.weight`], w[`${name}.bias`]);
    const [batch, length] = tokens.shape;
    let x = norm(tf.add(tf.gather(w["tokens.weight"], tokens), w["positions.weight"]), "norm");
    for (let i = 0; i < layers; i++) {
      const layer = `layers.${i}`;
      const split = (name) => linear(w, x, `${layer}.${name}`).reshape([batch, length, heads, -1]).transpose([0, 2, 1, 3]);
      const mixed = attend(split("q"), split("k"), split("v")).transpose([0, 2, 1, 3]).reshape(x.shape);
      x = norm(tf.add(x, linear(w, mixed, `${layer}.o`)), `${layer}.norm1`);
      const inner = linear(w, gelu(linear(w, x, `${layer}.up`)), `${layer}.down`);
      x = norm(tf.add(x, inner), `${layer}.norm2`);
    }
    const h = norm(gelu(linear(w, x, "transform")), "transform_norm");
    return tf.add(tf.matMul(h.reshape([batch * length, -1]), w["tokens.weight"], false, true), w["bias"]);
  },
};

/** The mean over the labels that count, which are not -100. */
function crossEntropy(logits, labels) {
  const flat = labels.reshape([-1]);
  const counts = tf.cast(tf.notEqual(flat, -100), "float32");
  const chosen = tf.oneHot(tf.cast(tf.maximum(flat, 0), "int32"), logits.shape[logits.shape.length - 1]);
  const losses = tf.neg(tf.sum(tf.mul(tf.logSoftmax(logits), chosen), -1));
  return tf.div(tf.sum(tf.mul(losses, counts)), tf.sum(counts));
}

/** A function that takes a step in TensorFlow.js, on a backend. */
async function tensorFlowStep(backend, { network, weights, batches, options, rate }) {
  await tf.setBackend(backend);
  await tf.ready();
  const w = Object.fromEntries(Object.entries(weights).map(([name, one]) => [name, tf.variable(tf.tensor(one.data, one.shape))]));
  const optimizer = tf.train.adam(rate, 0.9, 0.999, 1e-8);
  const given = batches.map((batch) =>
    Object.fromEntries(Object.entries(batch).map(([name, one]) => [name, tf.tensor(one.data, one.shape, one.dtype)])),
  );
  return async (number) => {
    if (tf.getBackend() !== backend) await tf.setBackend(backend);
    const batch = given[number % given.length];
    const loss = optimizer.minimize(() => crossEntropy(networks[network](w, batch, options), batch.labels), true);
    const [value] = await loss.data();
    loss.dispose();
    return value;
  };
}

async function bundleStep(batches) {
  const [ort, { Trainer }] = await Promise.all(
    ["./runtime/ort.wasm.bundle.min.mjs", "./client/index.js"].map((one) => import(new URL(one, location.href))),
  );
  ort.env.wasm.numThreads = 1;
  ort.env.wasm.wasmPaths = new URL("./runtime/", location.href).href;
  const trainer = await Trainer.load(new URL("./bundle", location.href), { runtime: ort });
  return (number) => trainer.trainStep(batches[number % batches.length]);
}

/** Milliseconds of each step of each way, in turns, and the losses. */
globalThis.compare = async (backends, rounds, steps) => {
  const work = await (await fetch("./work.json")).json();
  tf.wasm?.setWasmPaths(new URL("./tf/", location.href).href);
  const ways = new Map([["onward device", await bundleStep(work.bundle_batches)]]);
  const found = {};
  for (const backend of backends) {
    try {
      const step = await tensorFlowStep(backend, work);
      await step(0);
      ways.set(`TensorFlow.js, ${backend}`, await tensorFlowStep(backend, work));
    } catch (error) {
      found[`TensorFlow.js, ${backend}`] = { failure: error.message.split("\n")[0].slice(0, 150) };
    }
  }
  for (const way of ways.keys()) found[way] = { rounds: [], losses: [] };
  for (let round = -1; round < rounds; round++) {
    for (const [way, step] of ways) {
      const times = [];
      for (let i = 0; i < steps; i++) {
        const start = performance.now();
        found[way].losses.push(await step((round + 1) * steps + i));
        times.push(performance.now() - start);
      }
      if (round >= 0) found[way].rounds.push(times.sort((a, b) => a - b)[Math.floor(steps / 2)]);
    }
  }
  return found;
};
