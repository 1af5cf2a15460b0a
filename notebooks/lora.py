# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # LoRA and QLoRA: adapters are leaves
#
# A small Llama learns to write Python from the source of asyncio. Then it is fine-tuned on English prose,
# the help texts that come with Python, in three ways: all of it, LoRA adapters beside frozen weights, and the same
# adapters beside weights in four bits (QLoRA). The adapter is merged, saved, and opened by peft.

# %%
# %matplotlib inline
import asyncio
import tempfile
from pathlib import Path
from pydoc_data.topics import topics

import matplotlib.pyplot as plt
import peft
import torch
import transformers

import functional_booster as fb

# %% [markdown]
# ## A base model
#
# Bytes are tokens, as in [the quickstart](quickstart.ipynb).

# %%
code = fb.data.bytes_of(fb.data.text_files(Path(asyncio.__file__).parent))
prose, held_out = fb.data.split(torch.tensor(list("\n".join(topics.values()).encode()), dtype=torch.uint8))
print(f"{len(code):,} bytes of code, {len(prose):,} of prose")

base = fb.models.llama(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=64,
)
booster = fb.Booster(device="cpu")


def trained(model, tx, text, steps, params=None):
    """The state after some steps, and the loss on held-out prose on the way."""
    state = booster.init(model, tx, key=fb.random.key(0), params=params)
    step, evaluate = (
        booster.train_step(model.loss, tx, max_norm=1.0, jit=False),
        booster.eval_step(model.loss, jit=False),
    )
    batches = fb.data.batches(text, batch_size=8, length=64, seed=0)
    fixed = fb.data.batches(held_out, batch_size=32, length=64, seed=1)(0)
    curve = [(0, evaluate(state, fixed)["loss"])]
    for number in range(steps):
        state, _ = step(state, batches(number))
        if (number + 1) % 15 == 0:
            curve.append((number + 1, evaluate(state, fixed)["loss"]))
    return state, curve


schedule = fb.schedules.cosine_warmup(peak=5e-3, total_steps=120, warmup_steps=10)
state, _ = trained(base, fb.optim.adamw(schedule), code, 120)
weights = booster.full_params(state)

# %% [markdown]
# ## Adapters beside it
#
# `adapt` makes a model of a model. Its parameters are `{"base": ..., "adapters": ...}`; the abstract tree says which of
# them are trained. The config is peft's.

# %%
config = peft.LoraConfig(r=8, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
lora = fb.lora.adapt(base, config)
qlora = fb.lora.adapt(base, config, quantize=True)
for name, info in fb.tree.named_leaves(qlora.abstract).items():
    if "layers.0.mlp.up" in name or "layers.0.attn" in name:
        print(f"{name:64} {info.shape!s:10} {info.dtype}, trained: {info.trainable}")

# %% [markdown]
# ## Three ways to fine-tune
#
# The step, the optimizer and the loss are those of any other model.

# %%
ways = {"all parameters": (base, 1e-3), "LoRA": (lora, 1e-2), "QLoRA": (qlora, 1e-2)}
states, curves = {}, {}
for name, (model, rate) in ways.items():
    params = weights if model is base else fb.lora.init(model, weights, fb.random.key(1))
    tx = fb.optim.adamw(fb.schedules.cosine_warmup(peak=rate, total_steps=60, warmup_steps=5))
    states[name], curves[name] = trained(model, tx, prose, 60, params)


def size(tree):
    """Bytes of the leaves."""
    return sum(leaf.numel() * leaf.element_size() for leaf in fb.tree.leaves(tree))


figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
for name, curve in curves.items():
    left.plot(*zip(*curve, strict=True), "o-", markersize=3, label=name)
left.set(xlabel="steps", ylabel="loss on held-out prose (nats per byte)")
left.legend()
parts = {
    "frozen": [size(state.frozen) if state.frozen is not None else 0 for state in states.values()],
    "trained": [size(state.storage) for state in states.values()],
    "optimizer": [size(state.opt_state) for state in states.values()],
}
below = torch.zeros(len(states))
for label, sizes in parts.items():
    right.bar(list(states), torch.tensor(sizes) / 2**10, bottom=below, label=label)
    below += torch.tensor(sizes) / 2**10
right.set(ylabel="state (KiB)")
right.legend()
plt.show()

# %% [markdown]
# Only the adapters have optimizer state. (This model's embedding and head, which stay dense, are a large part of it; of
# a large model they are a small one, and NF4 is a quarter of bfloat16.)
#
# ## Merged, saved, opened by peft
#
# Merged parameters are the base model's own, and compute the same without adapters.

# %%
params = booster.full_params(states["LoRA"])
merged = fb.lora.merge(lora, params)
prompt = torch.tensor([list(b"The ")])
torch.testing.assert_close(base.apply(merged, prompt), lora.apply(params, prompt), rtol=1e-4, atol=1e-4)
for name, values in (("before", weights), ("after", merged)):
    written = fb.generate(base, values, prompt, key=fb.random.key(1), max_new_tokens=60, temperature=0.5)
    print(f"{name:6}: {bytes(written[0].tolist()).decode(errors='replace')!r}")

# %%
module = transformers.LlamaForCausalLM(transformers.LlamaConfig(**base.config.to_hf_config()))
module.load_state_dict(fb.models.hf.to_hf(base, weights))
with tempfile.TemporaryDirectory() as folder:
    fb.lora.save(folder, lora, states["LoRA"])
    theirs = peft.PeftModel.from_pretrained(module, folder).eval()
with torch.no_grad():
    torch.testing.assert_close(theirs(input_ids=prompt).logits, lora.apply(params, prompt), rtol=1e-4, atol=1e-4)
print("peft computes the same")
