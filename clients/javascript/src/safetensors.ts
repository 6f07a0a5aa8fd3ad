/** The safetensors format: eight bytes of header length, a JSON header, and the tensors' bytes. */

import { KINDS, type NDArray, fromBytes, kindOf, toBytes } from "./arrays.js";
import { BundleError } from "./errors.js";

const LARGEST_HEADER_BYTES = 100_000_000;

interface Entry {
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly data_offsets: readonly [number, number];
}

/** Tensors and metadata as the bytes of a file. */
export function writeSafetensors(tensors: ReadonlyMap<string, NDArray>, metadata: Record<string, string>): Uint8Array {
  const header: Record<string, unknown> = { __metadata__: metadata };
  let end = 0;
  // Wider types first, so that every tensor begins at a multiple of its element's size.
  const sorted = [...tensors].sort(([, a], [, b]) => b.data.BYTES_PER_ELEMENT - a.data.BYTES_PER_ELEMENT);
  for (const [name, array] of sorted) {
    header[name] = {
      dtype: kindOf(array.dtype).stored,
      shape: array.shape,
      data_offsets: [end, (end += array.data.byteLength)],
    };
  }
  const text = new TextEncoder().encode(JSON.stringify(header));
  const length = Math.ceil(text.length / 8) * 8;
  const file = new Uint8Array(8 + length + end).fill(0x20, 8, 8 + length);
  new DataView(file.buffer).setBigUint64(0, BigInt(length), true);
  file.set(text, 8);
  let place = 8 + length;
  for (const [, array] of sorted) {
    file.set(toBytes(array), place);
    place += array.data.byteLength;
  }
  return file;
}

/** The tensors and the metadata of a file's bytes. */
export function readSafetensors(file: Uint8Array): { tensors: Map<string, NDArray>; metadata: Record<string, string> } {
  const header = headerOf(file);
  const { __metadata__: metadata = {}, ...entries } = header.entries;
  const tensors = new Map<string, NDArray>();
  for (const [name, entry] of Object.entries(entries as Record<string, Entry>)) {
    const dtype = Object.keys(KINDS).find((one) => kindOf(one).stored === entry?.dtype);
    const [begin, end] = entry?.data_offsets ?? [0, -1];
    if (dtype === undefined || !(0 <= begin && begin <= end && end <= file.length - header.end)) {
      throw new BundleError(`these bytes are no safetensors file: the entry of "${name}" is damaged.`);
    }
    tensors.set(name, fromBytes(dtype, entry.shape, file.subarray(header.end + begin, header.end + end)));
  }
  checkOffsets(Object.values(entries as Record<string, Entry>), file.length - header.end);
  return { tensors, metadata: metadata as Record<string, string> };
}

/** Every byte belongs to one tensor: what is shifted in a damaged header would be the values of another. */
function checkOffsets(entries: readonly Entry[], length: number): void {
  let place = 0;
  for (const [begin, end] of entries.map((one) => one.data_offsets).sort(([a, b], [c, d]) => a - c || b - d)) {
    if (begin !== place) {
      throw new BundleError(`these bytes are no safetensors file: a tensor begins at byte ${begin}, where ${place} comes next.`);
    }
    place = end;
  }
  if (place !== length) {
    throw new BundleError(`these bytes are no safetensors file: they hold ${length} bytes for tensors of ${place}.`);
  }
}

/** All tensors of a file, of which a state carries the checksum: the bytes behind the header. */
export function tensorBytes(file: Uint8Array): Uint8Array {
  return file.subarray(headerOf(file).end);
}

function headerOf(file: Uint8Array): { entries: Record<string, unknown>; end: number } {
  try {
    const length = Number(new DataView(file.buffer, file.byteOffset, file.byteLength).getBigUint64(0, true));
    if (length > LARGEST_HEADER_BYTES || 8 + length > file.length) {
      throw new RangeError(`its header would take ${length} bytes`);
    }
    const entries: unknown = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(file.subarray(8, 8 + length)));
    if (typeof entries !== "object" || entries === null || Array.isArray(entries)) {
      throw new TypeError("its header is no object");
    }
    return { entries: entries as Record<string, unknown>, end: 8 + length };
  } catch (error) {
    throw new BundleError(`these bytes are no safetensors file: ${(error as Error).message}.`);
  }
}
