"""Every exception that jitfp4 raises on purpose.

Jitfp4Error
├── ArgumentError (ValueError)        a value is outside what is allowed: shape, size, layout, stride, alignment
│   └── ArgumentTypeError (TypeError) a dtype, device or Python type is not one that is allowed
├── UnsupportedArchError              no kernel exists for the GPU
├── RenderError                       a template and its specification do not fit together
├── ToolchainError                    NVRTC is missing or cannot be used
├── CompileError                      NVRTC rejected generated source; carries the log and the numbered lines
├── OfflineError                      a kernel is not in the cache and JITFP4_OFFLINE forbids building it
├── CacheError                        the store failed; raised only under JITFP4_STRICT or by cache commands
│   ├── CacheCorruptError             an entry's bytes are not what was published
│   ├── CacheUntrustedError           an entry or folder could have been written by somebody else
│   └── BundleError                   a bundle or remote entry does not match its digest or its grammar
├── TacticsError                      a tactics file is damaged, or of another GPU, toolchain or version
├── LaunchError                       the driver refused to load or launch a kernel
└── SimError                          the simulator found a fault in a program, or cannot model it
    ├── SimParseError                 PTX text that the parser does not know
    ├── SimMemoryError                out of bounds, misaligned or uninitialised access
    ├── SimRaceError                  two unordered accesses to one shared-memory byte
    ├── SimDeadlockError              every thread waits
    └── SimLimitError                 a program that does not end
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BundleError",
    "CacheCorruptError",
    "CacheError",
    "CacheUntrustedError",
    "CompileError",
    "Jitfp4Error",
    "LaunchError",
    "OfflineError",
    "RenderError",
    "SimError",
    "TacticsError",
    "ToolchainError",
    "UnsupportedArchError",
]


class Jitfp4Error(Exception):
    """Base of every error that jitfp4 raises on purpose.

    Each one survives pickle and copy: ``args`` are what its constructor takes, and the message is made of them.
    """


class ArgumentError(Jitfp4Error, ValueError):
    """An argument's value is not allowed. Says which argument, what came, and what is allowed."""

    if TYPE_CHECKING:  # torch.compile shows the arguments of an exception only where it has no constructor of its own

        def __init__(self, name: str, got: object, allowed: str) -> None: ...

    @property
    def name(self) -> str:
        """The argument."""
        return str(self.args[0])

    def __str__(self) -> str:
        name, got, allowed = self.args
        return f"{name}: got {got}; allowed: {allowed}"

    def __reduce__(self) -> tuple[type[ArgumentError], tuple[str, ...], dict[str, object]]:
        return type(self), tuple(map(str, self.args)), self.__dict__  # what came need not be something to pickle


class ArgumentTypeError(ArgumentError, TypeError):
    """An argument's dtype, device or Python type is not allowed."""


def renamed(error: ArgumentError, names: Mapping[str, str]) -> ArgumentError:
    """The error under the names that the caller of a public function knows."""
    return type(error)(names.get(error.name, error.name), *error.args[1:])


class UnsupportedArchError(Jitfp4Error):
    """No kernel exists for this architecture."""


class RenderError(Jitfp4Error):
    """A template asked for something that its specification does not hold."""


class ToolchainError(Jitfp4Error):
    """NVRTC is missing, too old, or failed for a reason that is not the source's."""


class CompileError(Jitfp4Error):
    """NVRTC rejected generated source."""

    def __init__(self, program: str, arch: str, log: str, excerpt: str) -> None:
        self.program, self.arch, self.log, self.excerpt = program, arch, log, excerpt

    def __str__(self) -> str:
        return f"NVRTC rejected {self.program} for {self.arch}\n{self.log.strip()}\n\n{self.excerpt}"


class OfflineError(Jitfp4Error):
    """A kernel is not in the cache and building it is forbidden."""


class CacheError(Jitfp4Error):
    """The store failed. Launches never see this unless JITFP4_STRICT is set."""


class CacheCorruptError(CacheError):
    """An entry's bytes are not what was published, or belong to another key."""


class CacheUntrustedError(CacheError):
    """An entry or a folder could have been written by somebody else."""


class BundleError(CacheError):
    """A bundle or a remote entry does not match its digest or its grammar."""


class TacticsError(Jitfp4Error):
    """A tactics file is damaged, or was tuned on another GPU or with another toolchain or version of jitfp4."""


class LaunchError(Jitfp4Error):
    """The driver refused to load or to launch a kernel."""


class SimError(Jitfp4Error):
    """The simulator found a fault in a program, or met something that it does not model."""


class SimParseError(SimError):
    """PTX text that the parser does not know."""


class SimMemoryError(SimError):
    """An access out of bounds, misaligned, or to memory that nothing wrote."""


class SimRaceError(SimError):
    """Two unordered accesses to one byte, at least one of them a write, or one that another proxy may not see yet."""


class SimDeadlockError(SimError):
    """Every thread waits; the message says who waits where."""


class SimLimitError(SimError):
    """The program did not end within the number of instructions that its caller allowed."""
