"""Ranks, devices, threads and random numbers of a run."""

import os
import random
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh


class UsageError(Exception):
    """The recipe cannot be carried out as written; the message names the key."""


@dataclass
class Runtime:
    """Where this process stands. mesh has the dimensions "dp" and "cp": neighbours in "cp" share every microbatch, and
    what they make of it are parts that add up to it. moe_mesh, None where every rank holds all experts, has the
    dimensions "ep_shard" and "ep" over the same ranks: neighbours in "ep" share the experts of every layer."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh
    dp_rank: int
    dp_size: int
    cp_rank: int
    cp_size: int
    moe_mesh: DeviceMesh | None = None

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
        """Whether this rank counts what its whole "cp" group sees: sums over all ranks then hold it once."""
        return self.cp_rank == 0


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
            yield runtime_over(shape, device, recipe.distributed.ep_size or 1)
    finally:
        dist.destroy_process_group()


def _check_gpu(backend, index):
    seen = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= seen:
        raise UsageError(
            f"dist_env.backend={backend} gives each rank of this machine a GPU: rank {index} has none, torch sees"
            f" {seen} (automodel-c doctor says what is missing; dist_env.backend=gloo runs on the CPU)"
        )


def _started_shape(section, world):
    """mesh_shape, which says how more ranks are started where nobody has started any."""
    try:
        return mesh_shape(section, world)
    except UsageError as error:
        raise UsageError(f"{error}{'' if 'RANK' in os.environ else '; --nproc N starts N'}") from None


def runtime_over(shape, device, ep=1):
    """A Runtime of the process group that there is. shape: as of mesh_shape. ep: the ranks that share experts, a
    divisor of all."""
    mesh, moe_mesh, world = init_device_mesh(device.type, shape, mesh_dim_names=("dp", "cp")), None, shape[0] * shape[1]
    if ep > 1:
        moe_mesh = init_device_mesh(device.type, (world // ep, ep), mesh_dim_names=("ep_shard", "ep"))
    dp_rank, cp_rank = mesh.get_coordinate()
    return Runtime(dist.get_rank(), world, device, mesh, dp_rank, shape[0], cp_rank, shape[1], moe_mesh)


def mesh_shape(section, world):
    """(dp, cp) of `world` ranks by a schema.Distributed section. UsageError where they do not multiply to it, or where
    ep_size does not divide it."""
    ep = section.ep_size or 1
    if world % ep:
        raise UsageError(f"distributed.ep_size={ep}, but {world} ranks were started: no multiple of it")
    cp = section.cp_size or 1
    if world % cp:
        raise UsageError(f"distributed.cp_size={cp}, but {world} ranks were started: no multiple of it")
    dp = section.dp_size or world // cp
    if dp * cp != world:
        over = f" and distributed.cp_size={cp}" if cp > 1 else ""
        raise UsageError(f"distributed.dp_size={dp}{over}, but {world} ranks were started")
    return dp, cp


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
