"""The random programs of ``test_fuzz``, their models compiled whole."""

from __future__ import annotations

import pytest

from tests.whole.test_fuzz import NUM_PROGRAMS, check_random_programs


@pytest.mark.timeout(max(300, NUM_PROGRAMS * 20))
def test_random_programs_train_as_unsharded_when_compiled(tmp_path):
    check_random_programs(2, 12, tmp_path / "report", compiled=True)
