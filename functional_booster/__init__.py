"""functional_booster: distributed training on PyTorch, done the functional way. ``import functional_booster as fb``."""

from __future__ import annotations

from functional_booster import losses, models, optim, schedules
from functional_booster.kernels import random, tree
from functional_booster.kernels.transforms import grad, grad_and_value, vjp, vmap
from functional_booster.precision import Policy
from functional_booster.sharding import initializers
from functional_booster.sharding.abstract import ArrayInfo, initialize
from functional_booster.sharding.region import region
from functional_booster.sharding.remat import checkpoint_name, remat
from functional_booster.sharding.spec import P, PartitionSpec

from .booster import Booster
from .donation import DonatedError
from .functionalize import functionalize
from .jit import Jitted, RecompileWarning, jit
from .models.model import Model
from .state import TrainState

__version__ = "0.1.0"
