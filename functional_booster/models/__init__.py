"""Models: pure functions over parameter trees, own families and Hugging Face's weights for them."""

from .gpt2 import GPT2Config, gpt2
from .hf import from_hf, to_hf
from .llama import LlamaConfig, Rope, llama
from .model import Model

__all__ = ["GPT2Config", "LlamaConfig", "Model", "Rope", "from_hf", "gpt2", "llama", "to_hf"]
