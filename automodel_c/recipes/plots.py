"""The curves of a run, and where its time goes, as pictures."""

from pathlib import Path

from .metrics import read_rows

PANELS = (
    ("loss", "training loss", True),
    ("grad_norm", "gradient norm before clipping", True),
    ("lr", "learning rate", False),
    ("tokens_per_s", "tokens per second", False),
)
PARTS = ("forward", "recomputed", "backward", "data", "clip", "optimizer", "rest")  # of a step, in profile.Table


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


def draw_profile(table, picture_path, most=20):
    """Draws a profile.Table into a PNG: a bar an operator, its parts of the step in colours, the costliest first."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sums = {}
    for row in table.rows:
        sums[row.operator] = sums.get(row.operator, 0.0) + row.seconds
    shown = sorted(sums, key=sums.get, reverse=True)[:most]
    figure, axis = pyplot.subplots(figsize=(10, 1.2 + 0.32 * len(shown)), layout="constrained")
    ends = dict.fromkeys(shown, 0.0)
    for colour, part in enumerate(PARTS):
        rows = [row for row in table.rows if row.part == part and row.operator in ends]
        widths = [1e3 * row.seconds / table.steps for row in rows]
        names = [row.operator for row in rows]
        places = [shown.index(name) for name in names]
        axis.barh(places, widths, left=[ends[name] for name in names], height=0.7, label=part, color=f"C{colour}")
        for name, width in zip(names, widths, strict=True):
            ends[name] += width
    for place, name in enumerate(shown):
        axis.text(ends[name], place, f" {100 * sums[name] / table.seconds:.1f} %", va="center", fontsize=8)
    axis.set_yticks(range(len(shown)), shown)
    axis.invert_yaxis()
    axis.set_xlabel(f"milliseconds a step ({table.clock} time, {1e3 * table.seconds / table.steps:,.1f} in all)")
    axis.grid(axis="x", alpha=0.3)
    axis.legend(fontsize=8)
    figure.suptitle(f"{picture_path.parent.name}, {table.steps} steps from {table.first_step} on")
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
