"""Learning rate and weight decay as functions of the step."""

import math

_FALLS = {  # from 1 at 0 to 0 at 1
    "linear": lambda done: 1.0 - done,
    "cosine": lambda done: 0.5 * (1.0 + math.cos(math.pi * done)),
    "exponential": lambda done: 2.0 * 0.5**done - 1.0,
    "minus_sqrt": lambda done: 1.0 - math.sqrt(done),
}


class LrSchedule:
    """The rate of every step, from a schema.LrScheduler section.

    Linear from init_lr to the peak over lr_warmup_steps, then, by lr_decay_style: constant; linear or cosine down to
    min_lr at lr_decay_steps (the whole run when absent); inverse-square-root, the peak times sqrt(warm-up / step), not
    below min_lr; WSD, the peak until wsd_decay_steps before lr_decay_steps, then down by lr_wsd_decay_style. It holds
    no state: a step's rate and weight decay depend on the step alone. ValueError names a key that does not fit.
    """

    STYLES = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
    WD_STYLES = (None, "constant", "linear", "cosine")

    def __init__(self, section, base_lr, steps, weight_decay=0.0):
        _check("lr_decay_style", section.lr_decay_style, self.STYLES)
        _check("lr_wsd_decay_style", section.lr_wsd_decay_style, (None, *_FALLS))
        _check("wd_incr_style", section.wd_incr_style, self.WD_STYLES)
        self.style = section.lr_decay_style
        self.warmup = section.lr_warmup_steps
        self.decay_end = section.lr_decay_steps or steps
        self.init_lr, self.min_lr = section.init_lr, section.min_lr
        self.peak = base_lr if section.max_lr is None else section.max_lr
        self.fall = _FALLS.get(self.style)
        self.decay_begin = self.warmup
        if self.style == "WSD":
            if section.wsd_decay_steps is None:
                raise ValueError("lr_scheduler.wsd_decay_steps: lr_decay_style=WSD needs it")
            self.fall = _FALLS[section.lr_wsd_decay_style or "exponential"]
            self.decay_begin = max(self.warmup, self.decay_end - section.wsd_decay_steps)
        self.first_wd = weight_decay if section.start_wd is None else section.start_wd
        self.last_wd = self.first_wd if section.end_wd is None else section.end_wd
        self.wd_style, self.wd_steps = section.wd_incr_style or "constant", section.wd_incr_steps or steps
        if self.wd_style == "constant" and self.first_wd != self.last_wd:
            raise ValueError(
                f"lr_scheduler.wd_incr_style: constant, but start_wd is {self.first_wd} and end_wd {self.last_wd}"
            )

    def __call__(self, step):
        """The learning rate of optimizer step `step`, counted from 1."""
        if step <= self.warmup:
            return self.init_lr + (self.peak - self.init_lr) * step / self.warmup
        if self.style == "constant":
            return self.peak
        if self.style == "inverse-square-root":
            return max(self.min_lr, self.peak * math.sqrt(max(self.warmup, 1) / step))
        done = min(1.0, max(0, step - 1 - self.decay_begin) / max(1, self.decay_end - self.decay_begin))
        return self.min_lr + (self.peak - self.min_lr) * self.fall(done)

    def weight_decay(self, step):
        """The weight decay of optimizer step `step`, counted from 1."""
        if self.wd_style == "constant":
            return self.first_wd
        left = _FALLS[self.wd_style](min(1.0, (step - 1) / self.wd_steps))
        return self.last_wd + (self.first_wd - self.last_wd) * left


def _check(key, value, known):
    if value not in known:
        shown = ", ".join(name for name in known if name)
        raise ValueError(f"lr_scheduler.{key}={value!r} is not supported; one of {shown} is")
