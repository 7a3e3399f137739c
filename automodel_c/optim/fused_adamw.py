"""AdamW in one C call a step over every parameter of every group."""

import math

import torch

from automodel_c import _amcore
from automodel_c.optim.local import any_dtensor, host_scalar, to_local

_MASTER_WEIGHTS = (True, False, "remainder")
_STATE_DTYPES = (torch.float32, torch.bfloat16)


class FusedAdamW(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter, 2019) for float32 and bfloat16 parameters, plain or DTensor, empty ones included.

    `params` as for every torch optimizer; a group may override lr, betas, eps and weight_decay. `lr` is a number or a
    float32 tensor of one element, read on the parameters' device. A bfloat16 parameter is stepped through
      master_weights=True         a float32 master,
      master_weights="remainder"  an int16 remainder: master bits = (p << 16) + remainder,
      master_weights=False        nothing: it is rounded once a step.
    State of a parameter p, made at the first step: `step` float32 [], `exp_avg` and `exp_avg_sq` in `state_dtype`
    (float32 or bfloat16) and `master_param` where there is one, all of p's shape and strides, DTensors if p is one.

    Parameters of one device are stepped by one call, once everything on every device is checked: after ValueError (a
    shape, strides with gaps, strides unlike the parameter's, memory shared by two of them) or TypeError (another dtype)
    all is as it was. A parameter without gradient is skipped and its step does not count.
    """

    def __init__(
        self,
        params,
        lr=1e-3,
        betas=(0.9, 0.999),
        eps=1e-8,
        weight_decay=0.01,
        *,
        master_weights=True,
        state_dtype=torch.float32,
    ):
        if not any(master_weights is known or master_weights == known for known in _MASTER_WEIGHTS):
            raise ValueError(f"FusedAdamW: master_weights is {master_weights!r}, not one of {_MASTER_WEIGHTS}")
        if state_dtype not in _STATE_DTYPES:
            raise TypeError(f"FusedAdamW: state_dtype is {state_dtype}, torch.float32 or torch.bfloat16 is needed")
        self.master_weights = master_weights
        self.state_dtype = state_dtype
        self._step_supports_amp_scaling = True  # GradScaler then sets self.grad_scale and self.found_inf
        self._state_complete = False
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group):
        checked = {**self.defaults, **param_group}
        lr = checked["lr"]
        if isinstance(lr, torch.Tensor) and lr.numel() != 1:
            raise ValueError(f"FusedAdamW: lr is a tensor of {lr.numel()} elements, 1 is needed")
        for name in ("lr", "eps", "weight_decay"):
            if not 0 <= float(checked[name]) < math.inf:
                raise ValueError(
                    f"FusedAdamW: {name} is {float(checked[name])}, a finite number of at least 0 is needed"
                )
        betas = tuple(checked["betas"])
        if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"FusedAdamW: betas are {betas}, two numbers in [0, 1) are needed")
        super().add_param_group(param_group)
        self._state_complete = False

    @torch.no_grad()
    def step(self, closure=None, *, found_inf=None, grad_scale=None):
        """One step; returns what `closure`, run first with gradients enabled, returned.

        found_inf: one element; not 0 makes the step a no-op. grad_scale: one element; gradients are divided by it as
        they are read. Both default to the attributes that GradScaler sets.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf = getattr(self, "found_inf", None) if found_inf is None else found_inf
        grad_scale = getattr(self, "grad_scale", None) if grad_scale is None else grad_scale
        if found_inf is not None:
            found_inf = host_scalar(found_inf, None)
            if found_inf.is_cpu and found_inf.numel() == 1 and found_inf.item() != 0:
                return loss
        if not self._state_complete:
            self.make_state()
        if len(self._devices) > 1:
            for device in self._devices:
                self._step_on(device, torch.ones((), device=device), grad_scale, check_only=True)
        for device in self._devices:
            self._step_on(device, found_inf, grad_scale)
        return loss

    def _step_on(self, device, found_inf, grad_scale, *, check_only=False):
        """One call for the parameters on `device`; check_only comes with a found_inf that is not 0."""
        params, grads, group_sizes = self._with_gradients(device if len(self._devices) > 1 else None)
        states = [self.state[p] for p in params]
        if not all(states):
            self.make_state()
            states = [self.state[p] for p in params]
        exp_avgs = [s["exp_avg"] for s in states]
        exp_avg_sqs = [s["exp_avg_sq"] for s in states]
        none = torch.empty(0, device=device)
        masters = [s.get("master_param", none) for s in states]
        if all(m is none for m in masters):
            masters = None
        stepped = params
        if any_dtensor(params):
            params, grads, exp_avgs, exp_avg_sqs = (
                [to_local(t) for t in tensors] for tensors in (params, grads, exp_avgs, exp_avg_sqs)
            )
            masters = masters and [to_local(t) for t in masters]
        if any(map(torch.Tensor.is_neg, grads)):  # DLPack does not tell that the memory holds the opposite sign
            grads = [grad.resolve_neg() for grad in grads]
        lrs = [group["lr"] for group in self.param_groups]
        on_device = [isinstance(lr, torch.Tensor) and lr.device == device != torch.device("cpu") for lr in lrs]
        betas = [group["betas"] for group in self.param_groups]
        _amcore.adam_step(
            params,
            exp_avgs,
            exp_avg_sqs,
            [s["step"] for s in states],
            grads,
            masters=masters,
            group_sizes=group_sizes,
            lr=[0.0 if there else float(lr) for lr, there in zip(lrs, on_device, strict=True)],
            beta1=[float(beta1) for beta1, _ in betas],
            beta2=[float(beta2) for _, beta2 in betas],
            eps=[float(group["eps"]) for group in self.param_groups],
            weight_decay=[float(group["weight_decay"]) for group in self.param_groups],
            lr_tensors=[lr if there else none for lr, there in zip(lrs, on_device, strict=True)]
            if any(on_device)
            else None,
            found_inf=host_scalar(found_inf, device),
            grad_scale=host_scalar(grad_scale, device),
        )
        if check_only:
            return
        torch.autograd.graph.increment_version(stepped)  # states are in nobody's graph
        if params is not stepped:
            torch.autograd.graph.increment_version(params)

    def _with_gradients(self, device):
        """(parameters, gradients, how many of each group) of what has a gradient, on `device` or anywhere (None)."""
        params, grads, sizes = [], [], []
        for group in self.param_groups:
            mine = group["params"] if device is None else [p for p in group["params"] if p.device == device]
            theirs = [p.grad for p in mine]
            if any(grad is None for grad in theirs):
                mine = [p for p, grad in zip(mine, theirs, strict=True) if grad is not None]
                theirs = [grad for grad in theirs if grad is not None]
            params += mine
            grads += theirs
            sizes.append(len(mine))
        return params, grads, sizes

    @torch.no_grad()
    def make_state(self):
        """Make what is missing of the state of every parameter that can have a gradient, which the first step would."""
        self._devices = list(dict.fromkeys(p.device for group in self.param_groups for p in group["params"]))
        for group in self.param_groups:
            for p in group["params"]:
                if not p.requires_grad and p.grad is None:
                    continue
                state = self.state[p]
                if "step" not in state:
                    state["step"] = torch.zeros((), dtype=torch.float32, device=p.device)
                for name in ("exp_avg", "exp_avg_sq"):
                    if name not in state:
                        state[name] = torch.zeros_like(p, dtype=self.state_dtype, memory_format=torch.preserve_format)
                if p.dtype == torch.bfloat16 and self.master_weights and "master_param" not in state:
                    state["master_param"] = (
                        torch.zeros_like(p, dtype=torch.int16, memory_format=torch.preserve_format)
                        if self.master_weights == "remainder"
                        else p.detach().to(torch.float32, memory_format=torch.preserve_format)
                    )
        self._state_complete = True

    def load_state_dict(self, state_dict):
        """As torch's, but every state keeps the dtype that it was saved with; it moves to its parameter's device."""
        hold = self.register_load_state_dict_pre_hook(_hold_tensors)
        try:
            super().load_state_dict(state_dict)
        finally:
            hold.remove()

    def __getstate__(self):
        return {**super().__getstate__(), "master_weights": self.master_weights, "state_dtype": self.state_dtype}

    def __setstate__(self, state):
        super().__setstate__(state)
        for p, entry in self.state.items():
            for name, value in entry.items():
                if isinstance(value, _Held):
                    entry[name] = value.tensor.to(p.device)
            if not isinstance(entry.get("step", p), torch.Tensor):
                entry["step"] = torch.tensor(float(entry["step"]), dtype=torch.float32, device=p.device)
        self._step_supports_amp_scaling = True
        self._state_complete = False


class _Held:
    """A state tensor on its way through torch's load_state_dict, which would cast it to the parameter's dtype."""

    def __init__(self, tensor):
        self.tensor = tensor


def _hold_tensors(_optimizer, state_dict):
    held = {
        key: {name: _Held(v) if isinstance(v, torch.Tensor) else v for name, v in entry.items()}
        for key, entry in state_dict["state"].items()
    }
    return {**state_dict, "state": held}
