import pytest

from automodel_c.recipes.schedule import LrSchedule
from automodel_c.recipes.schema import LrScheduler


@pytest.mark.parametrize(
    "style, expected",
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.775, 0.55, 0.325]),
        ("cosine", [0.5, 1.0, 1.0, 0.868198, 0.55, 0.231802]),
    ],
)
def test_schedule(style, expected):
    schedule = LrSchedule(LrScheduler(lr_decay_style=style, lr_warmup_steps=2, min_lr=0.1), 1.0, 6)
    assert [schedule(step) for step in range(1, 7)] == pytest.approx(expected, abs=1e-6)


def test_schedule_stays_at_min_lr():
    schedule = LrSchedule(LrScheduler(lr_decay_style="cosine", lr_decay_steps=3, min_lr=0.1, max_lr=2.0), 1.0, 9)
    assert schedule(1) == 2.0 and schedule(9) == pytest.approx(0.1)


def test_schedule_style():
    with pytest.raises(NotImplementedError, match=r"lr_scheduler\.lr_decay_style='WSD'"):
        LrSchedule(LrScheduler(lr_decay_style="WSD"), 1.0, 9)
