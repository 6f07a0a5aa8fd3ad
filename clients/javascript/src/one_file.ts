/**
 * An ONNX file with values put into it, by the wire format of protobuf alone.
 *
 * https://protobuf.dev/programming-guides/encoding and onnx.proto have the numbers of the fields.
 */

import { type NDArray, kindOf, toBytes } from "./arrays.js";
import { BundleError } from "./errors.js";

const GRAPH = 7;
const INITIALIZER = 5;
const INPUT = 11;
const VALUE_NAME = 1;
const DIMS = 1;
const TYPE = 2;
const TENSOR_NAME = 8;
const RAW = 9;
const EXTERNAL = 13;
const LOCATION = 14;
const LARGEST_BYTES = 2 ** 31 - 1;

interface Field {
  readonly number: number;
  /** Of a message, a text or bytes; of a number empty. */
  readonly content: Uint8Array;
  /** Tag and content. */
  readonly whole: Uint8Array;
}

/**
 * A model whose inputs of these names are initializers, and whose external tensors are inside.
 *
 * @param model An ONNX file.
 * @param values By the name of an input.
 * @param external The files that its tensors are in, by name.
 * @throws BundleError It is larger than an ONNX file can be.
 */
export function withValues(
  model: Uint8Array,
  values: ReadonlyMap<string, NDArray>,
  external: ReadonlyMap<string, Uint8Array>,
): Uint8Array {
  const content = joined(
    [...fields(model)].map((field) =>
      field.number === GRAPH ? message(GRAPH, graph(field.content, values, external)) : field.whole,
    ),
  );
  if (content.length > LARGEST_BYTES) {
    throw new BundleError(
      `the model takes ${content.length} bytes, and an ONNX file ends at 2 GiB. Save the state, and run ` +
        "`onward export MODEL --device-state`.",
    );
  }
  return content;
}

function graph(
  bytes: Uint8Array,
  values: ReadonlyMap<string, NDArray>,
  external: ReadonlyMap<string, Uint8Array>,
): Uint8Array {
  const parts: Uint8Array[] = [];
  for (const field of fields(bytes)) {
    if (field.number === INITIALIZER) {
      parts.push(message(INITIALIZER, inside(field.content, external)));
    } else if (field.number !== INPUT || !values.has(text(field.content, VALUE_NAME))) {
      parts.push(field.whole);
    }
  }
  for (const [name, array] of values) {
    const dims = array.shape.map((size) => joined([tag(DIMS, 0), varint(size)]));
    const kind = joined([tag(TYPE, 0), varint(kindOf(array.dtype).onnx)]);
    const named = message(TENSOR_NAME, new TextEncoder().encode(name));
    parts.push(message(INITIALIZER, joined([...dims, kind, named, message(RAW, toBytes(array))])));
  }
  return joined(parts);
}

/** A tensor whose bytes are in the message itself. */
function inside(tensor: Uint8Array, external: ReadonlyMap<string, Uint8Array>): Uint8Array {
  const all = [...fields(tensor)];
  const entries = all.filter((field) => field.number === EXTERNAL).map((field) => field.content);
  if (entries.length === 0) {
    return tensor;
  }
  const about = new Map(entries.map((entry) => [text(entry, 1), text(entry, 2)]));
  const file = external.get(about.get("location") ?? "");
  if (file === undefined) {
    throw new BundleError(`a tensor is in the file ${about.get("location")}, which the bundle does not have.`);
  }
  const offset = Number(about.get("offset") ?? 0);
  const length = Number(about.get("length") ?? file.length - offset);
  const kept = all.filter((field) => field.number !== EXTERNAL && field.number !== LOCATION).map((field) => field.whole);
  return joined([...kept, message(RAW, file.subarray(offset, offset + length))]);
}

function text(bytes: Uint8Array, wanted: number): string {
  for (const field of fields(bytes)) {
    if (field.number === wanted) {
      return new TextDecoder().decode(field.content);
    }
  }
  return "";
}

function* fields(bytes: Uint8Array): Generator<Field> {
  let place = 0;
  while (place < bytes.length) {
    const start = place;
    const [key, afterTag] = readVarint(bytes, place);
    place = afterTag;
    let content: Uint8Array = new Uint8Array();
    const wire = key & 7;
    if (wire === 0) {
      place = readVarint(bytes, place)[1];
    } else if (wire === 2) {
      const [length, begin] = readVarint(bytes, place);
      content = bytes.subarray(begin, begin + length);
      place = begin + length;
    } else {
      place += wire === 1 ? 8 : 4;
    }
    yield { number: Math.floor(key / 8), content, whole: bytes.subarray(start, place) };
  }
}

/** The number at a place, and the place after it. Numbers above 2^53 lose digits: only lengths and tags are looked at. */
function readVarint(bytes: Uint8Array, place: number): [number, number] {
  let found = 0;
  for (let factor = 1; ; factor *= 128) {
    const byte = bytes[place++] ?? 0;
    found += (byte & 0x7f) * factor;
    if (byte < 0x80) {
      return [found, place];
    }
  }
}

function varint(value: number): Uint8Array {
  const found: number[] = [];
  for (; value > 0x7f; value = Math.floor(value / 128)) {
    found.push((value % 128) | 0x80);
  }
  return Uint8Array.from([...found, value]);
}

function tag(number: number, wire: number): Uint8Array {
  return varint(number * 8 + wire);
}

function message(number: number, content: Uint8Array): Uint8Array {
  return joined([tag(number, 2), varint(content.length), content]);
}

function joined(parts: readonly Uint8Array[]): Uint8Array {
  const whole = new Uint8Array(parts.reduce((sum, part) => sum + part.length, 0));
  let place = 0;
  for (const part of parts) {
    whole.set(part, place);
    place += part.length;
  }
  return whole;
}
