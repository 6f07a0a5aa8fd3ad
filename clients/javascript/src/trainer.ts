/** Training with a device bundle: every call binds the state, runs a graph, and keeps what comes out as new state. */

import type { InferenceSession, Tensor } from "onnxruntime-common";

import { type NDArray, type TypedArray, converted, kindOf, sizeOf } from "./arrays.js";
import { Bundle, checksum, type Described, FORMAT, type Metric, type TrainingFeature } from "./bundle.js";
import { BundleError } from "./errors.js";
import { type BundleFiles, filesOf } from "./files.js";
import { withValues } from "./one_file.js";
import { readSafetensors, tensorBytes, writeSafetensors } from "./safetensors.js";
import { SkippedUpdates } from "./skipped_updates.js";

/** What is used of `onnxruntime-web` or `onnxruntime-node`. */
export interface Runtime {
  readonly InferenceSession: {
    create(path: string, options?: InferenceSession.SessionOptions): Promise<InferenceSession>;
    create(bytes: Uint8Array, options?: InferenceSession.SessionOptions): Promise<InferenceSession>;
  };
  readonly Tensor: new (type: Tensor.Type, data: never, dims: readonly number[]) => Tensor;
}

/** A feature of a batch: values in the order of rows, samples along the first axis. */
export interface Feature {
  readonly data: ArrayLike<number | bigint | boolean>;
  readonly shape: readonly number[];
}

export type Batch = Readonly<Record<string, Feature>>;

export interface LoadOptions {
  /** The module `onnxruntime-web` or `onnxruntime-node`; otherwise the one that is installed is imported. */
  readonly runtime?: Runtime;
  /** Of every graph; `executionProviders` chooses among wasm, webgpu and others. */
  readonly sessionOptions?: InferenceSession.SessionOptions;
  /** Compare the checksums of all files; true unless told otherwise. */
  readonly verify?: boolean;
  /** Takes the message about the first skipped update; `console.warn` unless told otherwise. */
  readonly onWarning?: (message: string) => void;
}

/** A model that is trained on this device. Calls wait for one another. */
export class Trainer {
  /** Of the last update, before clipping; not finite: the update was skipped. Undefined: there was none. */
  gradientNorm: number | undefined;

  readonly #runtime: Runtime;
  readonly #options: InferenceSession.SessionOptions;
  readonly #warn: (message: string) => void;
  readonly #sessions = new Map<string, Promise<InferenceSession>>();
  #state = new Map<string, Tensor>();
  #watch: SkippedUpdates;
  #last: Promise<unknown> = Promise.resolve();

  private constructor(
    readonly bundle: Bundle,
    runtime: Runtime,
    options: LoadOptions,
  ) {
    this.#runtime = runtime;
    this.#options = options.sessionOptions ?? {};
    this.#warn = options.onWarning ?? console.warn;
    this.#watch = new SkippedUpdates(bundle.manifest.training, this.#warn);
  }

  /**
   * Opens a bundle.
   *
   * @param source A URL or a folder, or files that the caller reads.
   * @param options See `LoadOptions`.
   * @throws BundleError It is no bundle of this version, or a file was changed.
   */
  static async load(source: string | URL | BundleFiles, options: LoadOptions = {}): Promise<Trainer> {
    const files = typeof source === "string" || source instanceof URL ? await filesOf(source) : source;
    const bundle = await Bundle.open(files, options.verify ?? true);
    const trainer = new Trainer(bundle, options.runtime ?? (await installedRuntime()), options);
    trainer.#setState(await bundle.firstState());
    return trainer;
  }

  /** Weight updates so far, skipped ones included. */
  async updates(): Promise<number> {
    return this.#inTurn(() => this.#counter("update_count"));
  }

  /** Updates that were skipped, because a gradient, the loss or a statistic was not finite. */
  async skippedUpdates(): Promise<number> {
    return this.#inTurn(() => this.#counter("skipped_updates"));
  }

  /**
   * A forward and backward pass, and the update where the gradients of enough passes are accumulated.
   *
   * @returns The loss of the batch. It says nothing of the update: one whose gradient is not finite is skipped, with a
   *   warning at the first.
   * @throws BundleError A feature is missing or does not fit.
   * @throws SkippedUpdatesError More updates in a row were skipped than `on_bad_loss.skip` of the run allows. Those by
   *   which a dynamic loss scale falls do not count.
   */
  async trainStep(batch: Batch): Promise<number> {
    return this.#inTurn(async () => {
      const { manifest } = this.bundle;
      const features = this.#features(batch, manifest.features);
      const [skippedBefore, scaleBefore] = [await this.#counter("skipped_updates"), await this.#lossScale()];
      const isOneStep = "step" in manifest.graphs;
      let results = await this.#run(isOneStep ? "step" : "train", features);
      const loss = await scalar(results, "loss");
      if (!isOneStep) {
        if ((await this.#counter("accumulated_passes")) < manifest.training.gradient_accumulation_steps) {
          return loss;
        }
        results = await this.#run("update", new Map());
      }
      const norm = await scalar(results, "gradient_norm");
      this.gradientNorm = norm;
      this.#watch.afterUpdate({
        number: await this.#counter("update_count"),
        isSkipped: (await this.#counter("skipped_updates")) > skippedBefore,
        lowersScale: (await this.#lossScale()) < scaleBefore,
        norm,
        loss,
      });
      return loss;
    });
  }

  /**
   * Metrics over all samples of some batches, in inference mode.
   *
   * @throws BundleError A feature is missing or does not fit, or there is no batch.
   */
  async evaluate(batches: Iterable<Batch> | AsyncIterable<Batch>): Promise<Record<string, number>> {
    const sums = new Map<string, number>();
    for await (const batch of batches) {
      const results = await this.#inTurn(() => this.#run("eval", this.#features(batch, this.#featuresOf("eval"))));
      for (const name of results.keys()) {
        sums.set(name, (sums.get(name) ?? 0) + (await scalar(results, name)));
      }
    }
    if (sums.size === 0) {
      throw new BundleError("there are no batches to evaluate. Pass at least one; a generator that was read before is empty, too.");
    }
    return metricsOf(this.bundle.manifest.metrics, sums);
  }

  /**
   * The outputs of the model with the present weights, by name.
   *
   * @throws BundleError An input is missing or does not fit.
   */
  async predict(inputs: Batch): Promise<Record<string, NDArray>> {
    return this.#inTurn(async () => {
      const results = await this.#run("infer", this.#features(inputs, this.#featuresOf("infer")));
      const found = [...results].map(async ([name, tensor]) => [name, await arrayOf(tensor)] as const);
      return Object.fromEntries(await Promise.all(found));
    });
  }

  /** A copy of weights, moments, running statistics, counters and accumulators, by name. */
  async state(): Promise<Map<string, NDArray>> {
    return this.#inTurn(() => this.#copyOfState());
  }

  /** Where the runtime holds each tensor of the state: `cpu`, or `gpu-buffer` with WebGPU after the first step. */
  async stateLocations(): Promise<Record<string, Tensor.DataLocation>> {
    return this.#inTurn(async () => Object.fromEntries([...this.#state].map(([name, one]) => [name, one.location])));
  }

  /** The state as the bytes of a safetensors file with the checksum of its tensors, which every client reads. */
  async saveState(): Promise<Uint8Array> {
    const { identity, run_fields: fields } = this.bundle.manifest;
    const about = { format: FORMAT, bundle: identity, ...(fields === undefined ? {} : { run_fields: fields }) };
    const state = await this.state();
    return writeSafetensors(state, { ...about, sha256: await checksum(tensorBytes(writeSafetensors(state, {}))) });
  }

  /**
   * Continues from a state that `saveState` gave.
   *
   * @throws BundleError It is of another bundle, or no state, or its tensors are not those that were saved.
   */
  async loadState(file: Uint8Array): Promise<void> {
    const { tensors, metadata } = readSafetensors(file);
    if (metadata["format"] !== FORMAT) {
      throw new BundleError("this is no state of a device bundle; save one with saveState.");
    }
    const [expected, found] = [metadata["sha256"], await checksum(tensorBytes(file))];
    if (expected !== undefined && found !== expected) {
      throw new BundleError(
        `this state was changed or damaged: the SHA-256 of its tensors is ${found}, its header has ${expected}. Copy the state again.`,
      );
    }
    const { identity } = this.bundle.manifest;
    if (metadata["bundle"] !== identity) {
      throw new BundleError(
        `this is a state of the bundle ${metadata["bundle"]?.slice(0, 12) || "without a name"}; this one is ` +
          `${identity.slice(0, 12)}. Use the bundle that the state was trained with.`,
      );
    }
    this.bundle.checkState(tensors);
    await this.#inTurn(async () => this.#setState(tensors));
  }

  /**
   * The model with its present weights as the bytes of one ONNX file, for any ONNX runtime.
   *
   * Its graph is the one that was trained. For the user's own graph, run `onward export MODEL --device-state`.
   */
  async exportModel(): Promise<Uint8Array> {
    const { files } = this.bundle;
    const { file, inputs } = this.bundle.graph("infer");
    const state = await this.state();
    const values = new Map(inputs.flatMap(({ name }) => (state.has(name) ? [[name, state.get(name) as NDArray]] : [])));
    const external = Object.keys(this.bundle.manifest.files).filter((name) => !name.endsWith(".onnx"));
    const read = external.map(async (name) => [name, await files.read(name)] as const);
    return withValues(await files.read(file), values, new Map(await Promise.all(read)));
  }

  /** Frees what the runtime holds; the trainer cannot be used afterwards. */
  async release(): Promise<void> {
    await this.#inTurn(async () => {
      for (const session of this.#sessions.values()) {
        await (await session).release();
      }
      this.#sessions.clear();
      for (const tensor of this.#state.values()) {
        tensor.dispose();
      }
      this.#state.clear();
    });
  }

  /** Does something after everything that was asked before, whether that failed or not. */
  async #inTurn<T>(does: () => Promise<T>): Promise<T> {
    const mine = this.#last.then(does, does);
    this.#last = mine.catch(() => undefined);
    return mine;
  }

  #setState(state: ReadonlyMap<string, NDArray>): void {
    const next = new Map([...state].map(([name, array]) => [name, this.#tensor(array)]));
    for (const tensor of this.#state.values()) {
      tensor.dispose();
    }
    this.#state = next;
    this.#watch = new SkippedUpdates(this.bundle.manifest.training, this.#warn);
  }

  async #copyOfState(): Promise<Map<string, NDArray>> {
    const found = [...this.#state].map(async ([name, tensor]) => [name, await arrayOf(tensor)] as const);
    return new Map(await Promise.all(found));
  }

  async #counter(name: string): Promise<number> {
    return scalar(this.#state, name);
  }

  /** The dynamic one; 0: there is none. */
  async #lossScale(): Promise<number> {
    return this.#state.has("loss_scale") ? scalar(this.#state, "loss_scale") : 0;
  }

  #tensor({ dtype, shape, data }: NDArray): Tensor {
    return new this.#runtime.Tensor(kindOf(dtype).runtime as Tensor.Type, data as never, shape);
  }

  #session(name: string): Promise<InferenceSession> {
    const found = this.#sessions.get(name) ?? this.#open(name);
    this.#sessions.set(name, found);
    return found;
  }

  async #open(name: string): Promise<InferenceSession> {
    const { file, outputs } = this.bundle.graph(name);
    const { files, manifest } = this.bundle;
    // Errors only: the runtime warns of each value that a skipped update reads and its optimizer would rename. A memory
    // pattern would take up to half more memory.
    const options: InferenceSession.SessionOptions = { logSeverityLevel: 3, enableMemPattern: false, ...this.#options };
    if (usesWebGpu(options)) {
      // The next step reads the state where this one leaves it; counters are read after every step.
      const kept = outputs.filter((one) => this.#stateOf(one.name) !== undefined && one.dtype.startsWith("float"));
      options.preferredOutputLocation = Object.fromEntries(kept.map((one) => [one.name, "gpu-buffer" as const]));
    }
    if (files.path !== undefined) {
      return this.#runtime.InferenceSession.create(files.path(file), options);
    }
    const external = Object.keys(manifest.files).filter((one) => !one.endsWith(".onnx"));
    const read = external.map(async (path) => ({ path, data: await files.read(path) }));
    const bytes = await files.read(file);
    return this.#runtime.InferenceSession.create(bytes, { ...options, externalData: await Promise.all(read) });
  }

  /** Runs a graph on the state; outputs named `<state>_new` become the state, the others are returned. */
  async #run(name: string, features: ReadonlyMap<string, Tensor>): Promise<Map<string, Tensor>> {
    const session = await this.#session(name);
    const { inputs, outputs } = this.bundle.graph(name);
    const feeds = inputs.map((one) => [one.name, features.get(one.name) ?? this.#state.get(one.name)] as const);
    const found = await session.run(Object.fromEntries(feeds) as InferenceSession.FeedsType);
    const results = new Map<string, Tensor>();
    for (const { name: output } of outputs) {
      const tensor = found[output] as Tensor;
      const state = this.#stateOf(output);
      if (state === undefined) {
        results.set(output, tensor);
      } else {
        this.#state.get(state)?.dispose();
        this.#state.set(state, tensor);
      }
    }
    return results;
  }

  #stateOf(output: string): string | undefined {
    const name = output.replace(/_new$/, "");
    return name !== output && this.#state.has(name) ? name : undefined;
  }

  #featuresOf(graph: string): Described[] {
    return this.bundle.graph(graph).inputs.filter((one) => !this.#state.has(one.name));
  }

  #features(batch: Batch, described: readonly Described[]): Map<string, Tensor> {
    const sizes = new Map<string, number>();
    const known = new Set([...this.bundle.manifest.features, ...this.#featuresOf("infer")].map(({ name }) => name));
    const unknown = Object.keys(batch).filter((name) => !known.has(name)).sort();
    if (unknown.length > 0) {
      throw new BundleError(
        `the batch has ${unknown.map((name) => `"${name}"`).join(", ")}, which no graph reads; expected ` +
          `${described.map(({ name }) => name).sort().join(", ")}. Leave out others, or fix the name.`,
      );
    }
    return new Map(
      described.map((one) => {
        const feature = batch[one.name];
        if (feature === undefined) {
          throw new BundleError(`the batch has no "${one.name}"; it has ${Object.keys(batch).sort().join(", ") || "nothing"}.`);
        }
        const array = checked(feature, one, sizes);
        const about = this.bundle.manifest.features.find(({ name }) => name === one.name);
        checkLabels(array, about);
        checkIndices(array, about);
        return [one.name, this.#tensor(array)];
      }),
    );
  }
}

/** A feature in the type of an input; its axes are compared with those that have the same name elsewhere. */
function checked(feature: Feature, { name, dtype, shape }: Described, sizes: Map<string, number>): NDArray {
  const given = feature.shape;
  if (feature.data.length !== sizeOf(given)) {
    throw new BundleError(`"${name}" has ${feature.data.length} values, and its shape [${given.join(", ")}] ${sizeOf(given)}.`);
  }
  if (given[0] === 0) {
    throw new BundleError(`"${name}" has the shape [${given.join(", ")}]. Leave out batches without samples.`);
  }
  const fits = (size: number | string, found: number): boolean => {
    if (typeof size === "number" || size === "?") {
      return size === "?" || size === found;
    }
    const known = sizes.get(size) ?? found;
    sizes.set(size, known);
    return known === found;
  };
  if (shape !== null && !(shape.length === given.length && shape.every((size, axis) => fits(size, given[axis] as number)))) {
    const listed = shape.map((size) => (sizes.has(String(size)) ? `${size}=${sizes.get(String(size))}` : size));
    throw new BundleError(`"${name}" has the shape [${given.join(", ")}]; expected [${listed.join(", ")}].`);
  }
  try {
    return converted(dtype, given, feature.data);
  } catch (error) {
    throw new BundleError(`"${name}": ${(error as Error).message}`);
  }
}

/** Compares labels with the classes: a runtime counts negative ones from the end, and fails for others. */
function checkLabels({ data }: NDArray, feature: TrainingFeature | undefined): void {
  if (feature?.classes === undefined) {
    return;
  }
  const { classes, ignored_label: ignored = null, name } = feature;
  for (const value of data) {
    const label = Number(value);
    if (label !== ignored && !(0 <= label && label < classes)) {
      const other = ignored === null ? "" : ` or ${ignored}, which does not count`;
      throw new BundleError(
        `"${name}" holds the label ${label}; expected 0 to ${classes - 1}${other}. Fix the data, or set ` +
          "loss.ignore_index and write the bundle again.",
      );
    }
  }
}

/** Compares indices with the rows of their table: a runtime counts negative ones from the end, and trains that row. */
function checkIndices({ data }: NDArray, feature: TrainingFeature | undefined): void {
  if (feature?.rows === undefined) {
    return;
  }
  const { name, rows } = feature;
  for (const value of data) {
    const index = Number(value);
    if (!(index > -1 && index < rows)) { // fractions are cut off before the lookup
      const advice =
        index < 0
          ? "If it marks padding, write the padding's own index, and leave the padding out of the loss by labels."
          : "Make the indices with the tokenizer or vocabulary that the model was made for.";
      throw new BundleError(
        `"${name}" holds the index ${index}; expected 0 to ${rows - 1}, since it picks rows of a table that has ${rows}. ` + advice,
      );
    }
  }
}

function metricsOf(metrics: readonly Metric[], sums: ReadonlyMap<string, number>): Record<string, number> {
  const means: Record<string, number> = {};
  const totals: Record<string, number> = {};
  for (const one of metrics) {
    if ("sum" in one && sums.get(one.count)) {
      means[one.name] = (sums.get(one.sum) as number) / (sums.get(one.count) as number);
    }
  }
  for (const one of metrics) {
    if ("total_of" in one && one.total_of.every((part) => part in means)) {
      totals[one.name] = one.total_of.reduce((sum, part) => sum + (means[part] as number), 0);
    }
  }
  return { ...totals, ...means };
}

async function scalar(tensors: ReadonlyMap<string, Tensor>, name: string): Promise<number> {
  const data = (await tensors.get(name)?.getData()) as ArrayLike<number | bigint>;
  return Number(data[0]);
}

async function arrayOf(tensor: Tensor): Promise<NDArray> {
  const data = ((await tensor.getData()) as TypedArray).slice();
  // Newer runtimes hold halves as Float16Array: the same bits.
  const isHalf = tensor.type === "float16" && !(data instanceof Uint16Array);
  const bits = isHalf ? new Uint16Array((data as TypedArray).buffer) : data;
  return { dtype: tensor.type, shape: [...tensor.dims], data: bits as TypedArray };
}

function usesWebGpu(options: InferenceSession.SessionOptions): boolean {
  const names = options.executionProviders?.map((one) => (typeof one === "string" ? one : one.name));
  return names?.[0] === "webgpu";
}

async function installedRuntime(): Promise<Runtime> {
  const order = typeof window === "undefined" && typeof process !== "undefined" ? ["node", "web"] : ["web", "node"];
  for (const kind of order) {
    try {
      const found = (await import(`onnxruntime-${kind}`)) as Runtime & { default?: Runtime };
      return found.InferenceSession === undefined ? (found.default as Runtime) : found;
    } catch (error) {
      if (!/Cannot find|Failed to (resolve|fetch)|bare specifier/i.test((error as Error).message)) {
        throw error;
      }
    }
  }
  throw new BundleError(
    "neither onnxruntime-node nor onnxruntime-web can be imported. Install one, or pass the module as `runtime`.",
  );
}
