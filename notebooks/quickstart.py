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
# # Quickstart: a training step is a function
#
# A model is a pair of pure functions over a tree of parameters; an optimizer is a pair of pure functions; a training
# step is a function `(state, batch) -> (state, metrics)`. This notebook trains a small GPT on the source code of
# Python's standard library, looks at the step as a graph, and then does what a step that is a plain function makes
# easy: gradients of each sample, a whole ensemble at once, a Hessian-vector product, and a learning rate learned
# through training steps.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import torch

import functional_booster as fb

# %% [markdown]
# ## Data, model, optimizer
#
# Batches are a function of their number: nothing to rewind, nothing to lose.

# %%
text = fb.data.bytes_of(fb.data.text_files())
train_text, held_out = fb.data.split(text)
batches = fb.data.batches(train_text, batch_size=8, length=64, seed=0)
print(f"{len(text):,} bytes; without context, the best loss is {fb.data.unigram_entropy(text):.2f} nats per byte")

# %%
model = fb.models.gpt2(
    vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0
)
schedule = fb.schedules.cosine_warmup(peak=5e-3, total_steps=400, warmup_steps=20)
tx = fb.optim.adamw(schedule, weight_decay=0.1, mask=fb.optim.matrices)

# %% [markdown]
# The parameters are described before they exist. `model.abstract` is a tree with the structure of the parameters, whose
# leaves say shape, dtype, how a leaf is born and how it may be split:

# %%
for name, info in list(fb.tree.named_leaves(model.abstract).items())[:6]:
    print(f"{name:24} {info.shape!s:12} {info.spec}")

# %% [markdown]
# ## Train
#
# `model.loss` is the next-token loss, fused with the output layer. The step is built eagerly here (`jit=False`) since
# compiling takes longer than this short training; the numbers are the same.

# %%
booster = fb.Booster(device="cpu")
state = booster.init(model, tx, key=fb.random.key(0))
step = booster.train_step(model.loss, tx, max_norm=1.0, jit=False)

records = []


class Recorder:
    """A tracker that keeps what it is told."""

    def log(self, step, metrics):
        records.append({"step": step, **metrics})

    def close(self):
        pass


state = fb.fit(step, state, batches, steps=400, tracker=Recorder(), log_every=10)
fb.visualize.loss(records, references={"unigram entropy": fb.data.unigram_entropy(text)})

# %%
prompt = torch.tensor([list(b"def ")])
written = fb.generate(model, state.params, prompt, key=fb.random.key(1), max_new_tokens=120, temperature=0.7)
print(bytes(written[0].tolist()).decode(errors="replace"))

# %% [markdown]
# ## The step is one graph
#
# `jit` runs the Python once on fake tensors. `lower` shows the graph without compiling or running it: the repeated
# block is a region, which is traced and compiled once whatever the depth.


# %%
def gradient_of_a_batch(params, batch):
    return fb.grad(lambda p: model.loss(p, batch)[0])(params)


jitted = fb.jit(gradient_of_a_batch)
lowered = jitted.lower(state.params, batches(0))
print(str(lowered).splitlines()[0])
print("memory:", lowered.memory)
for name, graph in lowered.regions.items():
    print(f"region {name[:8]}: {len(graph.nodes)} nodes")

# %% [markdown]
# ## Gradients of each sample
#
# `vmap(grad(...))` gives every row its own gradient. Their norms say which samples the model finds hard.

# %%
batch = batches(1000)


def row_loss(params, row):
    total, weight = model.loss(params, {"input_ids": row[None]})
    return total / weight


each = fb.vmap(fb.grad(row_loss), in_axes=(None, 0))(state.params, batch["input_ids"])
norms = sum(g.flatten(1).square().sum(1) for g in fb.tree.leaves(each)).sqrt()
losses = fb.vmap(row_loss, in_axes=(None, 0))(state.params, batch["input_ids"])
plt.figure(figsize=(5, 3))
plt.scatter(losses, norms)
plt.xlabel("loss of a sample")
plt.ylabel("norm of its gradient")
plt.show()

# %% [markdown]
# ## An ensemble in one call
#
# A `TrainState` is a tree, so four trainings are one `vmap`. Each member starts from another key.

# %%
member_tx = fb.optim.adamw(3e-3)
members = [booster.init(model, member_tx, key=fb.random.key(seed)) for seed in range(4)]
ensemble = fb.tree.map(lambda *leaves: torch.stack(leaves), *members)
member_step = booster.train_step(model.loss, member_tx, jit=False, donate=False)
together = fb.vmap(member_step, in_axes=(0, None))
curves = []
for number in range(20):
    ensemble, metrics = together(ensemble, batches(number))
    curves.append(metrics["loss"])
plt.figure(figsize=(5, 3))
plt.plot(torch.stack(curves))
plt.xlabel("steps")
plt.ylabel("loss of each member")
plt.show()

# %% [markdown]
# ## A Hessian-vector product
#
# The gradient of a gradient's product with a vector: how the gradient changes along a direction. Along the gradient
# itself it is the sharpness that a step meets.

# %%
small = {"input_ids": batches(7)["input_ids"][:2]}


def mean_loss(params):
    total, weight = model.loss(params, small)
    return total / weight


gradient = fb.grad(mean_loss)(state.params)
product = fb.grad(
    lambda p: sum((g * v).sum() for g, v in zip(*map(fb.tree.leaves, (fb.grad(mean_loss)(p), gradient)), strict=True))
)(state.params)
squared = sum(g.square().sum() for g in fb.tree.leaves(gradient))
curvature = sum((h * g).sum() for h, g in zip(*map(fb.tree.leaves, (product, gradient)), strict=True)) / squared
print(f"curvature along the gradient: {curvature:.3f}")

# %% [markdown]
# ## A learned learning rate
#
# A step can be differentiated. Here the loss after three steps is a function of the learning rate, and its gradient
# improves the rate.

# %%
weights = booster.full_params(state)


def after_three_steps(rate):
    meta_tx = fb.optim.sgd(rate)
    run = booster.init(model, meta_tx, key=fb.random.key(0), params=weights)
    meta_step = booster.train_step(model.loss, meta_tx, jit=False, donate=False)
    for _ in range(3):
        run, _ = meta_step(run, small)
    return mean_loss_of(run.params)


def mean_loss_of(params):
    total, weight = model.loss(params, small)
    return total / weight


rate, history = torch.tensor(0.01), []
for _ in range(6):
    slope, value = fb.grad_and_value(after_three_steps)(rate)
    history.append((rate.item(), value.item()))
    rate = (rate - 0.01 * slope).clamp(1e-3, 0.5)
plt.figure(figsize=(5, 3))
plt.plot(*zip(*history, strict=True), "o-")
plt.xlabel("learning rate")
plt.ylabel("loss after three steps")
plt.show()
