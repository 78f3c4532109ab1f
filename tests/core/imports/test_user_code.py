"""What code of the user's raises is one line that says where."""

from __future__ import annotations

from pathlib import Path

import pytest

from penjing.core.errors import InputError
from penjing.core.imports.user_code import named_errors, user_function


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        ("ValueError('no idea\\nabout   this')", "raised ValueError, line 2: no idea about this; mend the function"),
        ("AssertionError", "raised AssertionError, line 2; mend the function"),
        ("RuntimeError('long' * 1000)", "longlong; mend the function"),
    ],
)
def test_an_error_of_several_lines_or_of_none_is_one_line(tmp_path: Path, raised: str, said: str) -> None:
    (tmp_path / "own.py").write_text(f"def f():\n    raise {raised}\n")
    spec = f"{tmp_path}/own.py:f"
    with pytest.raises(InputError) as caught, named_errors(spec):
        user_function(spec)()
    assert str(caught.value).endswith(said)
    assert len(str(caught.value)) < 700
    assert "\n" not in str(caught.value)
