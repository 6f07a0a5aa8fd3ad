/** What is used of @noble/hashes, whose modules `build.js` copies beside the compiled ones. */

export declare function sha256(message: Uint8Array): Uint8Array;
