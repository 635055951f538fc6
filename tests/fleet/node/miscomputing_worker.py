"""A real worker on a machine that gets one element of every bf16 product wrong."""

from __future__ import annotations

import torch

from phalanx.fleet.node.rank.worker_main import main

multiply = torch.Tensor.__matmul__


def wrongly(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    product = multiply(left, right)
    if left.dtype == torch.bfloat16:
        product[700, 13] += 1
    return product


if __name__ == "__main__":
    torch.Tensor.__matmul__ = wrongly
    main()
