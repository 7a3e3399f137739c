"""Every key that a recipe may hold, as dataclasses: the annotation is the type, the default is the default.

A field made with `only(...)` is a key of NeMo Automodel that this package knows but does not carry out:
the listed values mean "off" and pass, any other is refused by config.load_recipe, never ignored.
"""
# ruff: noqa: RUF009 -- only() and block() return dataclass fields

from dataclasses import dataclass, field
from typing import Any


def only(*accepted):
    """A known key of which only `accepted` values are carried out; the first is the default."""
    return field(default=accepted[0], metadata={"accepted": accepted})


def block(cls):
    """A nested section that is there even when the recipe leaves it out."""
    return field(default_factory=cls)


@dataclass
class StepScheduler:
    global_batch_size: int = 8
    local_batch_size: int = 1
    max_steps: int | None = None  # None: as many as num_epochs hold
    num_epochs: int = 1
    ckpt_every_steps: int | None = None  # None: only the last step is kept
    val_every_steps: int | None = None  # None: only after the last step
    gc_every_steps: int | None = None  # None: Python collects when it likes
    save_checkpoint_every_epoch: bool = False


@dataclass
class DistEnv:
    backend: str | None = None  # None: nccl with CUDA, gloo without
    timeout_minutes: float = 10.0


@dataclass
class Rng:
    _target_: str = "StatefulRNG"
    seed: int | None = None  # None: the recipe's seed
    ranked: bool = True  # each rank draws from its own stream (seed + rank)
    deterministic: bool = True


@dataclass
class Model:
    _target_: str = "NeMoAutoModelForImageTextToText.from_pretrained"
    pretrained_model_name_or_path: str | None = None  # a local directory
    config: dict | None = None  # for from_config: keys of transformers' Qwen3_5MoeConfig
    attn_implementation: str = "sdpa"  # of transformers' definition as it comes
    operators: str = "automodel_c"  # models.qwen3_5; or patched, transformers' on our operators; or transformers
    torch_dtype: str = "float32"  # to compute in, where mp_policy.param_dtype does not say; masters are fp32
    backend: dict | None = only(None)
    text_config: dict | None = None  # overrides of the directory's text_config
    vision_config: dict | None = None
    freeze_config: dict | None = only(None)
    trust_remote_code: bool = only(False)
    use_liger_kernel: bool = only(False)


@dataclass
class VideoSize:
    shortest_edge: int | None = None  # no edge: the least frames * height * width of a clip
    longest_edge: int | None = None  # and the largest


@dataclass
class VideoProcessor:
    """None: what the model's directory says, else the default of models.video_processor."""

    _target_: str = "AutoVideoProcessor.from_pretrained"
    size: VideoSize = block(VideoSize)
    fps: float | None = None  # frames a second that are seen
    min_frames: int | None = None
    max_frames: int | None = None


@dataclass
class Processor:
    _target_: str = "AutoProcessor.from_pretrained"
    pretrained_model_name_or_path: str | None = None  # None: the model's directory
    min_pixels: int | None = None
    max_pixels: int | None = None
    words: list[str] | None = None  # for build_processor: character runs that are one token each
    video_processor: VideoProcessor = block(VideoProcessor)


@dataclass
class Checkpoint:
    enabled: bool = True
    checkpoint_dir: str | None = None  # None: <output_dir>/checkpoints
    restore_from: str | None = None  # a step folder; LATEST or LOWEST_VAL, of checkpoint_dir or with a folder before it
    max_recent_checkpoints: int | None = None  # None: all are kept; the one of LOWEST_VAL always is
    save_consolidated: bool | str = "final"  # the Hugging Face export: false or final
    model_save_format: str = only("safetensors")
    is_async: bool = False  # written by a thread, from a copy on the host, while training goes on
    wait_for_staging: bool = only(False, True)  # the copy is made before the next step, whatever this says
    cpu_offload: bool = only(False)
    best_metric_key: str | None = only(None, "default", "loss", "val_loss")  # LOWEST_VAL goes by the held-out loss
    v4_compatible: bool = only(False)
    staging_dir: str | None = only(None)
    single_rank_consolidation: bool = only(False)
    consolidation_timeout_minutes: float = 30.0
    allow_legacy_pickle_restore: bool = only(False)


@dataclass
class MpPolicy:
    _target_: str = "MixedPrecisionPolicy"
    param_dtype: str | None = None  # None: model.torch_dtype
    reduce_dtype: str = "float32"
    output_dtype: str | None = None
    cast_forward_inputs: bool = True


@dataclass
class FrameSharding:
    """parallel.frame_plan.FrameSharding says what each does."""

    enabled: bool = False  # without context parallelism one rank runs every frame, whatever this says
    mesh_dims: list[str] | None = None  # None: [cp]; [cp, tp] with a frozen tower
    min_tokens: int = 2048
    min_frames: int = 32
    min_local_patch_rows: int = 96
    cost_alpha: Any = "auto"  # or an int


@dataclass
class VisionParallel:
    frame_sharding: FrameSharding = block(FrameSharding)


@dataclass
class Multimodal:
    vision: VisionParallel = block(VisionParallel)
    frozen_sharding: str | None = only(None)


@dataclass
class Pipeline:
    reduce_grad_per_microbatch: bool | None = None  # the inverse of distributed.defer_fsdp_grad_sync
    pp_schedule: str | None = None  # 1F1B (None) or Interleaved1F1B
    stages_per_rank: int | None = None  # None: 1, with Interleaved1F1B 2
    pp_microbatch_size: int | None = only(None)  # a microbatch is step_scheduler.local_batch_size samples
    scale_grads_in_schedule: bool = only(False)
    round_virtual_stages_to_pp_multiple: str | None = only(None)
    layers_per_stage: int | None = only(None)
    patch_inner_model: bool = only(False)
    patch_causal_lm_model: bool = only(False)
    dtype: str | None = only(None)


@dataclass
class Moe:
    """Of experts that ranks share (distributed.ep_size)."""

    reshard_after_forward: bool | None = None  # None: as distributed.reshard_after_forward
    fp32_weight_grads: bool = False  # made and added in float32, with torch_dtype bfloat16
    ignore_router_for_ac: bool = only(True)  # their choice is kept under recomputation
    lm_head_precision: str | None = only(None)
    wrap_outer_model: bool = only(True)
    mp_policy: dict | None = only(None)


@dataclass
class Distributed:
    _target_: str | None = None  # accepted and unused, as upstream's parser does
    strategy: str = "fsdp2"  # or megatron_fsdp: on GPUs, by the package megatron-fsdp from 0.5 on
    dp_size: int | None = None  # None: the ranks that were started / (cp_size * tp_size * pp_size)
    dp_replicate_size: int | None = only(None, 1)
    tp_size: int | None = 1  # ranks that split heads and widths, and share every microbatch; None: 1
    cp_size: int | None = 1  # ranks that share every microbatch; None: 1
    pp_size: int | None = 1  # ranks over which the layers are laid, one behind another; None: 1
    ep_size: int | None = 1  # ranks that share the experts of every layer, of all with the same layers; None: 1
    sequence_parallel: bool | None = None  # with tp_size above 1 rows are always divided between split weights
    activation_checkpointing: bool | str = False  # false; true or "full"; "selective": some products are kept
    activation_checkpointing_scope: str | None = None  # all (None), language or vision; a frozen tower is never in it
    defer_fsdp_grad_sync: bool | None = None  # None: true (fsdp2), false (megatron_fsdp), or what pipeline says
    reshard_after_forward: bool | None = None  # None: FSDP2's own way, every unit but the root
    mp_policy: MpPolicy = block(MpPolicy)
    offload_policy: Any = only(None)
    autocast_dtype: str | None = only(None)
    pipeline: dict | None = only(None)
    moe: Moe = block(Moe)
    multimodal: Multimodal = block(Multimodal)
    enable_async_tensor_parallel: bool = False  # rows of split weights travel while these compute: compiled, on CUDA
    enable_compile: bool = False  # true is refused, with the reason
    enable_fsdp2_prefetch: bool = only(False)
    tp_plan: dict | None = None  # {pattern: style} instead of the model's own, see models.qwen3_5.tensor.plan_of
    patch_is_packed_sequence: bool = only(False)


@dataclass
class FreezeConfig:
    freeze_embeddings: bool = False
    freeze_vision_tower: bool = False
    freeze_audio_tower: bool = True  # Qwen3.5 has none, so both values mean the same
    freeze_language_model: bool = False


@dataclass
class LossFn:
    """models.qwen3_5 makes no logits with either; transformers' model does with MaskedCrossEntropy."""

    _target_: str = "MaskedCrossEntropy"


@dataclass
class Dataset:
    _target_: str = "make_chat_jsonl_dataset"
    path_or_dataset: str | None = None
    split: str = "train"
    shuffle_images: bool = False  # deal the images to the wrong prompts: what is left without sight
    limit: int | None = None  # the first so many samples
    cache: bool = False  # keep prepared samples in memory
    skip_bad_samples: bool = False  # what cannot be read or encoded is named and left out; False: it is an error
    allow_paths_outside: bool = False  # whether names of media may lead out of the data's folder
    max_image_pixels: int = 89_478_485  # of a picture or a frame; a larger one is a bad sample, and is not decoded
    max_clip_frames: int = 1 << 20  # that a file of a clip may hold
    max_clip_pixels: int = 1 << 31  # of all frames of a clip that are seen, or lie in an array


@dataclass
class PackedSequence:
    enabled: bool | None = None  # None: where pack_size is given
    pretokenize: bool = only(False, True)  # samples are encoded before they are packed, whatever this says
    max_length: int | None = None  # tokens of a sample; None: what a pack takes
    pack_size: int | None = None  # tokens of a pack
    collate_max_length: int | None = None  # so many tokens a pack, with padding; None: none (transformers: the longest)
    packing_ratio: float | None = None  # int(pack_size * packing_ratio) tokens are filled; None: all
    drop_long_samples: bool = False  # False: a sample that fits no pack is an error
    balance_media_tokens: bool = False  # order packs by their patches
    max_packs: int | None = None  # the first so many
    attn_implementation: str | None = only(None, "sdpa")
    packing_format: str | None = only(None)
    post_tokenize_hook_fn: str | None = only(None)


@dataclass
class Dataloader:
    _target_: str = "StatefulDataLoader"
    num_workers: int = 0
    pin_memory: bool = False
    drop_last: bool = only(True)
    shuffle: bool = True
    collate_fn: Any = only(None, "default_collate_fn")


@dataclass
class ClipGradNorm:
    max_norm: float | None = 1.0  # as upstream's VLM recipe; None: only measure


@dataclass
class Prewarm:
    """What is done before the first step. Nothing tunes itself at run time: the autotune keys change nothing."""

    cublas_backward: bool = False  # small products, forward and backward, on CUDA
    fla_gdn_autotune: bool = False
    mamba_ssd_autotune: bool = False
    comm_groups: bool = False  # one number through every group of the meshes


@dataclass
class Optimizer:
    _target_: str = "FusedAdamW"
    lr: float = 1e-4
    betas: list[float] = field(default_factory=lambda: [0.9, 0.999])
    eps: float = 1e-8
    weight_decay: float = 0.01
    adam_w_mode: bool = only(True)
    bias_correction: bool = only(True)
    master_weights: bool = only(True)
    master_weight_dtype: str = only("float32", "torch.float32", "fp32")
    store_param_remainders: bool = only(False)
    exp_avg_dtype: str = only("float32", "torch.float32", "fp32")
    exp_avg_sq_dtype: str = only("float32", "torch.float32", "fp32")


@dataclass
class LrScheduler:
    lr_decay_style: str = "constant"  # constant, linear, cosine, inverse-square-root or WSD
    lr_warmup_steps: int = 0
    lr_decay_steps: int | None = None  # None: all steps of the run
    init_lr: float = 0.0  # where the warm-up starts
    max_lr: float | None = None  # None: optimizer.lr
    min_lr: float = 0.0  # where the decay ends
    start_wd: float | None = None  # weight decay of the first step; None: optimizer.weight_decay
    end_wd: float | None = None  # and from wd_incr_steps on; None: start_wd
    wd_incr_steps: int | None = None  # None: all steps of the run
    wd_incr_style: str | None = None  # constant (None), linear or cosine
    wsd_decay_steps: int | None = None  # for WSD: the last so many steps before lr_decay_steps decay
    lr_wsd_decay_style: str | None = None  # exponential (None), linear, cosine or minus_sqrt


@dataclass
class Logging:
    """What is written besides metrics.jsonl, validation.jsonl and curves.png; wandb has a section of its own."""

    tensorboard: bool | str = False  # true: event files in <output_dir>/tensorboard; or a folder


@dataclass
class Wandb:
    """A run of Weights & Biases, where the section is there at all."""

    project: str | None = None  # None: automodel_c
    entity: str | None = None
    name: str | None = None  # None: the name of output_dir
    dir: str | None = None  # None: output_dir
    mode: str | None = None  # online, offline or disabled; None: what WANDB_MODE says, else online
    id: str | None = None  # of a run to go on with


@dataclass
class Recipe:
    """A whole recipe; see config.load_recipe."""

    recipe: str = "FinetuneRecipeForVLM"
    seed: int = 1234
    output_dir: str | None = None  # None: runs/<recipe's file name>
    step_scheduler: StepScheduler = block(StepScheduler)
    dist_env: DistEnv = block(DistEnv)
    rng: Rng = block(Rng)
    model: Model = block(Model)
    processor: Processor = block(Processor)
    checkpoint: Checkpoint = block(Checkpoint)
    distributed: Distributed = block(Distributed)
    pipeline: Pipeline = block(Pipeline)
    freeze_config: FreezeConfig = block(FreezeConfig)
    loss_fn: LossFn = block(LossFn)
    dataset: Dataset = block(Dataset)
    validation_dataset: Dataset | None = None
    validation_dataloader: dict | None = only(None)
    packed_sequence: PackedSequence = block(PackedSequence)
    dataloader: Dataloader = block(Dataloader)
    clip_grad_norm: ClipGradNorm = block(ClipGradNorm)
    prewarm: Prewarm = block(Prewarm)
    optimizer: Optimizer = block(Optimizer)
    lr_scheduler: LrScheduler = block(LrScheduler)
    logging: Logging = block(Logging)
    wandb: Wandb | None = None  # {}: with its defaults
    ci: Any = None  # for the people who run recipes on a cluster; training does not read it
