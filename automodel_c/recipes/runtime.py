"""Ranks, devices, threads and random numbers of a run."""

import os
import random
import warnings
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..parallel import megatron
from ..parallel.pipeline import Channels, PipelineParallel
from ..parallel.pipeline_order import stages_per_rank


class UsageError(Exception):
    """The recipe cannot be carried out as written; the message names the key."""


@dataclass
class Runtime:
    """Where this process stands. mesh has the dimensions "dp" and "cp", and "tp" where there is more than one:
    neighbours in "cp" and "tp" share every microbatch, and what they make of it are parts that add up to it.
    moe_mesh, None where every rank holds all experts, has the dimensions "ep_shard" and "ep" over the same ranks:
    neighbours in "ep" share the experts of every layer. pp: which stages of a pipeline they all hold; channels lead to
    the ranks of the others, pp_group has this rank's column."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh
    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    moe_mesh: DeviceMesh | None = None
    tp_rank: int = 0
    tp_size: int = 1
    pp: PipelineParallel = field(default_factory=PipelineParallel)
    pp_group: object = None
    channels: Channels | None = None

    @property
    def tp_mesh(self):
        """The ranks that share this one's split weights, None where it holds all."""
        return self.mesh["tp"] if self.tp_size > 1 else None

    @property
    def ep_size(self):
        return 1 if self.moe_mesh is None else self.moe_mesh["ep"].size()

    @property
    def ep_group(self):
        """The ranks that share this one's experts, None where it holds all."""
        return None if self.moe_mesh is None else self.moe_mesh.get_group("ep")

    @property
    def is_main(self):
        return self.rank == 0

    @property
    def speaks(self):
        """Whether this rank counts what all that share its microbatches see: sums over all ranks then hold it once.
        Of a pipeline it is one that holds the last stage, for that has the logits."""
        return self.cp_rank == self.tp_rank == 0 and self.pp.is_last


@contextmanager
def start_ranks(recipe):
    """Joins the process group of torchrun's environment (a group of one without it), and leaves it at the end.

    UsageError before it joins where the recipe does not fit the number of ranks.
    """
    backend = recipe.dist_env.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    device, shape = torch.device("cpu"), _started_shape(recipe.distributed, world)
    if "nccl" in backend:
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
        _check_gpu(backend, device.index)
        torch.cuda.set_device(device)
    if recipe.distributed.strategy == "megatron_fsdp":
        _check_megatron(device)
    store = None if "RANK" in os.environ else dist.HashStore()
    dist.init_process_group(
        backend,
        rank=rank,
        world_size=world,
        store=store,
        device_id=device if device.type == "cuda" else None,
        timeout=timedelta(minutes=recipe.dist_env.timeout_minutes),
    )
    try:
        with warnings.catch_warnings():
            # transformers' models return views that nobody writes to, which is all that FSDP2 warns about
            warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
            yield runtime_over(shape, device, recipe.distributed.ep_size or 1, stages_on(recipe.pipeline))
    finally:
        dist.destroy_process_group()


def _check_gpu(backend, index):
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= seen:
        raise UsageError(
            f"dist_env.backend={backend} gives each rank of this machine a GPU: rank {index} has none, torch sees"
            f" {seen} (automodel-c doctor says what is missing; dist_env.backend=gloo runs on the CPU)"
        )


def _check_megatron(device):
    try:
        megatron.require(device.type)
    except NotImplementedError as error:
        raise UsageError(str(error)) from None


def _started_shape(section, world):
    """mesh_shape, which says how more ranks are started where nobody has started any."""
    try:
        return mesh_shape(section, world)
    except UsageError as error:
        raise UsageError(f"{error}{'' if 'RANK' in os.environ else '; --nproc N starts N'}") from None


def runtime_over(shape, device, ep=1, chunks=1):
    """A Runtime of the process group that there is. shape: as of mesh_shape; tp and pp may be left out. ep: the ranks
    that share experts, a divisor of all but pp. chunks: stages of a pipeline on each rank."""
    dp, cp, tp, pp = (*shape, 1, 1)[:4]
    sizes, world = {"dp": dp, "cp": cp, **({"tp": tp} if tp > 1 else {})}, dp * cp * tp * pp
    mesh, column = _mesh(device, pp, sizes)
    moe_mesh = _mesh(device, pp, {"ep_shard": dp * cp * tp // ep, "ep": ep})[0] if ep > 1 else None
    dp_rank, cp_rank, tp_rank = (*mesh.get_coordinate(), 0)[:3]
    of_pipeline = {}
    if pp > 1:
        columns = torch.arange(world).view(pp, -1).T
        of_pipeline = {
            "pp": PipelineParallel(column.get_local_rank(), pp, chunks),
            "pp_group": column.get_group(),
            "channels": Channels(columns, chunks),
        }
    return Runtime(dist.get_rank(), world, device, mesh, dp_rank, dp, cp_rank, cp, moe_mesh, tp_rank, tp, **of_pipeline)


def _mesh(device, pp, sizes):
    """(mesh of the ranks that hold the same stages as this one, that of its column of a pipeline or None)."""
    names = tuple(sizes)
    if pp == 1:
        return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=names), None
    whole = init_device_mesh(device.type, (pp, *sizes.values()), mesh_dim_names=("pp", *names))
    return whole[names], whole["pp"]


def stages_on(section):
    """Stages of a pipeline on each rank, by a schema.Pipeline section."""
    return stages_per_rank(section.pp_schedule, section.stages_per_rank)


def mesh_shape(section, world):
    """(dp, cp, tp, pp) of `world` ranks by a schema.Distributed section. UsageError where they do not multiply to it,
    or where ep_size does not divide those of a stage."""
    ep, cp, tp, pp = (getattr(section, f"{name}_size") or 1 for name in ("ep", "cp", "tp", "pp"))
    if world % ep:
        raise UsageError(f"distributed.ep_size={ep}, but {world} ranks were started: no multiple of it")
    over = " and ".join(f"distributed.{name}_size={n}" for name, n in (("cp", cp), ("tp", tp), ("pp", pp)) if n > 1)
    if world % (cp * tp * pp):
        raise UsageError(f"{over}, but {world} ranks were started: no multiple of it")
    if world // pp % ep:
        raise UsageError(
            f"distributed.ep_size={ep} and distributed.pp_size={pp}, but {world} ranks were started, no multiple"
        )
    dp = section.dp_size or world // (cp * tp * pp)
    if dp * cp * tp * pp != world:
        over = f" and {over}" if over else ""
        raise UsageError(f"distributed.dp_size={dp}{over}, but {world} ranks were started")
    return dp, cp, tp, pp


def seed_model(recipe):
    """Seeds torch alike on all ranks, so that weights drawn from it are equal."""
    torch.manual_seed(recipe.seed)
    if recipe.rng.deterministic:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = False


def seed_training(recipe, rank):
    """Seeds every generator for training; with rng.ranked each rank has its own stream."""
    seed = recipe.rng.seed + (rank if recipe.rng.ranked else 0)
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state(device):
    """The state of all generators as tensors."""
    _, keys, position, has_gauss, gauss = np.random.get_state()
    version, numbers, next_gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(keys.astype(np.int64)),
        "numpy_position": torch.tensor([position, has_gauss]),
        "numpy_gauss": torch.tensor(gauss, dtype=torch.float64),
        "python": torch.tensor([version, *numbers], dtype=torch.int64),
        "python_gauss": torch.tensor(float("nan") if next_gauss is None else next_gauss, dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state, device):
    """Puts back what rng_state returned."""
    torch.set_rng_state(state["torch"])
    position, has_gauss = state["numpy_position"].tolist()
    keys = state["numpy"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, position, has_gauss, state["numpy_gauss"].item()))
    version, *numbers = state["python"].tolist()
    gauss = state["python_gauss"].item()
    random.setstate((version, tuple(numbers), None if gauss != gauss else gauss))
    if device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"], device)
