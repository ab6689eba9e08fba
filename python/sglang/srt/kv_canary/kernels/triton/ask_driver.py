"""Prints the compute capability of a visible GPU, such as "90". Run as a script, with the GPU's number.

It imports nothing of ours and creates no context.
"""

import ctypes
import sys

_MAJOR, _MINOR = 75, 76  # of CUdevice_attribute


def main(gpu: str) -> None:
    cuda = ctypes.CDLL("libcuda.so.1")
    device, numbers = ctypes.c_int(), (ctypes.c_int(), ctypes.c_int())
    results = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), int(gpu))]
    for attribute, number in zip((_MAJOR, _MINOR), numbers, strict=True):
        results.append(cuda.cuDeviceGetAttribute(ctypes.byref(number), attribute, device))
    if any(results):
        sys.exit(f"CUDA errors {results}")
    print(numbers[0].value * 10 + numbers[1].value, end="")


if __name__ == "__main__":
    main(*sys.argv[1:])
