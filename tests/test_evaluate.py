"""evaluate.py: statistics against known values, the lists of seeds, and the shield's log."""
import math

import numpy as np
import pytest

from configs import ConfigError
from evaluate import LANES, Audit, mean_ci, parse_seeds, student_t, summarise


@pytest.mark.parametrize("freedom, quantile", [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262)])
def test_quantiles_of_students_t(freedom, quantile):
    """Tabulated values; the expansion is allowed 2 %."""
    assert student_t(freedom) == pytest.approx(quantile, rel=0.02)


def test_interval_of_a_mean_by_hand():
    result = mean_ci([1.0, 2.0, 3.0, 4.0, 5.0])
    assert result["mean"] == 3 and result["ci95"] == pytest.approx(2.776 * math.sqrt(2.5 / 5), rel=0.01)
    assert mean_ci([7]) == {"mean": 7.0, "ci95": None} and mean_ci([]) == {"mean": None, "ci95": None}


def test_summary_leaves_missing_values_out():
    rows = [{"controller": "a", "seed": s, "x": s, "min_ttc": t} for s, t in ((1, None), (3, 2.0))]
    assert summarise(rows)["a"]["x"]["mean"] == 2 and summarise(rows)["a"]["min_ttc"] == {"mean": 2.0, "ci95": None}


def test_lists_of_seeds():
    assert parse_seeds("1001-1003,7") == [1001, 1002, 1003, 7]
    for text in ("", "a", "3-1", "1,1", "1-2,2", "1.5"):
        with pytest.raises(ConfigError, match="--seeds"):
            parse_seeds(text)


def test_shield_log_holds_every_override_with_its_reason():
    audit, keep = Audit("policy", 7), LANES.index("keep")
    nothing = {"reason": np.zeros(3, int), "slot": np.zeros(3, int)}
    audit.add(nothing)
    audit.add({"reason": np.array([0, 1, 6]), "slot": np.array([4, 5, 6]), "wanted": np.array([0.0, 2.0, 1.0]),
               "wanted_lane": np.array([keep, keep, 0]), "accel": np.array([0.0, 0.5, -3.0]),
               "lane": np.array([keep, keep, keep]), "brake": np.array([0.0, 0.0, 4.5])})
    assert audit.counts == {"shield_clips": 1, "shield_emergencies": 1}
    assert audit.lines == [("policy", 7, 1, 5, "clipped", 2.0, "keep", 0.5, "keep"),
                           ("policy", 7, 1, 6, "lane veto + emergency", 1.0, "left", -4.5, "keep")]
