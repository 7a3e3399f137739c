"""The whole model: a packed batch in, a loss out."""

import dataclasses

import numpy as np
import torch
from torch import nn

from automodel_c.parallel import ContextParallel, alarms, megatron
from automodel_c.parallel.exchange import exchange
from automodel_c.parallel.experts import ExpertParallel
from automodel_c.parallel.frame_plan import FrameSharding
from automodel_c.parallel.pipeline import PipelineParallel
from automodel_c.parallel.tensor import TensorParallel

from .checkpoint import Files, save
from .config import read_config
from .experts import Experts, auxiliary_loss, over_ranks
from .frames import see
from .initialise import initialise
from .layers import Head, through_head
from .mtp import LOSS_SCALE, MTP
from .pipeline import auxiliary_out, auxiliary_slope, total_load
from .step import IGNORE, Batch, OnHost
from .tensor import DIMS, check_sizes, head_style, plan_of
from .text import DecoderLayer, TextModel
from .vision import VisionModel

RECOMPUTE = (False, None, True, "full", "selective")
SCOPES = ("all", "language", "vision")
_AUX_LOSS = (None, "transformers", "per_layer")
_PARALLEL = ("dp", "ep", "dp_size", "tp_size", "pp_size", "cp_size", "ep_size", "mesh")


def load(
    path_or_config, *, dtype=None, device=None, cp=None, activation_checkpointing=False, aux_loss=None,
    frame_sharding=None, ep_group=None, tp=None, tp_plan=None, pp=None, config=None, **parallel,
):  # fmt: skip
    """A Qwen3.5 vision-language model, dense or with experts, ready to train.

    Args:
        path_or_config: a directory with config.json and safetensors, whose weights are read; or a configuration (a
            Config, one of CONFIGS, a mapping, a transformers configuration), whose weights are drawn from torch's
            generator.
        dtype: torch.float32 or torch.bfloat16; None is what the configuration names, else float32. A_log and dt_bias
            are float32 in any case.
        device: "meta" makes a model without memory, of a directory too; `materialise` gives it memory and weights, when
            it has been sharded or before.
        activation_checkpointing: True or "full" makes the activations inside each decoder layer and vision block
            again in backward, "selective" those alone that are no attention, gated delta rule or every second product
            of matrices; no bit changes.
        aux_loss: None adds transformers' auxiliary loss where the configuration's output_router_logits asks for it;
            "transformers" adds it anyway, "per_layer" adds the sum of every layer's own.
        cp: a `parallel.ContextParallel`: the ranks that share every pack. Each passes the whole batch and gets a part
            of the loss; parts and their gradients sum over the group to those of one rank. None is one rank.
        frame_sharding: a mapping with keys of `FrameSharding`: how the tower's frames are spread over those ranks.
            None is the default, every rank runs every frame.
        ep_group: None, or the process group whose ranks share the experts of every layer: rank r of R holds
            experts [r E / R, (r + 1) E / R), and reads only them. The ranks call the model alike, each with its own
            tokens (of packs of its own, or its part of one that `cp` shares); an expert's gradient is that of all
            their losses. What is no expert is whole on every rank, and its gradient this rank's alone. Clipping and
            torch's checkpoints take a plain tensor for the same on all ranks: `parallelize_qwen3_5` makes experts
            DTensors.
        tp: None, or a `parallel.TensorParallel`: the ranks that share the heads of attention, the width of dense
            MLPs and, where tp_plan has lm_head "colwise" and they divide it, the vocabulary, whose weights become
            DTensors of them, and each pack's rows between these. Each passes the whole batch and gets a part of the
            loss, as with `cp`; gradients of weights that are whole on every rank are parts too.
        tp_plan: None, or {pattern: style} in transformers' names, which takes the place of those of the model's own
            plan; see `tensor.plan_of`.
        pp: None, or a `parallel.PipelineParallel`: the model has the layers of this rank's stages alone, embedding and
            tower with the first, norm, head and multi-token prediction with the last. `pipeline.Stages` runs it.
        config: with a directory, a configuration that takes the place of its config.json.
        **parallel: None or one rank.

    Returns:
        Qwen3_5, in training mode. The state dict has the keys of published checkpoints.

    Raises:
        ValueError: no model directory, a configuration that makes no model, a shape that disagrees, experts in two
            key styles, a number of experts that the ranks of `ep_group` do not divide, heads or a width that those of
            `tp` do not, an unknown style, fewer layers than stages. TypeError: another dtype, an `ep_group` that is no
            process group. RuntimeError: keys that are missing or not the model's, all named.
            NotImplementedError: other kinds of parallelism over more ranks than one, or a part that this definition
            does not have.
    """
    others = {} if isinstance(cp, ContextParallel) else {"cp": cp}
    others |= {} if isinstance(tp, TensorParallel) else {"tp": tp}
    others |= {} if isinstance(pp, PipelineParallel) else {"pp": pp}
    _refuse_parallel(others, parallel)
    tp = tp if isinstance(tp, TensorParallel) else TensorParallel()
    pp = pp if isinstance(pp, PipelineParallel) else PipelineParallel()
    if activation_checkpointing not in RECOMPUTE:
        raise ValueError(
            f"load: activation_checkpointing is {activation_checkpointing!r}, False, True, 'full' or 'selective' is"
            " needed"
        )
    if aux_loss not in _AUX_LOSS:
        raise ValueError(f"load: aux_loss is {aux_loss!r}, None, 'transformers' or 'per_layer' is needed")
    config = read_config(path_or_config if config is None else config)
    dtype = dtype or config.dtype or torch.float32
    if dtype not in (torch.float32, torch.bfloat16):
        raise TypeError(f"load: dtype is {dtype}, torch.float32 or torch.bfloat16 is needed")
    ep = _expert_parallel(ep_group, config.text.num_experts)
    plan = plan_of(config.text, tp_plan, head_style(config.tie_word_embeddings, config.text.vocab_size, tp))
    check_sizes(config.text, plan, tp)
    folder = path_or_config if isinstance(path_or_config, str) or hasattr(path_or_config, "__fspath__") else None
    model = _build(config, folder, dtype, device, Shared(ep, tp, plan, pp))
    model.recompute(activation_checkpointing)
    model.aux_loss = aux_loss
    model.cp = cp if isinstance(cp, ContextParallel) else None
    if frame_sharding is not None:
        model.frame_sharding = FrameSharding.from_mapping(frame_sharding)
    return model.train()


class Qwen3_5(nn.Module):
    """`loss, metrics = model(batch)`. Letters: T tokens, H hidden size, V vocabulary.

    Attributes: config; model.language_model, model.visual, lm_head; mtp, or None where there is none (set it to None
    to train without); aux_loss, cp, tp and pp, as in `load`; ep, the ranks that share the experts; frame_sharding, a
    `FrameSharding`; folder, the directory that it was loaded from, or None, and bytes_read, how much of it this rank
    read; aux_share, by which the auxiliary loss is multiplied where it is added: a step of several batches gives each
    its share of the average; loss_extra_bytes, what the loss may hold beyond its gradients on CUDA, None for as much as
    a float32 gradient of lm_head, which its reduction takes later anyway: logits that fit are made once.
    """

    def __init__(self, config):
        super().__init__()
        self.config, self.ep, self.tp = config, ExpertParallel(), TensorParallel()
        self.aux_loss, self.cp, self.frame_sharding = None, None, FrameSharding()
        self.aux_share = 1.0
        self.loss_extra_bytes = None
        self.folder, self.bytes_read, self.expert_layouts = None, 0, {}
        self.pp, self.compute_dtype = PipelineParallel(), None
        self.model = nn.Module()
        self.model.language_model = TextModel(config.text)
        self.model.visual = VisionModel(config.vision)
        self.lm_head = None  # the embedding's, where they are tied
        if not config.tie_word_embeddings:
            self.lm_head = Head(config.text.hidden_size, config.text.vocab_size)
        self.mtp = MTP(config.text) if config.text.mtp_num_hidden_layers else None

    def __call__(self, batch, *stage):
        return super().__call__(batch if stage else OnHost(batch), *stage)

    def forward(self, batch, arrived=None, chunk=None):
        """The loss of a packed batch, and what it is made of.

        batch: a dict, never written to, of
            input_ids [T] and labels [T], the token that each is to predict, -100 for none;
            cu_seqlens or doc_ids, as `automodel_c.Pack` takes them; neither is one document;
            position_ids [3, T], made here when absent; mm_token_type_ids [T], 1 image, 2 video, checked;
            pixel_values, pixel_values_videos [P, patch width] and image_grid_thw, video_grid_thw [n, 3], media of the
            whole pack in order of appearance;
            num_label_tokens, an int or a tensor: what the sum of losses is divided by, this batch's own when absent.
        Host tensors are best: plans are made on the host, the rest is moved to the model's device.

        Returns (loss, metrics): loss, a float32 scalar, is lm_loss + 0.1 mtp_loss + aux_share * router_aux_loss_coef *
        aux_loss; metrics, detached device tensors: lm_loss, mtp_loss (mean over depths), aux_loss, label_tokens. Where
        there is no such part it is 0.

        Under context and tensor parallelism every rank passes the same whole batch. loss, lm_loss, mtp_loss and
        aux_loss are parts that sum over the group to one rank's; gradients are this rank's parts, to be summed
        likewise, but those of weights that ranks split; label_tokens is the whole batch's on every rank.

        ValueError and TypeError name the key, and both numbers where counts disagree. What is raised on one rank is
        raised on all that share a pack or experts with it; where they also wait in FSDP2's own collectives, only
        `parallel.faults.guard` can tell them.

        Of a pipeline batch is what `prepare` gives, arrived what came from other stages, and chunk which of this rank's
        stages runs; see `pipeline.Stages`. Before the last stage it is {name: tensor} of what goes on.
        """
        with alarms.everywhere(self.ep.group):
            if chunk is None:
                batch, arrived, chunk = self.prepare(batch), {}, 0
            return self._losses(batch, arrived, chunk)

    def _losses(self, batch, arrived, chunk):
        whole = self.mtp is not None or self.has_aux_loss  # they read every row of the last layer
        rows = None if whole else batch.labelled_rows
        hidden, stats, embeddings = self._run(batch, arrived, chunk, rows)
        text = self.config.text
        if self.has_aux_loss and (batch.step.plan is not None or self.tp.group is not None):
            stats = over_ranks(stats, batch.step.plan, batch.real_rows, self.tp)
        if self.pp.stage(chunk) < self.pp.stages - 1:
            out = {"hidden": hidden}
            if embeddings is not None and text.mtp_num_hidden_layers:
                out["embeddings"] = embeddings
            if self.has_aux_loss:
                out |= auxiliary_out(stats, text.num_experts_per_tok, self.aux_loss == "per_layer", arrived)
            return out
        labels = batch.labels if rows is None else batch.labels.index_select(0, rows)
        depths = [] if self.mtp is None else self.mtp(hidden, embeddings, batch)
        lm_loss, *ahead = self._cross_entropies([(hidden, labels), *depths], batch)
        loss, mtp_loss, aux_loss = lm_loss, torch.zeros_like(lm_loss), torch.zeros_like(lm_loss)
        if ahead:
            mtp_loss = sum(ahead) / len(ahead)
            loss = loss + LOSS_SCALE * mtp_loss
        load = {}
        if self.has_aux_loss:
            if "load" in arrived:
                load = {"load": total_load(stats, arrived)}
                slope = auxiliary_slope(load["load"], batch.real_rows, text.num_hidden_layers)
                aux_loss = (torch.stack([layer[1] for layer in stats]).sum(0) * slope).sum()
            else:
                aux_loss = auxiliary_loss(stats, text.num_experts_per_tok, self.aux_loss == "per_layer")
            loss = loss + self.aux_weight * aux_loss
        parts = {"lm_loss": lm_loss, "mtp_loss": mtp_loss, "aux_loss": aux_loss, "label_tokens": batch.label_count}
        return loss, {name: value.detach() for name, value in {**parts, **load}.items()}

    def _run(self, batch, arrived, chunk, rows=None):
        """(hidden states, statistics, embeddings or None) behind a stage of this rank."""
        if self.pp.stage(chunk) == 0:
            embeddings = self._embed(batch)
            hidden = self.tp.own(embeddings[: len(batch.share.own)])
        else:
            hidden, embeddings = arrived["hidden"], arrived.get("embeddings")
        layers = self.pp.layers(self.config.text.num_hidden_layers, chunk)
        return *self.model.language_model(hidden, batch.step, rows, layers), embeddings

    @property
    def shares_loads(self):
        """Whether the auxiliary loss needs counts of all layers together, and so of all stages."""
        return self.has_aux_loss and self.aux_loss != "per_layer"

    @property
    def aux_weight(self):
        """By what the auxiliary loss is multiplied where it is added."""
        return self.aux_share * self.config.text.router_aux_loss_coef

    @property
    def device(self):
        return next(self.parameters()).device

    @property
    def has_aux_loss(self):
        """Whether the auxiliary loss is part of the loss."""
        text = self.config.text
        return bool(text.num_experts and (self.aux_loss or text.output_router_logits))

    def logits(self, batch, rows=None, arrived=None, chunk=None):
        """Logits [n, V] of the tokens `rows` (int [n], any sequence; None is all T) of a batch, whose labels may be
        missing. Ranks that share a pack give the same rows of the whole pack, and each gets all their logits.
        Ranks that share experts call it alike, each with its own tokens.
        Under FSDP2 register it: `register_fsdp_forward_method(model, "logits")`."""
        with alarms.everywhere(self.ep.group):
            if chunk is None:
                batch, arrived, chunk = self.prepare(batch, labels=False), {}, 0
            hidden, *_ = self._run(batch, arrived, chunk)
            if self.pp.stage(chunk) < self.pp.stages - 1:
                return {"hidden": hidden}
            hidden = self.tp.gather(hidden)
            if rows is None and batch.tokens != batch.share.tokens:
                rows = np.arange(batch.tokens)
            plan, share = batch.step.plan, batch.share
            if plan is not None:
                rows = np.arange(plan.tokens) if rows is None else rows
                rows = torch.as_tensor(rows, dtype=torch.int64).cpu().numpy()
                hidden = exchange(hidden, share.to_all(_rows_in(rows, plan.tokens)), plan.group)
            elif rows is not None:
                hidden = hidden.index_select(0, torch.as_tensor(rows, dtype=torch.int64, device=hidden.device))
            return self._head(hidden)

    def prepare(self, batch, labels=True):
        """The `Batch` of a batch, which must have labels where they are asked for."""
        depths = len(self.mtp.layers) if self.mtp is not None else 0
        if self.pp.stages > 1:  # the last stage's
            depths = self.config.text.mtp_num_hidden_layers
        depths = depths if labels else 0
        return Batch(batch, self.config, self.device, self.cp, depths, labels, self.ep, self.tp)

    def _embed(self, batch):
        """Embeddings of the batch's embedded rows, those of the media in their places; without media the tower runs all
        the same, on a frame that takes no place, so that its gradients exist."""
        embeddings = self.model.language_model.embed_tokens(batch.input_ids)
        seen, places = see(self.model.visual, batch.media, batch.share, self.frame_sharding, embeddings.device)
        return embeddings.index_copy(0, places, seen.to(embeddings.dtype))

    def _head(self, hidden, labels=None, **options):
        """As `Head`, whose weight may be the embedding's."""
        if self.lm_head is not None:
            return self.lm_head(hidden, labels, **options)
        return through_head(self.model.language_model.embed_tokens.weight, TensorParallel(), hidden, labels, **options)

    def _cross_entropies(self, pairs, batch):
        """The loss of each (hidden states, labels)."""
        return self._head(
            *map(list, zip(*pairs, strict=True)), num_label_tokens=batch.num_label_tokens, ignore_index=IGNORE,
            extra_bytes=self.loss_extra_bytes,
        )  # fmt: skip

    def recompute(self, value, scope="all"):
        """Whether backward makes the activations inside layers and blocks again instead of keeping them: one of
        RECOMPUTE. scope: one of SCOPES, the parts that this is about; the others keep theirs."""
        language = [part for part in (self.model.language_model, self.mtp) if part is not None]
        vision = [self.model.visual] if self.model.visual is not None else []
        for name, parts in (("language", language), ("vision", vision)):
            for part in parts:
                part.recompute = ("full" if value is True else value or False) if scope in ("all", name) else False

    def save_pretrained(self, folder, *, experts=None):
        """Writes safetensors and config.json as transformers reads them; where ranks share the experts, all call it.
        See `checkpoint.save`."""
        save(self, folder, experts=experts)


def _expert_parallel(group, experts):
    try:
        ep = ExpertParallel(group)
    except (TypeError, ValueError) as error:
        raise type(error)(f"load: {error}") from None
    if ep.ranks > 1 and not experts:
        raise ValueError(f"load: ep_group has {ep.ranks} ranks, the model has no experts")
    if experts and experts % ep.ranks:
        raise ValueError(f"load: num_experts is {experts}, no multiple of the {ep.ranks} ranks of ep_group")
    return ep


@dataclasses.dataclass(frozen=True)
class Shared:
    """What ranks share: an ExpertParallel, a TensorParallel with its plan, a PipelineParallel."""

    ep: ExpertParallel
    tp: TensorParallel
    plan: dict
    pp: PipelineParallel


def _build(config, folder, dtype, device, shared):
    ep, tp, pp = shared.ep, shared.tp, shared.pp
    files = None if folder is None else Files(folder)
    if files is not None:
        config = dataclasses.replace(config, text=files.with_mtp(config.text))
    with torch.device("meta"):
        model = Qwen3_5(config)
    model.ep, model.tp, model.pp, model.compute_dtype = ep, tp, pp, dtype
    _keep_stages(model, pp)
    for module in model.modules() if ep.group is not None else ():
        if isinstance(module, Experts):
            module.spread(ep)
    model = model.to(dtype)
    for module in model.modules() if tp.group is not None else ():
        if isinstance(module, DecoderLayer):
            module.spread(tp, shared.plan)
    if tp.group is not None and model.lm_head is not None and shared.plan["lm_head"] in DIMS:
        model.lm_head.spread(tp)
    meta = device is not None and torch.device(device).type == "meta"
    if not meta:
        model.to_empty(device=device or "cpu")
    if files is not None:
        model.folder, model.expert_layouts = folder, files.fill(model, whole_on_meta(model))
        model.bytes_read = 0 if meta else files.bytes_read
    elif not meta:
        initialise(model, whole_on_meta(model))
    return model


def _keep_stages(model, pp):
    """Drops what other ranks of a pipeline hold."""
    if pp.stages == 1:
        return
    if model.config.tie_word_embeddings:
        raise NotImplementedError(
            f"load: pp={pp}: tie_word_embeddings is True, the first and the last stage would both hold the embedding"
        )
    count = model.config.text.num_hidden_layers
    layers = [i for chunk in range(pp.chunks) for i in pp.layers(count, chunk)]
    model.model.language_model.keep(layers, pp.is_first, pp.is_last)
    if not pp.is_first:
        model.model.visual = None
    if not pp.is_last:
        model.lm_head = model.mtp = None


def whole_on_meta(model):
    """The model with the parts that other ranks of a pipeline hold, without memory; its experts are whole."""
    with torch.device("meta"):
        return Qwen3_5(model.config)


def materialise(model, device="cpu", *, weights=True):
    """Gives a model that was loaded on the meta device memory and its weights, in place, and returns it.

    model: a Qwen3_5, as `load` made it or sharded by `parallelize_qwen3_5` since: a rank then reads its shards alone,
    and of drawn weights no more than one is whole at a time. They are those that `load` gives on the same seed.
    device: of the memory. weights: False leaves them undefined, for who fills them at once.
    `model.bytes_read` says what of the files this rank has read. Raises what `load` raises of files.
    """
    shards = megatron.of(model)
    if shards is None:
        model.to_empty(device=device)
    if weights and model.folder is None:
        initialise(model, whole_on_meta(model))
    elif weights:
        files = Files(model.folder)
        files.fill(model, whole_on_meta(model))
        model.bytes_read = files.bytes_read
    if shards is not None:
        shards.install()
    return model


def _rows_in(rows, tokens):
    """rows int64 [n]; IndexError for one that the pack does not have."""
    wrong = rows[(rows < 0) | (rows >= tokens)]
    if len(wrong):
        raise IndexError(f"logits: rows holds {wrong[0]}, the pack has {tokens} tokens")
    return rows


def _refuse_parallel(cp, parallel):
    """NotImplementedError for more ranks than one, TypeError for an argument that is no kind of parallelism."""
    for name, value in {**cp, **parallel}.items():
        if name not in ("cp", "tp", "pp", *_PARALLEL):
            raise TypeError(f"load: unexpected keyword argument {name!r}")
        ranks = _ranks(value)
        if ranks != 1:
            raise NotImplementedError(
                f"load: {name}={value!r}: this model runs on one rank of {name} so far; data parallelism goes around "
                "it (parallelize_qwen3_5), context parallelism is cp=ContextParallel(group), expert parallelism "
                "ep_group=group, tensor parallelism tp=TensorParallel(mesh), a pipeline pp=PipelineParallel(...)"
            )


def _ranks(value):
    """How many ranks an argument means: None, an int, or what tells `ranks` or `size()`."""
    if value is None or isinstance(value, int):
        return 1 if value is None else value
    told = getattr(value, "ranks", getattr(value, "size", None))
    return told() if callable(told) else told
