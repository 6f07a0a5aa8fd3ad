/** Plain arrays of numbers with a shape, in the types that ONNX and numpy share. */

import { BundleError } from "./errors.js";

export type TypedArray =
  | Float32Array
  | Float64Array
  | Int8Array
  | Int16Array
  | Int32Array
  | BigInt64Array
  | Uint8Array
  | Uint16Array
  | Uint32Array
  | BigUint64Array;

type TypedArrayConstructor = {
  readonly BYTES_PER_ELEMENT: number;
  readonly name: string;
  new (length: number): TypedArray;
  new (buffer: ArrayBufferLike, offset?: number, length?: number): TypedArray;
};

/** Values in the order of rows, and the size of every axis. */
export interface NDArray {
  readonly dtype: string;
  readonly shape: readonly number[];
  readonly data: TypedArray;
}

interface Kind {
  /** onnxruntime's name. */
  readonly runtime: string;
  /** Safetensors' name. */
  readonly stored: string;
  /** Of `TensorProto.DataType`. */
  readonly onnx: number;
  readonly array: TypedArrayConstructor;
}

/** The types of a manifest, by numpy's names. Halves are their bits, booleans are bytes. */
export const KINDS: Readonly<Record<string, Kind>> = {
  float32: { runtime: "float32", stored: "F32", onnx: 1, array: Float32Array },
  uint8: { runtime: "uint8", stored: "U8", onnx: 2, array: Uint8Array },
  int8: { runtime: "int8", stored: "I8", onnx: 3, array: Int8Array },
  uint16: { runtime: "uint16", stored: "U16", onnx: 4, array: Uint16Array },
  int16: { runtime: "int16", stored: "I16", onnx: 5, array: Int16Array },
  int32: { runtime: "int32", stored: "I32", onnx: 6, array: Int32Array },
  int64: { runtime: "int64", stored: "I64", onnx: 7, array: BigInt64Array },
  bool: { runtime: "bool", stored: "BOOL", onnx: 9, array: Uint8Array },
  float16: { runtime: "float16", stored: "F16", onnx: 10, array: Uint16Array },
  float64: { runtime: "float64", stored: "F64", onnx: 11, array: Float64Array },
  uint32: { runtime: "uint32", stored: "U32", onnx: 12, array: Uint32Array },
  uint64: { runtime: "uint64", stored: "U64", onnx: 13, array: BigUint64Array },
};

export function kindOf(dtype: string): Kind {
  const kind = KINDS[dtype];
  if (kind === undefined) {
    throw new BundleError(`the type ${dtype} cannot be held here; expected one of ${Object.keys(KINDS).join(", ")}.`);
  }
  return kind;
}

export function sizeOf(shape: readonly number[]): number {
  return shape.reduce((product, size) => product * size, 1);
}

/** A tensor from little-endian bytes, which are copied. */
export function fromBytes(dtype: string, shape: readonly number[], bytes: Uint8Array): NDArray {
  const kind = kindOf(dtype);
  const expected = sizeOf(shape) * kind.array.BYTES_PER_ELEMENT;
  if (bytes.byteLength !== expected) {
    throw new BundleError(`${bytes.byteLength} bytes are no ${dtype} [${shape.join(", ")}]; expected ${expected}.`);
  }
  const copy = new Uint8Array(bytes); // not slice, which of a Buffer of Node is a view
  return { dtype, shape, data: new kind.array(copy.buffer, 0, sizeOf(shape)) };
}

export function toBytes(array: NDArray): Uint8Array {
  return new Uint8Array(array.data.buffer, array.data.byteOffset, array.data.byteLength);
}

/** A tensor of one value throughout. */
export function filled(dtype: string, shape: readonly number[], value: number): NDArray {
  return converted(dtype, shape, new Array<number>(sizeOf(shape)).fill(value));
}

/** The kind of numbers that values are; undefined: a plain list, whose elements tell. */
function kindOfValues(values: ArrayLike<number | bigint | boolean>): "float" | "int" | undefined {
  if (!ArrayBuffer.isView(values)) {
    return undefined;
  }
  return /^Float/.test(values.constructor.name) ? "float" : "int";
}

/**
 * Numbers, big integers or booleans in a type; integers are asked for where the type holds integers.
 *
 * Integers in a typed array, and booleans, are no floats: pixels of 0 to 255 would train a model that was made for 0 to 1,
 * and nothing would show it. A half is its bits, in a Uint16Array.
 */
export function converted(
  dtype: string,
  shape: readonly number[],
  values: ArrayLike<number | bigint | boolean>,
): NDArray {
  const kind = kindOf(dtype);
  if (dtype === "float16" && kindOfValues(values) !== "int" && typeof values[0] !== "boolean") {
    return { dtype, shape, data: Uint16Array.from(values, (value) => halfOf(Number(value))) };
  }
  if (values instanceof kind.array) {
    return { dtype, shape, data: values };
  }
  const [found, expected] = [kindOfValues(values), dtype.startsWith("float") ? "float" : "int"];
  if (found !== undefined && found !== expected && dtype !== "bool") {
    throw new BundleError(`a ${values.constructor.name} is no ${dtype}. ${howToConvert(dtype)}`);
  }
  const data = new kind.array(values.length);
  const isBig = data instanceof BigInt64Array || data instanceof BigUint64Array;
  for (let index = 0; index < values.length; index++) {
    const value = values[index] as number | bigint | boolean;
    if (expected === "int" && typeof value === "number" && !Number.isInteger(value)) {
      throw new BundleError(`${value} is no ${dtype}. Round it, or look whether the feature is the right one.`);
    }
    if (typeof value === "boolean" && dtype !== "bool") {
      throw new BundleError(`${value} is no ${dtype}. ${howToConvert(dtype)}`);
    }
    (data as unknown as (number | bigint)[])[index] = isBig ? BigInt(value) : Number(value);
    if (expected === "int" && Number(data[index]) !== Number(value)) {
      throw new BundleError(`${value} is more than ${dtype} holds. Look whether the feature is the right one.`);
    }
  }
  return { dtype, shape, data };
}

function howToConvert(dtype: string): string {
  const scaled = dtype.startsWith("float") ? ", scaled as the model expects it" : "";
  return `Convert it to a ${kindOf(dtype).array.name}${scaled}.`;
}

/** The bits of the half nearest to a number, ties to even (IEEE 754). */
function halfOf(value: number): number {
  const sign = Object.is(Math.sign(value), -0) || value < 0 ? 0x8000 : 0;
  const size = Math.abs(value);
  if (Number.isNaN(value)) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  if (size < 2 ** -14) return sign | roundedToEven(size * 2 ** 24);
  const exponent = Math.floor(Math.log2(size));
  const [power, fraction] = size < 2 ** exponent ? [exponent - 1, size / 2 ** (exponent - 1)] : [exponent, size / 2 ** exponent];
  return sign | (((power + 15) << 10) + roundedToEven((fraction - 1) * 1024));
}

function roundedToEven(value: number): number {
  const below = Math.floor(value);
  const rest = value - below;
  return rest > 0.5 || (rest === 0.5 && below % 2 === 1) ? below + 1 : below;
}
