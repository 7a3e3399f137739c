"""What a recipe's `prewarm` section has done before the first step: handles and communicators are made, so that the
first step does not wait for them."""

import logging

import torch
import torch.distributed as dist

_SIZE = 16
_log = logging.getLogger(__name__)


def prewarm(section, runtime):
    """Carries out a schema.Prewarm on every rank. Returns {key: whether it was done}.

    A part that fails is a warning, and the next one runs. Generators of random numbers are as they were. The autotune
    keys do nothing: no kernel of this package tunes itself.
    """
    asked = {name: getattr(section, name) for name in _PARTS}
    return {name: _carried_out(name, runtime) for name, wanted in asked.items() if wanted}


def _carried_out(name, runtime):
    devices = [runtime.device] if runtime.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices):
            return _PARTS[name](runtime)
    except Exception as error:
        _log.warning("prewarm.%s failed: %s: %s", name, type(error).__name__, error)
        return False


def _cublas_backward(runtime):
    """A product and its gradients in the dtypes that training computes in; nothing on a CPU."""
    if runtime.device.type != "cuda":
        return False
    for dtype in (torch.float32, torch.bfloat16):
        a, b = (torch.ones(_SIZE, _SIZE, device=runtime.device, dtype=dtype, requires_grad=True) for _ in range(2))
        (a @ b).sum().backward()
    torch.cuda.synchronize(runtime.device)
    return True


def _comm_groups(runtime):
    """One number through every group that is going to be used."""
    for mesh in (runtime.mesh, runtime.moe_mesh):
        for name in () if mesh is None else mesh.mesh_dim_names:
            if mesh[name].size() > 1:
                dist.all_reduce(torch.ones(1, device=runtime.device), group=mesh.get_group(name))
    if runtime.pp_group is not None:
        dist.all_reduce(torch.ones(1, device=runtime.device), group=runtime.pp_group)
        runtime.channels.open(runtime.device)
    return True


_PARTS = {"cublas_backward": _cublas_backward, "comm_groups": _comm_groups}
