"""The GPU architectures that kernels are built for, and the facts about them that templates and selection use.

Sources: CUDA C++ Programming Guide, compute capability tables; PTX ISA, target notes of each instruction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitfp4.errors import ArgumentError, UnsupportedArchError

CTA_RESERVE = 1024  # bytes of shared memory that the driver keeps in each CTA
_GPC_SMS = 20


@dataclass(frozen=True, slots=True, eq=False)  # one object each, compared by identity
class Arch:
    """One compile target.

    ``name`` is NVRTC's ``--gpu-architecture``. ``shared_bytes`` is the largest dynamic shared memory of one CTA.
    ``num_sms`` is the size of the part that selection assumes (B200, H200, ...): it shapes grids, never results.
    ``nvrtc`` is the first version, of those that jitfp4 supports, that compiles for it.
    """

    name: str
    shared_bytes: int
    num_sms: int
    has_e4m3_cvt: bool = False  # cvt.*.e4m3x2
    has_e2m1_cvt: bool = False  # cvt.*.e2m1x2
    has_pdl: bool = False  # griddepcontrol
    has_tma: bool = False  # cp.async.bulk.tensor, mbarrier transactions, clusters
    has_ld256: bool = False  # ld.global.v8.b32
    has_f32x2: bool = False  # fma.rn.f32x2
    has_scaled_mma: bool = False  # mma.sync with block scales
    has_wgmma: bool = False  # wgmma
    has_tcgen05: bool = False  # tcgen05, also with block scales
    has_k96: bool = False  # tcgen05 products of 96 columns of FP4
    nvrtc: tuple[int, int] = (12, 8)

    @property
    def ptx_target(self) -> str:
        """NVRTC's name for PTX output, such as ``compute_90a``."""
        return self.name.replace("sm_", "compute_")

    @property
    def capability(self) -> tuple[int, int]:
        """The compute capability that the target is made for."""
        return divmod(int(self.name.removeprefix("sm_").rstrip("a")), 10)

    def _runs_on(self, major: int, minor: int) -> bool:
        """Arch-specific code runs on its own capability only, sm_80 code also on 8.6 and 8.7."""
        at_major, at_minor = self.capability
        return major == at_major and (minor == at_minor if self.name.endswith("a") else minor >= at_minor)

    def shared_of(self, ctas: int) -> int:
        """Bytes of shared memory that each of ``ctas`` CTAs on an SM can have."""
        return (self.shared_bytes + CTA_RESERVE) // ctas - CTA_RESERVE

    def clusters(self, ctas: int) -> int:
        """Clusters of ``ctas`` CTAs, each on an SM of its own, that run at once.

        A cluster stays within a GPC. How many SMs the GPCs of a part have is not documented: here each has up to 20,
        in pairs, as evenly as possible.
        """
        if ctas == 1:
            return self.num_sms
        pairs, gpcs = self.num_sms // 2, -(-self.num_sms // _GPC_SMS)
        return sum(2 * ((pairs + gpc) // gpcs) // ctas for gpc in range(gpcs))

    @staticmethod
    def of(name: str) -> Arch:
        """The architecture called ``name``. Raises ArgumentError when there is none."""
        if name not in ARCHS:
            raise ArgumentError("arch", repr(name), ", ".join(ARCHS))
        return ARCHS[name]

    @staticmethod
    def of_capability(major: int, minor: int) -> Arch:
        """The target whose cubins run on a device of this compute capability."""
        fitting = [arch for arch in ARCHS.values() if arch._runs_on(major, minor)]
        if fitting:
            return max(fitting, key=lambda arch: arch.capability)
        raise UnsupportedArchError(f"compute capability {major}.{minor} has no target; supported: {', '.join(ARCHS)}")


_HOPPER: dict[str, Any] = {"has_e4m3_cvt": True, "has_pdl": True, "has_tma": True}
_BLACKWELL: dict[str, Any] = {**_HOPPER, "has_e2m1_cvt": True, "has_f32x2": True}
_TCGEN05: dict[str, Any] = {**_BLACKWELL, "shared_bytes": 232448, "has_ld256": True, "has_tcgen05": True}

ARCHS = {
    arch.name: arch
    for arch in (
        Arch("sm_80", shared_bytes=166912, num_sms=108),
        Arch("sm_89", shared_bytes=101376, num_sms=128, has_e4m3_cvt=True),
        Arch("sm_90a", shared_bytes=232448, num_sms=132, has_wgmma=True, **_HOPPER),
        Arch("sm_100a", num_sms=148, **_TCGEN05),
        Arch("sm_103a", num_sms=148, has_k96=True, nvrtc=(12, 9), **_TCGEN05),
        Arch("sm_120a", shared_bytes=101376, num_sms=188, has_scaled_mma=True, **_BLACKWELL),
        Arch("sm_121a", shared_bytes=101376, num_sms=48, has_scaled_mma=True, nvrtc=(12, 9), **_BLACKWELL),
    )
}


def shared_bytes_with(capability: str) -> int:
    """Bytes of dynamic shared memory that a CTA has on every architecture with a capability, such as ``has_wgmma``."""
    return min(arch.shared_bytes for arch in ARCHS.values() if getattr(arch, capability))


def names_with(capability: str) -> str:
    """The architectures with a capability, such as ``sm_100a and sm_103a``."""
    return " and ".join(arch.name for arch in ARCHS.values() if getattr(arch, capability))
