"""Learning rate as a function of the step."""

import math


class LrSchedule:
    """The rate of every step, from a schema.LrScheduler section.

    Linear from init_lr to the peak over lr_warmup_steps, then constant, linear or cosine down to min_lr at
    lr_decay_steps (the whole run when absent). It holds no state: a step's rate depends on the step alone.
    """

    STYLES = ("constant", "linear", "cosine")

    def __init__(self, section, base_lr, steps):
        if section.lr_decay_style not in self.STYLES:
            raise NotImplementedError(
                f"lr_scheduler.lr_decay_style={section.lr_decay_style!r} is not supported yet; only {self.STYLES} are"
            )
        self.style = section.lr_decay_style
        self.warmup = section.lr_warmup_steps
        self.decay_end = section.lr_decay_steps or steps
        self.init_lr, self.min_lr = section.init_lr, section.min_lr
        self.peak = base_lr if section.max_lr is None else section.max_lr

    def __call__(self, step):
        """The learning rate of optimizer step `step`, counted from 1."""
        if step <= self.warmup:
            return self.init_lr + (self.peak - self.init_lr) * step / self.warmup
        if self.style == "constant":
            return self.peak
        done = min(1.0, (step - 1 - self.warmup) / max(1, self.decay_end - self.warmup))
        left = 1.0 - done if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
        return self.min_lr + (self.peak - self.min_lr) * left
