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


@pytest.mark.parametrize(
    "style, expected",
    [
        (None, [1.0, 1.0, 1.0, 0.681793, 0.414214, 0.189207]),
        ("linear", [1.0, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", [1.0, 1.0, 1.0, 0.853553, 0.5, 0.146447]),
        ("minus_sqrt", [1.0, 1.0, 1.0, 0.5, 0.292893, 0.133975]),
    ],
)
def test_schedule_stable_then_decay(style, expected):
    """Four steps of decay at the end of seven: the fourth after the peak begins it."""
    section = LrScheduler(lr_decay_style="WSD", wsd_decay_steps=4, lr_wsd_decay_style=style, lr_decay_steps=6)
    schedule = LrSchedule(section, 1.0, 9)
    assert [schedule(step) for step in range(1, 7)] == pytest.approx(expected, abs=1e-6)
    assert schedule(7) == schedule(9) == 0


def test_schedule_inverse_square_root():
    section = LrScheduler(lr_decay_style="inverse-square-root", lr_warmup_steps=4, min_lr=0.3)
    schedule = LrSchedule(section, 1.0, 99)
    assert [schedule(step) for step in (2, 4, 16, 99)] == pytest.approx([0.5, 1.0, 0.5, 0.3])


@pytest.mark.parametrize(
    "style, expected",
    [("linear", [0.1, 0.2, 0.3, 0.4, 0.5, 0.5]), ("cosine", [0.1, 0.158579, 0.3, 0.441421, 0.5, 0.5])],
)
def test_schedule_of_weight_decay(style, expected):
    section = LrScheduler(start_wd=0.1, end_wd=0.5, wd_incr_steps=4, wd_incr_style=style)
    schedule = LrSchedule(section, 1.0, 9, weight_decay=7.0)
    assert [schedule.weight_decay(step) for step in range(1, 7)] == pytest.approx(expected, abs=1e-6)
    assert LrSchedule(LrScheduler(), 1.0, 9, weight_decay=7.0).weight_decay(3) == 7.0


@pytest.mark.parametrize(
    "section, words",
    [
        ({"lr_decay_style": "wsd"}, r"lr_scheduler\.lr_decay_style='wsd' is not supported; one of constant, linear"),
        ({"lr_decay_style": "WSD"}, r"lr_scheduler\.wsd_decay_steps: lr_decay_style=WSD needs it"),
        ({"lr_wsd_decay_style": "square"}, r"lr_wsd_decay_style='square' is not supported; one of linear"),
        ({"wd_incr_style": "square"}, r"wd_incr_style='square' is not supported; one of constant"),
        ({"start_wd": 0.1, "end_wd": 0.2}, r"wd_incr_style: constant, but start_wd is 0\.1 and end_wd 0\.2"),
    ],
)
def test_schedule_refuses(section, words):
    with pytest.raises(ValueError, match=words):
        LrSchedule(LrScheduler(**section), 1.0, 9)
