"""What a user can get wrong when running things, one class each; every message ends with the remedy."""

from tracefuse.optimizers.errors import NotSupported as NotSupported
from tracefuse.optimizers.errors import SessionError as SessionError
from tracefuse.optimizers.errors import TracefuseError as TracefuseError
from tracefuse.optimizers.errors import UnknownValue as UnknownValue


class CaptureError(TracefuseError):
    """Nothing was recorded, or what was recorded is no program."""


class ReplayError(TracefuseError):
    """An op of a trace raised when it was run again."""


class OptionError(TracefuseError):
    """An option that does not exist, or a value that it cannot take."""


class RegistrationError(TracefuseError):
    """A class that can be no pass of the user's own, or a name that none can have."""


class PassError(TracefuseError):
    """A pass that could not do what its options ask for."""


class ExportError(TracefuseError):
    """A trace that cannot be written as a Python file."""


class FixError(TracefuseError):
    """A fix that cannot be tried: on this machine, or on this program."""


class MeasureError(TracefuseError):
    """Programs that cannot be timed or compared with each other, or a measurement that cannot be made."""


class Cancelled(TracefuseError):
    """A measurement that was asked to stop before it had anything to show."""


class BuildError(TracefuseError):
    """A kernel's text that the compiler refused, or a cache that cannot be written."""


class SyncError(TracefuseError):
    """An operation that makes the host wait for the GPU, where `assert_no_sync` allows none."""


class TraceFileError(TracefuseError):
    """A trace file that cannot be read, or a window that is not in it."""
