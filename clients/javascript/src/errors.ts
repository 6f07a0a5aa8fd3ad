/** A bundle, a state or a batch that does not fit, with what was expected and what to do. */
export class BundleError extends Error {
  override readonly name = "BundleError";
}

/** Too many weight updates in a row were skipped; weights and moments are as before them. */
export class SkippedUpdatesError extends Error {
  override readonly name = "SkippedUpdatesError";
}
