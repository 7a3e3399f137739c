"""The model as stages of a pipeline: what goes from one to the next, and the loss of microbatches that run through."""

import torch

from automodel_c import ops

METRICS = ("lm_loss", "mtp_loss", "aux_loss")


class Stages:
    """The stages of one rank, for `parallel.pipeline.Pipeline`. model: a Qwen3_5 of `load(..., pp=)`, sharded or not.
    batches: microbatches, as the model takes them.

    From stage to stage go the hidden states of this rank's rows; where transformers' auxiliary loss is wanted, whose
    layers share their counts, the counts so far, of which the sum comes back; and past all others, from the first to
    the last, the embeddings that multi-token prediction reads.

    Attributes: losses, {one of METRICS: a scalar}, the sums over microbatches of this rank's parts; what model(batch)
    has in its metrics then sums over all ranks.
    """

    def __init__(self, model, batches):
        self.model, self.batches = model, [model.prepare(batch) for batch in batches]
        device = model.device
        self.losses = {name: torch.zeros((), device=device) for name in METRICS}
        self._held = {}

    def specs(self, microbatch):
        model, batch = self.model, self.batches[microbatch]
        rows, size = len(batch.share.own) // model.tp.ranks, model.config.text.hidden_size
        specs = {"hidden": ((rows, size), model.compute_dtype)}
        if model.shares_loads:
            specs["load"] = (model.config.text.num_experts,), torch.int64
        return specs

    def skip_specs(self, microbatch):
        model, batch = self.model, self.batches[microbatch]
        if not model.config.text.mtp_num_hidden_layers:
            return {}
        return {"embeddings": ((len(batch.share.rows), model.config.text.hidden_size), model.compute_dtype)}

    def forward(self, microbatch, chunk, arrived):
        batch = self.batches[microbatch]
        for name in ("hidden", "embeddings"):
            if name in arrived and torch.is_grad_enabled():
                arrived[name].requires_grad_()
        out = self.model(batch, arrived, chunk)
        self._held[microbatch, chunk] = arrived, out
        return out if isinstance(out, dict) else {}

    def backward(self, microbatch, chunk, returned):
        arrived, out = self._held.pop((microbatch, chunk))
        batch = self.batches[microbatch]
        load = returned.get("load")
        if isinstance(out, dict):
            roots = [(out[name], returned[name]) for name in ("hidden", "embeddings") if name in out]
            if "aux_loss" in out:
                roots.append((out["aux_loss"] * self.model.aux_weight, None))
                self._add({"aux_loss": out["aux_loss"]})
            if "prob_sum" in out:
                slope = auxiliary_slope(load, batch.real_rows, self.model.config.text.num_hidden_layers)
                roots.append((out["prob_sum"], slope * self.model.aux_weight))
                self._add({"aux_loss": (out["prob_sum"] * slope).sum()})
            roots = [(root, grad) for root, grad in roots if root.requires_grad]
            if roots:
                torch.autograd.backward(*map(list, zip(*roots, strict=True)))
        else:
            loss, metrics = out
            loss.backward()
            load = metrics.pop("load", None)
            self._add({name: metrics[name] for name in METRICS})
        back = {
            name: torch.zeros_like(arrived[name]) if arrived[name].grad is None else arrived[name].grad
            for name in ("hidden", "embeddings")
            if name in arrived
        }
        return back if load is None else {**back, "load": load}

    def _add(self, losses):
        for name, value in losses.items():
            self.losses[name] += value.detach().float()


class Answers(Stages):
    """The stages of `model.logits(batch, rows)`: `logits` on the ranks of the last stage, None on others."""

    def __init__(self, model, batch, rows):
        self.model, self.batches = model, [model.prepare(batch, labels=False)]
        self.rows, self.logits = rows, None

    def specs(self, microbatch):
        return {"hidden": super().specs(microbatch)["hidden"]}

    def skip_specs(self, microbatch):
        return {}

    def forward(self, microbatch, chunk, arrived):
        out = self.model.logits(self.batches[microbatch], self.rows, arrived, chunk)
        if isinstance(out, dict):
            return out
        self.logits = out
        return {}


def auxiliary_slope(load, real_rows, layers):
    """[E]: by what transformers' auxiliary loss grows with the sum over layers of a rank's probabilities; load [E] is
    that of all tokens in all layers."""
    n = max(layers * real_rows, 1)
    return load.float() / n * (len(load) / n)


def auxiliary_out(stats, top_k, per_layer, arrived):
    """What a stage before the last makes of its layers' statistics."""
    if per_layer:
        return {"aux_loss": sum(ops.per_layer_aux_loss(*layer, top_k=top_k) for layer in stats)}
    return {"prob_sum": torch.stack([layer[1] for layer in stats]).sum(0), "load": total_load(stats, arrived)}


def total_load(stats, arrived):
    """int64 [E]: counts of this stage and those before it."""
    load = torch.stack([layer[0] for layer in stats]).sum(0)
    return load + arrived["load"] if "load" in arrived else load
