"""LoRA and QLoRA: adapters beside a frozen base, as a transform of models and of parameter trees. Needs peft."""

try:
    import peft as _peft  # noqa: F401
except ImportError as error:
    raise ImportError(
        "functional_booster.lora reads configs with peft: pip install functional-booster[lora]"
    ) from error

from .combining import combine
from .files import load, save
from .merging import merge, unmerge
from .model import LoraModel, activate, adapt, attached, init
from .peft_module import enable, save_module
from .plan import Plan, Site
from .quantized_weight import QuantizedWeight
from .weight import Adapter, LoraWeight

__all__ = [
    "Adapter",
    "LoraModel",
    "LoraWeight",
    "Plan",
    "QuantizedWeight",
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
