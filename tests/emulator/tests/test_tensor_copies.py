"""Tensor copies in the emulator, against indexing by torch, and faults in kernels that use them."""

from __future__ import annotations

import math

import pytest
import torch

from tests import emulator
from tests.emulator.tests.copies import INIT, kernel, planted, run, to_global, to_shared, wait

SEEDS = range(4)


def coordinates(first: list[int]) -> str:
    return "{" + ", ".join(str(c % 2**32) for c in reversed(first)) + "}"


def load_kernel(first: list[int], size: int) -> str:
    """Copies a box to shared memory, and from there unchanged to `to`."""
    parameters = ".param .align 64 .b8 tensor[128], .param .u64 out"
    body = f"""
    mov.b64 map, tensor;
    cvta.param.u64 map, map;
    ld.param.u64 to, [out];
    {INIT}
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], {size};
    @first cp.async.bulk.tensor.{len(first)}d.shared::cta.global.tile.mbarrier::complete_tx::bytes
        [box], [map, {coordinates(first)}], [full];
    {wait("full")}
    {to_global(size, 32)}
"""
    return kernel(parameters, body)


def store_kernel(first: list[int], size: int, operation: str = "cp.async") -> str:
    """Copies `from` to shared memory, and from there to a box."""
    parameters = ".param .align 64 .b8 tensor[128], .param .u64 data"
    kind = f"{operation}.bulk.tensor.{len(first)}d.global.shared::cta"
    if "reduce" in operation:
        kind += ".add"
    body = f"""
    mov.b64 map, tensor;
    cvta.param.u64 map, map;
    ld.param.u64 from, [data];
    {to_shared(size, 32)}
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @first {kind}.tile.bulk_group [map, {coordinates(first)}], [box];
    @first cp.async.bulk.commit_group;
    @first cp.async.bulk.wait_group.read 0;
    bar.sync 0;
"""
    return kernel(parameters, body)


def window(tensor: torch.Tensor, first: list[int], box: list[int], steps: list[int], fill: float):
    """The elements of a box, one by one along each dimension."""
    out = tensor
    for d, (start, size, step) in enumerate(zip(first, box, steps, strict=True)):
        at = torch.arange(start, start + size, step)
        inside = (at >= 0) & (at < tensor.shape[d])
        out = out.index_select(d, at.clamp(0, tensor.shape[d] - 1))
        shape = [-1 if e == d else 1 for e in range(tensor.dim())]
        out = torch.where(inside.view(shape), out, fill)
    return out


def swizzled(rows: torch.Tensor, width: int) -> torch.Tensor:
    """Permutes the 16-byte chunks within each 128 bytes."""
    if not width:
        return rows
    chunks = rows.flatten().view(torch.uint8).view(-1, 16)
    per_row = width // 16
    out = torch.empty_like(chunks)
    for i in range(len(chunks)):
        line = i // 8
        out[i ^ (line % per_row)] = chunks[i]
    return out.flatten().view(rows.dtype)


BOXES = {
    "1d": ([64], [16], [8], [1], 0, "zero"),
    "outside before": ([20, 40], [8, 32], [-3, -5], [1, 1], 0, "zero"),
    "outside behind": ([20, 40], [8, 32], [15, 20], [1, 1], 0, "nan"),
    "wholly outside": ([20, 40], [8, 32], [20, 40], [1, 1], 0, "zero"),
    "swizzle 32": ([40, 24], [24, 16], [3, 4], [1, 1], 32, "zero"),
    "swizzle 64": ([40, 40], [24, 32], [3, 4], [1, 1], 64, "zero"),
    "swizzle 128": ([40, 72], [24, 64], [30, 4], [1, 1], 128, "zero"),
    "3d": ([4, 6, 24], [2, 5, 16], [1, 2, 3], [1, 1, 1], 0, "zero"),
    "5d": ([2, 3, 3, 4, 16], [2, 2, 3, 2, 8], [1, 0, -1, 1, 4], [1] * 5, 0, "zero"),
    "every other": ([20, 64], [6, 32], [1, 3], [2, 2], 0, "zero"),
}


@pytest.mark.parametrize("name", BOXES)
def test_loaded_boxes_equal_torch_indexing(name):
    shape, box, first, steps, swizzle, fill = BOXES[name]
    tensor = torch.randn(shape).half()
    expected = window(tensor, first, box, steps, math.nan if fill == "nan" else 0.0)
    out = torch.full((expected.numel(),), 7.0).half()
    tensor_map = emulator.TensorMap(tensor, box, element_strides=steps, swizzle=swizzle, fill=fill)
    run(load_kernel(first, 2 * expected.numel()), [tensor_map, out])
    assert torch.equal(out.isnan(), swizzled(expected, swizzle).flatten().isnan())
    assert torch.equal(out.nan_to_num(), swizzled(expected, swizzle).flatten().nan_to_num())


@pytest.mark.parametrize("name", [name for name in BOXES if name != "every other"])
def test_stored_boxes_are_clipped_to_the_tensor(name):
    shape, box, first, _, swizzle, _ = BOXES[name]
    around = torch.zeros(math.prod(shape) + 32).half()
    tensor = around[16:-16].view(shape)
    data = torch.randn(box).half()
    expected = tensor.clone()
    for index in torch.cartesian_prod(*(torch.arange(n) for n in box)).view(-1, len(box)).tolist():
        place = [c + i for c, i in zip(first, index, strict=True)]
        if all(0 <= c < n for c, n in zip(place, shape, strict=True)):
            expected[tuple(place)] = data[tuple(index)]
    tensor_map = emulator.TensorMap(tensor, box, swizzle=swizzle)
    run(store_kernel(first, 2 * data.numel()), [tensor_map, swizzled(data, swizzle).clone()])
    assert torch.equal(tensor, expected)
    assert not around[:16].any()
    assert not around[-16:].any()


def test_reduction_adds_to_the_tensor():
    tensor, data = torch.randn(8, 40), torch.randn(8, 32)
    expected = tensor.clone()
    expected[2:, 16:] += data[:6, :24]
    text = store_kernel([2, 16], 4 * data.numel(), "cp.reduce.async")
    run(text, [emulator.TensorMap(tensor, [8, 32]), data])
    assert torch.equal(tensor, expected)


LOAD, STORE = load_kernel([4, 8], 1024), store_kernel([4, 8], 1024)
FAULTS = {
    "no wait for the load": (LOAD, wait("full"), "", "race"),
    "expects too few bytes": (LOAD, "[full], 1024", "[full], 1008", "in flight|deadlock|invalid"),
    "expects too many bytes": (LOAD, "[full], 1024", "[full], 1040", "deadlock"),
    "misaligned destination": (LOAD, "[box], [map", "[box+64], [map", "misaligned"),
    "wrong rank": (LOAD, "2d.shared::cta", "3d.shared::cta", "invalid"),
    "uninitialized mbarrier": (LOAD, INIT, "", "uninitialized"),
    "generic writes without a fence": (STORE, "fence.proxy.async.shared::cta;", "", "race"),
    "fence of global memory only": (STORE, "async.shared::cta;", "async.global;", "race"),
    "the block ends before the store has read": (
        STORE,
        "@first cp.async.bulk.wait_group.read 0;",
        "",
        "in flight",
    ),
    "waits for a group that was not committed": (
        STORE,
        "@first cp.async.bulk.commit_group;",
        "",
        "in flight",
    ),
    "another thread waits": (
        STORE,
        "@first cp.async.bulk.wait_group",
        "@!first cp.async.bulk.wait_group",
        "in flight",
    ),
    "allows one group to be pending": (
        STORE,
        "wait_group.read 0",
        "wait_group.read 1",
        "in flight",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_fault_in_tensor_copies_is_found(name):
    text, old, new, expected = FAULTS[name]
    tensor, data = torch.randn(20, 64).half(), torch.randn(16, 32).half()
    tensor_map = emulator.TensorMap(tensor, [16, 32])
    run(text, [tensor_map, data])
    for seed in SEEDS:
        with pytest.raises(emulator.Fault) as found:
            run(planted(text, old, new), [tensor_map, data], seed=seed)
        assert found.value.kind in expected.split("|"), str(found.value)


def test_source_of_a_store_may_be_overwritten_after_its_read():
    tensor, data = torch.randn(20, 64).half(), torch.randn(16, 32).half()
    tensor_map = emulator.TensorMap(tensor, [16, 32])
    waits = "@first cp.async.bulk.wait_group.read 0;\n    bar.sync 0;"
    overwrites = "st.shared.b32 [box], thread;"
    run(planted(STORE, waits, waits + overwrites), [tensor_map, data])
    for seed in SEEDS:
        with pytest.raises(emulator.Fault, match="not ordered after a read"):
            run(planted(STORE, waits, overwrites + waits), [tensor_map, data], seed=seed)


def test_boxes_outside_the_arguments_are_out_of_bounds():
    encoded = bytes(emulator.TensorMap(torch.randn(20, 64).half(), [16, 32]))
    with pytest.raises(emulator.Fault, match="out of bounds"):
        run(LOAD, [encoded, torch.zeros(512).half()])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"box": [16, 20]}, "multiple of 16 bytes"),
        ({"box": [300, 32]}, "1 to 256"),
        ({"swizzle": 32}, "wider than the swizzle"),
        ({"element_strides": [1, 9]}, "1 to 8"),
    ],
)
def test_invalid_tensor_maps_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        emulator.TensorMap(torch.zeros(320, 64).half(), **{"box": [16, 32]} | change)


def modified_map_kernel() -> str:
    """Makes a tensor map in shared memory, copies it to global memory, and loads a box with it."""
    fields = {
        "global_address.shared::cta.b1024.b64": "[box], from",
        "rank.shared::cta.b1024.b32": "[box], 1",
        "box_dim.shared::cta.b1024.b32": ("[box], 0, 32", "[box], 1, 16"),
        "global_dim.shared::cta.b1024.b32": ("[box], 0, 64", "[box], 1, 20"),
        "global_stride.shared::cta.b1024.b64": "[box], 0, left",
        "element_stride.shared::cta.b1024.b32": ("[box], 0, 1", "[box], 1, 1"),
        "elemtype.shared::cta.b1024.b32": "[box], 6",
        "swizzle_mode.shared::cta.b1024.b32": "[box], 2",
    }
    replaced = ""
    for field, operands in fields.items():
        for one in [operands] if isinstance(operands, str) else operands:
            replaced += f"    @first tensormap.replace.tile.{field} {one};\n"
    body = f"""
    ld.param.u64 from, [data];
    ld.param.u64 map, [scratch];
    ld.param.u64 to, [out];
    mov.u64 left, 128;
    shl.b32 n, thread, 2;
    mov.u32 y, box;
    add.u32 y, y, n;
    mov.u32 x, 0;
    st.shared.b32 [y], x;
    bar.warp.sync -1;
{replaced}
    bar.warp.sync -1;
    tensormap.cp_fenceproxy.global.shared::cta.tensormap::generic.release.gpu.sync.aligned
        [map], [box], 128;
    fence.proxy.tensormap::generic.acquire.gpu [map], 128;
    {INIT}
    @first fence.proxy.async.shared::cta;
    @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 1024;
    @first cp.async.bulk.tensor.2d.shared::cta.global.mbarrier::complete_tx::bytes
        [box2], [map, {coordinates([4, 8])}], [full];
    {wait("full")}
    {to_global(1024, 32, "box2")}
"""
    return kernel(".param .u64 data, .param .u64 scratch, .param .u64 out", body)


def test_kernels_may_make_tensor_maps():
    tensor, out = torch.randn(20, 64).half(), torch.zeros(16, 32).half()
    padded = torch.zeros(256, dtype=torch.uint8)
    scratch = padded[-padded.data_ptr() % 128 :]
    run(modified_map_kernel(), [tensor, scratch, out])
    assert torch.equal(out.flatten(), swizzled(tensor[4:20, 8:40].clone(), 64).flatten())


@pytest.mark.parametrize(
    ("old", "kind"),
    [
        ("fence.proxy.tensormap::generic.acquire.gpu [map], 128;", "race"),
        ("@first tensormap.replace.tile.box_dim.shared::cta.b1024.b32 [box], 1, 16;", "invalid"),
        ("bar.warp.sync -1;\n    tensormap", "race"),
    ],
)
def test_fault_in_making_a_tensor_map_is_found(old, kind):
    tensor, out = torch.randn(20, 64).half(), torch.zeros(16, 32).half()
    padded = torch.zeros(256, dtype=torch.uint8)
    new = "tensormap" if old.endswith("tensormap") else ""
    text = planted(modified_map_kernel(), old, new)
    with pytest.raises(emulator.Fault) as found:
        run(text, [tensor, padded[-padded.data_ptr() % 128 :], out])
    assert found.value.kind == kind, str(found.value)
