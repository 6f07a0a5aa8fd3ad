/** Trains device bundles of onward with ONNX Runtime, in a browser or in Node. */

export type { NDArray, TypedArray } from "./arrays.js";
export { Bundle, type Described, type Graph, type Manifest, type Metric, type StateTensor } from "./bundle.js";
export { BundleError, SkippedUpdatesError } from "./errors.js";
export type { BundleFiles } from "./files.js";
export { type Batch, type Feature, type LoadOptions, type Runtime, Trainer } from "./trainer.js";
