"""The exceptions of Moxie: one class per ErrorCode, each also the built-in class that Python users expect.

The C++ side raises them by name (python/bindings/errors.cpp); two more stand for what only Python can do wrong.
"""

from collections.abc import Sequence

from moxie._moxie import ErrorCode, WaitRecord


class Error(Exception):
    """Base class. `what` is one sentence: what is wrong, the value seen, the rule, the nearest legal value.

    `code` says which kind of rule; `waits` has one record per rank that gave up (WaitTimeoutError only).
    """

    code: ErrorCode = ErrorCode.invalid_argument

    def __init__(self, what: str, waits: Sequence[WaitRecord] = ()) -> None:
        super().__init__(what)
        self.what = what
        self.waits = list(waits)


class InvalidArgumentError(Error, ValueError):
    """A size, dtype, array or file breaks a rule."""


class ArgumentTypeError(Error, TypeError):
    """Something that is no array, no list, or not of the class that is needed."""


class ClosedError(InvalidArgumentError):
    """A World, Layer or Context was used after close()."""


class InvalidPlanError(Error, ValueError):
    """A plan that could deadlock or does not fit."""

    code = ErrorCode.invalid_plan


class InvalidRouteError(Error, ValueError):
    """An expert id outside -1 .. E-1; found before a row moves."""

    code = ErrorCode.invalid_route


class NonFiniteError(Error, ValueError):
    """Validation found a NaN or an infinity."""

    code = ErrorCode.non_finite


class CapacityExceededError(Error, RuntimeError):
    """More rows for a rank than the plan's capacity; found before data moves."""

    code = ErrorCode.capacity_exceeded


class WaitTimeoutError(Error, TimeoutError):
    """A bounded wait expired; `waits` says who waited for whom. World.reset() before the next pass."""

    code = ErrorCode.timeout


class WorldStoppedError(Error, RuntimeError):
    """A pass on a World that has timed out and was not reset."""

    code = ErrorCode.world_stopped


class UnavailableError(Error, RuntimeError):
    """A backend or library that this build does not have."""

    code = ErrorCode.unavailable
