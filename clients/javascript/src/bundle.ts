/** A device bundle: its manifest, checked, and the first values of its state. */

import { type NDArray, filled, fromBytes } from "./arrays.js";
import { BundleError } from "./errors.js";
import type { BundleFiles } from "./files.js";

export const FORMAT = "onward-device";
export const VERSION = 1;
/** What bundles may require of a client. */
export const KNOWN: ReadonlySet<string> = new Set(["accumulation", "class_labels", "table_rows", "weights_inside"]);

/** An input, an output or a tensor of the state; sizes that are names are open, equal names are equal sizes. */
export interface Described {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly (number | string)[] | null;
}

/** Data of a training pass; class labels are 0 to `classes` - 1 and one that does not count, indices 0 to `rows` - 1. */
export interface TrainingFeature extends Described {
  readonly is_label: boolean;
  readonly classes?: number;
  readonly ignored_label?: number | null;
  readonly rows?: number;
}

export interface StateTensor {
  readonly name: string;
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly kind: "weight" | "moment" | "statistic" | "counter" | "seed" | "accumulator";
  readonly start: { readonly value: number } | { readonly file: string; readonly offset: number; readonly length: number };
}

export interface Graph {
  readonly file: string;
  readonly inputs: readonly Described[];
  readonly outputs: readonly Described[];
}

export type Metric =
  | { readonly name: string; readonly sum: string; readonly count: string }
  | { readonly name: string; readonly total_of: readonly string[] };

/** `manifest.json`, as docs/reference/device-bundle.md of onward describes it. */
export interface Manifest {
  readonly format: string;
  readonly version: number;
  readonly identity: string;
  readonly written_by: string;
  readonly requires?: readonly string[];
  readonly graphs: Readonly<Record<string, Graph>>;
  readonly features: readonly TrainingFeature[];
  readonly state: readonly StateTensor[];
  readonly metrics: readonly Metric[];
  readonly training: {
    readonly batch_size: number;
    readonly gradient_accumulation_steps: number;
    readonly updates: number;
    readonly [name: string]: unknown;
  };
  /** The fields of the run, as the text that states carry. */
  readonly run_fields?: string;
  readonly files: Readonly<Record<string, string>>;
}

export class Bundle {
  private constructor(
    readonly files: BundleFiles,
    readonly manifest: Manifest,
  ) {}

  /**
   * Reads the manifest.
   *
   * @param files Of the bundle.
   * @param verify Compare the checksum of every file.
   * @throws BundleError It is no bundle of this version, or a file was changed.
   */
  static async open(files: BundleFiles, verify = true): Promise<Bundle> {
    const manifest = parsed(files, await files.read("manifest.json"));
    const bundle = new Bundle(files, manifest);
    if (verify) {
      await bundle.verify();
    }
    return bundle;
  }

  /** Compares the checksum of every file with the manifest. */
  async verify(): Promise<void> {
    for (const [file, expected] of Object.entries(this.manifest.files)) {
      const found = await checksum(await this.files.read(file));
      if (found !== expected) {
        throw new BundleError(
          `${file} of ${this.files.name} was changed or damaged: its SHA-256 is ${found}, the manifest has ` +
            `${expected}. Copy the bundle again.`,
        );
      }
    }
  }

  /** A graph of the manifest. */
  graph(name: string): Graph {
    const found = this.manifest.graphs[name];
    if (found === undefined) {
      throw new BundleError(`${this.files.name} has no graph ${name}; it has ${Object.keys(this.manifest.graphs).join(", ")}.`);
    }
    return found;
  }

  /** The state before the first step, by name. */
  async firstState(): Promise<Map<string, NDArray>> {
    const read = new Map<string, Uint8Array>();
    const state = new Map<string, NDArray>();
    for (const { name, dtype, shape, start } of this.manifest.state) {
      if ("value" in start) {
        state.set(name, filled(dtype, shape, start.value));
        continue;
      }
      const bytes = read.get(start.file) ?? (await this.files.read(start.file));
      read.set(start.file, bytes);
      state.set(name, fromBytes(dtype, shape, bytes.subarray(start.offset, start.offset + start.length)));
    }
    return state;
  }

  /** Compares names, shapes and types with those of this bundle. */
  checkState(state: ReadonlyMap<string, NDArray>): void {
    const expected = new Map(this.manifest.state.map((one) => [one.name, one]));
    const other = [...expected.keys(), ...state.keys()].filter((name) => !(expected.has(name) && state.has(name)));
    if (other.length > 0) {
      throw new BundleError(
        `this is no state of the bundle: ${other.slice(0, 5).join(", ")} ${other.length === 1 ? "is" : "are"} in one of ` +
          "the two alone. Use the bundle that the state was trained with.",
      );
    }
    for (const [name, array] of state) {
      const { shape, dtype } = expected.get(name) as StateTensor;
      if (array.dtype !== dtype || array.shape.join() !== shape.join()) {
        throw new BundleError(
          `this is no state of the bundle: "${name}" is ${array.dtype} [${array.shape.join(", ")}]; expected ${dtype} ` +
            `[${shape.join(", ")}]. Use the bundle that the state was trained with.`,
        );
      }
    }
  }
}

/** SHA-256 in hexadecimal digits; browsers have `crypto.subtle`, which is faster, on https and localhost alone. */
export async function checksum(bytes: Uint8Array): Promise<string> {
  const subtle = globalThis.crypto?.subtle;
  const digest =
    subtle === undefined
      ? (await import("./noble-hashes/sha2.js")).sha256(bytes)
      : new Uint8Array(await subtle.digest("SHA-256", bytes as Uint8Array<ArrayBuffer>));
  return Array.from(digest, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

function parsed(files: BundleFiles, bytes: Uint8Array): Manifest {
  let manifest: unknown;
  try {
    manifest = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
  } catch (error) {
    throw new BundleError(`manifest.json of ${files.name} is no JSON: ${(error as Error).message}. Write the bundle again.`);
  }
  const about = (manifest ?? {}) as Partial<Manifest>;
  if (about.format !== FORMAT) {
    throw new BundleError(`manifest.json of ${files.name} is no manifest of a device bundle; expected the format "${FORMAT}".`);
  }
  if (about.version !== VERSION) {
    throw new BundleError(
      `${files.name} is a device bundle of version ${about.version}; this package reads version ${VERSION}. Install ` +
        `the onward-device of the onward that wrote it (${about.written_by}).`,
    );
  }
  const unknown = (about.requires ?? []).filter((one) => !KNOWN.has(one)).sort();
  if (unknown.length > 0) {
    throw new BundleError(
      `${files.name} is a device bundle that requires ${unknown.join(", ")}, which this package does not know. Install ` +
        `the onward-device of the onward that wrote it (${about.written_by}).`,
    );
  }
  return about as Manifest;
}
