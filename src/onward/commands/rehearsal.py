"""Steps of a run that leave nothing behind: no checkpoint is read or written, no model, no logs."""

from __future__ import annotations

from dataclasses import replace

from onward.data.loader import DataLoader
from onward.errors import ParametersError
from onward.parameters import Aim, Checkpoint, EarlyStopping, Mlflow, Parameters, TensorBoard, Wandb


def without_traces(parameters: Parameters, steps: int) -> Parameters:
    """The first round of a run, shortened to so many steps, without anything that is written or resumed from."""
    paths = replace(
        parameters.paths,
        output_dir=None,
        test_data_dir=None,
        model_with_loss_func_path=None,
        model_with_training_graph_path=None,
        optimizer_graph_path=None,
    )
    training = replace(
        parameters.training,
        num_train_steps=steps,
        num_epochs=None,
        evaluation_period=0,
        evaluation_period_epochs=None,
        skip_evaluation=True,
    )
    rate = replace(parameters.learning_rate, warmup_mode="none", warmup_steps=None, warmup_ratio=None)
    return replace(
        parameters,
        paths=paths,
        training=training,
        learning_rate=rate,
        checkpoint=Checkpoint(),
        early_stopping=EarlyStopping(),
        tensorboard=TensorBoard(),
        wandb=Wandb(),
        mlflow=Mlflow(),
        aim=Aim(),
        profiler=replace(parameters.profiler, first_step=None, last_step=None),
        next_rounds=(),
    )


def training_loader(parameters: Parameters) -> DataLoader:
    """The training data of a run in one process.

    Raises:
        ParametersError: the run names none.
        DataError: they are not there or broken.
    """
    folder, data = parameters.paths.train_data_dir, parameters.data
    if folder is None:
        raise ParametersError("paths.train_data_dir is missing; name the folder of the training shards.")
    return DataLoader(
        data.input_name_map,
        folder,
        data.max_num_files_preload,
        0,
        1,
        shuffle=data.shuffle_data,
        seed=parameters.training.seed,
        last_batch=data.last_batch,
        skip_corrupt=data.skip_corrupt_files,
    )
