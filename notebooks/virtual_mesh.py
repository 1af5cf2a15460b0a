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
# # The virtual mesh: many ranks in one cell
#
# A training run on 8 GPUs is one program that runs on 8 ranks and speaks by *collectives*: gather, sum, scatter. Here
# the 8 ranks live inside this process. The same program, the same plugins and the same collectives run, no launcher is
# needed, and every rank's numbers lie open. What works here works under `torchrun`, where only the mesh is another one.

# %%
# %matplotlib inline
import time

import matplotlib.pyplot as plt
import torch

import functional_booster as fb
from functional_booster.sharding import collectives

# %% [markdown]
# ## Collectives by hand
#
# `fb.spmd` runs a function on every rank of a mesh. Tensors have the mesh's dims in front, one value a rank; inside the
# function a rank sees only its own, and asks for others' along an axis by name.

# %%
mesh = fb.virtual_mesh(dp=4)
x = torch.tensor([1.0, 2.0, 3.0, 4.0])  # rank r holds r + 1


def program(x):
    return {
        "mine": x,
        "sum of all": collectives.psum(x, "dp"),
        "everyone's": collectives.all_gather(x, "dp", tiled=False),
        "my left neighbour's": collectives.ppermute(x, "dp", [(rank, (rank + 1) % 4) for rank in range(4)]),
    }


for name, values in fb.spmd(program, mesh)(x).items():
    print(f"{name:20}", values.tolist())

# %% [markdown]
# Collectives are differentiable, and the transpose of a collective is a collective: that of a gather sums what all
# ranks did with a value, and brings it back to its owner. Below, rank $r$ weighs the gathered squares by $r + 1$, so
# the gradient of $x$ is $\sum_r (r + 1) \cdot 2x = 20x$. No line of the program says that gradients are communicated.


# %%
def weighed(x):
    mine = collectives.axis_index("dp") + 1
    return (mine * collectives.all_gather(x, "dp", tiled=False).square()).sum()


gradient = fb.spmd(fb.grad(weighed), mesh)(x)
print(gradient.tolist())
assert torch.equal(gradient, 20 * x)

# %% [markdown]
# ## A GPT over 8 ranks
#
# A plugin says how a training is laid out over a mesh. FSDP splits everything over all ranks, and gathers a block when
# the loss needs it. A row of the picture is a bucket, the leaves of a block that travel together; a colour is a rank.
# White lines are where leaves begin, and hatched is padding, which makes the parts equal.

# %%
model = fb.models.gpt2(
    vocab_size=97, n_positions=32, n_embd=32, n_layer=3, n_head=4, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0
)
tx = fb.optim.adamw(1e-2, weight_decay=0.1)
exact = fb.Policy(param=torch.float64)  # so that differences are rounding, and nothing else


def booster_of(plugin, mesh):
    return fb.Booster(device="cpu", mixed_precision=exact, plugin=plugin, mesh=mesh)


fsdp = booster_of(fb.TorchFSDPPlugin(), fb.virtual_mesh(8))
state = fsdp.init(model, tx, key=fb.random.key(0))
print("the mesh:", fsdp.plan.mesh)
print("a bucket of all 8 ranks:", tuple(next(iter(state.storage.buffers.values())).shape))
fb.visualize.sharding(state)

# %% [markdown]
# Two groups of four ranks: each group holds everything once. Ranks that hold the same part share a row's height. For
# the picture alone no state is needed, `abstract` describes the one that `init` would make.

# %%
hybrid = booster_of(fb.TorchFSDPPlugin(sharding_strategy="HYBRID_SHARD"), fb.virtual_mesh(dp=2, fsdp=4))
fb.visualize.sharding(hybrid.abstract(model, tx))

# %% [markdown]
# ## What is held, and what travels
#
# `fb.explain` traces one rank's step on fake tensors: no memory, no processes. It says what every rank holds after
# `init`, what a step takes on top, and each kind of collective with its bytes: those of the results, and those that a
# rank sends if the ranks form a ring. (Given `loss_fn` and `batch`, it traces that very step, and knows its FLOPs and
# activations, too.)

# %%
fb.explain(model, fsdp, tx=tx)

# %% [markdown]
# What a layout costs is a small table. Under DDP every rank holds everything. Under ZeRO it holds an eighth, and sends
# no more for it: a reduce_scatter and an all_gather are what an all_reduce is made of. FSDP frees a block after its
# use, and gathers it once more for the backward.

# %%
plugins = {
    "DDP": fb.TorchDDPPlugin(),
    "ZeRO-1": fb.LowLevelZeroPlugin(stage=1),
    "ZeRO-2": fb.LowLevelZeroPlugin(stage=2),
    "FSDP": fb.TorchFSDPPlugin(),
}
explained = {name: fb.explain(model, booster_of(plugin, fb.virtual_mesh(8)), tx=tx) for name, plugin in plugins.items()}
print(f"{'':8}{'held':>10}{'gradients kept':>16}{'sent a step':>13}   KiB a rank")
for name, found in explained.items():
    sent = sum(one.wire for one in found.collectives)
    print(f"{name:8}{found.held.total / 1024:10.0f}{found.work.kept / 1024:16.0f}{sent / 1024:13.0f}")

# %% [markdown]
# ## Is a ZeRO step the plain one?
#
# The law of all plugins: laid out over any number of ranks, a step is the step on one device. Three steps, in float64,
# from the same key, on the same global batches; then the largest difference of any parameter.


# %%
def batch(number, rows=16):
    ids = fb.random.randint(fb.random.fold_in(fb.random.key(1), number), (rows, 32), 0, 97)
    return {"input_ids": ids.to(torch.int64)}


def trained(booster, steps=3):
    state = booster.init(model, tx, key=fb.random.key(0))
    step = booster.train_step(model.loss, tx, max_norm=1.0, jit=False)
    for number in range(steps):
        state, metrics = step(state, batch(number))
    return booster.full_params(state), metrics


def difference(one, other):
    return max((a - b).abs().max().item() for a, b in zip(fb.tree.leaves(one), fb.tree.leaves(other), strict=True))


plain, metrics = trained(fb.Booster(device="cpu", mixed_precision=exact))
print(f"{'one device':20} loss {metrics['loss']:.12f}   gradient norm {metrics['grad_norm']:.12f}")
for name, plugin in plugins.items():
    params, metrics = trained(booster_of(plugin, fb.virtual_mesh(8)))
    apart = difference(params, plain)
    print(f"{name:20} loss {metrics['loss']:.12f}   gradient norm {metrics['grad_norm']:.12f}   apart {apart:.0e}")
    assert apart < 1e-9

# %% [markdown]
# ## 64 ranks
#
# The number of ranks is only the size of a dim. ZeRO over groups of 16 ranks, four of them, and one row a rank:

# %%
many = booster_of(fb.LowLevelZeroPlugin(extra_dp_size=4), fb.virtual_mesh(64))
state = many.init(model, tx, key=fb.random.key(0))
step = many.train_step(model.loss, tx, jit=False)
losses = []
start = time.perf_counter()
for _ in range(10):
    state, metrics = step(state, batch(0, rows=64))
    losses.append(metrics["loss"].item())
print(f"{many.plan.mesh}: {(time.perf_counter() - start) / 10:.2f} seconds a step")
plt.figure(figsize=(5, 3))
plt.plot(losses)
plt.xlabel("steps")
plt.ylabel("loss on 64 ranks (nats per token)")
plt.show()

# %%
fb.visualize.sharding(state)
