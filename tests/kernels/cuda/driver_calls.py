"""Calls of the CUDA driver, in a process whose libcuda is that of libcuda.cpp."""

from types import SimpleNamespace
from unittest import mock

import torch

from biased_flash_attn.cuda_kernels.driver import CudaDriver
from biased_flash_attn.cuda_kernels.nvrtc import Kernel

DEVICE = torch.device("cuda", 1)
with (
    mock.patch("torch.cuda.device"),
    mock.patch("torch.cuda.current_device", return_value=DEVICE.index),
    mock.patch("torch.cuda.current_stream", return_value=SimpleNamespace(cuda_stream=0x57)),
):
    driver = CudaDriver()
    function = driver.load(DEVICE, Kernel("kernel", b"image\0"), 200000)
    layout = (40, 300, 4, 2), (96, 28800, 2**39), (64, 128, 1, 1)
    encoded = driver.tensor_map(torch.float16, 0x1230, *layout)
    assert encoded == bytes(range(128))
    driver.tensor_map(torch.bfloat16, 0x1230, *layout)
    driver.launch(DEVICE, function, 2**20, 384, 200000, b"parameters\0", ())
    try:
        driver.load(DEVICE, Kernel("missing", b"image\0"), 0)
    except RuntimeError as error:
        print(error)
