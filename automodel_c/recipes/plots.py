"""The curves of a run as one picture."""

from pathlib import Path

from .metrics import read_rows

PANELS = (
    ("loss", "training loss", True),
    ("grad_norm", "gradient norm before clipping", True),
    ("lr", "learning rate", False),
    ("tokens_per_s", "tokens per second", False),
)


def draw_curves(metrics_path, validation_path, picture_path):
    """Draws metrics.jsonl (and the accuracy of validation.jsonl, where there is one) into a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    picture_path = Path(picture_path)
    rows, checks = read_rows(metrics_path), read_rows(validation_path)
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7), sharex=True, layout="constrained")
    for axis, (key, title, logarithmic) in zip(axes.flat, PANELS, strict=True):
        axis.plot([r["step"] for r in rows], [r[key] for r in rows], linewidth=1.2)
        axis.set_title(title, loc="left", fontsize=10)
        axis.grid(alpha=0.3)
        if logarithmic and all(r[key] > 0 for r in rows):
            axis.set_yscale("log")
        else:
            axis.set_ylim(bottom=0)
    for axis in axes[1]:
        axis.set_xlabel("step")
    if checks:
        _add_held_out(axes[0, 0], checks)
    figure.suptitle(picture_path.parent.name)
    figure.savefig(picture_path, dpi=120)
    pyplot.close(figure)


def _add_held_out(axis, checks):
    steps = [check["step"] for check in checks]
    axis.plot(steps, [check["loss"] for check in checks], "s", color="tab:orange", markersize=4, label="held-out loss")
    axis.legend(loc="lower left", fontsize=8)
    right = axis.twinx()
    right.plot(steps, [100 * check["accuracy"] for check in checks], "o--", color="tab:green", markersize=4)
    right.set_ylabel("held-out accuracy, %", color="tab:green")
    right.set_ylim(0, 102)
