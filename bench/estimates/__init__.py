"""Estimates of the speed of the Triton kernels on a GPU that need not be present.

A kernel is compiled for the GPU, and the machine code of its loops is simulated on one
multiprocessor (simulate.py): schedulers, arithmetic units, matrix units, shared memory and the L2
cache (pipes.py, gpu.py). What an iteration of a loop executes is in iteration.py. The number of
iterations follows from the problem (tiles.py; decoding.py), and blocks are assigned to
multiprocessors as they become free (times.py). Two undocumented
parameters of a GPU are fitted to some published timings (calibration.py, published.py); the stated
error is that of predicting the others. The CUDA kernels have estimates of their own (cuda).
"""
