"""What a rank does in the tests of the model whose experts several ranks share."""

import functools
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from automodel_c.models import qwen3_5
from automodel_c.models.export import full_state_dict
from automodel_c.models.gates import published_name
from automodel_c.models.parallelize import parallelize_qwen3_5
from automodel_c.models.qwen3_5 import checkpoint as files
from automodel_c.models.qwen3_5.experts import Experts
from automodel_c.optim import FusedAdamW, clip_grad_norm_
from automodel_c.parallel import ContextParallel, faults, set_grad_reduction, wire
from automodel_c.recipes.checkpoint import load_checkpoint, save_checkpoint
from automodel_c.recipes.parts import install_reduction
from automodel_c.recipes.runtime import runtime_over
from tests.models import cp_worker
from tests.models.cp_worker import PACKS
from tests.patch import models
from tests.ranks import here

PADDING = {"input_ids": torch.zeros(12, dtype=torch.int64), "labels": torch.full((12,), -100)}
PADDING["doc_ids"] = torch.zeros_like(PADDING["input_ids"])


@functools.cache
def runtime(shape, ep):
    """The meshes of (dp, cp) ranks of which `ep` share experts."""
    return runtime_over(shape, here(), ep)


def build(name, seed, shape, ep, **options):
    """A model of cp_worker.MODELS as this rank of the meshes holds it, not sharded any further."""
    where = runtime(shape, ep)
    model = cp_worker.build.__wrapped__(name, seed, ep_group=where.ep_group, **options)
    model.cp = ContextParallel(where.mesh.get_group("cp"))
    return model


def sharded(name, seed, shape, ep, checkpointing=False, **options):
    where, model = runtime(shape, ep), build(name, seed, shape, ep)
    return parallelize_qwen3_5(
        model, where.mesh, moe_mesh=where.moe_mesh, activation_checkpointing=checkpointing, **options
    )


def backward(model, chosen, where, count, scale=1):
    """The loss of the packs, which the ranks of dp deal out among them."""
    total = torch.zeros((), device=here())
    for pack in chosen[where.dp_rank :: where.dp_size]:
        loss, _ = model({**PACKS[pack], "num_label_tokens": count})
        (loss * scale).backward()
        total += loss.detach()
    dist.all_reduce(total)
    return total


def whole(model, loss):
    """{"loss": ..., parameter: gradient} on rank 0, None elsewhere."""
    found = {"loss": loss}
    for key, p in model.named_parameters():
        if p.requires_grad:
            found[published_name(key)] = p.grad.full_tensor()
    return found if dist.get_rank() == 0 else None


def steps(seeds, shape, ep, chosen, count):
    """Of every seed: (`whole` of one global batch, its norm), activations made again in backward."""
    where, found = runtime(shape, ep), []
    for seed in seeds:
        model = sharded("experts", seed, shape, ep, checkpointing=True)
        install_reduction(model, where.device)
        loss = backward(model, chosen, where, count)
        found.append((whole(model, loss), clip_grad_norm_(model.parameters(), float("inf"))))
    return found


def in_bf16(seeds, shape, ep, chosen, count, held=True, **options):
    """`whole` of each seed where bf16 computes over fp32 masters; gradients are held until the last microbatch."""
    where, found = runtime(shape, ep), []
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for seed in seeds:
        model = sharded("experts", seed, shape, ep, mp_policy=policy, **options)
        install_reduction(model, where.device)
        total, mine = torch.zeros(()), chosen[where.dp_rank :: where.dp_size]
        for pack in mine:
            set_grad_reduction(model, not held or pack == mine[-1])
            loss, _ = model({**PACKS[pack], "num_label_tokens": count})
            loss.backward()
            total += loss.detach()
        dist.all_reduce(total)
        assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters())
        found.append(whole(model, total))
    return found


def not_wide():
    """What a model without experts, and one that computes in float32, say to float32 gradients of experts."""
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    dense = lambda: sharded("dense", 0, (1, 1), 1, mp_policy=policy, fp32_expert_grads=True)  # noqa: E731
    return _said(dense), _said(lambda: sharded("experts", 0, (1, 1), 1, fp32_expert_grads=True))


def of_bf16_weights(shape, ep):
    """[(loss, gradients of this rank)] of a model whose weights are bf16, but for the gates': plain, and sharded."""
    where, found = runtime(shape, ep), []
    for shard in (False, True):
        model = build("experts", 0, shape, ep, dtype=torch.bfloat16)
        if shard:
            parallelize_qwen3_5(model, where.mesh, moe_mesh=where.moe_mesh)
        loss, _ = model(PACKS["mixed"])
        loss.backward()
        grads = {published_name(k): getattr(p.grad, "_local_tensor", p.grad) for k, p in model.named_parameters()}
        found.append((loss.detach(), grads))
    return found


def outputs(shape, ep):
    """{output_dtype: (loss, auxiliary loss, a router's gradient here)} where bf16 computes."""
    found = {}
    for dtype in (None, torch.float32, torch.bfloat16):
        model = sharded("experts", 0, shape, ep, mp_policy=MixedPrecisionPolicy(torch.bfloat16, output_dtype=dtype))
        loss, metrics = model(PACKS["mixed"])
        loss.backward()
        router = model.model.language_model.layers[0].mlp.gate.weight
        found[dtype] = loss.detach(), metrics["aux_loss"], router.grad.to_local()
    return found


def means(name, shape, ep, chosen, count):
    """`whole` as FSDP2 reduces by itself: it takes means over ranks, for which the loss is scaled up."""
    where, model = runtime(shape, ep), sharded(name, 0, shape, ep)
    return whole(model, backward(model, chosen, where, count, scale=where.world))


def bits(shape, ep, pack, other):
    """Whether, on a model that FSDP2 shards and on one that it does not, recomputation and another
    forward before backward change a bit, or move rows."""
    for make in (build, sharded):
        found, moved = [], []
        for recompute, between in ((False, False), (True, False), (True, True)):
            model = make("experts", 0, shape, ep)
            model.recompute(recompute)
            before = wire.sent
            loss, metrics = model(PACKS[pack])
            later = model(PACKS[other])[0] if between else None
            forward = wire.sent
            loss.backward()
            moved.append((forward - before if not between else None, wire.sent - forward))
            grads = {k: getattr(p.grad, "_local_tensor", p.grad).clone() for k, p in model.named_parameters()}
            found.append({"loss": loss.detach(), **metrics, **grads})
            if between:
                later.backward()
        for again in found[1:]:
            for key, value in found[0].items():
                assert torch.equal(again[key], value), (make.__name__, key)
        assert moved[0] == moved[1] and moved[0][1] == moved[2][1] > 0


def unused(shape, ep, **options):
    """[gradients of experts], all experts', of a pack so short that some get no token; the second dp rank has padding
    alone. Rank 0's."""
    where, model = runtime(shape, ep), sharded("experts", 0, shape, ep, **options)
    install_reduction(model, where.device)
    batch = PACKS["tiny"] if where.dp_rank == 0 else PADDING
    loss, metrics = model({**batch, "num_label_tokens": 4})
    loss.backward()
    assert where.dp_rank == 0 or metrics["lm_loss"] == metrics["aux_loss"] == 0
    return whole(model, loss.detach())


def fails(shape, ep, rank):
    """One rank fails in a layer, where some of the others wait for its tokens, and the rest for its weights."""
    model = sharded("experts", 0, shape, ep)
    if dist.get_rank() == rank:
        model.model.language_model.layers[2].mlp.shared_expert.register_forward_pre_hook(_raise)
    with faults.guard():
        model(PACKS["clips"])[0].backward()


def _raise(*_):
    raise KeyError("the layer's own")


def fails_alone(rank):
    """One rank of a group that shares experts and nothing else has a bad batch, without a guard."""
    group = dist.new_group(list(range(dist.get_world_size())))
    model = cp_worker.build.__wrapped__("experts", 0, ep_group=group)
    batch = dict(PACKS["clips"])
    if dist.get_rank() == rank:
        batch["image_grid_thw"] = batch["image_grid_thw"][:-1]
    model(batch)


def read(folder, ep):
    """(this rank's experts, the keys and shapes that it read of the files) of a model that `ep` ranks share."""
    seen = []

    class Recording:
        def __init__(self, *args, **options):
            self.file = files_open(*args, **options)

        def __enter__(self):
            return self.file.__enter__()

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def get_tensor(self, key):
            seen.append((key, list(self.file.get_tensor(key).shape)))
            return self.file.get_tensor(key)

        def get_slice(self, key):
            return _Slice(self.file.get_slice(key), key, seen)

    files_open = files.safe_open
    with mock.patch.object(files, "safe_open", Recording):
        model = qwen3_5.load(folder, ep_group=runtime((dist.get_world_size(), 1), ep).ep_group)
    return experts_of(model), [entry for entry in seen if ".experts." in entry[0]]


class _Slice:
    def __init__(self, part, key, seen):
        self.part, self.key, self.seen = part, key, seen

    def __getattr__(self, name):
        return getattr(self.part, name)

    def __getitem__(self, index):
        found = self.part[index]
        self.seen.append((self.key, list(found.shape)))
        return found


def experts_of(model):
    return {
        f"{prefix}.{name}": p.detach()
        for prefix, module in model.named_modules()
        if isinstance(module, Experts)
        for name, p in module.named_parameters()
    }


def write(source, folder, ep):
    """Writes a model of `ep` ranks again, as it is and sharded by FSDP2."""
    shape = (dist.get_world_size(), 1)
    where = runtime(shape, ep)
    model = qwen3_5.load(source, ep_group=where.ep_group)
    model.save_pretrained(folder)
    parallelize_qwen3_5(model, where.mesh, moe_mesh=where.moe_mesh)
    return full_state_dict(model)


def does_not_write(source, folder, ep):
    """What a model says that cannot write to `folder`, and sharded by FSDP2; and whether its ranks can go on."""
    where = runtime((dist.get_world_size(), 1), ep)
    model = qwen3_5.load(source, ep_group=where.ep_group)
    said = [_said(lambda: model.save_pretrained(folder))]
    parallelize_qwen3_5(model, where.mesh, moe_mesh=where.moe_mesh)
    said.append(_said(lambda: model.save_pretrained(folder)))
    ranks = torch.ones(())
    dist.all_reduce(ranks, group=where.ep_group)
    return said, ranks


def drawn(ep):
    """This rank's experts of a model with random weights, and the random number after it."""
    torch.manual_seed(5)
    model = qwen3_5.load(models.config().to_dict(), ep_group=runtime((dist.get_world_size(), 1), ep).ep_group)
    return experts_of(model), torch.rand(())


def train(model, where, first, last):
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    return optimizer, advance(model, optimizer, where, first, last)


def advance(model, optimizer, where, first, last):
    losses = []
    for number in range(first, last):
        chosen = ("tiny", "text", "padding", "tiny")[number % 2 :] + ("tiny",) * (number % 2)
        losses.append(backward(model, chosen, where, 100))
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def save(folder, shape, ep):
    """Two steps, a checkpoint, and two more: (state at the checkpoint, losses of the latter)."""
    where, model = runtime(shape, ep), sharded("experts", 0, shape, ep)
    install_reduction(model, where.device)
    optimizer, _ = train(model, where, 0, 2)
    save_checkpoint(folder, 2, model, optimizer, where, data={})
    return state(model, optimizer), advance(model, optimizer, where, 2, 4)


def resume(folder, shape, ep):
    where, model = runtime(shape, ep), sharded("experts", 1, shape, ep)
    install_reduction(model, where.device)
    optimizer = FusedAdamW(model.parameters(), lr=1e-2)
    load_checkpoint(f"{folder}/step_2", model, optimizer, where, data={})
    return state(model, optimizer), advance(model, optimizer, where, 2, 4)


def state(model, optimizer):
    """{parameter: [it, its moments], whole}, of rank 0; every DTensor of the state lies as its parameter does."""
    found = {}
    for key, p in model.named_parameters():
        moments = [optimizer.state[p][name] for name in ("exp_avg", "exp_avg_sq")]
        assert all(m.placements == p.placements and m.device_mesh == p.device_mesh for m in moments)
        found[published_name(key)] = [t.full_tensor().detach().clone() for t in (p, *moments)]
    return found if dist.get_rank() == 0 else None


def placements(shape, ep):
    """{placements of the experts}, {of the rest} and local shapes of the experts."""
    model = sharded("experts", 0, shape, ep)
    experts = experts_of(model)
    rest = {p.placements for key, p in model.named_parameters() if key not in experts}
    return {p.placements for p in experts.values()}, rest, {tuple(p.to_local().shape) for p in experts.values()}


def refused(shape, ep, mapping):
    """The message of a model that the meshes do not fit."""
    where = runtime(shape, ep)
    return _said(lambda: _over(qwen3_5.load(mapping, ep_group=where.ep_group), where, where.moe_mesh))


def misfits():
    where, mapping = runtime((2, 1), 2), models.config().to_dict()
    shared, alone = (qwen3_5.load(mapping, ep_group=group) for group in (where.ep_group, None))
    turned = DeviceMesh("cpu", [[1, 0]], mesh_dim_names=("ep_shard", "ep"))
    nameless = DeviceMesh("cpu", [[0, 1]])
    calls = [
        lambda: _over(shared, where, None),
        lambda: _over(alone, where, where.moe_mesh),
        lambda: _over(shared, where, where.mesh),
        lambda: _over(shared, where, turned),
        lambda: _over(models.build(), where, where.moe_mesh),
        lambda: qwen3_5.load(mapping, ep_group=2),
        lambda: _over(shared, where, nameless),
    ]
    return [_said(call) for call in calls]


def other_neighbours():
    """The messages where the ranks of a model's ep, and of its cp, are as many as the mesh's, but others."""
    pairs = [dist.new_group(pair) for pair in ([0, 2], [1, 3])]
    group, where = pairs[dist.get_rank() % 2], runtime((2, 2), 2)
    mapping = models.config().to_dict()
    of_ep = qwen3_5.load(mapping, ep_group=group, cp=ContextParallel(where.mesh.get_group("cp")))
    of_cp = qwen3_5.load(mapping, ep_group=where.ep_group, cp=ContextParallel(group))
    return [_said(lambda model=model: _over(model, where, where.moe_mesh)) for model in (of_ep, of_cp)]


def _over(model, where, moe_mesh):
    parallelize_qwen3_5(model, where.mesh, moe_mesh=moe_mesh)


def _said(call):
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
