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
# # Pipelines: schedules are data
#
# A pipeline puts the layers of a model on ranks that follow one another, and sends microbatches through them. What each
# rank does when is a schedule: a list of actions, which can be drawn, timed, proved and run, here in one process.

# %%
# %matplotlib inline
import torch

import functional_booster as fb
from functional_booster import pipeline

# %% [markdown]
# ## Four schedules
#
# Of 4 ranks and 8 microbatches. A box is an action with its microbatch's number; white is a rank that waits.

# %%
ranks, microbatches = 4, 8
schedules = [
    pipeline.gpipe(ranks, microbatches),
    pipeline.one_f_one_b(ranks, microbatches),
    pipeline.interleaved(ranks, microbatches, 2),
    pipeline.zero_bubble_v(ranks, microbatches),
]
fb.visualize.schedule(schedules[1])

# %% [markdown]
# Zero bubble (Qi et al. 2024): two chunks a rank, placed as a V, and the gradients of the weights apart, where a rank
# would wait.

# %%
fb.visualize.schedule(schedules[3])

# %% [markdown]
# How long ranks are idle, beside the theory (forward, input gradient and weight gradient take the same time), and the
# most activations that a rank holds, in those of a whole rank's layers.

# %%
p, m = ranks, microbatches
theory = [(p - 1) / (m + p - 1), (p - 1) / (m + p - 1), (p - 1) / (2 * m + p - 1), (p - 1) / (6 * m + p - 1)]
print(f"{'':26}{'bubble':>8}{'theory':>8}{'activations':>13}")
for schedule, expected in zip(schedules, theory, strict=True):
    pipeline.check(schedule)  # every action once, and no rank waits for ever
    timeline = pipeline.simulate(schedule)
    chunks = schedule.stages // schedule.ranks
    print(f"{schedule.name:26}{timeline.bubble:8.3f}{expected:8.3f}{max(timeline.live) / chunks:13.1f}")

# %% [markdown]
# ## A model, cut into stages
#
# The loss function is one program; it is traced once, and cut where `split` puts the layers: each stage is a forward
# graph and a backward graph, and the backward is cut again into input gradient and weight gradient. The embedding is
# tied: it is used at both ends, and stored at one.

# %%
model = fb.models.gpt2(vocab_size=256, n_positions=32, n_embd=32, n_layer=4, n_head=2)
split = pipeline.split(model, 4)


def loss_fn(params, microbatch):
    loss, weight = model.loss(params, {"input_ids": microbatch["tokens"]}, microbatch["key"])
    return loss, weight


objective = pipeline.Objective(loss_fn, split)
text = torch.tensor(list((pipeline.__doc__ * 8).encode()))
tokens = text[: len(text) // 32 * 32].reshape(-1, 32)[:32]
params = model.init(fb.random.key(0))
first = {"tokens": tokens[:4], "key": fb.random.key(0)}
for number, stage in enumerate(objective.traced(params, first).stages):
    nodes = [len(graph.graph.nodes) for graph in (stage.forward.run.graph, stage.backward.graph)]
    sent = [tuple(one.shape) for one in stage.sent]
    print(f"stage {number}: {nodes[0]} nodes forward, {nodes[1]} backward, hands on {sent}")

# %% [markdown]
# ## Training, over four stages in one process
#
# The optimizer does not know that the gradients come from a pipeline.

# %%
tx = fb.optim.adamw(3e-3)
opt_state = tx.init(params)
schedule = pipeline.one_f_one_b(4, 8)
records = []
for step in range(20):
    rows = [{"tokens": tokens[4 * n : 4 * n + 4], "key": fb.random.fold_in(fb.random.key(step), n)} for n in range(8)]
    outcome = pipeline.run(schedule, pipeline.Program(objective, params, rows), measure=True)
    loss, weight = (torch.stack(values).sum() for values in zip(*outcome.results.values(), strict=True))
    named = {}
    for terms in outcome.gradients.values():  # the tied embedding has a term at each end
        for name, term in terms.items():
            named[name] = named[name] + term if name in named else term
    grads = fb.tree.map_with_name(lambda name, leaf, named=named, weight=weight: named[name] / weight, params)
    updates, opt_state = tx.update(grads, opt_state, params)
    params = fb.optim.apply_updates(params, updates)
    records.append({"step": step, "loss": float(loss / weight)})
fb.visualize.loss(records, unit="byte")

# %% [markdown]
# When which action ran, in the last step: one process takes the actions of all ranks in turn.

# %%
fb.visualize.schedule(outcome.timeline)
