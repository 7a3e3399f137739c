"""What a rank does in the tests of the model whose split weights several ranks share."""

import functools
import re
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from automodel_c.models import qwen3_5
from automodel_c.models.gates import published_name
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.models.qwen3_5.shards import Part
from automodel_c.optim import clip_grad_norm_
from automodel_c.parallel import ContextParallel, PipelineParallel, TensorParallel, set_grad_reduction, tensor
from automodel_c.recipes.parts import install_reduction
from tests.models import cp_worker
from tests.models.cp_worker import PACKS
from tests.models.ep_worker import PADDING, runtime, whole
from tests.patch import models
from tests.ranks import here


def build(name, seed, shape, ep=1, **options):
    """A model of cp_worker.MODELS as this rank of the meshes holds it, not sharded any further."""
    where = runtime(shape, ep)
    shared = {"ep_group": where.ep_group, "tp": TensorParallel(where.tp_mesh)}
    model = cp_worker.build.__wrapped__(name, seed, **shared, **options)
    model.cp = ContextParallel(where.mesh.get_group("cp"))
    return model


def sharded(name, seed, shape, ep=1, tp_plan=None, **options):
    where, model = runtime(shape, ep), build(name, seed, shape, ep, tp_plan=tp_plan)
    model = parallelize_qwen3_5(model, where.mesh, moe_mesh=where.moe_mesh, **options)
    install_reduction(model, where.device)
    return model


def backward(model, chosen, where, count, per_microbatch=True):
    """The loss of the packs, which the ranks of dp deal out among them."""
    total, mine = torch.zeros((), device=here()), chosen[where.dp_rank :: where.dp_size]
    for index, pack in enumerate(mine):
        set_grad_reduction(model, per_microbatch or index == len(mine) - 1)
        loss, _ = model({**PACKS[pack], "num_label_tokens": count})
        loss.backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total


def compiled_steps(*arguments):
    """As `steps`, where products of split weights are traced with their collectives."""
    with mock.patch.object(tensor, "compiled", functools.cache(lambda f: torch.compile(f, backend="aot_eager"))):
        return steps(*arguments, async_tensor_parallel=True)


def steps(name, seeds, shape, ep, chosen, count, checkpointing=False, tp_plan=None, **options):
    """Of every seed: (`whole` of one global batch, its norm), gradients reduced in each microbatch for even ones."""
    where, found = runtime(shape, ep), []
    for seed in seeds:
        model = sharded(name, seed, shape, ep, tp_plan, activation_checkpointing=checkpointing, **options)
        loss = backward(model, chosen, where, count, per_microbatch=seed % 2 == 0)
        found.append((whole(model, loss), clip_grad_norm_(model.parameters(), float("inf"))))
    return found


def unused(shape, ep):
    """As ep_worker's, of experts beside weights that ranks split."""
    where, model = runtime(shape, ep), sharded("experts", 0, shape, ep, activation_checkpointing=True)
    batch = PACKS["tiny"] if where.dp_rank == 0 else PADDING
    loss, _ = model({**batch, "num_label_tokens": 4})
    loss.backward()
    return whole(model, loss.detach())


def logits(name, shape, pack, rows):
    """Logits of a pack without labels, and of some of its rows, sharded by FSDP2."""
    model = sharded(name, 0, shape)
    batch = {key: value for key, value in PACKS[pack].items() if key != "labels"}
    with torch.no_grad():
        return model.logits(batch), model.logits(batch, rows)


def parts(name, shape, pack):
    """What this rank of a model that FSDP2 does not shard makes of a pack: loss, metrics and gradients; and of the
    weights that are split, where each lies among its rows and columns."""
    model = build(name, 0, shape)
    loss, metrics = model(PACKS[pack])
    loss.backward()
    split = {key: Part.of(p.grad) for key, p in model.named_parameters() if isinstance(p, DTensor)}
    whole = {key: p.grad for key, p in model.named_parameters() if key not in split}
    split = {key: (part.tensor, part.offsets, part.shape) for key, part in split.items()}
    return {"loss": loss.detach(), **metrics, **whole}, split


def places(shape):
    """{placements: names of parameters that lie so}, without numbers of layers, of a dense model."""
    found = {}
    for key, p in sharded("dense", 0, shape).named_parameters():
        key = re.sub(r"\d+", "*", published_name(key))
        found.setdefault((str(p.placements), p.device_mesh.size()), set()).add(key)
    return found


def refused(calls):
    """The message of each load: [(family, keys of the text's configuration, options)]."""
    tp, found = TensorParallel(runtime((1, 1, 2), 1).tp_mesh), []
    for family, text, options in calls:
        found.append(_said(lambda: qwen3_5.load(models.config(family, **text), tp=tp, **options)))  # noqa: B023
    tied = {**models.config("qwen3_5").to_dict(), "tie_word_embeddings": True}
    found.append(_said(lambda: qwen3_5.load(tied, pp=PipelineParallel(0, 2))))
    found.append(_said(lambda: qwen3_5.load(models.config("qwen3_5"), pp=PipelineParallel(0, 5))))
    found.append(_said(lambda: qwen3_5.load(models.config("qwen3_5"), pp=2)))
    model = qwen3_5.load(models.config("qwen3_5"), tp=tp)
    found.append(_said(lambda: parallelize_qwen3_5(model, runtime((2, 1, 1), 1).mesh)))
    found.append(_said(lambda: parallelize_qwen3_5(models.build(), runtime((1, 1, 2), 1).mesh)))
    found.append(_said(lambda: TensorParallel(2)))
    found.append(_said(lambda: TensorParallel(runtime((1, 1, 2), 1).mesh)))
    return found


def _said(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def means(name, shape, ep, chosen, count):
    """`whole` as FSDP2 reduces by itself: it takes means over ranks, for which the loss is scaled up."""
    where, model = runtime(shape, ep), build(name, 0, shape, ep)
    parallelize_qwen3_5(model, where.mesh, moe_mesh=where.moe_mesh)
    total = torch.zeros(())
    for pack in chosen[where.dp_rank :: where.dp_size]:
        loss, _ = model({**PACKS[pack], "num_label_tokens": count})
        (loss * where.world).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return whole(model, total)


def products(asynchronous):
    """Products of split weights, their sum over ranks, and all gradients."""
    tp = TensorParallel(runtime((1, 1, 2), 1).tp_mesh)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x, *weights = (torch.randn(n, 32, generator=generator).requires_grad_() for n in (6, 24, 8))
    down = torch.randn(32, 24, generator=generator).requires_grad_()
    wide, narrow = tp.products(x, weights, asynchronous)
    out = tp.product(wide * narrow.sum(1, keepdim=True), down, asynchronous)
    out.square().sum().backward()
    return [wide.detach(), narrow.detach(), out.detach(), *(p.grad for p in (x, *weights, down))]


def products_in_pieces(rows, size, width, seed):
    """Of an MLP's products, forward and backward, on GPUs: {how: (outputs and gradients, fused collectives that ran)}
    compiled and not, and in float32 what all ranks' weights give."""
    tp, found = TensorParallel(runtime((1, 1, 2), 1).tp_mesh), {}
    tp.send_in_pieces()
    generator = torch.Generator().manual_seed(seed)
    whole = [torch.randn(n, m, generator=generator) / m**0.5 for n, m in ((width, size), (width, size), (size, width))]
    x, dout = (torch.randn(rows, size, generator=generator) for _ in range(2))
    parts = [tp.own(whole[0]), tp.own(whole[1]), tp.own(whole[2], 1)]
    for how in ("exact", "plain", "eager", "compiled"):
        alone, dtype = how in ("exact", "plain"), torch.float32 if how == "exact" else torch.bfloat16
        leaves = [x, *whole] if alone else [tp.own(x), *parts]
        leaves = [leaf.to(here(), dtype).contiguous().requires_grad_() for leaf in leaves]
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            out = gated(leaves, TensorParallel() if alone else tp, how == "compiled")
            out.backward((dout if alone else tp.own(dout)).to(out))
        fused = sum(event.count for event in profile.key_averages() if event.key.startswith("fused_"))
        values = [out.detach(), *(leaf.grad for leaf in leaves)]
        if alone:  # what this rank has of it
            values = [tp.own(v, dim) for v, dim in zip(values, (0, 0, 0, 0, 1), strict=True)]
        found[how] = [v.cpu() for v in values], fused
    return found


def gated(leaves, tp, asynchronous):
    x, gate, up, down = leaves
    gate, up = tp.products(x, [gate, up], asynchronous)
    return tp.product(gate * up.sigmoid(), down, asynchronous)
