/** Where the files of a bundle come from: a web server, a folder, or whatever the caller reads them from. */

import { BundleError } from "./errors.js";

export interface BundleFiles {
  /** How messages name it. */
  readonly name: string;
  /** All bytes of a file. Throws a `BundleError` where there is none. */
  read(file: string): Promise<Uint8Array>;
  /** The path of a file, where onnxruntime reads files by itself; absent in a browser. */
  path?(file: string): string;
}

const IN_NODE = typeof process !== "undefined" && Boolean(process.versions?.node);

/** The files below a URL, or in a folder of this machine. */
export async function filesOf(source: string | URL): Promise<BundleFiles> {
  const text = String(source);
  if (IN_NODE && !/^https?:/.test(text)) {
    return folderFiles(source);
  }
  return servedFiles(text);
}

function servedFiles(source: string): BundleFiles {
  const base = source.endsWith("/") ? source : `${source}/`;
  return {
    name: source,
    async read(file) {
      // Asks whether a copy is still the server's: of a bundle that was written again, one file may be an old copy.
      const answer = await fetch(base + file, { cache: "no-cache" });
      if (!answer.ok) {
        throw new BundleError(`${base + file} is answered with ${answer.status}. Serve all files of the bundle.`);
      }
      return new Uint8Array(await answer.arrayBuffer());
    },
  };
}

async function folderFiles(source: string | URL): Promise<BundleFiles> {
  const [{ readFile }, { join }, { fileURLToPath }] = await Promise.all([
    import("node:fs/promises"),
    import("node:path"),
    import("node:url"),
  ]);
  const folder = String(source).startsWith("file:") ? fileURLToPath(source) : String(source);
  return {
    name: folder,
    path: (file) => join(folder, file),
    async read(file) {
      try {
        const bytes = await readFile(join(folder, file));
        return new Uint8Array(bytes.buffer, bytes.byteOffset, bytes.byteLength);
      } catch (error) {
        if ((error as NodeJS.ErrnoException).code === "ENOENT") {
          throw new BundleError(`${folder} has no file ${file}. Copy the bundle again, all files of it.`);
        }
        throw error;
      }
    },
  };
}
