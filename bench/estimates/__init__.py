"""Estimates of how fast the Triton kernels run on a GPU that is not there.

A kernel is compiled for the GPU, and the machine code of its loops is simulated on one
multiprocessor (simulate.py): schedulers, arithmetic units, matrix units, shared memory and the L2
cache (pipes.py, gpu.py). How often each loop runs follows from the problem (tiles.py), and blocks
are dealt to multiprocessors as they become free (times.py). Two numbers of a GPU that no document
states are fitted to published timings (calibration.py, published.py); how well the others of those
timings are predicted is the error of every estimate.
"""
