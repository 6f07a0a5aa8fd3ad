"""Steps of a run that leave nothing behind: no checkpoint is read or written, no model, no logs."""

from __future__ import annotations

from dataclasses import replace

from onward.parameters import Aim, Checkpoint, EarlyStopping, Mlflow, Parameters, TensorBoard, Wandb


def without_files(parameters: Parameters) -> Parameters:
    """A run that writes nothing, resumes from nothing, and has one round."""
    paths = replace(
        parameters.paths,
        output_dir=None,
        model_with_loss_func_path=None,
        model_with_training_graph_path=None,
        optimizer_graph_path=None,
    )
    return replace(
        parameters,
        paths=paths,
        checkpoint=Checkpoint(),
        early_stopping=EarlyStopping(),
        on_bad_loss=replace(parameters.on_bad_loss, spike_threshold=None),  # it returns to a checkpoint
        distributed=replace(parameters.distributed, elastic=False),  # so does this
        tensorboard=TensorBoard(),
        wandb=Wandb(),
        mlflow=Mlflow(),
        aim=Aim(),
        profiler=replace(parameters.profiler, first_step=None, last_step=None),
        next_rounds=(),
    )


def without_traces(parameters: Parameters, steps: int) -> Parameters:
    """The first round of a run, shortened to so many steps, without anything that is written or resumed from."""
    parameters = without_files(parameters)
    training = replace(
        parameters.training,
        num_train_steps=steps,
        num_updates=None,
        num_epochs=None,
        evaluation_period=0,
        evaluation_period_epochs=None,
        skip_evaluation=True,
    )
    rate = replace(parameters.learning_rate, warmup_mode="none", warmup_steps=None, warmup_ratio=None)
    paths = replace(parameters.paths, test_data_dir=None)
    return replace(parameters, paths=paths, training=training, learning_rate=rate)
