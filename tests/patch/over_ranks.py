"""What a rank does in the tests of a patched model whose ranks share every batch, and the batches."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import automodel_c
from automodel_c.models.gates import published_name
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.parallel import ContextParallel, checkpoint_context_fn, install_comm_hooks, sum_gradients, wire
from tests.parallel.context_worker import groups
from tests.patch import models

SMALL = {"num_hidden_layers": 2}  # one gated-delta layer, one of full attention


def indexed(documents, pad=0):
    """The pack with an indexed mask and padding in place of restarting positions."""
    batch = models.pack(documents)
    lengths = torch.tensor([len(d["input_ids"]) for d in documents])
    batch["attention_mask"] = torch.arange(1, len(documents) + 1).repeat_interleave(lengths)[None]
    for key in ("input_ids", "labels", "position_ids", "attention_mask"):
        batch[key] = torch.nn.functional.pad(batch[key], (0, pad), value=-100 if key == "labels" else 0)
    return batch


def rows(documents):
    """An ordinary batch: a row a document, 0/1 mask, without images."""
    ids, labels = (
        torch.nn.utils.rnn.pad_sequence([d[key] for d in documents], batch_first=True, padding_value=fill)
        for key, fill in (("input_ids", 0), ("labels", -100))
    )
    lengths = torch.tensor([len(d["input_ids"]) for d in documents])
    return {"input_ids": ids, "labels": labels, "attention_mask": (torch.arange(ids.shape[1]) < lengths[:, None]).int()}


TEXTS = [models.document(n, seed=n) for n in (17, 5, 30)]
BATCHES = {
    "positions": (models.uneven(), models.pack(models.uneven())),
    "mask": (models.uneven(), indexed(models.uneven(), pad=41)),  # the last of three ranks has no token
    "videos": (models.with_videos(), models.pack(models.with_videos())),
    "rows": (TEXTS, rows(TEXTS)),
}


def patched(family, seed=0, **options):
    model = models.build(family, seed=seed, **options)
    automodel_c.patch_transformers(model, cp=ContextParallel(groups("world")))
    return model


def parts(family, seeds, batch):
    """Of each seed's model, this rank's part of the loss and of the gradients."""
    return [models.run(patched(family, seed), BATCHES[batch][1]) for seed in seeds]


def sharded(family, seeds, batch, hooks, checkpointing, shape):
    """As `parts`, gathered, with weights sharded over a mesh dp x cp; each rank of dp takes its share of documents."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("dp", "cp"))
    documents = BATCHES[batch][0]
    count = torch.tensor(sum(int((d["labels"][1:] != -100).sum()) for d in documents))
    mine = documents if shape[0] == 1 else [documents[:2], documents[2:]][mesh.get_local_rank("dp")]  # images in both
    found = []
    for seed in seeds:
        model = models.build(family, seed=seed, **SMALL)
        automodel_c.patch_transformers(model, cp=ContextParallel(mesh.get_group("cp")))
        parallelize_qwen3_5(model, mesh, activation_checkpointing=checkpointing)
        if hooks:
            install_comm_hooks(model)
        sum_gradients(model)
        loss = model(**models.pack(mine), num_items_in_batch=count).loss
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        found.append({"loss": total})
        for name, p in model.named_parameters():
            found[-1][published_name(name)] = torch.zeros(p.shape) if p.grad is None else p.grad.full_tensor()
    return found


def recomputed(family, batch):
    """Bytes sent and received in each backward: of a plain model, under checkpointing, and under checkpointing that
    keeps what came in; every bit of loss and gradients is compared."""
    moved, expected = [], None
    for options in (None, {"use_reentrant": False}, {"use_reentrant": False, "context_fn": checkpoint_context_fn}):
        model = patched(family)
        if options:
            model.gradient_checkpointing_enable(options)
        loss = model(**BATCHES[batch][1]).loss
        later = model(**BATCHES["rows"][1]).loss  # another forward, and its backward, before this one's recomputation
        later.backward()
        model.zero_grad(set_to_none=True)
        before = wire.sent + wire.received
        loss.backward()
        moved.append(wire.sent + wire.received - before)
        found = {"loss": loss.detach()}
        found |= {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
        expected = expected or found
        assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    return moved


def outputs(family, batch, **more):
    """Without labels: logits, the auxiliary loss, and the gradients of this rank's share of a sum of all logits."""
    model = patched(family)
    given = {key: value for key, value in BATCHES[batch][1].items() if key != "labels"}
    found = model(**given, **more)
    model.zero_grad(set_to_none=True)
    (found.logits.sum() / dist.get_world_size()).backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return found.logits.detach(), getattr(found, "aux_loss", None), grads


def auxiliary(batch, documents):
    """(loss, aux_loss, gradients) with the auxiliary loss."""
    model = patched("qwen3_5_moe")
    model.config.get_text_config().router_aux_loss_coef = 0.5
    found = model(**batch, output_router_logits=True)
    found.loss.backward()
    grads = {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in model.named_parameters()}
    return found.loss.detach(), found.aux_loss.detach(), grads


def compiled(family, batch):
    """Whether torch.compile changes loss or gradients by more than rounding."""
    model = patched(family, **SMALL)
    expected = models.run(model, BATCHES[batch][1])
    torch._dynamo.reset()
    model.zero_grad(set_to_none=True)
    loss = torch.compile(model, backend="aot_eager")(**BATCHES[batch][1]).loss
    loss.backward()
    torch.testing.assert_close(loss.detach(), expected["loss"])
    for name, p in model.named_parameters():
        grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.testing.assert_close(grad, expected[name], msg=lambda text, name=name: f"{name}: {text}")


def undone(family, batch):
    model = models.build(family)
    before = models.run(model, BATCHES[batch][1])
    report = automodel_c.patch_transformers(model, cp=ContextParallel(groups("world")))
    table = str(report)
    models.run(model, BATCHES[batch][1])
    report.undo()
    after = models.run(model, BATCHES[batch][1])
    assert [name for name, value in before.items() if not torch.equal(after[name], value)] == []
    return table


def refusals():
    """The words of each."""
    said = []

    def refused(error, function, *args, **options):
        try:
            function(*args, **options)
        except error as found:
            said.append(str(found))
        else:
            raise AssertionError(f"{function} was not refused")

    cp = ContextParallel(groups("world"))
    model, batch = patched("qwen3_5_moe"), BATCHES["positions"][1]
    ids = {"input_ids": batch["input_ids"][:, :5]}
    refused(ValueError, automodel_c.patch_transformers, model)
    refused(ValueError, model, **batch, output_hidden_states=True)
    refused(ValueError, model, **ids, use_cache=True)
    refused(ValueError, model.generate, **ids, max_new_tokens=2)
    odd = models.build(linear_value_head_dim=12)
    refused(NotImplementedError, automodel_c.patch_transformers, odd, cp=cp)
    assert "_amcore_report" not in vars(odd)
    refused(NotImplementedError, automodel_c.patch_transformers, models.build(head_dim=24), cp=cp)
    refused(TypeError, automodel_c.patch_transformers, models.build(), cp=groups("world"))
    return said


def odd_batch(rank, change):
    """One rank's mask has another shape, or says other documents."""
    batch = dict(BATCHES["mask"][1])
    if dist.get_rank() == rank:
        batch["attention_mask"] = batch["attention_mask"].clone()
        if change == "shape":
            batch["attention_mask"] = batch["attention_mask"][:, 1:]
        else:
            batch["attention_mask"][0, 3] = 0
    patched("qwen3_5")(**batch)
