/** Handwritten digits: those that came with the page, and drawings made like them. */

export const SIZE = 8;
export const LARGEST = 16;

/** Digits of the data set: bytes of one label and 64 values from 0 to 16 each. */
export async function readDigits(url) {
  const bytes = new Uint8Array(await (await fetch(url)).arrayBuffer());
  const length = 1 + SIZE * SIZE;
  return Array.from({ length: bytes.length / length }, (_, index) => ({
    label: bytes[index * length],
    pixels: bytes.subarray(index * length + 1, (index + 1) * length),
  }));
}

/** Samples as the features of a batch. */
export function batchOf(samples) {
  const X = Float32Array.from(samples.flatMap(({ pixels }) => Array.from(pixels, (value) => value / LARGEST)));
  return {
    X: { shape: [samples.length, 1, SIZE, SIZE], data: X },
    labels: { shape: [samples.length], data: BigInt64Array.from(samples, ({ label }) => BigInt(label ?? 0)) },
  };
}

/**
 * A drawing as the data set's authors made theirs: its box on 32 x 32 points, of which each block of 4 x 4 is counted.
 *
 * Returns null where nothing is drawn.
 */
export function pixelsOf(canvas) {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d", { willReadFrequently: true }).getImageData(0, 0, width, height);
  const isInk = (x, y) => data[4 * (y * width + x) + 3] > 127;
  let [left, top, right, bottom] = [width, height, -1, -1];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (isInk(x, y)) {
        [left, top, right, bottom] = [Math.min(left, x), Math.min(top, y), Math.max(right, x), Math.max(bottom, y)];
      }
    }
  }
  if (right < 0) return null;
  const points = 4 * SIZE;
  const scale = Math.max(right - left, bottom - top) / (points - 1) || 1;
  const [middleX, middleY] = [(left + right) / 2, (top + bottom) / 2];
  const pixels = new Uint8Array(SIZE * SIZE);
  for (let y = 0; y < points; y++) {
    for (let x = 0; x < points; x++) {
      const atX = Math.round(middleX + (x - (points - 1) / 2) * scale);
      const atY = Math.round(middleY + (y - (points - 1) / 2) * scale);
      if (atX >= 0 && atY >= 0 && atX < width && atY < height && isInk(atX, atY)) {
        pixels[(y >> 2) * SIZE + (x >> 2)] += 1;
      }
    }
  }
  return pixels;
}

/** The same order for the same seed (mulberry32). */
export function shuffled(samples, seed) {
  let state = seed;
  const random = () => {
    state = (state + 0x6d2b79f5) | 0;
    let mixed = Math.imul(state ^ (state >>> 15), 1 | state);
    mixed = (mixed + Math.imul(mixed ^ (mixed >>> 7), 61 | mixed)) ^ mixed;
    return ((mixed ^ (mixed >>> 14)) >>> 0) / 4294967296;
  };
  const found = [...samples];
  for (let last = found.length - 1; last > 0; last--) {
    const other = Math.floor(random() * (last + 1));
    [found[last], found[other]] = [found[other], found[last]];
  }
  return found;
}
