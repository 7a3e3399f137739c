"""Keeps the gate parameters of gated-delta layers in fp32 under any mixed-precision policy."""

from torch import nn

HOLDER = "gate_parameters"
_NAMES = ("A_log", "dt_bias")


class GateParameters(nn.Module):
    """Holds A_log and dt_bias [value heads] of one layer, so that they can be a unit of their own."""

    def __init__(self, layer):
        super().__init__()
        for name in _NAMES:
            held = getattr(layer, name)
            setattr(self, name, nn.Parameter(held.detach().float(), requires_grad=held.requires_grad))

    def forward(self, _):
        """Copies: a unit's own parameters are gone once its forward has returned. Takes something, whatever it is: on
        CUDA the FSDP2 of torch 2.11 fails on a root's forward without arguments, and made again this is one."""
        return tuple(getattr(self, name).clone() for name in _NAMES)


def hold_gates(model):
    """Moves A_log and dt_bias of every gated-delta layer into a GateParameters and returns these.

    The layer finds them under their names during its forward. State-dict names gain a part; see published_name.
    """
    holders = []
    for layer in [m for m in model.modules() if all(name in m._parameters for name in _NAMES)]:
        holder = GateParameters(layer)
        for name in _NAMES:
            delattr(layer, name)
        layer.add_module(HOLDER, holder)
        layer.register_forward_pre_hook(_lend)
        layer.register_forward_hook(_take_back, always_call=True)
        holders.append(holder)
    return holders


def published_name(name):
    """The name of a parameter in published checkpoints."""
    return name.replace(f".{HOLDER}.", ".")


def _lend(layer, _):
    for name, value in zip(_NAMES, getattr(layer, HOLDER)(None), strict=True):
        setattr(layer, name, value)


def _take_back(layer, *_):
    for name in _NAMES:
        layer.__dict__.pop(name, None)
