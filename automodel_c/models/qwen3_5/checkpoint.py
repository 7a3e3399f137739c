"""Published checkpoints: a directory of config.json and safetensors, read into a model and written from one.

Experts come in two key styles: grouped (`experts.gate_up_proj` [E, 2I, H], `experts.down_proj` [E, H, I], as the model
holds them) and split (`experts.{e}.gate_proj.weight`, `.up_proj.weight` [I, H], `.down_proj.weight` [H, I]). The
decoder and the MTP head have each their own; the keys tell which.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from automodel_c.parallel import faults
from automodel_c.sums import write_sums

from ..gates import published_name
from .experts import whole_experts
from .quantized import DTYPES, SCALE, block_size, dequantise, scale_shape, scale_slices
from .shards import Part

LAYOUTS = ("grouped", "split")
_HEAD = "lm_head.weight"
_PARTS = {"decoder": "model.language_model.layers.", "mtp": "mtp.layers."}
_EXPERTS = re.compile(r"^(?P<layer>.*\.layers\.\d+)\.mlp\.experts\.(?:(?P<expert>\d+)\.)?(?P<what>\w+?)(?:\.weight)?$")
_ITEMSIZE = {  # of safetensors' names
    **{"F64": 8, "F32": 4, "F16": 2, "BF16": 2},
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8"), 1),
}
_NOT_OURS = ("torch_dtype", "quantization_config")  # of a config.json: what is written is not quantized
_log = logging.getLogger(__name__)


class Files:
    """The tensors of a model directory, by the model's own keys.

    Attributes: bytes_read, what of the files `fill` has read, or on the meta device would have; total_bytes, of all
    tensors that belong to the model.
    """

    def __init__(self, folder):
        self.folder = Path(folder)
        self.at = {}  # key -> (file, the key there)
        for name, keys in _contents(self.folder):
            for key in keys:
                if not key.endswith("rotary_emb.inv_freq"):  # is made from the configuration
                    self.at[_normalised(key)] = (name, key)
        bases = [key.removesuffix(SCALE) for key in self.at if key.endswith(SCALE)]
        self.scales = {base: self.at.pop(base + SCALE) for base in bases if base in self.at}
        self.layouts = {part: _layout(self.at, part, prefix) for part, prefix in _PARTS.items()}
        self.bytes_read, self.tied = 0, False
        self._open = {}

    def with_mtp(self, text):
        """A TextConfig with as many MTP layers as there are in the files."""
        found = {key.split(".")[2] for key in self.at if key.startswith("mtp.layers.")}
        if text.mtp_num_hidden_layers != len(found):
            _log.warning(
                "%s: config.json has mtp_num_hidden_layers %d, the files hold %d layers: these count",
                self.folder, text.mtp_num_hidden_layers, len(found),
            )  # fmt: skip
        return dataclasses.replace(text, mtp_num_hidden_layers=len(found))

    @property
    def total_bytes(self):
        return sum((self.folder / name).stat().st_size for name in {name for name, _ in self.at.values()})

    @torch.no_grad()
    def fill(self, model, whole=None):
        """Writes every parameter of `model` from the files, in its own dtype; on the meta device shapes are checked
        alone. whole: the model with the layers of all ranks, whose keys are accounted for, where it has not all itself.
        Of what ranks share it reads this rank's part. Blocks of 8-bit floats are multiplied by their scales. Returns
        the layouts of the experts, {"decoder": ..., "mtp": ...}.

        RuntimeError names the keys that are missing and those that are left over; ValueError a shape that disagrees;
        NotImplementedError another kind of quantized weights.
        """
        block, sources = block_size(model.config.source), {}
        whole = model if whole is None else whole
        held = {published_name(name): tensor for name, tensor in model.state_dict().items()}
        for key in map(published_name, whole.state_dict()):
            sources |= dict(self._sources(key, held.get(key), model.config.text.num_experts, model.ep))
        self.tied = whole.config.tie_word_embeddings
        self._account(sources)
        for key in sorted(sources, key=self.at.get):  # a file after another
            if sources[key] is not None:
                self._read(key, sources[key], block)
        return dict(self.layouts)

    def _sources(self, key, tensor, experts, ep):
        """(key in the files, the `Part` of it that this rank holds, None where it holds nothing)."""
        match = _EXPERTS.match(key)
        if not match:
            yield key, None if tensor is None else Part.of(tensor)
            return
        part = None if tensor is None else Part.of(tensor, ep.range(experts)[0], experts)
        if self.layouts[_part(key)] != "split":
            yield key, part
            return
        for expert in range(experts):
            yield from _split(match["layer"], match["what"], expert, part and part.row(expert), _halves)

    def _account(self, sources):
        missing, left = [k for k in sources if k not in self.at], [k for k in self.at if k not in sources]
        if self.tied and left == [_HEAD]:  # written though it is the embedding
            left = []
        said = [f"{w}: {_listed(keys)}" for w, keys in (("missing", missing), ("not the model's", left)) if keys]
        if said:
            raise RuntimeError(f"load: the files of {self.folder} do not fit config.json; " + "; ".join(said))

    def _read(self, key, part, block):
        """Fills a `Part` of a key."""
        name, there = self.at[key]
        file = self._file(name)
        stored = file.get_slice(there)
        _check_shape(key, name, stored.get_shape(), part.shape)
        scale = self._scale(key, part, block)
        if not part.tensor.numel():
            return
        self.bytes_read += part.tensor.numel() * _ITEMSIZE.get(stored.get_dtype(), 0)
        if part.tensor.is_meta:
            return
        values = file.get_tensor(there) if part.whole else stored[part.slices]
        if scale is not None:
            values = dequantise(values, scale, part.slices, block)
        elif values.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
            kind = f"without {key}{SCALE}" if values.dtype in DTYPES else "which is not read"
            raise NotImplementedError(f"load: {key} is {values.dtype} in {name}, {kind}")
        part.tensor.copy_(values)

    def _scale(self, key, part, block):
        """The scales of the blocks that a part lies in, None where the key has none or the part no numbers."""
        if key not in self.scales:
            return None
        name, there = self.scales[key]
        stored = self._file(name).get_slice(there)
        if len(part.shape) < 2:
            raise ValueError(f"load: {key}{SCALE} belongs to a weight of {len(part.shape)} axes, 2 are needed")
        _check_shape(key + SCALE, name, stored.get_shape(), scale_shape(part.shape, block))
        if not part.tensor.numel():
            return None
        slices = scale_slices(part.slices, block)
        self.bytes_read += math.prod(s.stop - s.start for s in slices) * _ITEMSIZE.get(stored.get_dtype(), 0)
        return None if part.tensor.is_meta else stored[slices]

    def _file(self, name):
        if name not in self._open:
            self._open = {name: safe_open(self.folder / name, framework="pt")}
        return self._open[name]


def _check_shape(key, name, found, needed):
    if list(found) != list(needed):
        raise ValueError(f"load: {key} has shape {list(found)} in {name}, the model needs {list(needed)}")


def _halves(part):
    """The parts of the gate and of the other half of one expert's `gate_up_proj`."""
    middle = part.shape[0] // 2
    return part.rows(0, middle), part.rows(middle, 2 * middle)


def _contents(folder):
    """[(file name, its keys)] of all safetensors that belong to the model."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = {}
        for key, name in json.loads(index.read_text())["weight_map"].items():
            files.setdefault(name, []).append(key)
        absent = [name for name in files if not (folder / name).is_file()]
        if absent:
            raise ValueError(f"load: {index.name} of {folder} names files that are not there: {_listed(absent)}")
        return sorted(files.items())
    names = sorted(p.name for p in folder.glob("*.safetensors"))
    names = ["model.safetensors"] if "model.safetensors" in names else names
    if not names:
        raise ValueError(f"load: {folder} holds no *.safetensors")
    contents = []
    for name in names:
        with safe_open(folder / name, framework="pt") as file:
            contents.append((name, list(file.keys())))
    return contents


def _normalised(key):
    """The model's key for one that lacks or has too much of the prefix `model.`."""
    if key.startswith(("language_model.", "visual.")):
        return f"model.{key}"
    return key.removeprefix("model.") if key.startswith(("model.lm_head.", "model.mtp.")) else key


def _part(key):
    return next(part for part, prefix in _PARTS.items() if key.startswith(prefix))


def _layout(keys, part, prefix):
    found = {}
    for key in keys:
        match = _EXPERTS.match(key) if key.startswith(prefix) else None
        if match:
            found.setdefault("grouped" if match["expert"] is None else "split", key)
    if len(found) > 1:
        raise ValueError(f"load: experts of the {part} in two key styles: {found['grouped']} and {found['split']}")
    return next(iter(found), "grouped")


def _split(layer, what, expert, whole, halves=lambda whole: whole.chunk(2)):
    """(split key, its part of one expert's grouped weight, None of None)."""
    base = f"{layer}.mlp.experts.{expert}"
    if what == "down_proj":
        yield f"{base}.down_proj.weight", whole
    else:
        gate, up = (None, None) if whole is None else halves(whole)
        yield f"{base}.gate_proj.weight", gate
        yield f"{base}.up_proj.weight", up


def _listed(keys, most=8):
    more = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + more


def save(model, folder, *, experts=None, shard_bytes=5 * 10**9, state=None, extra=None):
    """Writes a Qwen3_5 as a directory that transformers and `load` read.

    experts: "split", what transformers 5.24 writes, or "grouped"; None is as the checkpoint had it that the model was
    loaded from, else split. shard_bytes: a file holds at most so much. state: the whole tensors by name, where the
    model's own are parts of them. extra(folder): writes what else belongs there. Written beside and renamed: `folder`
    is whole or as it was.

    Where ranks share the experts and no state is given, all ranks of one such group call it, and its first one writes;
    what it raises is a `RankFailure` on the others, and the group stays usable. ValueError for weights that FSDP2
    shards and no state: `models.export.export_hf` gathers them.
    """
    if experts not in (None, *LAYOUTS):
        raise ValueError(f"save: experts is {experts!r}, one of {', '.join(LAYOUTS)} is needed")
    if state is None and any(isinstance(p, DTensor) for p in model.parameters()):
        raise ValueError(
            "save: the weights are shards of several ranks; models.export.export_hf gathers and writes them"
        )
    layouts = {part: experts or model.expert_layouts.get(part, "split") for part in _PARTS}
    group = model.ep.group if state is None else None
    first = group is None or model.ep.rank == 0
    if state is None:
        state = {name: tensor for name, tensor in whole_experts(model) if first}
    with _first_alone(group):
        if first:
            with written_beside(folder) as beside:
                _write_shards(_published(state, layouts), beside, shard_bytes)
                (beside / "config.json").write_text(json.dumps(_config(model), indent=2) + "\n")
                if extra is not None:
                    extra(beside)


@contextlib.contextmanager
def _first_alone(group):
    """Around what the first rank of a group does while the others wait; what it raises is raised on all."""
    error = None
    try:
        yield
    except Exception as raised:
        error = raised
    if group is not None:
        told = [error and f"{type(error).__name__}: {error}"]
        dist.broadcast_object_list(told, group=group, group_src=0)
        if told[0] and not error:
            raise faults.RankFailure(dist.get_global_rank(group, 0), told[0])
    if error is not None:
        raise error


@contextlib.contextmanager
def written_beside(folder):
    """A new folder to write into, which gets its SHA256SUMS and takes the place of `folder` when nothing was raised."""
    folder = Path(folder)
    beside = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    beside.mkdir(parents=True)
    try:
        yield beside
        write_sums(beside)
        take_place(beside, folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def take_place(beside, folder):
    """Renames `beside` to `folder`. What was there is renamed first and deleted last: nothing that is called `folder`
    is ever half of one, wherever the process is killed."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old.tmp")
    with contextlib.suppress(FileNotFoundError):
        folder.rename(old)
    try:
        beside.rename(folder)
    except OSError:
        with contextlib.suppress(OSError):
            old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _config(model):
    text = model.config.text
    if model.pp.stages == 1:
        text = dataclasses.replace(text, mtp_num_hidden_layers=0 if model.mtp is None else len(model.mtp.layers))
    mapping = dataclasses.replace(model.config, text=text).to_dict()
    mapping["text_config"] = {k: v for k, v in mapping["text_config"].items() if k not in _NOT_OURS}
    dtype = str(next(p for p in model.parameters() if p.ndim > 1).dtype).removeprefix("torch.")
    return {**{k: v for k, v in mapping.items() if k not in _NOT_OURS}, "dtype": dtype}


def _published(state, layouts):
    """(key, tensor) of a state dict in the wanted layouts."""
    for name, tensor in state.items():
        key = published_name(name)
        match = _EXPERTS.match(key)
        if match and layouts[_part(key)] == "split":
            for expert, whole in enumerate(tensor):
                yield from _split(match["layer"], match["what"], expert, whole)
        else:
            yield key, tensor


def _write_shards(tensors, folder, shard_bytes):
    shards, held, size = [], {}, 0

    def flush():
        shards.append(list(held))
        save_file(held, folder / f"{len(shards)}.safetensors", metadata={"format": "pt"})
        held.clear()

    total = 0
    for key, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if held and size + nbytes > shard_bytes:
            flush()
            size = 0
        held[key] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        size, total = size + nbytes, total + nbytes
    flush()
    if len(shards) == 1:
        (folder / "1.safetensors").rename(folder / "model.safetensors")
        return
    weight_map = {}
    for number, keys in enumerate(shards, 1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{number}.safetensors").rename(folder / name)
        weight_map |= dict.fromkeys(keys, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
