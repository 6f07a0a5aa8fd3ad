/**
 * Compiles the package: `node build.js [FOLDER]`, by default into dist.
 *
 * The SHA-256 of @noble/hashes goes into the package, in files of its own: workers have no import maps, so a page without a
 * bundler could not load it by its name.
 */

import { spawnSync } from "node:child_process";
import { copyFileSync, mkdirSync } from "node:fs";
import { join, resolve } from "node:path";

const folder = resolve(process.argv[2] ?? join(import.meta.dirname, "dist"));
const modules = join(import.meta.dirname, "node_modules");
const compiler = join(modules, "typescript", "bin", "tsc");
const { status } = spawnSync(process.execPath, [compiler, "--outDir", folder], { cwd: import.meta.dirname, stdio: "inherit" });
if (status !== 0) process.exit(status ?? 1);
mkdirSync(join(folder, "noble-hashes"), { recursive: true });
for (const file of ["sha2.js", "_md.js", "_u64.js", "utils.js", "LICENSE"]) {
  copyFileSync(join(modules, "@noble", "hashes", file), join(folder, "noble-hashes", file));
}
