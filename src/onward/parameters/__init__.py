"""What the user asked: a run as frozen dataclasses, a file for each section or two, checked in full before any work."""

from __future__ import annotations

from onward.parameters.adapter import Adapter as Adapter
from onward.parameters.adapter import AdapterRule as AdapterRule
from onward.parameters.augmentation import Augmentation as Augmentation
from onward.parameters.averaging import Averaging as Averaging
from onward.parameters.distillation import Distillation as Distillation
from onward.parameters.distributed import Distributed as Distributed
from onward.parameters.distributed import Recompute as Recompute
from onward.parameters.evaluation import EarlyStopping as EarlyStopping
from onward.parameters.evaluation import OnBadLoss as OnBadLoss
from onward.parameters.frozen_weights import FrozenWeights as FrozenWeights
from onward.parameters.head import Head as Head
from onward.parameters.limits import Limits as Limits
from onward.parameters.loss import Loss as Loss
from onward.parameters.optimizer import AttributeRule as AttributeRule
from onward.parameters.optimizer import Optimizer as Optimizer
from onward.parameters.optimizer import SwitchRule as SwitchRule
from onward.parameters.paths import Data as Data
from onward.parameters.paths import Paths as Paths
from onward.parameters.pruning import Pruning as Pruning
from onward.parameters.quantize_aware import QuantizeAware as QuantizeAware
from onward.parameters.reporting import Checkpoint as Checkpoint
from onward.parameters.reporting import Profiler as Profiler
from onward.parameters.reporting import TensorBoard as TensorBoard
from onward.parameters.run import Parameters as Parameters
from onward.parameters.run import check as check
from onward.parameters.speed import Machine as Machine
from onward.parameters.speed import MixedPrecision as MixedPrecision
from onward.parameters.speed import Speed as Speed
from onward.parameters.trackers import Aim as Aim
from onward.parameters.trackers import Mlflow as Mlflow
from onward.parameters.trackers import Wandb as Wandb
from onward.parameters.training import LearningRate as LearningRate
from onward.parameters.training import Training as Training
from onward.parameters.training import UnfreezeRule as UnfreezeRule
