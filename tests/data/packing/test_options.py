"""Options of packing that make no sense."""

import pytest

from onward.data.packing import PackOptions
from onward.errors import ParametersError


def test_bad_options_are_refused():
    with pytest.raises(ParametersError, match="samples_per_file is 0"):
        PackOptions(samples_per_file=0)
    with pytest.raises(ParametersError, match=r"test_fraction is 1\.0"):
        PackOptions(test_fraction=1.0)
    with pytest.raises(ParametersError, match="seed -1"):
        PackOptions(seed=-1)
