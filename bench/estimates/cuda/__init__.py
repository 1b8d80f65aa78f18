"""Estimates of the speed of the CUDA kernels for Hopper (csrc/cuda) on a GPU that need not be
present.

Like those of the Triton kernels (bench/estimates), they come from a simulation of the machine code
on one multiprocessor. A block has a multiprocessor to itself. Its warp groups execute different
code (paths.py) and wait for one another (simulate.py): one copies tiles, two compute, and products
are asynchronous, so what overlaps follows from the code: where the groups take turns, the softmax
of one coincides with the products of the other, and where a group waits for its own products, the
other one continues. Warps that sum gradients of a bias execute their own code beside these
(events.py). Times are those of all tiles of all blocks (times.py), some of which wait for others
(turns.py).

One parameter, the sustained fraction of the simulated speed, is fitted to published timings of
kernels with the same structure (calibration.py, published.py), and others are predicted.
"""
