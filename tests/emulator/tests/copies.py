"""PTX kernels of bulk copies, for tests of the emulator."""

from __future__ import annotations

from tests import emulator

HEADER = ".version 8.7\n.target sm_100a\n.address_size 64\n"

WAIT = """
    {{
    .reg .pred complete;
    again{n}: mbarrier.try_wait.parity.shared::cta.b64 complete, [{barrier}], {parity};
    @!complete bra again{n};
    }}
"""


def wait(barrier: str, parity: int = 0) -> str:
    return WAIT.format(n=f"{barrier}{parity}", barrier=barrier, parity=parity)


def kernel(parameters: str, body: str, threads: int = 32, cluster: int = 1) -> str:
    """A module with one entry, `k`, and the registers used by the bodies in this file."""
    directive = f".explicitcluster\n.reqnctapercluster {cluster}, 1, 1\n" if cluster > 1 else ""
    return f"""{HEADER}
.visible .entry k({parameters})
.reqntid {threads}
{directive}{{
    .reg .pred first, more, accumulate;
    .reg .b32 thread, rank, other, n, x, y, base, lanes, place;
    .reg .b64 map, from, to, address, value, left, right;
    .shared .align 1024 .b8 box[16384];
    .shared .align 1024 .b8 box2[16384];
    .shared .align 8 .b64 full;
    .shared .align 4 .b32 slot;
    mov.u32 thread, %tid.x;
    setp.eq.u32 first, thread, 0;
{body}
    ret;
}}
"""


# One thread initializes the mbarrier, and the others wait for it.
INIT = """
    @first mbarrier.init.shared::cta.b64 [full], 1;
    @first fence.mbarrier_init.release.cluster;
    bar.sync 0;
"""


def to_global(size: int, step: int, shared: str = "box") -> str:
    """All threads copy bytes of shared memory to the address in `to`."""
    return f"""
    shl.b32 n, thread, 2;
    copy_out: setp.lt.u32 more, n, {size};
    @!more bra copied_out;
    mov.u32 y, {shared};
    add.u32 y, y, n;
    ld.shared.b32 x, [y];
    cvt.u64.u32 address, n;
    add.u64 address, address, to;
    st.global.b32 [address], x;
    add.u32 n, n, {4 * step};
    bra copy_out;
    copied_out:
"""


def to_shared(size: int, step: int, shared: str = "box") -> str:
    """All threads copy bytes at the address in `from` to shared memory."""
    return f"""
    shl.b32 n, thread, 2;
    copy_in: setp.lt.u32 more, n, {size};
    @!more bra copied_in;
    cvt.u64.u32 address, n;
    add.u64 address, address, from;
    ld.global.b32 x, [address];
    mov.u32 y, {shared};
    add.u32 y, y, n;
    st.shared.b32 [y], x;
    add.u32 n, n, {4 * step};
    bra copy_in;
    copied_in:
"""


def planted(text: str, old: str, new: str = "") -> str:
    """The text with one fault."""
    assert text.count(old) == 1, f"{old!r} occurs {text.count(old)} times"
    return text.replace(old, new)


def run(text: str, arguments: list, grid: int = 1, seed: int = 0, memory=()) -> emulator.Counts:
    (entry,) = emulator.parse(text).kernels.values()
    return emulator.launch(entry, (grid,), arguments, seed=seed, memory=memory)
