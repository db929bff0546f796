"""Other people's errors in one line."""

import pytest

from megatron_resilient.mcore.one_line import one_line


def raised(function) -> BaseException:
    try:
        function()
    except BaseException as error:
        return error
    raise AssertionError("nothing was raised")


def bare_assert():
    layers = 3
    assert layers % 2 == 0


class Several(BaseException):
    def __init__(self, failures):
        super().__init__("several ranks\nTraceback ...")
        self.failures = failures


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one\ntwo"), "one"),
        (ValueError("  padded \n"), "padded"),
        (KeyError("step"), "KeyError: 'step'"),
        (KeyError(), "KeyError"),
        (RuntimeError(), "RuntimeError"),
        (RuntimeError("  \n "), "RuntimeError"),
        (Several({3: (KeyError("x"), None), 1: (OSError("disk full\nmore"), None)}), "disk full"),
        (Several({}), "several ranks"),
    ],
)
def test_one_line(error, line):
    assert one_line(error) == line


def test_a_bare_assert_is_told_by_its_condition():
    lineno = bare_assert.__code__.co_firstlineno + 2
    error = raised(bare_assert)
    error.args = ()  # pytest explains asserts; Python does not
    assert one_line(error) == f"assert layers % 2 == 0 (test_one_line.py:{lineno})"


def test_a_line_has_an_end():
    line = one_line(ValueError(" ".join(f"decoder.layers.{n}.weight" for n in range(1000))))
    assert len(line) <= 400
    assert line.endswith(" ...")
