"""A run whose loss rose is reported, and a very short one; noise is not."""

from __future__ import annotations

import pytest

from symbiosis.cli.loss_trend import training_warning


@pytest.mark.parametrize(
    "losses",
    [[], [3.0] + [3.1] * 9, [3.0, 2.0, 2.5, 1.0] * 3, [2.0, 2.1, 1.9, 2.0, 2.1, 2.05, 2.1, 2.1] * 2],
    ids=["no steps", "a bit of noise", "fell", "did not move"],
)
def test_a_loss_that_did_not_rise_gives_no_warning(losses):
    assert training_warning(losses) is None


def test_a_rise_is_measured_from_the_model_before_training():
    """The second step is the worst one: the mean of the first quarter would hide the rise."""
    assert "rose from 3.50 to 10.00" in training_warning([3.5, 80.0, 60.0, 40.0, 30.0, 20.0, 10.0, 10.0])


def test_a_loss_that_is_no_number_is_reported():
    assert "rose from 3.00 to nan" in training_warning([3.0, 9.0, float("nan"), float("nan")])


def test_a_run_of_few_steps_is_reported():
    assert "with 1 optimizer step the adapter hardly changes" in training_warning([3.0])
    assert "with 3 optimizer steps" in training_warning([3.0, 2.0, 1.0])
