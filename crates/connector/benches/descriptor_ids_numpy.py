"""The computation of descriptor_ids.rs in numpy, timed: run with any Python that has numpy."""

import statistics
import time

import numpy as np

REGIONS, POOL, BLOCKS = 80 * 2, 10_000, 4_096


def ids(offsets: np.ndarray, blocks: list[int], dtype: type) -> np.ndarray:
    return (offsets[:, None] + np.asarray(blocks, dtype=dtype)[None, :]).ravel()


def main() -> None:
    blocks = [i * 7_919 % POOL for i in range(BLOCKS)]
    for dtype in (np.int32, np.int64):
        offsets = np.arange(REGIONS, dtype=np.int64) * POOL
        times = []
        for _ in range(200):
            start = time.perf_counter()
            result = ids(offsets, blocks, dtype)
            times.append(time.perf_counter() - start)
        assert result.size == REGIONS * BLOCKS and result[-1] == (REGIONS - 1) * POOL + blocks[-1]
        median, best = statistics.median(times) * 1e3, min(times) * 1e3
        print(f"numpy, block ids as {np.dtype(dtype).name}: median {median:.3f} ms, best {best:.3f} ms")


if __name__ == "__main__":
    main()
