"""LoRA and QLoRA: adapters beside a frozen base, as a transform of models and of parameter trees. Needs peft."""

try:
    import peft as _peft  # noqa: F401
except ImportError as error:
    raise ImportError(
        "functional_booster.lora reads configs with peft: pip install functional-booster[lora]"
    ) from error

from .files import load, save
from .merging import combine, merge, unmerge
from .model import LoraModel, activate, adapt, attached, init
from .nf4_weight import Nf4Weight
from .peft_module import enable, save_module
from .plan import Plan, Site
from .weight import Adapter, LoraWeight

__all__ = [
    "Adapter",
    "LoraModel",
    "LoraWeight",
    "Nf4Weight",
    "Plan",
    "Site",
    "activate",
    "adapt",
    "attached",
    "combine",
    "enable",
    "init",
    "load",
    "merge",
    "save",
    "save_module",
    "unmerge",
]
