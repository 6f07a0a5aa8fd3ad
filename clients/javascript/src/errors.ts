/** A bundle, a state or a batch that does not fit, with what was expected and what to do. */
export class BundleError extends Error {
  override readonly name = "BundleError";
}
