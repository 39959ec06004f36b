"""A run whose loss rose is reported; noise is not."""

from __future__ import annotations

import pytest

from symbiosis.cli.loss_trend import loss_warning


@pytest.mark.parametrize(
    "losses",
    [[], [3.0], [3.0, 3.1], [3.0, 2.0, 2.5, 1.0], [2.0, 2.1, 1.9, 2.0, 2.1, 2.05, 2.1, 2.1]],
    ids=["no steps", "one step", "a bit of noise", "fell", "did not move"],
)
def test_a_loss_that_did_not_rise_gives_no_warning(losses):
    assert loss_warning(losses) is None


def test_a_rise_is_measured_from_the_model_before_training():
    """The second step is the worst one: the mean of the first quarter would hide the rise."""
    assert "rose from 3.50 to 10.00" in loss_warning([3.5, 80.0, 60.0, 40.0, 30.0, 20.0, 10.0, 10.0])


def test_a_loss_that_is_no_number_is_reported():
    assert "rose from 3.00 to nan" in loss_warning([3.0, 9.0, float("nan"), float("nan")])
