/** Updates that are skipped are reported, so that training that changes nothing is noticed. */

import { SkippedUpdatesError } from "./errors.js";

/** What an update left behind. */
export interface Update {
  /** Its number, from 1. */
  readonly number: number;
  readonly isSkipped: boolean;
  /** Whether it lowered the dynamic loss scale, which is how that one is found: it does not count. */
  readonly lowersScale: boolean;
  /** Of its gradient. */
  readonly norm: number;
  /** Of its last batch. */
  readonly loss: number;
}

/** Watches the updates of a trainer, by the rule of `onward train`. */
export class SkippedUpdates {
  readonly #most: number;
  readonly #fixedScale: number | undefined;
  readonly #warn: (message: string) => void;
  #inARow = 0;
  #hasWarned = false;

  /**
   * @param training That section of the manifest.
   * @param warn Takes the message about the first skipped update.
   */
  constructor(training: Readonly<Record<string, unknown>>, warn: (message: string) => void) {
    this.#most = Number(training["skipped_in_a_row"] ?? 10);
    this.#fixedScale = typeof training["fixed_loss_scale"] === "number" ? training["fixed_loss_scale"] : undefined;
    this.#warn = warn;
  }

  /** @throws SkippedUpdatesError More in a row were skipped than are allowed. */
  afterUpdate({ number, isSkipped, lowersScale, norm, loss }: Update): void {
    if (!isSkipped) {
      this.#inARow = 0;
      return;
    }
    if (lowersScale) {
      return;
    }
    this.#inARow += 1;
    const found = `gradient norm ${norm}, loss ${loss}`;
    if (this.#inARow > this.#most) {
      throw new SkippedUpdatesError(
        `the last ${this.#inARow} weight updates were skipped, since their losses, gradients or batch statistics were ` +
          `not finite (update ${number}: ${found}): nothing was trained by them. on_bad_loss.skip of the bundle's run ` +
          `allows ${this.#most} in a row. ${this.#whatToDo()}`,
      );
    }
    if (!this.#hasWarned) {
      this.#hasWarned = true;
      this.#warn(
        `update ${number} was skipped: its loss, gradient or batch statistics are not finite (${found}). Later ones ` +
          `are counted in Trainer.skippedUpdates; more than ${this.#most} in a row throw an error.`,
      );
    }
  }

  #whatToDo(): string {
    if (this.#fixedScale !== undefined) {
      return (
        `mixed_precision.loss_scale of the bundle's run is ${this.#fixedScale}, at which gradients overflow. Write the ` +
        "bundle again with 0 for dynamic loss scaling, or with a smaller value."
      );
    }
    return (
      "Look for infinite, NaN or very large values in the batches, or write the bundle again with a lower " +
      "learning_rate.initial_lr or with optimizer.max_norm_clip."
    );
  }
}
